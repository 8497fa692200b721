"""Spending of a run towards the view that was asked for, by round, and its noise over its signal.

Noise over signal is the R of `planning`. Planned: from the mechanism's own error and an assumed share of the
updates that clients agree on. As seen: from the squared error and the squared mean of every round, which only
a simulation knows; what clipping cuts off counts as noise there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms.byzantine.counted import num_byzantine_of
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.privacy.planning import GOOD, HOMOGENEITY, SWAMPED, relative_error, verdict_on
from lightning_fedq.privacy.report import PrivacyReport, State, epsilon_after, privacy_report
from lightning_fedq.privacy.run import Run
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.training.described import run_so_far

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation

_MOST_POINTS = 12
"""Rounds for which epsilon is computed."""
_ROOM = 1.5
"""Length of a clip that would do, over the updates' root mean square."""


def report_of(
    federated: Federation, trainer: pl.Trainer, delta: float, state: State = "ended"
) -> PrivacyReport:
    """Privacy report of a run, by what its ledger has charged.

    Args:
        federated: Its federation, after a fit.
        delta: In (0, 1 / num_clients), where the target says none.
        state: Is it to come, under way or over?
    """
    return privacy_report(run_of(federated, trainer), delta, state, federated.privacy_target)


def run_of(federated: Federation, trainer: pl.Trainer) -> Run:
    """Run of a federation so far."""
    assert federated.engine is not None
    return run_so_far(federated, federated.engine, num_byzantine_of(trainer, federated.planner))


def by_round(
    federated: Federation, trainer: pl.Trainer, report: PrivacyReport, charged: Sequence[tuple[int, int]]
) -> tuple[tuple[int, float], ...]:
    """Epsilon of the row that a report is about after some of the rounds, the last one among them.

    Args:
        federated: Its federation, after a fit.
        report: Its report.
        charged: Pairs of a round, from 1, and the rounds that some client had been charged for by then.

    Returns:
        Pairs of a round and the epsilon over the run so far, none without one.
    """
    if not math.isfinite(report.about.epsilon):
        return ()
    run, every = run_of(federated, trainer), max(1, math.ceil(len(charged) / _MOST_POINTS))
    shown = list(reversed(charged))[::every][::-1]
    # all releases in every point: none is too small
    return tuple((round, epsilon_after(run, report.about, most)) for round, most in shown)


def noise_over_signal(engine: RoundEngine, rows: Sequence[dict[str, float]], rounds: int) -> dict[str, Any]:
    """R of a run, as planned and as seen, None where it is not known.

    Args:
        engine: Its engine, after a fit.
        rows: Its rounds, as in `metrics.csv`.
        rounds: Rounds of the run.

    Returns:
        `planned` and `sim_seen`; `clip` where another clip would do, see `clip_that_would_do`.
    """
    dim = engine.weights.numel()
    error = relative_error(engine.mechanism, engine.planner.cohort_size, dim)
    found: dict[str, Any] = {
        "planned": None if error is None else error / (HOMOGENEITY * max(rounds, 1)),
        "sim_seen": noise_seen(rows),
    }
    clip = clip_that_would_do(engine.mechanism, dim, rows)
    return found if clip is None else {**found, "clip": clip}


def noise_words(known: Mapping[str, Any]) -> str:
    """R of a run and what it means for the model: as seen after the run, else as planned. "" without one.

    Where updates were far shorter than the clip, the clip that would do.

    Args:
        known: Figures of `noise_over_signal`.
    """
    seen: Any = known.get("sim_seen")
    planned: Any = known.get("planned")
    words = []
    if seen is not None:
        words.append(f"{seen:.2g} as seen, with what clipping cuts off")
    if planned is not None:
        words.append(f"{planned:.2g} planned, with {HOMOGENEITY:g} of the updates' energy common to all")
    if not words:
        return ""
    value = planned if seen is None else seen
    means = "this run could hardly learn" if value > SWAMPED else verdict_on(value)
    if (clip := known.get("clip")) and seen is not None and seen > GOOD:
        means += (
            f"; updates were {clip['sim_update_norm']:.2g} long: clip_norm {clip['enough']:.2g} would do for "
            f"{clip['clip_norm']:.2g}, and R be about {clip['less']:.2g} of what was seen (read off data, "
            "which no epsilon counts; AdaptiveClip counts it)"
        )
    return f"R = {'; '.join(words)}: {means}"


def clip_that_would_do(
    mechanism: Mechanism, dim: int, rows: Sequence[dict[str, float]]
) -> dict[str, float] | None:
    """A clip for updates that are far shorter than the present one, and the share of R that it leaves.

    The root of the updates' mean square in the round in which they were longest, with half as much on top.

    Args:
        mechanism: The mechanism of the run.
        dim: Parameters.
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


def noise_seen(rows: Sequence[dict[str, float]]) -> float | None:
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
