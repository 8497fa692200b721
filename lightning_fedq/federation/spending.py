"""Spending of a run towards the view that was asked for, by round, and its noise over its signal.

Noise over signal is the R of `planning`. Planned: from the mechanism's own error and an assumed share of the
updates that clients agree on. As seen: from the squared error and the squared mean of every round, which only
a simulation knows; what clipping cuts off counts as noise there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_fedq._lightning import pl
from lightning_fedq.byzantine.counted import num_byzantine_of
from lightning_fedq.federation.privacy_target import fewest_answers
from lightning_fedq.federation.protocol import Federation
from lightning_fedq.federation.released import beside
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanism import Adversary
from lightning_fedq.planning import HOMOGENEITY, relative_error
from lightning_fedq.privacy.beside import Beside
from lightning_fedq.privacy.charged import Population
from lightning_fedq.privacy.report import PrivacyReport, Row, privacy_report
from lightning_fedq.privacy.setting import Setting
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundEngine

_MOST_POINTS = 12
"""Rounds for which epsilon is computed."""


def report_of(federated: Federation, trainer: pl.Trainer, delta: float) -> PrivacyReport:
    """Privacy report of a finished run, by what its ledger has charged.

    Args:
        federated: Its federation, after a fit.
        trainer: Its Trainer.
        delta: In (0, 1 / num_clients).
    """
    engine, secagg = federated.engine, federated.server.secure_aggregation
    assert engine is not None
    planner = engine.planner
    secret = planner.cohort_key is not None
    return privacy_report(
        engine.mechanism,
        engine.charged_context(planner.plan(0, engine.mechanism)),
        rounds=engine.ledger.rounds,
        charges=None if secret else engine.ledger.charges,
        delta=delta,
        num_clients=planner.num_clients,
        dropout_probability=planner.dropout_probability,
        secure_keys=not isinstance(engine.keys, SeededKeys),
        secure_aggregation=secagg is not None,
        protocol="" if secagg is None else secagg.statement_of(engine.ledger.rounds),
        equal_weights=engine.plain_sum,
        max_corrupt=(secagg and secagg.max_corrupt) or 0.0,
        num_byzantine=max(num_byzantine_of(trainer, federated.planner), engine.ledger.num_byzantine),
        fewest_survivors=None if secagg is None else secagg.fewest_survivors(planner.cohort_size),
        fewest_answers=fewest_answers(planner, secagg),
        most_rounds=planner.most_rounds(engine.ledger.rounds),
        secret_cohorts=why_round_repeated(engine) if secret else None,
        beside=beside(federated, delta),
        real_clients=planner.real_clients,
    )


def why_round_repeated(engine: RoundEngine) -> str:
    """Condition that is broken where a ledger holds other rounds than the finished ones of this server."""
    charged, finished = engine.ledger.rounds, engine.round
    if charged == finished:
        return ""
    return (
        f"S2, one draw a release: {charged} rounds were charged and {finished} are finished, so one was "
        "given up or the ledger holds another training; whether a round begins again may hang on the draw. "
        "Begin a new Federated(cohorts='secret'), and add the epsilons of both"
    )


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
        trainer: Its Trainer.
        report: Its privacy report.
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
    row = min(seen, key=_epsilon) if target is None else report.row(target.against)
    if target is not None and target.secret and report.secret is not None:
        row, seen = report.secret, [report.secret]
    asked = over = spent = met = None
    if target is not None:
        asked, over = target.epsilon, target.over
        spent = of_a_round(federated, trainer, row) if over == "round" else _epsilon(row)
        met = bool(spent <= asked * (1.0 + 1e-9)) and row in seen
    return {
        "adversary": row.name,
        "epsilon": _epsilon(row),
        "delta": row.delta,
        "verdict": row.verdict,
        "asked": asked,
        "over": over,
        "spent": spent,
        "met": met,
        "by_round": _by_round(federated, trainer, row, charged) if math.isfinite(_epsilon(row)) else [],
    }


def _epsilon(row: Row) -> float:
    """Between any two updates, which every verdict is about."""
    return max(row.epsilon_run, row.epsilon_any_two)


def of_a_round(federated: Federation, trainer: pl.Trainer, row: Row) -> float:
    """Epsilon of one round between any two updates."""
    if not math.isfinite(row.epsilon_round):
        return math.inf
    return _after(federated, trainer, row, 1)


def _by_round(
    federated: Federation, trainer: pl.Trainer, row: Row, charged: Sequence[tuple[int, int]]
) -> list[list[float]]:
    """Epsilon after some of the rounds, the last one among them."""
    every = max(1, math.ceil(len(charged) / _MOST_POINTS))
    shown = list(reversed(charged))[::every][::-1]
    counted = beside(federated, row.delta)  # all of them in every point: none is too small
    return [[float(round), _after(federated, trainer, row, most, counted)] for round, most in shown]


def _after(
    federated: Federation, trainer: pl.Trainer, row: Row, most: int, counted: Beside | None = None
) -> float:
    """Epsilon towards a row's adversary where no client was charged for more than so many rounds."""
    engine, secagg = federated.engine, federated.server.secure_aggregation
    assert engine is not None
    planner = engine.planner
    secret = planner.cohort_key is not None
    setting = Setting(
        engine.charged_context(planner.plan(0, engine.mechanism)),
        most,
        row.delta,
        1.0,
        planner.dropout_probability,
        secagg is not None,
        engine.plain_sum,
        (secagg and secagg.max_corrupt) or 0.0,
        max(num_byzantine_of(trainer, federated.planner), engine.ledger.num_byzantine),
        None if secagg is None else secagg.fewest_survivors(planner.cohort_size),
        fewest_answers(planner, secagg),
        planner.num_clients,
        secret,
        counted,
    )
    if secret:
        claim = setting.claims(engine.mechanism)[Adversary[row.adversary]]
        if row.cohorts == "secret":
            return setting.secret(claim, most)
        return setting.between_any_two(claim, most, planner.cohort_size / planner.num_clients)
    charges = engine.ledger.charges.clamp(max=most)
    claim, rounds = Population(engine.mechanism, setting, planner.num_clients, charges).worst(
        Adversary[row.adversary]
    )
    return setting.between_any_two(claim, rounds, setting.participation)


def noise_over_signal(engine: RoundEngine, rows: Sequence[dict[str, float]], rounds: int) -> dict[str, Any]:
    """R of a run, as planned and as seen, None where it is not known.

    Args:
        engine: Its engine, after a fit.
        rows: Its rounds, as in `metrics.csv`.
        rounds: Rounds of the run.

    Returns:
        `planned` and `sim_seen`.
    """
    error = relative_error(engine.mechanism, engine.planner.cohort_size, engine.weights.numel())
    return {
        "planned": None if error is None else error / (HOMOGENEITY * max(rounds, 1)),
        "sim_seen": noise_seen(rows),
    }


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
