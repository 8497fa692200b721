"""Accounts of a federation: its settings as the one `Run` that every statement takes, and what follows.

Figures as loggers get them after a round (epsilon, bits a parameter, megabytes); the report of a run, epsilon
by round, and noise over signal, the R of `planning`. Planned: from the mechanism's own error and an assumed
share of the updates that clients agree on. As seen: from the squared error and the squared mean of every
round, which only a simulation knows; what clipping cuts off counts as noise there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import get_callbacks, pl
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, NonPrivate, PrivacyClaim, RoundContext
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import closed_form
from lightning_fedq.privacy.planning import GOOD, HOMOGENEITY, SWAMPED, relative_error, verdict_on
from lightning_fedq.privacy.report import PrivacyReport, State, epsilon_after, privacy_report
from lightning_fedq.privacy.run import Run, SecureSum, ThreatModel
from lightning_fedq.reports.runs import BITS_PER_MEGABYTE
from lightning_fedq.rounds import RoundEngine, RoundPlanner, RoundRecord, RoundServer
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.checkpoints import count_other_runs
from lightning_fedq.training.settings import Federation


class NoiseWarning(UserWarning):
    """A privacy target whose noise swamps the updates."""


def describe_run(
    planner: RoundPlanner,
    mechanism: Mechanism,
    context_or_dim: RoundContext | int,
    *,
    rounds: int,
    secure_sum: SecAgg | SecureSum | None,
    plain_sum: bool,
    num_byzantine: int,
    secure_keys: bool,
    charges: Sequence[int] | Tensor | None = None,
    to_come: int = 0,
) -> Run:
    """Describe a run.

    Args:
        context_or_dim: A round of it, or before there is a server the number of parameters.
        plain_sum: Does the model depend on the messages through their plain sum only?
        num_byzantine: Clients of a cohort, at most, that do not run the protocol.
        secure_keys: Do keys come from the operating system?
        charges: Charges of a run so far; left out where they would tell who was drawn.
        to_come: Rounds that are not among them.
    """
    if isinstance(context_or_dim, int):
        one = torch.ones(1, dtype=torch.float64)
        context_or_dim = RoundContext(
            0, planner.expected(0, mechanism).groups, (context_or_dim,), 0.0 * one, one
        )
    sampling = planner.sampling()
    if isinstance(secure_sum, SecAgg):
        size = planner.cohort_size
        secure_sum = secure_sum.guarantee(planner.num_clients, size, rounds, num_byzantine)
    return Run(
        mechanism=mechanism,
        context=context_or_dim,
        rounds=rounds,
        sampling=sampling,
        threat=ThreatModel(
            secure_sum=secure_sum, plain_sum=plain_sum, num_byzantine=num_byzantine, secure_keys=secure_keys
        ),
        charges=None if sampling.law.secret else charges,
        to_come=to_come,
    )


def planned_run(
    federation: Federation, mechanism: Mechanism, dim: int, rounds: int, num_byzantine: int
) -> Run:
    """Run of a federation before there is a server: so many more rounds than its ledger's."""
    return describe_run(
        federation.planner,
        mechanism,
        dim,
        rounds=rounds,
        secure_sum=federation.server.secure_aggregation,
        plain_sum=federation.server.plain_sum,
        num_byzantine=num_byzantine,
        secure_keys=federation.seed is None,
    )


def run_to_charge(server: RoundServer, secagg: SecAgg | None, num_byzantine: int) -> Run:
    """Run of a server's rounds to come, whose terms its ledger holds them to."""
    return describe_run(
        server.planner,
        server.mechanism,
        server.context(server.next_plan()),
        rounds=server.ledger.rounds,
        secure_sum=secagg,
        plain_sum=server.plain_sum,
        num_byzantine=num_byzantine,
        secure_keys=server.keys.mode != "reproducible",
    )


