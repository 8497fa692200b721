"""Privacy of a whole sweep, towards who sees its runs and towards who sees the winner alone.

The clients receive every model of every run, and the server every message or sum, so towards them the runs
compose. An outsider who is shown nothing but the best model of a *random* number of runs pays for their
selection (`privacy.selection`); one of a fixed number pays for all, too.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fedq._lightning import callbacks_of
from lightning_fedq.algorithms.byzantine.counted import num_byzantine_of
from lightning_fedq.clients.vector import num_coordinates
from lightning_fedq.comparison.selection import (
    ORDERS,
    NegativeBinomialTrials,
    run_loss,
    run_profile,
    selection_epsilon,
)
from lightning_fedq.mechanisms.interface import Adversary, Neighbours, NonPrivate, PrivacyClaim, Slack
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import ClaimAccountant, check_delta
from lightning_fedq.privacy.losses import RenyiLoss
from lightning_fedq.privacy.target import account_of, affordable
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.runs import read_rows
from lightning_fedq.training.accounts import run_to_come
from lightning_fedq.training.settings import Federation

_VIEWS = (Adversary.SECAGG_SERVER, Adversary.SERVER, Adversary.CLIENT, Adversary.OUTSIDER)


@dataclass(frozen=True)
class RunCost:
    """Cost of one run for a client, known before it starts.

    Args:
        mechanism: The mechanism, calibrated.
        claims: Claim towards each adversary, or why its runs are not added up here.
        most_charges: Rounds of a client, at most.
        chances: Chance towards each adversary, paid from delta, that a claim is not what was run: too many
            drop out or collude, masks are opened. None of it hangs on clients' data.
    """

    mechanism: str
    claims: Mapping[Adversary, PrivacyClaim | str]
    most_charges: int
    chances: Mapping[Adversary, float] = field(default_factory=dict)


def cost_of(federated: Any, trainer: Any, module: Any, delta: float) -> RunCost:
    """Cost of a run that has not begun.

    Args:
        federated: Its `Federated`.
        delta: Chance with which the epsilon of the whole sweep may fail.

    Raises:
        ValueError: If there is no number of rounds, or the run's target can't be met.
    """
    planner, rounds = federated.planner, trainer.max_epochs
    if rounds is None or rounds < 1:
        raise ValueError(f"a run needs a number of rounds, got trainer.max_epochs={rounds}; give one")
    dim = num_coordinates(module, federated.local.buffers, federated.local.patterns, federated.local.shared)
    byzantine = num_byzantine_of(trainer, planner)
    mechanism = federated.calibrated(dim, rounds, byzantine)
    asked = federated.privacy_target
    run = run_to_come(federated, mechanism, dim, rounds, byzantine)
    most = run.most_rounds or rounds
    if asked is not None and asked.over == "run" and not asked.secret:
        most = min(most, affordable(account_of(asked, run), asked.against, asked.epsilon, secret=False))
    whole = Account(run, check_delta(delta, run.num_clients, "clients"))
    claims: dict[Adversary, PrivacyClaim | str] = {}
    for who, claim in whole.claims().items():
        claims[who] = claim
        if federated.seed is not None:
            claims[who] = "keys are reproducible (use seed=None)"
        elif federated.clients.cohorts == "secret":
            claims[who] = "cohorts are secret, whose runs are not added up yet (use cohorts='known')"
        elif isinstance(claim.loss, NonPrivate):
            claims[who] = claim.loss.reason
        elif claim.neighbours is not Neighbours.SUBSTITUTION:
            claims[who] = f"its claim is {claim.neighbours.name}, which is not added up here"
        elif len(mechanism.protection_groups(planner.num_clients)) > 1:
            claims[who] = "clients have epsilons of their own"
    chances = {who: delta - whole.available(claim) for who, claim in whole.claims().items()}
    return RunCost(repr(mechanism), claims, most, chances)


def cost_of_folder(folder: Path, delta: float) -> RunCost:
    """Cost of the run of a folder, by its configuration.

    Raises:
        ValueError: If the folder has none, or it is no federation's.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no config.yaml, since `fedq fit` did not start its run; give folders of those "
            "that it did"
        )
    return cost_of_config(str(path), delta)


