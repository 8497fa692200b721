"""Privacy report of a run: one row per adversary, for people and for programs.

Every row states epsilon, delta, the adjacency, the accounting method and the assumptions, or "no guarantee"
and the reason. `document` words, groups and orders the rows for every output. A loss above 20 nats is called
vacuous, and so are distinguishing events more likely than delta, because such a bound excludes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Literal

import torch

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.dpsgd.statement import SampleStatement
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import Spending, check_delta
from lightning_fedq.privacy.client_spending import ChargedClients, Population, current_epsilon
from lightning_fedq.privacy.report_notes import notes_on
from lightning_fedq.privacy.row import Row, format_times, is_met
from lightning_fedq.privacy.run import ASSUMED, Run
from lightning_fedq.privacy.sampled import find_amplification_obstacle, find_secrecy_obstacle
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, VACUOUS_EPSILON, verdict

OWN_CODE = kind.TRUSTED_CODE(
    "every client runs code of its own (fedq flower client), or only trusted operators start runs and hold "
    "the SuperLink, because Flower sends the client's code with each run"
)
_SECURE_ONLY = (
    "keys are reproducible, so everybody who knows the seed can compute all randomness. "
    "Use secure keys (seed=None)"
)

CONDITIONS = tuple(
    kind.SECRET_SAMPLE(sentence)
    for sentence in (
        "S1: every cohort is a uniform draw of fixed size, by a key that only the server has",
        "S2: every released round has its own draw, and none was begun twice",
        "S3: the set of clients is fixed, and every drawn client answers",
        "S4: clients are treated identically: one mechanism, equal weights, no pairs, no Byzantine clients",
        "S5: clients keep nothing from one round to the next, and none has a limit of its own",
        "S6: the end of the run and the choice of the model follow from released models and public data",
        "S7: the noise of rounds is independent",
        "S8: nothing else that depends on the draw is revealed: no server's memory, no logs or files of "
        "clients, no duration of a round",
        "S9: the ledger has charges of this training only",
        "S10: the claim is about any two updates and a whole round",
    )
)
"""Conditions of the row, by name. A law of cohorts may replace conditions by others of the same name."""

STATED = {
    "client": "What a client is",
    "responsible": "Responsible party",
    "purpose": "Purpose",
    "data": "Data",
    "tuning": "Tuned on the same data",
    "earlier_runs": "Earlier runs with the same data that are not counted",
}
"""What only the user knows about a run, by key, with the words of the page."""


def check_stated(stated: Mapping[str, str] | None) -> dict[str, str]:
    """Return what the user states about a run, or raise for an unknown key or another value than text.

    Raises:
        ValueError: If a key is not in `STATED`, or a value is no text of one line.
    """
    for key, value in (stated or {}).items():
        if key not in STATED:
            raise ValueError(f"stated has no entry {key!r}. Choose from {', '.join(STATED)}.")
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(
                f"stated[{key!r}] must be one line of text, got {value!r:.60}. Write it in quotes."
            )
    return dict(stated or {})


State = Literal["planned", "running", "ended"]
"""State of a run: not begun, under way, or over."""
Masks = Literal["ran", "asked", "counted", "assumed", "none"]
"""State of secure aggregation: masks ran, will run, are only counted, are assumed by the reader, or are
not used."""


@dataclass(frozen=True)
class TargetOutcome:
    """Target of a run, and whether it is met.

    Args:
        adversary: Name of the row that the target is about.
        epsilon: Target epsilon, at the delta of the report.
        over: Scope of the target.
        spent: Epsilon that was spent over that scope.
        met: Whether the target is met. A target against the server behind secure aggregation also needs
            masks.
    """

    adversary: str
    epsilon: float
    over: Literal["run", "round"]
    spent: float
    met: bool


@dataclass(frozen=True)
class Bits:
    """Bits per parameter that one client sends and receives in a round. None is not known.

    The mechanism, its epsilon, the masks and the rounds are those of the report.

    Args:
        measured: Whether the bits were counted in a run, and not planned.
        update: Uplink: bits of the message, masked if masks run.
        unmasked: Uplink: bits of the message without masks.
        keys: Uplink: bits of keys and shares of the masks, without the set-up.
        down: Downlink: bits of the model.
        megabytes_up: Megabytes from all clients over the run, including the set-up.
        megabytes_down: Megabytes to all clients over the run.
        rounds: Number of rounds of these megabytes. An earlier training may have charged more rounds.
    """

    measured: bool
    update: float | None
    unmasked: float | None
    keys: float | None = None
    down: float | None = None
    megabytes_up: float | None = None
    megabytes_down: float | None = None
    rounds: int | None = None


def _current_origin() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


@dataclass(frozen=True)
class Origin:
    """Origin of a report: time, version and files.

    Args:
        made: Time of writing in UTC, to the minute. Only the day where cohorts are secret (S8).
        version: Version of this package.
        config: SHA-256 of the configuration file. "" where there is none.
        model: SHA-256 of the model file. "" where there is none.
    """

    made: str = field(default_factory=_current_origin)
    version: str = field(default_factory=lambda: version("lightning_fedq"))
    config: str = ""
    model: str = ""


@dataclass(frozen=True)
class PrivacyReport:
    """Privacy report of one run.

    Args:
        state: State of the run: planned, running or ended.
        mechanism: Mechanism, as Python code.
        dim: Number of parameters that are sent in each round.
        cohort_size: Number of clients per round.
        num_clients: Number of clients of the federation.
        rounds: Number of rounds accounted for.
        delta: Delta of all rows.
        secure_keys: Whether the keys were drawn from the operating system.
        masks: State of secure aggregation.
        server: What the server behind secure aggregation may do. "" without it.
        simulated: Whether one program plays the server and all clients.
        rows: One row per adversary.
        with_secure_keys: Rows that secure keys would give, where keys are reproducible. Otherwise empty.
        notes: Sentences on how to read the numbers, and on what they do not cover.
        samples: Statement of DP-SGD inside the clients. None without it.
        charged: Spending of the clients of a finished run, largest first. Empty for a run to come. With
            reproducible keys, it is what the clients would have spent with secure ones.
        leaves: Outputs that differential privacy does not cover, a sentence each. Empty where they are not
            known.
        times: What the times of a run's files and logs reveal, where clients draw for themselves. ""
            elsewhere.
        secret: Row of an outsider who never learns who took part. None where cohorts are known.
        asked: Target of the run. None without one.
        by_round: Pairs of a number of rounds and the epsilon of `about` after them. Empty where it is not
            known.
        ended: What ended the run before its last round. "" for nothing.
        limit: Epsilon that a privacy budget kept, whatever ended the run, in words. "" without a budget.
        smaller_delta: A smaller delta and the epsilon of `about` at it, under replace-one adjacency. None
            where nothing is guaranteed.
        bits: Bits of the uplink and the downlink. None where nothing is known.
        stated: What the user states about the run, by the keys of `STATED`.
        origin: Time, version and files.
    """

    state: State
    mechanism: str
    dim: int
    cohort_size: int
    num_clients: int
    rounds: int
    delta: float
    secure_keys: bool
    masks: Masks
    server: str
    simulated: bool
    rows: tuple[Row, ...]
    with_secure_keys: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    samples: SampleStatement | None = None
    charged: tuple[ChargedClients, ...] = ()
    leaves: tuple[str, ...] = ()
    times: str = ""
    secret: Row | None = None
    asked: TargetOutcome | None = None
    by_round: tuple[tuple[int, float], ...] = ()
    ended: str = ""
    limit: str = ""
    smaller_delta: tuple[float, float] | None = None
    bits: Bits | None = None
    stated: dict[str, str] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)

    @property
    def masked(self) -> bool:
        """Whether masks run, now or in a planned run."""
        return self.masks in ("ran", "asked")

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows, followed by the row for secret cohorts if there is one."""
        return self.rows if self.secret is None else (*self.rows, self.secret)

    @property
    def readable_rows(self) -> tuple[Row, ...]:
        """The rows as secret keys would give them, followed by the row for secret cohorts if there is one."""
        rows = self.with_secure_keys or self.rows
        return rows if self.secret is None else (*rows, self.secret)

    @property
    def about(self) -> Row:
        """Row of the target, or without a target the row with the smallest epsilon that the run has."""
        rows, name = self.all_rows, "" if self.asked is None else self.asked.adversary
        return next((row for row in rows if row.name == name), None) or min(
            (row for row in self.rows if is_met(row, self.masked)), key=lambda row: row.epsilon
        )

    def row(self, adversary: Adversary) -> Row:
        """Return the row of one adversary."""
        return next(row for row in self.rows if row.adversary == adversary.name)