def charged_run(federation: Federation, engine: RoundEngine, num_byzantine: int) -> Run:
    """Run of a federation, by what its ledger has charged."""
    num_byzantine = max(num_byzantine, engine.ledger.num_byzantine)
    count_other_runs(engine.ledger)
    run = run_to_charge(engine, federation.server.secure_aggregation, num_byzantine)
    return replace(
        run,
        context=engine.charged_context(engine.next_plan()),
        charges=None if run.sampling.law.secret else engine.ledger.charges,
        sampling=engine.planner.sampling(find_repeated_round(engine)),
    )


def full_run(federation: Federation, engine: RoundEngine, num_byzantine: int, rounds: int) -> Run:
    """Run of a federation that has begun, over so many rounds of a client."""
    return replace(charged_run(federation, engine, num_byzantine), rounds=rounds, charges=None)


def find_repeated_round(engine: RoundEngine) -> str:
    """Condition that is broken where a ledger holds other rounds than the finished ones of this server."""
    charged, finished = engine.ledger.rounds, engine.round
    if charged == finished:
        return ""
    return (
        f"S2, one draw a release: {charged} rounds were charged and {finished} are finished, so one was "
        "given up or the ledger holds another training; whether a round begins again may hang on the draw. "
        "Begin a new Federated, and add the epsilons of both"
    )


# ---- after a round -----------------------------------------------------------------------------------------


FIGURES = ("fed/epsilon", "fed/sim_epsilon", "fed/delta", "fed/bits_per_parameter", "fed/megabytes_up")
_LARGEST_DELTA = 1e-5
_FIRST_PRICED = 32
"""A grid's epsilon takes half a round of 1,000 clients: from here on, below 2% of all rounds before it."""


def choose_delta(federation: Federation, trainer: pl.Trainer) -> float:
    """Delta of all that a run says of its clients: its target's, its folder's or budget's, or the usual one.

    Args:
        trainer: Its callbacks ask for a delta by `clients_delta`.

    Raises:
        ValueError: If two of them ask for different ones.
    """
    target, usual = federation.privacy_target, min(_LARGEST_DELTA, 0.1 / federation.planner.num_clients)
    said: list[float | None] = [
        getattr(callback, "clients_delta", None) for callback in get_callbacks(trainer)
    ]
    asked = {delta for delta in (*said, None if target is None else target.delta) if delta is not None}
    if len(asked) > 1:
        raise ValueError(
            f"the epsilons of a run's clients are all said at one delta, got {sorted(asked)}; give target, "
            "budget and RunFolder the same one, or leave the RunFolder's out"
        )
    return asked.pop() if asked else usual


class RunFigures:
    """Figures of a federation's rounds.

    Where an epsilon has no closed form it takes milliseconds, so it is known after rounds 32, 64, ... and the
    last one only. An older one is never shown in its place. With keys from a seed it is what secret keys
    would give, and its name says so.
    """

    def __init__(self, federation: Federation, trainer: pl.Trainer) -> None:
        self._federation, self._trainer = federation, trainer
        self._megabytes, self._costs = 0.0, dict[str, tuple[Account, PrivacyClaim]]()
        budgets: list[Any] = [each for each in get_callbacks(trainer) if hasattr(each, "epsilon_spent")]
        about = [each.adversary for each in budgets if each.unit != "sample"]
        target = federation.privacy_target
        self._counted = len(about) == 1 and (target is None or about[0] is target.against)
        self.vector_changed()

    def vector_changed(self) -> None:
        """Price the rounds again: parameters have joined or left."""
        federation, target = self._federation, self._federation.privacy_target
        self._costs = {}
        if self._counted or federation.planner.law.secret:
            return  # a budget logs its own; and who was charged would tell who was drawn
        assert federation.engine is not None
        to_come = (self._trainer.max_epochs or 0) - self._trainer.current_epoch
        # half of delta pays for unlucky rounds, of as many as there will be
        if to_come < 0 and federation.planner.dropout_probability:
            return
        horizon = max(federation.engine.ledger.rounds + to_come, 1)
        byzantine = count_byzantine(self._trainer, federation.planner)
        run = full_run(federation, federation.engine, byzantine, horizon)
        account = Account(run, choose_delta(federation, self._trainer))
        groups = run.mechanism.protection_groups(run.num_clients)
        if len(groups) > 1:
            return  # every kind of clients has an epsilon of its own: the report says them
        sums = run.threat.secure_sum
        for who, claim in account.claims().items():
            if target is None or who is not target.against or isinstance(claim.loss, NonPrivate):
                continue  # without a target the six stand in the report at the end
            masked = who is not Adversary.SECAGG_SERVER or (sums is not None and sums.ran)
            true = run.threat.secure_keys and masked
            self._costs["fed/epsilon" if true else "fed/sim_epsilon"] = account, claim

    def after(self, record: RoundRecord) -> dict[str, float]:
        """Figures after a round, by name, NaN where one is not computed after this round."""
        engine, last = self._federation.engine, self._trainer.max_epochs
        assert engine is not None
        self._megabytes += (record.uplink_bits + record.setup_bits) / BITS_PER_MEGABYTE
        values = {"fed/megabytes_up": self._megabytes}
        if record.num_received:
            values["fed/bits_per_parameter"] = (
                record.uplink_bits / record.num_received / engine.weights.numel()
            )
        count = record.round + 1
        sparse = count == last or (count >= _FIRST_PRICED and count & (count - 1) == 0)
        charges = engine.ledger.max_charges
        for name, (account, claim) in self._costs.items():
            values["fed/delta"] = account.delta
            known = sparse or closed_form(claim.loss)
            values[name] = account.epsilon_replace_one(claim, charges) if known else math.nan
        return values


