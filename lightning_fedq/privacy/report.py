"""The privacy statement of a run: one row per adversary, for people and for programs.

Every row says how much, at which delta, for which neighbours, by which method and under which assumptions;
or "no guarantee", and why. Where a claim does not fit the set-up the report falls back on a view that sees
at least as much (post-processing), or says "no guarantee"; it never guesses. A loss above 20 nats, or
outcomes of infinite loss more likely than delta, are called vacuous: such a bound excludes nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace

from lightning_fedq.core import (
    Adversary,
    CoinSum,
    Loss,
    Mechanism,
    NonPrivate,
    PmfPairs,
    PrivacyClaim,
    RoundContext,
)
from lightning_fedq.functional.one_bit_privacy import gaussian_epsilon
from lightning_fedq.privacy.accounting import Spending, check_delta, spent, with_dropouts
from lightning_fedq.privacy.losses import pure_epsilon

VACUOUS_EPSILON = 20.0
NO_GUARANTEE = "no guarantee"
VACUOUS = "vacuous"
ASSUMED = "assumed here, no protocol was run"
_SECURE_ONLY = (
    "keys are reproducible: whoever knows the seed can compute every coin; run with secure keys (seed=None)"
)
_WIDER_VIEW = {
    Adversary.SECAGG_SERVER: Adversary.SERVER,
    Adversary.OUTSIDER: Adversary.SERVER,
    Adversary.CLIENT: Adversary.SERVER_AND_PARTNER,
}
"""A view that sees at least as much and depends on no aggregation."""


@dataclass(frozen=True)
class Row:
    """What one adversary can learn about one client.

    Args:
        adversary: Name of the `Adversary`.
        view: Who that is, in words.
        epsilon_coordinate: Pure epsilon of one coordinate in one round, or None where the mechanism works on
            whole vectors or nothing is claimed; infinite where some outcome excludes an input.
        epsilon_round: Of one round, at `delta`.
        epsilon_run: Of the whole run, at `delta`.
        delta: The delta of the last two.
        infinite_mass: Chance, over the run, of an outcome that only one of two inputs can produce.
        neighbours: What differs between the two worlds.
        method: How it was computed.
        assumptions: What has to hold.
        verdict: One or two words.
        reason: Why, where the verdict is bad.
        advice: What would make it better.
        remark: How secure aggregation bears on this view, whatever the verdict.
    """

    adversary: str
    view: str
    epsilon_coordinate: float | None
    epsilon_round: float
    epsilon_run: float
    delta: float
    infinite_mass: float
    neighbours: str
    method: str
    assumptions: tuple[str, ...]
    verdict: str
    reason: str = ""
    advice: str = ""
    remark: str = ""


@dataclass(frozen=True)
class PrivacyReport:
    """The statement of one run.

    Args:
        mechanism: The mechanism, as it would be written in Python.
        dim: Parameters sent each round.
        cohort_size: Clients per round.
        num_clients: Clients in the federation.
        rounds: Rounds accounted for.
        delta: Chance with which the guarantee may fail.
        secure_keys: Were the keys drawn from the operating system?
        secure_aggregation: Was the server handed sums only?
        protocol: How: whether masks really ran, and what the server may do.
        rows: One per adversary.
        with_secure_keys: With reproducible keys: what the same run gives with secure ones. Else empty.
        notes: What the figures leave out.
    """

    mechanism: str
    dim: int
    cohort_size: int
    num_clients: int
    rounds: int
    delta: float
    secure_keys: bool
    secure_aggregation: bool
    protocol: str
    rows: tuple[Row, ...]
    with_secure_keys: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    def row(self, adversary: Adversary) -> Row:
        """The row of one adversary."""
        return next(row for row in self.rows if row.adversary == adversary.name)

    def to_json(self) -> str:
        """JSON with infinite numbers as the string "inf"."""
        return json.dumps(_plain(asdict(self)), indent=2)

    def to_markdown(self) -> str:
        """Two tables, one to read and one to check."""
        return _markdown(self)


def privacy_report(
    mechanism: Mechanism,
    context: RoundContext,
    *,
    rounds: int,
    delta: float | None,
    num_clients: int | None = None,
    dropout_probability: float = 0.0,
    secure_keys: bool = True,
    secure_aggregation: bool = False,
    protocol: str = ASSUMED,
    equal_weights: bool = True,
    validation_choices: bool = True,
) -> PrivacyReport:
    """State what `rounds` rounds like the one of `context` give away, adversary by adversary.

    Args:
        mechanism: The mechanism of the run.
        context: A round of it: cohort, groups, dim.
        rounds: Rounds of the run, >= 0.
        delta: In (0, 1 / num_clients).
        num_clients: Clients in the federation; None is the cohort.
        dropout_probability: Chance that a client of the cohort does not answer.
        secure_keys: Whether keys come from the operating system; with reproducible ones nothing is private.
        secure_aggregation: Whether the server is handed sums only.
        protocol: How, in words: whether masks really ran, and what the server may do.
        equal_weights: Whether the model depends on the messages through their plain sum only: no weights,
            no robust rule.
        validation_choices: Whether anything was picked on validation scores (smoothing, a checkpoint).

    Raises:
        ValueError: If delta is missing or out of range, or a number makes no sense.
    """
    size = len(context.cohort)
    total = size if num_clients is None else num_clients
    checked = check_delta(delta, total)
    if not 0.0 <= dropout_probability < 1.0 or total < size or rounds < 0:
        raise ValueError(
            "dropout_probability in [0, 1), num_clients >= the cohort and rounds >= 0 are needed, "
            f"got {dropout_probability}, {total} for a cohort of {size}, and {rounds}"
        )
    setting = _Setting(
        rounds,
        checked,
        size / total * (1.0 - dropout_probability),
        dropout_probability,
        secure_aggregation,
        equal_weights,
        mechanism.tolerated_dropouts(context),
    )
    claims = {claim.adversary: claim for claim in mechanism.claims(context)}
    rows = tuple(_row(claims, adversary, context, setting) for adversary in Adversary)
    if secure_aggregation:
        rows = tuple(_with_remark(row, protocol) for row in rows)
    shown = rows if secure_keys else tuple(_refused(row, _SECURE_ONLY, "use seed=None") for row in rows)
    return PrivacyReport(
        repr(mechanism),
        context.dim,
        size,
        total,
        rounds,
        checked,
        secure_keys,
        secure_aggregation,
        protocol if secure_aggregation else "",
        shown,
        () if secure_keys else rows,
        _notes(setting, validation_choices),
    )


def claim_against(
    adversary: Adversary,
    mechanism: Mechanism,
    context: RoundContext,
    *,
    rounds: int,
    delta: float,
    dropout_probability: float = 0.0,
    secure_aggregation: bool = False,
    equal_weights: bool = True,
) -> tuple[PrivacyClaim, float]:
    """The claim that fits a set-up, and the delta that is left for it; arguments as in `privacy_report`.

    Dropouts take half of delta. The loss is `NonPrivate` where the set-up contradicts the adversary.
    """
    tolerated = mechanism.tolerated_dropouts(context)
    setting = _Setting(rounds, delta, 1.0, dropout_probability, secure_aggregation, equal_weights, tolerated)
    claims = {claim.adversary: claim for claim in mechanism.claims(context)}
    claim = _fitting_claim(claims, adversary, context, setting)
    return claim, setting.available(claim)


@dataclass(frozen=True)
class _Setting:
    rounds: int
    delta: float
    participation: float
    dropout_probability: float
    secure_aggregation: bool
    equal_weights: bool
    tolerated_dropouts: int | None

    def available(self, claim: PrivacyClaim) -> float:
        """What of delta is left for the mechanism."""
        after_drops = isinstance(claim.loss, CoinSum) and self.dropout_probability > 0.0
        return self.delta / 2.0 if after_drops else self.delta


def _notes(setting: _Setting, validation_choices: bool) -> tuple[str, ...]:
    notes = [
        "An epsilon bounds what an adversary learns about one client's update in any round of the run: "
        "its odds between two possible updates change by at most a factor e^epsilon, "
        f"except with chance {setting.delta:g}.",
        "Ranges, cohorts and groups are public and follow from released models only; they cost nothing.",
        "Statements that rest on a key agreement are computational.",
    ]
    if setting.participation < 1.0:
        notes.append(
            f"A client takes part in a round with chance {setting.participation:.4g}, whatever its data; "
            "that it did is taken as known, so there is no amplification by sampling."
        )
    if setting.dropout_probability > 0.0:
        notes.append(
            "Dropouts are taken as independent of the data and caused by nobody; "
            "a server that can force clients out voids the aggregate rows."
        )
    if setting.secure_aggregation:
        notes.append("The rows of views that see single messages hold if the secure aggregation is broken.")
    if validation_choices:
        notes.append("What was picked on validation data (smoothing, a checkpoint) is not accounted for.")
    return tuple(notes)


def _with_remark(row: Row, protocol: str) -> Row:
    if row.adversary == Adversary.SERVER.name:
        remark = "the server is handed the sum only, see the row of the server behind secure aggregation"
        return replace(row, remark=f"{remark} ({protocol}); this row is for messages seen one by one")
    if row.adversary == Adversary.SECAGG_SERVER.name:
        return replace(row, remark=protocol, assumptions=(*row.assumptions, protocol))
    return row


def _refused(row: Row, reason: str, advice: str) -> Row:
    return replace(
        row,
        epsilon_coordinate=None,
        epsilon_round=math.inf,
        epsilon_run=math.inf,
        infinite_mass=1.0,
        method="none",
        verdict=NO_GUARANTEE,
        reason=reason,
        advice=advice,
    )


def _fitting_claim(
    claims: dict[Adversary, PrivacyClaim], adversary: Adversary, context: RoundContext, setting: _Setting
) -> PrivacyClaim:
    """The claim for this set-up: its own, after dropouts, or that of a view that sees at least as much."""
    claim = claims[adversary]
    wider = _WIDER_VIEW.get(adversary)
    if wider is None:
        return claim
    if adversary is Adversary.SECAGG_SERVER and not setting.secure_aggregation:
        return replace(
            claim,
            loss=NonPrivate(f"secure aggregation is off: the server sees every message, see {wider.name}"),
        )
    if not setting.equal_weights:
        return _as_wider(
            claims[wider],
            adversary,
            "the mean is weighted, or no mean, so this is the claim of a view of all messages",
        )
    if setting.dropout_probability > 0.0 and claim.loss != claims[wider].loss:
        return _after_dropouts(claim, claims[wider], context, setting)
    return claim


def _as_wider(wider: PrivacyClaim, adversary: Adversary, why: str) -> PrivacyClaim:
    return replace(wider, adversary=adversary, assumptions=(*wider.assumptions, why))


def _after_dropouts(
    claim: PrivacyClaim, wider: PrivacyClaim, context: RoundContext, setting: _Setting
) -> PrivacyClaim:
    if isinstance(claim.loss, NonPrivate):
        return claim
    if setting.tolerated_dropouts is not None:
        enforced = f"a round with more than {setting.tolerated_dropouts} dropouts is aborted"
        return replace(claim, assumptions=(*claim.assumptions, enforced))
    if not isinstance(claim.loss, CoinSum):
        why = (
            "the aggregate claim needs every client to answer, so this is the claim of a view of all messages"
        )
        return _as_wider(wider, claim.adversary, why)
    failure = setting.delta / (2 * max(setting.rounds, 1))
    sizes = [len(group) for group in context.groups]
    loss = with_dropouts(claim.loss, sizes, setting.dropout_probability, failure)
    return replace(
        claim,
        loss=loss,
        assumptions=(
            *claim.assumptions,
            "clients drop out independently of data and adversary; half of delta pays for it",
        ),
    )


def _row(
    claims: dict[Adversary, PrivacyClaim], adversary: Adversary, context: RoundContext, setting: _Setting
) -> Row:
    claim = _fitting_claim(claims, adversary, context, setting)
    loss, delta = claim.loss, setting.delta
    blank = Row(
        adversary.name,
        adversary.value,
        None,
        math.inf,
        math.inf,
        delta,
        1.0,
        claim.neighbours.value,
        "none",
        claim.assumptions,
        NO_GUARANTEE,
    )
    if isinstance(loss, NonPrivate):
        return replace(blank, reason=loss.reason)
    available = setting.available(claim)
    once = spent(loss, available, compositions=claim.compositions)
    run = spent(
        loss,
        available,
        compositions=claim.compositions,
        rounds=setting.rounds,
        participation=setting.participation,
    )
    verdict, reason = _verdict(run)
    return replace(
        blank,
        epsilon_coordinate=_of_a_coordinate(claim, context),
        epsilon_round=once.epsilon,
        epsilon_run=run.epsilon,
        infinite_mass=run.infinite_mass,
        method=run.method,
        verdict=verdict,
        reason=reason,
        advice="" if verdict in ("strong", "good") else _advice(claim, setting, run),
    )


def _of_a_coordinate(claim: PrivacyClaim, context: RoundContext) -> float | None:
    """Pure epsilon of one coordinate in one round, where the claim tells."""
    count = claim.coordinate_losses or (1 if claim.compositions == context.dim else None)
    return None if count is None else count * pure_epsilon(claim.loss)


def _verdict(run: Spending) -> tuple[str, str]:
    if run.infinite_mass > run.delta:
        chance = f"{run.infinite_mass:.3g}"
        return (
            VACUOUS,
            f"with chance {chance}, above delta, an outcome occurs that excludes one of two updates",
        )
    if run.epsilon > VACUOUS_EPSILON:
        return VACUOUS, f"epsilon is above {VACUOUS_EPSILON:g}: the bound excludes nothing"
    for limit, word in ((1.0, "strong"), (4.0, "good"), (8.0, "usable")):
        if run.epsilon <= limit:
            return word, ""
    return (
        "weak",
        f"epsilon {run.epsilon:.3g} allows odds to change by a factor of {math.exp(run.epsilon):.2g}",
    )


def _largest_mu(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian DP reaches epsilon at delta."""
    low, high = 1e-9, 50.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if gaussian_epsilon(middle, delta) <= epsilon else (low, middle)
    return low