def privacy_report(
    run: Run, delta: float | None, state: State | None = None, target: PrivacyTarget | None = None
) -> PrivacyReport:
    """Make the privacy report of a run.

    Every row is about the client about whom its adversary learns most.

    Args:
        run: Run, planned or so far. The rows of a run to come average over the draw of the cohorts.
        delta: Delta of the report, in (0, 1 / num_clients). Used where the target has none.
        state: State of the run. None derives it from the charges: without charges, the run is planned. Runs
            with secret cohorts have no charges in any state.
        target: Target of the run. The report is at its delta.

    Raises:
        ValueError: If delta is missing or out of range.
    """
    if target is not None and target.delta is not None:
        delta = target.delta
    checked = check_delta(delta, run.num_clients, "clients")
    account, threat = Account(run, checked), run.threat
    population = Population(account)
    rows = tuple(_row(*population.worst_claim(adversary), account) for adversary in Adversary)
    if run.sampling.real_clients:
        rows = tuple(replace(row, assumptions=(*row.assumptions, OWN_CODE)) for row in rows)
    state = state or ("planned" if run.charges is None else "ended")
    masks, server = _mask_state(run, state), ""
    if threat.secure_sum is not None:
        server = threat.secure_sum.statement
        rows = tuple(_row_behind_masks(row, masks, server, run) for row in rows)
    hidden = None
    if run.sampling.law.secret:
        broken = run.sampling.broken or ("" if threat.secure_keys else f"S1, a secret key: {_SECURE_ONLY}")
        outsider = next(row for row in rows if row.adversary == Adversary.OUTSIDER.name)
        hidden = _secret_row(outsider, account, broken)
    shown = rows if threat.secure_keys else tuple(row.refused(_SECURE_ONLY, "use seed=None") for row in rows)
    report = PrivacyReport(
        state,
        repr(run.mechanism),
        run.context.dim,
        run.cohort_size,
        run.num_clients,
        run.rounds,
        checked,
        threat.secure_keys,
        masks,
        server,
        not run.sampling.real_clients,
        shown,
        () if threat.secure_keys else rows,
        tuple(notes_on(account, population, rows)),
        charged=population.histogram(),
        secret=hidden,
        origin=Origin(_current_origin().partition(" ")[0]) if run.sampling.law.secret else Origin(),
    )
    if target is not None:
        report = replace(report, asked=_target_outcome(target, run, report))
    return replace(report, smaller_delta=_epsilon_at_smaller_delta(run, report))