def finite_epsilons(rows: list[tuple[str, float]], masked: bool) -> dict[str, float]:
    """Epsilon of a finished run with secure keys towards every adversary, by name, where it is finite.

    Args:
        rows: Adversaries by name, with an epsilon each.
        masked: Whether the masks of secure aggregation really ran; else that row's name says "sim".
    """
    found = {}
    for who, value in rows:
        prefix = "fed/epsilon" if masked or who != Adversary.SECAGG_SERVER.name else "fed/sim_epsilon"
        if math.isfinite(value):
            found[f"{prefix}_{who.lower()}"] = value
    return found


# ---- of a run ----------------------------------------------------------------------------------------------


_MOST_POINTS = 12
"""Rounds for which epsilon is computed."""
_ROOM = 1.5
"""Length of a clip that would do, over the updates' root mean square."""


def make_report(
    federated: Federation, trainer: pl.Trainer, delta: float, state: State = "ended"
) -> PrivacyReport:
    """Privacy report of a run, by what its ledger has charged.

    Args:
        delta: In (0, 1 / num_clients), where the target says none.
        state: Is it to come, under way or over?
    """
    return privacy_report(current_run(federated, trainer), delta, state, federated.privacy_target)


def current_run(federated: Federation, trainer: pl.Trainer) -> Run:
    """Run of a federation so far."""
    assert federated.engine is not None
    return charged_run(federated, federated.engine, count_byzantine(trainer, federated.planner))


def stopped(trainer: pl.Trainer) -> str:
    """Say what ended a fit before its last round. "" where it had all of them."""
    last = trainer.max_epochs or 0
    return f"by a stop after round {trainer.current_epoch} of {last}" if trainer.current_epoch < last else ""


def epsilon_by_round(
    federated: Federation, trainer: pl.Trainer, report: PrivacyReport, charged: Sequence[tuple[int, int]]
) -> tuple[tuple[int, float], ...]:
    """Epsilon of the row that a report is about after some of the rounds, the last one among them.

    Args:
        charged: Pairs of a round, from 1, and the rounds that some client had been charged for by then.

    Returns:
        Pairs of a round and the epsilon over the run so far, none without one.
    """
    if not math.isfinite(report.about.epsilon):
        return ()
    run, every = current_run(federated, trainer), max(1, math.ceil(len(charged) / _MOST_POINTS))
    shown = list(reversed(charged))[::every][::-1]
    # all releases in every point: none is too small
    return tuple((round, epsilon_after(run, report.about, most)) for round, most in shown)


