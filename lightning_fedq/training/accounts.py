"""Privacy accounts of a federation: builds the `Run` that every report takes, and figures computed from it.

The figures are those that loggers get after a round (epsilon, bits per parameter, megabytes), the privacy
report, epsilon by round, and the noise-to-signal ratio (R in `privacy.planning`). The planned ratio uses the
mechanism's own error and an assumed share of the updates that clients have in common. The measured ratio uses
the squared error and the squared mean of every round, which only a simulation knows, and the share of the
updates that arrived. It counts the error of clipping as noise. The verdict uses the larger ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_info
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.data.sampling import in_short
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, NonPrivate, RoundContext
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import closed_form
from lightning_fedq.privacy.planning import GOOD, HOMOGENEITY, SWAMPED, planned_noise, verdict_on
from lightning_fedq.privacy.report import PrivacyReport, State, epsilon_after, privacy_report
from lightning_fedq.privacy.run import Run, SecureSum, ThreatModel
from lightning_fedq.reports.runs import BITS_PER_MEGABYTE, worse_ratio
from lightning_fedq.rounds import RoundEngine, RoundPlanner, RoundRecord, RoundServer
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.checkpoints import count_other_runs
from lightning_fedq.training.settings import Federation


class NoiseWarning(UserWarning):
    """Warning that the noise of a run is much larger than the updates."""


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
    """Build the `Run` that accounts and reports take.

    Args:
        context_or_dim: Context of one round of the run, or the number of parameters before there is a server.
        plain_sum: Does the model depend on the messages through their plain sum only?
        num_byzantine: Largest number of clients of a cohort that do not run the protocol.
        secure_keys: Do keys come from the operating system?
        charges: Charges of each client so far, `(num_clients,)`. Dropped for secret cohorts, because charges
            reveal the clients that were drawn.
        to_come: Number of rounds that are planned and not in `charges`.
    """
    if isinstance(context_or_dim, int):
        context_or_dim = planner.expected_context(mechanism, context_or_dim)
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
    """Return the run of a federation that has no server yet, over `rounds` rounds."""
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
    """Return the run whose terms a server's ledger records when it charges the next round."""
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
    """Return the run of a federation so far, with the charges of its ledger and of other runs."""
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
    """Return the run of a started federation as if a client took part in `rounds` rounds."""
    return replace(charged_run(federation, engine, num_byzantine), rounds=rounds, charges=None)


def find_repeated_round(engine: RoundEngine) -> str:
    """Return the condition of secret cohorts that a repeated round breaks. "" if no round was repeated.

    The ledger then has charged another number of rounds than this server has finished. A round that was given
    up, or another training, was charged. Whether a round is repeated may depend on the draw.
    """
    charged, finished = engine.ledger.rounds, engine.round
    if charged == finished:
        return ""
    return (
        f"S2, one draw a release: {charged} rounds were charged and {finished} are finished. "
        "Begin a new Federated, and add the epsilons of both"
    )


# ---- after a round -----------------------------------------------------------------------------------------


FIGURES = ("fed/epsilon", "fed/sim_epsilon", "fed/delta", "fed/bits_per_parameter", "fed/megabytes_up")
_LARGEST_DELTA = 1e-5
_FIRST_PRICED = 32
"""First round with an epsilon on a grid, which takes half a round of 1,000 clients.

At rounds 32, 64, ... it costs less than 2% of the rounds before it.
"""


def choose_delta(federation: Federation, trainer: pl.Trainer) -> float:
    """Return the delta of all epsilons of clients that a run reports.

    It is the delta of the privacy target or a budget, else min(1e-5, 0.1 / num_clients).

    Args:
        trainer: Trainer, whose callbacks ask for a delta by their attribute `clients_delta`.

    Raises:
        ValueError: If the target and the callbacks ask for different deltas.
    """
    target, usual = federation.privacy_target, min(_LARGEST_DELTA, 0.1 / federation.planner.num_clients)
    deltas = [None if target is None else target.delta]
    deltas += [getattr(callback, "clients_delta", None) for callback in get_callbacks(trainer)]
    asked = {delta for delta in deltas if delta is not None}
    if len(asked) > 1:
        raise ValueError(
            f"All epsilons of clients need the same delta, got {sorted(asked)}. "
            "Give the target and the budget the same delta."
        )
    return asked.pop() if asked else usual