def cost_of_config(config: str, delta: float) -> RunCost:
    """Cost of a configuration that has not run.

    Args:
        config: Its file.

    Raises:
        ValueError: If nothing is federated, delta does not fit, or its target can't be met.
    """
    from lightning_fedq.commands.run import FedqCLI  # imports Lightning: not for --help

    cli = FedqCLI(["--config", config], run=False)
    federated = next((c for c in callbacks_of(cli.trainer) if isinstance(c, Federation)), None)
    if federated is None:
        raise ValueError(f"{config} has no Federated callback, and a sweep's cost is about federated runs")
    return cost_of(federated, cli.trainer, cli.model, delta)


def charged_by(folder: Path, cost: RunCost) -> int:
    """Rounds of the most charged client: what a run that has ended says, else all that it may have.

    Its page is written when it ends, and the configuration when it begins, and again when it goes on.
    """
    page, config, table = (folder / name for name in ("privacy.json", "config.yaml", "metrics.csv"))
    last = read_rows(table)[-1] if table.is_file() else {}
    rounds = int(last.get("charged", last.get("round", 0)))
    if page.is_file() and page.stat().st_mtime >= config.stat().st_mtime:
        return max(rounds, int(json.loads(page.read_text())["rounds"]))
    return max(rounds, cost.most_charges)


def composed(
    costs: Sequence[RunCost], charges: Sequence[int], adversary: Adversary, delta: float
) -> float | str:
    """Epsilon towards who sees every run, or why there is none.

    Kinds of runs that no grid can hold together add up in epsilon and delta. The chances of all runs are paid
    first, from half of delta at most.

    Args:
        costs: Costs of the runs that were made.
        charges: Rounds of the most charged client of each.
        adversary: Adversary that sees every run.
    """
    accountant = ClaimAccountant()
    made = [cost for cost, rounds in zip(costs, charges, strict=True) if rounds]
    left = delta - sum(cost.chances.get(adversary, 0.0) for cost in made)
    if left < 0.5 * delta:
        return "more than half of delta pays for dropouts or colluders, in every run anew"
    for cost, rounds in zip(costs, charges, strict=True):
        claim = cost.claims[adversary]
        if isinstance(claim, str):
            return claim
        if rounds:
            accountant.step(claim.loss, claim.compositions, rounds, claim.slack)
    found = accountant.get_epsilon(left)
    if found == math.inf and len(accountant.losses) > 1:  # a grid that is too narrow for wide losses
        share = left / len(accountant.losses)
        kinds = [(kind._replace(loss=kind.loss.by_itself), n) for kind, n in accountant.losses.items()]
        found = sum(ClaimAccountant({kind: n}).get_epsilon(share) for kind, n in kinds)
    return found


def of_winner(costs: Sequence[RunCost], trials: NegativeBinomialTrials, delta: float) -> float:
    """Epsilon towards an outsider who is shown the winner of a random number of runs and nothing else.

    Args:
        costs: Costs of every candidate, whether it will be drawn or not: the worst one counts.
        trials: Law of the number of runs.

    Raises:
        ValueError: If a candidate's claim is none of which a winner's follows.
    """
    losses, whole, slack = [], [], Slack()
    for cost in costs:
        claim = cost.claims[Adversary.OUTSIDER]
        if cost.chances.get(Adversary.OUTSIDER):
            claim = "a part of delta pays for dropouts, in every run anew"
        if isinstance(claim, str):
            raise ValueError(f"nothing is known of the winner towards an outsider: {claim}")
        whole.append((claim.loss, claim.compositions * cost.most_charges))
        losses.append(run_loss(*whole[-1]))
        slack = Slack(
            max(slack.distance, cost.most_charges * claim.slack.distance),
            max(slack.log_ratio, cost.most_charges * claim.slack.log_ratio),
        )
    worst = tuple(max(loss.divergence(order) for loss in losses) for order in ORDERS)
    profile = run_profile(whole)
    return selection_epsilon(RenyiLoss(ORDERS, worst), delta, trials, slack=slack, profile=profile)


