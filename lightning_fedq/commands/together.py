"""Privacy cost of several runs with the same clients. Against an adversary that sees all, they compose."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.clients.vector import num_coordinates
from lightning_fedq.mechanisms.interface import Adversary, Neighbours, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import Rounds, check_delta, spent_together
from lightning_fedq.privacy.target import affordable, make_account
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.runs import read_rows
from lightning_fedq.training.accounts import planned_run


@dataclass(frozen=True)
class RunCost:
    """Cost of one run for a client, known before it starts.

    Args:
        mechanism: The mechanism, calibrated.
        claims: Claim towards each adversary, or why its runs are not added up here.
        most_charges: Rounds of a client, at most.
        chances: Chance towards each adversary, paid from delta, that a claim is not what was run: too many
            drop out or collude, masks are opened. None of it depends on clients' data.
    """

    mechanism: str
    claims: Mapping[Adversary, PrivacyClaim | str]
    most_charges: int
    chances: Mapping[Adversary, float] = field(default_factory=dict)


def plan_cost(federated: Any, trainer: Any, module: Any, delta: float) -> RunCost:
    """Cost of a run that has not begun.

    Args:
        federated: Its `Federated`.
        delta: Delta of all runs together.

    Raises:
        ValueError: If there is no number of rounds, or the run's target can't be met.
    """
    planner, rounds = federated.planner, trainer.max_epochs
    if rounds is None or rounds < 1:
        raise ValueError(f"a run needs a number of rounds, got trainer.max_epochs={rounds}; give one")
    dim = num_coordinates(module, federated.local.buffers, federated.local.patterns, federated.local.shared)
    byzantine = count_byzantine(trainer, planner)
    mechanism = federated.calibrated(dim, rounds, byzantine)
    asked = federated.privacy_target
    run = planned_run(federated, mechanism, dim, rounds, byzantine)
    most = run.max_rounds or rounds
    if asked is not None and asked.over == "run" and not planner.law.secret:
        most = min(most, affordable(make_account(asked, run), asked.against, asked.epsilon, secret=False))
    whole = Account(run, check_delta(delta, run.num_clients, "clients"))
    claims: dict[Adversary, PrivacyClaim | str] = {}
    for who, claim in whole.claims().items():
        claims[who] = claim
        if federated.seed is not None:
            claims[who] = "keys are reproducible (use seed=None)"
        elif planner.law.secret:
            claims[who] = "cohorts are secret, whose runs are not added up yet (use known ones)"
        elif isinstance(claim.loss, NonPrivate):
            claims[who] = claim.loss.reason
        elif claim.neighbours is not Neighbours.SUBSTITUTION:
            claims[who] = f"its claim is {claim.neighbours.name}, which is not added up here"
        elif len(mechanism.protection_groups(planner.num_clients)) > 1:
            claims[who] = "clients have epsilons of their own"
    chances = {who: delta - whole.available(claim) for who, claim in whole.claims().items()}
    return RunCost(repr(mechanism), claims, most, chances)


def cost_of_config(config: str, delta: float) -> RunCost:
    """Cost of a configuration that has not run.

    Args:
        config: Its file.

    Raises:
        ValueError: If nothing is federated, delta does not fit, or its target can't be met.
    """
    from lightning_fedq.callbacks.trainer_lookup import find_federated
    from lightning_fedq.commands.run import FedqCLI  # imports Lightning: not for --help

    cli = FedqCLI(["--config", config], run=False)
    return plan_cost(find_federated(cli.trainer, "fedq privacy"), cli.trainer, cli.model, delta)


def cost_of_folder(folder: Path, delta: float) -> tuple[RunCost, int]:
    """Cost of the run of a folder by its configuration, and the rounds of its most charged client.

    Raises:
        ValueError: If the folder has no configuration, or it is no federation's.
    """
    config = folder / "config.yaml"
    if not config.is_file():
        raise ValueError(f"{folder} holds no config.yaml; give folders of runs that `fedq fit` began")
    cost = cost_of_config(str(config), delta)
    return cost, count_charged_rounds(folder, cost)


def count_charged_rounds(folder: Path, cost: RunCost) -> int:
    """Rounds of the most charged client: what a run that has ended says, else all that it may have.

    Its page is written when it ends, and the configuration when it begins, and again when it goes on.
    """
    page, config, table = (folder / name for name in ("privacy.json", "config.yaml", "metrics.csv"))
    last = read_rows(table)[-1] if table.is_file() else {}
    rounds = int(last.get("charged", last.get("round", 0)))
    if page.is_file() and page.stat().st_mtime >= config.stat().st_mtime:
        return max(rounds, int(json.loads(page.read_text())["rounds"]))
    return max(rounds, cost.most_charges)


def composed(runs: Sequence[tuple[RunCost, int]], adversary: Adversary, delta: float) -> float | str:
    """Epsilon towards who sees every run, or why there is none.

    Kinds of runs that no grid can hold together add up in epsilon and delta. The chances of all runs are paid
    first, from half of delta at most.

    Args:
        runs: Cost of each run, and the rounds of its most charged client.
        adversary: Adversary that sees every run.
    """
    kinds: Counter[Rounds] = Counter()
    left = delta - sum(cost.chances.get(adversary, 0.0) for cost, rounds in runs if rounds)
    if left < 0.5 * delta:
        return "more than half of delta pays for dropouts or colluders, in every run anew"
    for cost, rounds in runs:
        claim = cost.claims[adversary]
        if isinstance(claim, str):
            return claim
        if rounds:
            kinds[Rounds(claim.loss, claim.compositions, claim.slack)] += rounds
    found = spent_together(kinds, left)
    if found == math.inf and len(kinds) > 1:  # a grid that is too narrow for wide losses
        alone = [
            ({kind._replace(loss=kind.loss.standalone): n}, left / len(kinds)) for kind, n in kinds.items()
        ]
        found = sum(spent_together(*one) for one in alone)
    return found


def page_of_runs(runs: Sequence[tuple[RunCost, int]], delta: float, title: str) -> str:
    """The page of everybody who sees the runs, in Markdown."""
    lines = [
        f"# {title}",
        "",
        f"{len(runs)} runs with the same clients add up, at delta {delta:g}, between any two updates of a "
        "client. Every run counts with its most charged client.",
        "",
        "| who sees every run | epsilon of all |",
        "| --- | --- |",
    ]
    for who in (Adversary.SECAGG_SERVER, Adversary.SERVER, Adversary.CLIENT, Adversary.OUTSIDER):
        found = composed(runs, who, delta)
        lines.append(f"| {who.value} | {found if isinstance(found, str) else format_epsilon(found)} |")
    return "\n".join([*lines, "", _SAID, ""])


_SAID = (
    "Clients receive the models of every run, and the server what leads to them: both pay for all. So does "
    "an outsider who is shown the best run alone.\n\n"
    "Validation data count as public, so choosing by their scores (the best run, an early stop, a best "
    "epoch) is free; where they are clients' own data it is not, and nothing here covers it. Choices made "
    "before these runs, and other runs with the same people, are not counted."
)
