"""Joint privacy cost of all runs of a comparison, whose keys are secret and whose clients are the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_fedq.commands.together import (
    RunCost,
    composed,
    cost_of_config,
    count_charged_rounds,
    page_of_runs,
)
from lightning_fedq.comparison.processes import quiet
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.runs import write_atomically

ALL_RUNS = "all_runs.md"


def write_joint_cost(out: Path, delta: float, coming: Sequence[Path] = ()) -> list[tuple[RunCost, int]]:
    """Write the page on the joint privacy cost of all runs.

    Args:
        out: Folder of the comparison.
        delta: Delta of the joint epsilon.
        coming: Configurations of runs that have not started. They are charged all their rounds.

    Returns:
        Cost of each run, and the rounds of its most charged client.
    """
    costs: dict[Path, RunCost | None] = {}
    runs: list[tuple[RunCost, int]] = []
    begun = [file.parent for file in sorted((out / "runs").glob("*/epsilon_*/seed_*/config.yaml"))]
    with quiet():
        for place in (*coming, *begun):
            if (group := place.parent) not in costs:
                try:
                    costs[group] = cost_of_config(str(min(group.glob("seed_*.yaml"))), delta)
                except ValueError:  # `Federated` will refuse this run, so its clients send nothing
                    costs[group] = None
            if cost := costs[group]:
                charged = cost.most_charges if place in coming else count_charged_rounds(place, cost)
                runs.append((cost, charged))
    title = "Privacy of all runs of a comparison, for clients and the server"
    page = page_of_runs(runs, delta, title)
    rest = [run for run in runs if not _is_plain(run)]
    if 0 < len(rest) < len(runs):
        page += "\n" + page_of_runs(rest, delta, "Runs without those of FedAvg, which has no privacy")
    write_atomically(out / ALL_RUNS, page)
    return runs


def describe_joint_cost(out: Path, delta: float, who: Adversary) -> str:
    """Write the page, and return a text on the joint privacy cost of all runs that have started."""
    runs = write_joint_cost(out, delta)
    rest = [run for run in runs if not _is_plain(run)]
    epsilon = composed(rest, who, delta)
    plain = len(runs) - len(rest)
    above = f" The {plain} runs of FedAvg give no privacy." if plain else ""
    page, many = out / ALL_RUNS, f"{len(rest)} runs with the same clients"
    if isinstance(epsilon, str):
        return f"{page}: {many} have no joint epsilon against {who.value}: {epsilon}.{above}"
    price = f"epsilon {format_epsilon(epsilon)} at delta {delta:g}"
    return f"{page}: {many}. Against {who.value}, they spend {price} together.{above}"


def _is_plain(run: tuple[RunCost, int]) -> bool:
    """Return whether a run is one of FedAvg, which has no privacy."""
    return run[0].mechanism.startswith("FedAvg(")