def _advice(claim: PrivacyClaim, setting: _Setting, run: Spending) -> str:
    """By the rule of thumb that many small losses add up to a Gaussian one."""
    loss: Loss = claim.loss
    steps = claim.compositions * max(setting.rounds, 1) * setting.participation
    mu = _largest_mu(8.0, setting.delta)
    if isinstance(loss, CoinSum):
        epsilon_bit = math.log(loss.high / loss.low)
        coins = math.ceil((2.0 * math.sinh(epsilon_bit / 2.0) / mu) ** 2 * steps)
        mass = (loss.high - loss.low) * steps / setting.delta
        coins = max(coins, math.ceil(math.log(max(mass, 1.0)) / -math.log(loss.high)))
        return f"about {coins:.3g} clients that work alone in every round would bring epsilon to about 8"
    if isinstance(loss, PmfPairs) and run.infinite_mass > run.delta:
        return "share no bits (shared_bits=0, or LDPQ), or add secure aggregation and clients that work alone"
    if isinstance(loss, PmfPairs):
        return (
            f"an epsilon of about {mu / math.sqrt(steps):.2g} per coordinate would bring it to about 8; "
            "or secure aggregation with many clients"
        )
    return "more noise, fewer rounds, or secure aggregation"


# ---- output -------------------------------------------------------------------------------------------


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "inf"
    return value


