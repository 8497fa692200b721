"""Joint privacy cost of several runs with the same clients, against an adversary that sees all of them."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.mechanisms.interface import Adversary, Neighbours, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import Rounds, check_delta, spent_together
from lightning_fedq.privacy.target import affordable, make_account
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.runs import read_rows
from lightning_fedq.training.accounts import planned_run


@dataclass(frozen=True)
class RunCost:
    """Privacy cost of one run for a client, which is known before the run starts.

    Args:
        mechanism: Text of the calibrated mechanism.
        claims: Claim against each adversary, or the reason why its runs can't be composed here.
        most_charges: Maximum number of rounds of a client.
        chances: Part of delta against each adversary for events that the claim does not cover: too many
            clients drop out or collude, or masks are opened. These events do not depend on clients' data.
    """

    mechanism: str
    claims: Mapping[Adversary, PrivacyClaim | str]
    most_charges: int
    chances: Mapping[Adversary, float] = field(default_factory=dict)


def plan_cost(federated: Any, trainer: Any, module: Any, delta: float) -> RunCost:
    """Return the privacy cost of a run that has not started.

    Args:
        federated: `Federated` callback of the run.
        trainer: Trainer of the run, whose limits give the number of rounds.
        module: Module of the run.
        delta: Delta of all runs together.

    Raises:
        ValueError: If there is no number of rounds, or the run's target can't be met.
    """
    planner, rounds = federated.planner, federated.count_rounds(trainer, module)
    if rounds is None or rounds < 1:
        given = f"trainer.max_epochs={trainer.max_epochs} and max_steps={trainer.max_steps}"
        raise ValueError(f"A run needs a known number of rounds, got {given}")
    dim, byzantine = federated.local.num_coordinates(module), count_byzantine(trainer, planner)
    mechanism = federated.calibrated(dim, rounds, byzantine)
    asked = federated.privacy_target
    run = planned_run(federated, mechanism, dim, rounds, byzantine)
    most = run.max_rounds or rounds
    if asked is not None and asked.over == "run" and not planner.law.secret:
        most = min(most, affordable(make_account(asked, run), asked.against, asked.epsilon, secret=False))
    whole = Account(run, check_delta(delta, run.num_clients, "clients"))
    claims = whole.claims()
    groups = mechanism.protection_groups(planner.num_clients)
    differ = "clients have different epsilons" if len(groups) > 1 else ""
    composable = {who: _find_obstacle(federated, claim) or differ or claim for who, claim in claims.items()}
    chances = {who: delta - whole.available(claim) for who, claim in claims.items()}
    return RunCost(repr(mechanism), composable, most, chances)


def _find_obstacle(federated: Any, claim: PrivacyClaim) -> str:
    """Return the reason why a claim of a run can't be composed with those of other runs, or ""."""
    if federated.seed is not None:
        return "keys are reproducible (use seed=None)"
    if federated.planner.law.secret:
        return "runs with secret cohorts can't be composed yet (use known cohorts)"
    if isinstance(claim.loss, NonPrivate):
        return claim.loss.reason
    if claim.neighbours is not Neighbours.SUBSTITUTION:
        return f"claims under {claim.neighbours.name} adjacency can't be composed here"
    return ""


def cost_of_config(config: str, delta: float) -> RunCost:
    """Return the privacy cost of a configuration that has not run.

    Args:
        config: File of the configuration.
        delta: Delta of all runs together.

    Raises:
        ValueError: If there is no `Federated` callback, delta does not fit, or the target can't be met.
    """
    from lightning_fedq.callbacks.trainer_lookup import find_federated
    from lightning_fedq.commands.run import FedqCLI  # imports Lightning, which --help does not need

    cli = FedqCLI(["--config", config], run=False)
    return plan_cost(find_federated(cli.trainer, "fedq privacy"), cli.trainer, cli.model, delta)