class LoggedEpsilon(NamedTuple):
    """Epsilon that is logged after rounds.

    Args:
        name: Name under which it is logged.
        account: Account of the run.
        adversary: Adversary of the privacy target.
        is_cheap: Does it have a closed form?
    """

    name: str
    account: Account
    adversary: Adversary
    is_cheap: bool


class RunFigures:
    """Figures of a federation that are logged after each round.

    An epsilon without a closed form takes milliseconds to compute, so it is computed after rounds 32, 64, ...
    and the last one only. No older value is logged in between. If keys come from a seed, or masks do not run,
    the name of the epsilon contains "sim": it is the value that secret keys and real masks would give.
    """

    def __init__(self, federation: Federation, trainer: pl.Trainer) -> None:
        self._federation, self._trainer = federation, trainer
        self._megabytes = 0.0
        self._epsilon: LoggedEpsilon | None = None
        budgets: list[Any] = [each for each in get_callbacks(trainer) if hasattr(each, "epsilon_spent")]
        about = [each.adversary for each in budgets if each.unit != "sample"]
        target = federation.privacy_target
        self._counted = len(about) == 1 and (target is None or about[0] is target.against)
        self.vector_changed()

    def vector_changed(self) -> None:
        """Compute epsilons for a new trained vector, because parameters were frozen or unfrozen."""
        federation, target = self._federation, self._federation.privacy_target
        self._epsilon = None
        if target is None or self._counted or federation.planner.law.secret:
            # Without a target, the report at the end has all adversaries. A budget logs its own epsilon, and
            # charges of secret cohorts reveal the clients drawn.
            return
        engine, byzantine = federation.started_engine, count_byzantine(self._trainer, federation.planner)
        run = full_run(federation, engine, byzantine, engine.ledger.rounds)
        if len(run.mechanism.protection_groups(run.num_clients)) > 1:
            return  # each kind of clients has an epsilon of its own, which only the report shows
        account, who = Account(run, choose_delta(federation, self._trainer)), target.against
        claim = account.claims()[who]
        if isinstance(claim.loss, NonPrivate):
            return
        sums = run.threat.secure_sum
        masked = who is not Adversary.SECAGG_SERVER or (sums is not None and sums.ran)
        name = "fed/epsilon" if run.threat.secure_keys and masked else "fed/sim_epsilon"
        self._epsilon = LoggedEpsilon(name, account, who, closed_form(claim.loss))

    def after(self, record: RoundRecord) -> dict[str, float]:
        """Return the figures after a round by their logged names. NaN if not computed after this round."""
        engine, last = self._federation.started_engine, self._federation.count_rounds(self._trainer)
        self._megabytes += (record.uplink_bits + record.setup_bits) / BITS_PER_MEGABYTE
        values = {"fed/megabytes_up": self._megabytes}
        if record.num_received:
            bits = record.uplink_bits / record.num_received
            values["fed/bits_per_parameter"] = bits / engine.weights.numel()
        count = record.round + 1
        sparse = count == last or (count >= _FIRST_PRICED and count & (count - 1) == 0)
        ledger = engine.ledger
        if (asked := self._epsilon) is not None:
            account = replace(asked.account, run=replace(asked.account.run, rounds=ledger.rounds))
            values["fed/delta"], values[asked.name] = account.delta, math.nan
            if sparse or asked.is_cheap:
                values[asked.name] = account.epsilon(asked.adversary, ledger.max_charges, secret=False)
        return values


def finite_epsilons(rows: list[tuple[str, float]], masked: bool) -> dict[str, float]:
    """Return the finite epsilons of a finished run with secure keys, by their logged names.

    Args:
        rows: Pairs of the name of an adversary and the epsilon against it.
        masked: Did the masks of secure aggregation run? If not, the name against the server behind them
            contains "sim".
    """
    simulated = "" if masked else Adversary.SECAGG_SERVER.name
    return {
        f"fed/{'sim_' if who == simulated else ''}epsilon_{who.lower()}": value
        for who, value in rows
        if math.isfinite(value)
    }


# ---- of a run ----------------------------------------------------------------------------------------------


_MOST_POINTS = 12
"""Largest number of rounds for which `epsilon_by_round` computes epsilon."""
_ROOM = 1.5
"""Suggested clip_norm over the root mean square of the updates' norms."""


