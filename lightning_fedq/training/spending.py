"""Spending of a run towards the view that was asked for, by round, and its noise over its signal.

Noise over signal is the R of `planning`. Planned: from the mechanism's own error and an assumed share of the
updates that clients agree on. As seen: from the squared error and the squared mean of every round, which only
a simulation knows; what clipping cuts off counts as noise there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms.byzantine.counted import num_byzantine_of
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.charged import spent_so_far
from lightning_fedq.privacy.digest import least
from lightning_fedq.privacy.planning import HOMOGENEITY, relative_error
from lightning_fedq.privacy.report import PrivacyReport, Row, privacy_report
from lightning_fedq.privacy.run import Run
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.training.described import run_so_far

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation

_MOST_POINTS = 12
"""Rounds for which epsilon is computed."""
_ROOM = 1.5
"""Length of a clip that would do, over the updates' root mean square."""


def report_of(federated: Federation, trainer: pl.Trainer, delta: float) -> PrivacyReport:
    """Privacy report of a finished run, by what its ledger has charged.

    Args:
        federated: Its federation, after a fit.
        delta: In (0, 1 / num_clients).
    """
    return privacy_report(run_of(federated, trainer), delta)


def run_of(federated: Federation, trainer: pl.Trainer) -> Run:
    """Run of a federation so far."""
    assert federated.engine is not None
    return run_so_far(federated, federated.engine, num_byzantine_of(trainer, federated.planner))


def view_of(
    federated: Federation,
    trainer: pl.Trainer,
    report: PrivacyReport,
    target: PrivacyTarget | None,
    charged: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Privacy towards the view that was asked for, or without a target towards that of the least epsilon.

    Args:
        federated: Its federation, after a fit.
        target: What was asked for; None where nothing was.
        charged: Pairs of a round, from 1, and the rounds that some client had been charged for by then.

    Returns:
        `adversary`; `epsilon` over the run, `delta` and `verdict`; `asked`, `over` (a "round" or the "run"),
        `spent` over that, and whether it is `met`, all None without a target; `by_round`, pairs of a round
        and the epsilon over the run so far, empty without one.
    """
    if target is not None and target.delta not in (None, report.delta):
        report = report_of(federated, trainer, target.delta)  # what was asked for is judged at its own delta
    secagg = federated.server.secure_aggregation
    masked = secagg is not None and secagg.run != "accounted"
    seen = [row for row in report.rows if masked or row.adversary != Adversary.SECAGG_SERVER.name]
    row = least(report, masked) if target is None else report.row(target.against)
    if target is not None and target.secret and report.secret is not None:
        row, seen = report.secret, [report.secret]
    asked = over = spent = met = None
    if target is not None:
        asked, over = target.epsilon, target.over
        spent = of_a_round(federated, trainer, row) if over == "round" else row.epsilon
        met = target.met(spent) and row in seen
    return {
        "adversary": row.name,
        "epsilon": row.epsilon,
        "delta": row.delta,
        "verdict": row.verdict,
        "asked": asked,
        "over": over,
        "spent": spent,
        "met": met,
        "by_round": _by_round(federated, trainer, row, charged) if math.isfinite(row.epsilon) else [],
    }


def of_a_round(federated: Federation, trainer: pl.Trainer, row: Row) -> float:
    """Epsilon of one round between any two updates."""
    if not math.isfinite(row.epsilon_round):
        return math.inf
    return _after(run_of(federated, trainer), row, 1)


def _by_round(
    federated: Federation, trainer: pl.Trainer, row: Row, charged: Sequence[tuple[int, int]]
) -> list[list[float]]:
    """Epsilon after some of the rounds, the last one among them."""
    every = max(1, math.ceil(len(charged) / _MOST_POINTS))
    shown = list(reversed(charged))[::every][::-1]
    run = run_of(federated, trainer)  # all releases in every point: none is too small
    return [[float(round), _after(run, row, most)] for round, most in shown]


def _after(run: Run, row: Row, most: int) -> float:
    """Epsilon towards a row's adversary where no client was charged for more than so many rounds."""
    if run.charges is not None:
        run = replace(run, charges=torch.as_tensor(run.charges).clamp(max=most))
    return spent_so_far(Account(run, row.delta), Adversary[row.adversary], most, row.cohorts == "secret")


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