def _epsilon_at_smaller_delta(run: Run, report: PrivacyReport) -> tuple[float, float] | None:
    """Return a tenth of delta and the epsilon of the report's main row at it, or None without a guarantee."""
    row = report.about
    if row.verdict == NO_GUARANTEE or math.isinf(row.epsilon):
        return None
    delta, secret = report.delta / 10.0, row.cohorts == "secret"
    rounds = run.rounds if secret else run.max_rounds_to_come
    return delta, current_epsilon(Account(run, delta), Adversary[row.adversary], rounds, secret)


def _mask_state(run: Run, state: State) -> Masks:
    sums = run.threat.secure_sum
    if sums is None:
        return "none"
    if sums.settings == ASSUMED.settings:
        return "assumed"
    if not sums.ran:
        return "counted"
    return "asked" if state == "planned" else "ran"


def _target_outcome(target: PrivacyTarget, run: Run, report: PrivacyReport) -> TargetOutcome:
    row = report.row(target.against)
    if report.secret is not None:
        row = report.secret
    spent = row.epsilon
    if target.over == "round":
        spent = epsilon_after(run, row, 1) if math.isfinite(row.epsilon_round) else math.inf
    there = is_met(row, report.masked) or row.adversary != Adversary.SECAGG_SERVER.name
    return TargetOutcome(row.name, target.epsilon, target.over, spent, target.is_met(spent) and there)


def epsilon_after(run: Run, row: Row, most: int) -> float:
    """Return epsilon against a row's adversary if no client is charged for more than `most` rounds."""
    if run.charges is not None:
        run = replace(run, charges=torch.as_tensor(run.charges).clamp(max=most), to_come=0)
    return current_epsilon(Account(run, row.delta), Adversary[row.adversary], most, row.cohorts == "secret")


def _row_behind_masks(row: Row, masks: Masks, server: str, run: Run) -> Row:
    """Add masks to the assumptions of the row of the server behind secure aggregation."""
    if row.adversary != Adversary.SECAGG_SERVER.name:
        return row
    if run.min_survivors is not None:
        server += f", and at least {run.min_survivors} of {run.cohort_size} clients confirm each sum"
    doubt = {"counted": " (they are only counted here)", "assumed": " (assumed, no protocol does)"}
    stated = kind.SUM_ALONE(f"masks run{doubt.get(masks, '')}, {server}")
    return replace(row, assumptions=(*row.assumptions, stated))