def make_report(
    federated: Federation, trainer: pl.Trainer, delta: float, state: State = "ended"
) -> PrivacyReport:
    """Return the privacy report of a run, computed from the charges of its ledger.

    Args:
        delta: Delta in (0, 1 / num_clients), used if the privacy target has none.
        state: Is the run still to come, running or over?
    """
    report = privacy_report(current_run(federated, trainer), delta, state, federated.privacy_target)
    limits = filter(None, (getattr(callback, "limit_in_words", "") for callback in get_callbacks(trainer)))
    return replace(report, limit=" and ".join(limits))


def current_run(federated: Federation, trainer: pl.Trainer) -> Run:
    """Return the run of a federation so far."""
    return charged_run(federated, federated.started_engine, count_byzantine(trainer, federated.planner))


def stopped(federated: Federation, trainer: pl.Trainer) -> str:
    """Describe the stop that ended a fit before its last round. "" if all rounds were trained."""
    last = federated.count_rounds(trainer) or 0
    return f"by a stop after round {trainer.current_epoch} of {last}" if trainer.current_epoch < last else ""


def epsilon_by_round(
    federated: Federation, trainer: pl.Trainer, report: PrivacyReport, charged: Sequence[tuple[int, int]]
) -> tuple[tuple[int, float], ...]:
    """Return epsilon against the report's main adversary after at most 12 rounds, with the last among them.

    Args:
        charged: Pairs of a round (from 1) and the largest number of rounds a client was charged for by then.

    Returns:
        Pairs of a round and the epsilon over the run so far. Empty if the report has no finite epsilon.
    """
    if not math.isfinite(report.about.epsilon):
        return ()
    run, every = current_run(federated, trainer), max(1, math.ceil(len(charged) / _MOST_POINTS))
    shown = list(reversed(charged))[::every][::-1]
    # the charges of all clients, each capped at `most`, so that no epsilon is too small
    return tuple((round, epsilon_after(run, report.about, most)) for round, most in shown)


def noise_over_signal(
    engine: RoundEngine, rows: Sequence[dict[str, float]], rounds: int, lengths: Sequence[float] = ()
) -> dict[str, Any]:
    """Return the noise-to-signal ratio R of a run, planned and measured. None where it is not known.

    Args:
        rows: Rounds of the run, as in `metrics.csv`.
        rounds: Number of rounds of the run.
        lengths: Lengths of updates by the schedule, see `FederatedFit`. Used if they cover all rounds.

    Returns:
        `planned` and `sim_seen` (measured). Also `clip` if a smaller clip_norm is enough, see
        `suggest_clip_norm`, and `short_rounds`, the rounds whose updates were below a tenth of the longest.
    """
    dim, cohort, rounds = engine.weights.numel(), engine.planner.cohort_size, max(rounds, 1)
    lengths = lengths[:rounds] if len(lengths) >= rounds else ()
    found: dict[str, Any] = {
        "planned": planned_noise(engine.mechanism, cohort, dim, rounds, lengths=lengths),
        "sim_seen": measured_noise(rows),
    }
    if (clip := suggest_clip_norm(engine.mechanism, dim, rows)) is not None:
        found["clip"] = clip
    if short := find_short_rounds([_update_norm(row, dim) for row in rows]):
        found["short_rounds"] = short
    return found


def report_short_rounds(engine: RoundEngine, lengths: Sequence[float]) -> None:
    """Report rounds in which a schedule makes updates short, if the plan's R rises by half and is not good.

    Args:
        lengths: Lengths of the updates of each round by the schedule, relative to the longest.
    """
    short, rounds = find_short_rounds(lengths), len(lengths)
    known = engine.mechanism, engine.planner.cohort_size, engine.weights.numel(), rounds
    ratio, constant = planned_noise(*known, lengths=lengths), planned_noise(*known)
    if short and ratio is not None and constant is not None and ratio > max(GOOD, 1.5 * constant):
        rank_zero_info(
            f"The schedule makes updates of rounds {in_short(short)} shorter than a tenth of the longest, "
            f"and their noise stays. R is {ratio:.2g} instead of {constant:.2g} at a constant rate. Use a "
            "schedule that ends higher, or fewer rounds"
        )