def format_epsilon(value: float | None) -> str:
    """Three digits, rounded up so that a claim never shrinks in print; an infinite one is "∞"."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "∞"
    if value == 0.0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-9) * unit:.3g}"


def _plain_words(row: Row) -> str:
    if row.verdict == NO_GUARANTEE:
        words = f"No guarantee: {row.reason}."
    elif row.verdict == VACUOUS:
        words = f"Vacuous: {row.reason}."
    else:
        factor = math.exp(row.epsilon_run)
        words = f"Odds between two possible updates change at most {factor:.3g}-fold over the run."
    return f"{words} Secure aggregation: {row.remark}." if row.remark else words


def _tables(rows: tuple[Row, ...]) -> list[str]:
    lines = ["| Who | Verdict | epsilon over the run | What it means |", "| --- | --- | --- | --- |"]
    for row in rows:
        means = _plain_words(row) + (f" Better: {row.advice}." if row.advice else "")
        lines.append(f"| {row.view} | **{row.verdict}** | {format_epsilon(row.epsilon_run)} | {means} |")
    lines += [
        "",
        "| Adversary | coordinate and round (pure) | round | run | delta | infinite mass | method |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        numbers = (row.epsilon_coordinate, row.epsilon_round, row.epsilon_run)
        lines.append(
            f"| {row.adversary} | {' | '.join(map(format_epsilon, numbers))} | {row.delta:g} "
            f"| {row.infinite_mass:.3g} | {row.method} |"
        )
    return lines


def _markdown(report: PrivacyReport) -> str:
    common = set.intersection(*(set(row.assumptions) for row in report.rows))
    lines = [
        "# What was protected, and from whom",
        "",
        f"{report.mechanism}: {report.dim} parameters, {report.cohort_size} of {report.num_clients} clients "
        f"a round, {report.rounds} rounds, delta {report.delta:g}, "
        f"{'secure' if report.secure_keys else 'reproducible'} keys, "
        f"secure aggregation {f'on: {report.protocol}' if report.secure_aggregation else 'off'}.",
        "",
        *_tables(report.rows),
        "",
        "Assumptions:",
        "",
        f"- everywhere: {'; '.join(sorted(common)) or 'none'}.",
    ]
    for row in report.rows:
        special = "; ".join(text for text in row.assumptions if text not in common)
        lines.append(f"- {row.adversary} ({row.neighbours}){': ' if special else ''}{special}.")
    lines += ["", *(f"- {note}" for note in report.notes)]
    if report.with_secure_keys:
        lines += [
            "",
            "## What the same run would give with secure keys",
            "",
            *_tables(report.with_secure_keys),
        ]
    return "\n".join(lines) + "\n"