def page_of_runs(
    costs: Sequence[RunCost], charges: Sequence[int], delta: float, fixed: bool, title: str
) -> str:
    """The page of everybody who sees the runs.

    Args:
        fixed: Was the number of runs fixed beforehand, so that the winner costs as much as all?
    """
    lines = [
        f"# {title}",
        "",
        f"{len(costs)} runs with the same clients add up, at delta {delta:g}, between any two updates of a "
        "client. Every run counts with its most charged client.",
        "",
        "| who sees every run | epsilon of the sweep |",
        "| --- | --- |",
    ]
    for who in _VIEWS:
        found = composed(costs, charges, who, delta)
        lines.append(f"| {who.value} | {found if isinstance(found, str) else format_epsilon(found)} |")
    lines += [
        "",
        "Clients receive the models of every run, and the server what leads to them: both pay for all.",
    ]
    if fixed:
        lines.append(
            "An outsider who is shown the winner alone pays for all, too, because the number of runs was "
            "fixed: `fedq sweep select` draws it, and states less towards such an outsider."
        )
    return "\n".join([*lines, "", _NOT_COUNTED, ""])


_HOW_LONG = ", how long the runs took (`--publish-after` hides it)"
_NOT_COUNTED = (
    "Validation data count as public, so choosing by their scores (the winner, an early stop, a best epoch) "
    "is free; where they are clients' own data it is not, and nothing here covers it. Choices made before "
    "this sweep, and other sweeps with the same people, are not counted."
)


def page_of_winner(
    costs: Sequence[RunCost],
    trials: NegativeBinomialTrials,
    delta: float,
    candidates: Sequence[str],
    minutes: float | None = None,
) -> str:
    """The page that may be published with the winner. It says the same however many runs were made.

    Args:
        costs: Costs of every candidate.
        minutes: When the winner is exported, in minutes after the start; None for as soon as it is known.

    Raises:
        ValueError: If nothing is known of the winner.
    """
    epsilon = of_winner(costs, trials, delta)
    if math.isinf(epsilon) and trials.beyond > 0.0:
        raise ValueError(
            f"nothing is left of delta {delta:g}: more than {trials.at_most} runs are drawn with chance "
            f"{trials.beyond:.2g}; let --at-most be larger, or --mean smaller"
        )
    one = max(
        epsilon_of
        for cost in costs
        if not isinstance(epsilon_of := composed([cost], [cost.most_charges], Adversary.OUTSIDER, delta), str)
    )
    most = max(cost.most_charges for cost in costs)
    lines = [
        "# Privacy of the best of a random number of runs",
        "",
        f"Epsilon {format_epsilon(epsilon)} at delta {delta:g}, between any two updates of a client, towards "
        "**an outsider who sees nothing but the winner**: its final weights, its settings and its score. One "
        f"run alone would be {format_epsilon(one)}.",
        "",
        f"The number of runs was drawn from a truncated negative binomial law, eta {trials.eta:g} and gamma "
        f"{trials.gamma:.6g}, {trials.mean:.4g} on average"
        + (f", {trials.at_most} at most" if trials.beyond > 0.0 else "")
        + f", and is told nobody. Each run draws one of {len(candidates)} candidates anew: "
        f"{'; '.join(candidates)}. A client counts for {most} rounds of a run.",
        "",
        "It is void for whoever learns the number of runs, or anything of the others: the folder `private/`, "
        f"loggers, the screen{_HOW_LONG if minutes is None else ''}. "
        + ("" if minutes is None else f"The winner came out {minutes:g} minutes after the start. ")
        + "**Clients and the server see every run and pay for all of them**: `private/all_runs.md` says how "
        "much.",
        "",
        _NOT_COUNTED,
        "",
    ]
    return "\n".join(lines)