def _row(claim: PrivacyClaim, charges: int, account: Account) -> Row:
    rounds, participation = account.run.max_rounds_to_come, account.run.participation
    blank = Row(
        claim.adversary.name,
        claim.unit.value,
        None,
        math.inf,
        math.inf,
        account.delta,
        1.0,
        claim.neighbours.value,
        "none",
        claim.assumptions,
        NO_GUARANTEE,
        colluders=claim.num_colluders,
    )
    if isinstance(claim.loss, NonPrivate):
        return replace(blank, reason=claim.loss.reason)
    run = account.spent(claim, rounds, participation, charges)
    any_two = account.epsilon_replace_one(claim, rounds, participation, charges)
    # the verdict is under replace-one adjacency, so that rows of different adjacencies can be compared
    word, reason = _verdict(run, max(run.epsilon, any_two))
    advice = ""
    if word not in ("strong", "good"):
        steps = claim.compositions * max(account.run.horizon, 1) * participation
        enough, advice = claim.loss.advice(steps, account.delta), account.run.mechanism.advice(claim)
        advice = f"{enough}; or {advice}" if enough else advice
    # a law that is known only up to a distance has no finite pure epsilon of a unit
    return replace(
        blank,
        epsilon_unit=math.inf if claim.slack.distance else claim.unit_losses * claim.loss.pure_epsilon,
        epsilon_round=account.spent(claim, 1).epsilon,
        epsilon_run=run.epsilon,
        infinite_mass=run.infinite_mass,
        method=run.method,
        verdict=word,
        reason=reason,
        epsilon_any_two=any_two,
        advice=advice,
    )


def _secret_row(blank: Row, account: Account, broken: str) -> Row:
    """Return the row of an outsider who never learns who took part: its epsilon, or why there is none.

    It depends on the numbers of clients, of clients in a cohort and of released rounds. It never depends on
    how often single clients were charged, because that would reveal who was drawn.

    Args:
        blank: Row of an outsider who may learn who took part. It is not changed.
        account: Account of the run. Each of its rounds is released and has its own draw.
        broken: Name of a condition that this run does not meet, with the cure. "" for none.

    Returns:
        A new row, without a guarantee if a condition is not met.
    """
    claim, run = account.claims()[Adversary.OUTSIDER], account.run
    law, clients, rounds = run.sampling.law, run.num_clients, run.rounds
    named = {line.partition(":")[0]: line for line in (*CONDITIONS, *law.own_conditions)}
    assumptions = (*claim.assumptions, *named.values())
    row = replace(blank, cohorts="secret", assumptions=assumptions, advice="")
    row = replace(row, epsilon_unit=None, infinite_mass=0.0)
    broken = broken or find_secrecy_obstacle(run.sampling, run.threat.plain_sum, run.threat.num_byzantine)
    if why := broken or find_amplification_obstacle(run.mechanism, claim, law, clients):
        return row.refused(f"secret cohorts need {why}")
    spent = account.secret(claim, rounds)
    word, reason = verdict(spent), ""
    if word == VACUOUS:
        reason = f"epsilon is above {VACUOUS_EPSILON:g}: the bound excludes nothing"
    return replace(
        row,
        epsilon_round=account.secret(claim, min(rounds, 1)),
        epsilon_run=spent,
        epsilon_any_two=spent,
        method=law.method(rounds, clients),
        verdict=word,
        reason=reason,
    )


def _verdict(run: Spending, epsilon: float) -> tuple[str, str]:
    """Return verdict and reason for a run, by its epsilon under replace-one adjacency."""
    if run.infinite_mass > run.delta:
        chance = f"with probability {run.infinite_mass:.3g}, above delta"
        return VACUOUS, f"{chance}, an outcome occurs that excludes one of two updates"
    if math.isinf(run.epsilon):
        return VACUOUS, run.method
    if math.isinf(epsilon):
        zero = f"epsilon is {run.epsilon:.3g} between an update and zero"
        return VACUOUS, f"{zero}, but for any two updates nothing is left of delta"
    if epsilon > VACUOUS_EPSILON:
        return VACUOUS, f"epsilon is above {VACUOUS_EPSILON:g}: the bound excludes nothing"
    word = verdict(epsilon)
    if word != "weak":
        return word, ""
    return word, f"outcomes may be {format_times(epsilon)} as likely under one update as under another"