def find_short_rounds(lengths: Sequence[float]) -> list[int]:
    """Return the rounds, from 1, whose length is below a tenth of the largest one. NaN is not known."""
    longest = max((length for length in lengths if not math.isnan(length)), default=0.0)
    return [round for round, length in enumerate(lengths, 1) if length < 0.1 * longest]


def _update_norm(row: Mapping[str, float], dim: int) -> float:
    """Return the root mean square norm of the updates of a round. NaN without diagnostics."""
    mse, snr, homogeneity = (row.get(f"sim_{name}", math.nan) for name in ("mse", "snr_db", "homogeneity"))
    if not (math.isfinite(mse) and math.isfinite(snr) and homogeneity > 0.0):
        return math.nan
    return math.sqrt(dim * mse * 10.0 ** (snr / 10.0) / homogeneity)


def describe_noise(ratios: Mapping[str, Any]) -> str:
    """Describe the noise-to-signal ratio R of a run, and what it means for the model. "" without a ratio.

    The verdict uses the larger of the two ratios. If updates were much shorter than the clip_norm, a smaller
    clip_norm is suggested.

    Args:
        ratios: Figures of `noise_over_signal`.
    """
    seen: Any = ratios.get("sim_seen")
    planned: Any = ratios.get("planned")
    if (value := worse_ratio(ratios)) is None:
        return ""
    words = []
    if seen is not None:
        words.append(f"{seen:.2g} measured, with the error of clipping")
    if planned is not None:
        words.append(f"{planned:.2g} planned, if clients share {HOMOGENEITY:g} of the updates' energy")
    means = "this run could hardly learn" if value > SWAMPED else verdict_on(value)
    if (clip := ratios.get("clip")) and seen is not None and seen > GOOD:
        means += (
            f". Updates had norm {clip['sim_update_norm']:.2g}: clip_norm {clip['enough']:.2g} is enough "
            f"instead of {clip['clip_norm']:.2g}, with {clip['less']:.2g} of the measured R. The norm was "
            "read from data without a charge (AdaptiveClip charges it)"
        )
    if short := ratios.get("short_rounds"):
        means += f". Updates of rounds {in_short(short)} were shorter than a tenth of the longest"
    return f"R = {', '.join(words)}: {means}"


def suggest_clip_norm(
    mechanism: Mechanism, dim: int, rows: Sequence[dict[str, float]]
) -> dict[str, float] | None:
    """Suggest a clip_norm if updates are much shorter than the present one.

    The suggestion is 1.5 times the root mean square norm of the updates, in the round with the longest ones.

    Args:
        dim: Number of coordinates of an update.
        rows: Rounds of the run. Rounds without diagnostics are left out.

    Returns:
        `clip_norm` (present), `enough` (suggested), `less` (square of their ratio, the share of R that is
        left) and `sim_update_norm`, norms in units of the update. None if the mechanism clips no l2 norm,
        nothing was measured, or the present clip_norm is less than twice the suggested one.
    """
    if not mechanism.clips_norm:
        return None
    present: float = mechanism.clip_norm
    norms = [norm for row in rows if not math.isnan(norm := _update_norm(row, dim))]
    ratio = _ROOM * max(norms, default=math.inf) / present
    if ratio > 0.5:
        return None
    found = {"clip_norm": present, "enough": ratio * present, "less": ratio**2}
    return {**found, "sim_update_norm": max(norms)}


def measured_noise(rows: Sequence[dict[str, float]]) -> float | None:
    """Return the measured noise-to-signal ratio of a run.

    It is the sum of all rounds' squared errors over the square of the sum of the mean updates' norms. If all
    rounds are alike, this is one round's ratio divided by the number of rounds. If only a share of the
    updates arrived, it is at least (1 - share)^2, so a decoder of zeros or of pure noise has at least 1.

    Args:
        rows: Rounds of the run. Rounds without diagnostics are left out.

    Returns:
        None if no round has diagnostics, or all mean updates were zero.
    """
    noise = signal = lost = 0.0
    for row in rows:
        mse, snr = row.get("sim_mse", math.nan), row.get("sim_snr_db", math.nan)
        if math.isfinite(mse) and math.isfinite(snr):
            noise += mse
            signal += math.sqrt(mse * 10.0 ** (snr / 10.0))
        if math.isfinite(share := row.get("sim_arrived", math.nan)):
            lost = 1.0 - min(share, 1.0)  # over all rounds so far
    return max(noise / signal**2, lost**2) if signal > 0.0 else None