def cost_of_folder(folder: Path, delta: float) -> tuple[RunCost, int]:
    """Return the privacy cost of the run in a folder, and the rounds of its most charged client.

    Raises:
        ValueError: If the folder has no configuration, or the configuration has no `Federated` callback.
    """
    config = folder / "config.yaml"
    if not config.is_file():
        raise ValueError(f"{folder} holds no config.yaml. Give folders of runs that `fedq fit` started.")
    cost = cost_of_config(str(config), delta)
    return cost, count_charged_rounds(folder, cost)


def count_charged_rounds(folder: Path, cost: RunCost) -> int:
    """Return the rounds of a run's most charged client, or the maximum if the run did not train all rounds.

    The number of rounds of a run that was stopped may follow from what it released, and composition needs a
    number that was fixed before.
    A run writes its privacy page when it ends. It writes its configuration when it starts, and again when it
    is resumed. A page that is older than the configuration is therefore of an unfinished run.
    """
    page, config, table = (folder / name for name in ("privacy.json", "config.yaml", "metrics.csv"))
    last = read_rows(table)[-1] if table.is_file() else {}
    rounds = int(last.get("charged", last.get("round", 0)))
    if page.is_file() and page.stat().st_mtime >= config.stat().st_mtime:
        stated = json.loads(page.read_text())
        rounds = max(rounds, int(stated["rounds"]))
        if not stated.get("ended"):
            return rounds
    return max(rounds, cost.most_charges)


def composed(runs: Sequence[tuple[RunCost, int]], adversary: Adversary, delta: float) -> float | str:
    """Return the joint epsilon against an adversary that sees every run, or the reason why there is none.

    The runs' chances of uncovered events are subtracted from delta first and may use half of it. If one grid
    can't represent the losses of all runs, each kind of run is composed separately with a share of delta,
    and the epsilons are added.

    Args:
        runs: Cost of each run, and the rounds of its most charged client.
        adversary: Adversary that sees every run.
        delta: Delta of all runs together.
    """
    kinds: Counter[Rounds] = Counter()
    remaining = delta - sum(cost.chances.get(adversary, 0.0) for cost, rounds in runs if rounds)
    if remaining < 0.5 * delta:
        return "dropouts or colluders of all runs would use more than half of delta"
    for cost, rounds in runs:
        claim = cost.claims[adversary]
        if isinstance(claim, str):
            return claim
        if rounds:
            kinds[Rounds(claim.loss, claim.compositions, claim.slack)] += rounds
    epsilon = spent_together(kinds, remaining)
    if epsilon < math.inf or len(kinds) < 2:
        return epsilon
    # the common grid is too narrow for wide losses
    share = remaining / len(kinds)
    alone = [(kind._replace(loss=kind.loss.standalone), count) for kind, count in kinds.items()]
    return sum(spent_together({kind: count}, share) for kind, count in alone)


def page_of_runs(runs: Sequence[tuple[RunCost, int]], delta: float, title: str) -> str:
    """Return a Markdown page on the joint epsilon of several runs against each adversary."""
    lines = [
        f"# {title}",
        "",
        f"{len(runs)} runs with the same clients compose at delta {delta:g}, under replace-one adjacency. "
        "Every run counts with its most charged client.",
        "",
        "| who sees every run | epsilon of all |",
        "| --- | --- |",
    ]
    for who in (Adversary.SECAGG_SERVER, Adversary.SERVER, Adversary.CLIENT, Adversary.OUTSIDER):
        found = composed(runs, who, delta)
        lines.append(f"| {who.value} | {found if isinstance(found, str) else format_epsilon(found)} |")
    return "\n".join([*lines, "", _SAID, ""])


_SAID = (
    "Clients and the server observe every run, so all runs count against them. All runs also count against "
    "an outsider who sees the best run alone, because the choice depends on all runs.\n\n"
    "Validation data count as public, so choosing by their scores (the best run, an early stop, a best "
    "epoch) costs nothing. If validation data are clients' own data, the choice costs privacy, which this "
    "page does not cover. Choices made before these runs, and other runs with the same people, are not "
    "counted."
)