def noise_over_signal(engine: RoundEngine, rows: Sequence[dict[str, float]], rounds: int) -> dict[str, Any]:
    """R of a run, as planned and as seen, None where it is not known.

    Args:
        rows: Its rounds, as in `metrics.csv`.

    Returns:
        `planned` and `sim_seen`; `clip` where another clip would do, see `suggest_clip_norm`.
    """
    dim = engine.weights.numel()
    error = relative_error(engine.mechanism, engine.planner.cohort_size, dim)
    found: dict[str, Any] = {
        "planned": None if error is None else error / (HOMOGENEITY * max(rounds, 1)),
        "sim_seen": measured_noise(rows),
    }
    clip = suggest_clip_norm(engine.mechanism, dim, rows)
    return found if clip is None else {**found, "clip": clip}


def describe_noise(ratios: Mapping[str, Any]) -> str:
    """R of a run and what it means for the model: as seen after the run, else as planned. "" without one.

    Where updates were far shorter than the clip, the clip that would do.

    Args:
        ratios: Figures of `noise_over_signal`.
    """
    seen: Any = ratios.get("sim_seen")
    planned: Any = ratios.get("planned")
    words = []
    if seen is not None:
        words.append(f"{seen:.2g} as seen, with what clipping cuts off")
    if planned is not None:
        words.append(f"{planned:.2g} planned, with {HOMOGENEITY:g} of the updates' energy common to all")
    if not words:
        return ""
    value = planned if seen is None else seen
    means = "this run could hardly learn" if value > SWAMPED else verdict_on(value)
    if (clip := ratios.get("clip")) and seen is not None and seen > GOOD:
        means += (
            f"; updates were {clip['sim_update_norm']:.2g} long: clip_norm {clip['enough']:.2g} would do for "
            f"{clip['clip_norm']:.2g}, and R be about {clip['less']:.2g} of what was seen (read off data, "
            "which no epsilon counts; AdaptiveClip counts it)"
        )
    return f"R = {'; '.join(words)}: {means}"


def suggest_clip_norm(
    mechanism: Mechanism, dim: int, rows: Sequence[dict[str, float]]
) -> dict[str, float] | None:
    """A clip for updates that are far shorter than the present one, and the share of R that it leaves.

    The root of the updates' mean square in the round in which they were longest, with half as much on top.

    Args:
        rows: Rounds of the run; those without diagnostics are left out.

    Returns:
        `clip_norm` of the run, `enough`, `less` (the square of their ratio) and `sim_update_norm`, in units
        of the update. None where it holds no l2 norm, nothing was seen, or it is not twice too long.
    """
    if not mechanism.clips_norm:
        return None
    present: float = mechanism.clip_norm
    norms = [
        math.sqrt(dim * row["sim_mse"] * 10.0 ** (row["sim_snr_db"] / 10.0) / row["sim_homogeneity"])
        for row in rows
        if all(math.isfinite(row.get(f"sim_{name}", math.nan)) for name in ("mse", "snr_db", "homogeneity"))
        and row["sim_homogeneity"] > 0.0
    ]
    ratio = _ROOM * max(norms, default=math.inf) / present
    if ratio > 0.5:
        return None
    found = {"clip_norm": present, "enough": ratio * present, "less": ratio**2}
    return {**found, "sim_update_norm": max(norms)}


def measured_noise(rows: Sequence[dict[str, float]]) -> float | None:
    """Squared errors of all rounds over the square of the sum of their mean updates' norms.

    Where rounds are alike it is the error over the signal of one round, divided by the number of rounds.

    Args:
        rows: Rounds of the run; those without diagnostics are left out.

    Returns:
        None where no round has diagnostics, or no update was other than zero.
    """
    noise = signal = 0.0
    for row in rows:
        mse, snr = row.get("sim_mse", math.nan), row.get("sim_snr_db", math.nan)
        if math.isfinite(mse) and math.isfinite(snr):
            noise += mse
            signal += math.sqrt(mse * 10.0 ** (snr / 10.0))
    return noise / signal**2 if signal > 0.0 else None
