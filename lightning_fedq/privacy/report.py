"""The privacy statement of a run: one row per adversary, for people and for programs.

Every row says how much, at which delta, for which neighbours, by which method and under which assumptions;
or "no guarantee", and why. `document` words, groups and orders it for every output. A loss above 20 nats, or
outcomes of infinite loss more likely than delta, are called vacuous: such a bound excludes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Literal

import torch

from lightning_fedq.dpsgd.statement import SampleStatement
from lightning_fedq.mechanisms.interface import Adversary, Neighbours, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import Spending, check_delta
from lightning_fedq.privacy.client_spending import ChargedClients, Population, current_epsilon
from lightning_fedq.privacy.run import ASSUMED, Run
from lightning_fedq.privacy.secret_row import NOTE, SECRET_COHORTS, adversary_title, secret_row
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, VACUOUS_EPSILON, format_epsilon, verdict

OWN_CODE = (
    "every client runs code of its own (fedq flower client), or only trusted operators start runs and hold "
    "the SuperLink: Flower sends the client's code with each run"
)
_SECURE_ONLY = (
    "keys are reproducible: whoever knows the seed can compute every coin; run with secure keys (seed=None)"
)


_OTHER_WORLD = {
    Neighbours.SUBSTITUTION.value: "with any other one",
    Neighbours.ZERO_OUT.value: "with an update of zero",
}


def _times(epsilon: float) -> str:
    odds = math.exp(min(epsilon, 300.0))
    if odds > 1e12:
        return "any number of times"
    return f"{math.ceil(odds):,} times" if odds >= 1000.0 else f"{format_epsilon(odds)} times"


@dataclass(frozen=True)
class Row:
    """Privacy of one client against one adversary.

    Args:
        adversary: Name of the `Adversary`.
        unit: What the mechanism protects one by one: a "coordinate", a "block" of them or the "message".
        epsilon_unit: Pure epsilon of one unit in one round, or None where nothing is claimed; infinite where
            some outcome excludes an input, or the loss has no largest value (Gaussian noise).
        epsilon_round: Epsilon of one round, at `delta`.
        epsilon_run: Epsilon of the whole run, at `delta`.
        delta: The delta of the last two.
        infinite_mass: Chance, over the run, of an outcome that only one of two inputs can produce.
        neighbours: What differs between the two worlds.
        method: How it was computed.
        assumptions: What has to hold.
        verdict: One or two words.
        reason: Why, where the verdict is bad.
        advice: What would make it better.
        epsilon_any_two: Epsilon of the run between any two updates: `epsilon_run`, unless `neighbours` are an
            update and one of zero.
        cohorts: "secret" for a row that counts on nobody but the server knowing who took part; else "known".
    """

    adversary: str
    unit: str
    epsilon_unit: float | None
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
    epsilon_any_two: float = math.inf
    cohorts: str = "known"

    @property
    def name(self) -> str:
        """Name of the adversary, with what the row counts on."""
        return f"{self.adversary}{SECRET_COHORTS}" if self.cohorts == "secret" else self.adversary

    @property
    def title(self) -> str:
        """Name of the adversary for a reader, with what the row counts on."""
        return adversary_title(self.name)

    @property
    def epsilon(self) -> float:
        """Epsilon over the run between any two updates, which every verdict is about."""
        return max(self.epsilon_run, self.epsilon_any_two)

    def refused(self, reason: str, advice: str = "") -> Row:
        """The row without a guarantee."""
        return replace(
            self,
            epsilon_unit=None,
            epsilon_round=math.inf,
            epsilon_run=math.inf,
            epsilon_any_two=math.inf,
            infinite_mass=1.0,
            method="none",
            verdict=NO_GUARANTEE,
            reason=reason,
            advice=advice,
        )

    @property
    def sentence(self) -> str:
        """The row in a sentence or two."""
        if self.verdict == NO_GUARANTEE:
            return f"No guarantee: {self.reason}."
        if self.verdict == VACUOUS:
            return f"Vacuous: {self.reason}."
        words = (
            f"Whatever it looks for is at most {_times(self.epsilon_run)} as likely with a client's "
            f"update as {_OTHER_WORLD[self.neighbours]}, plus {self.delta:g}."
        )
        if self.neighbours == Neighbours.ZERO_OUT.value:
            words += f" Between any two updates: {_times(self.epsilon_any_two)}."
        return words


State = Literal["planned", "running", "ended"]
"""Of a run: not begun, begun, over."""
Masks = Literal["ran", "asked", "counted", "assumed", "none"]
"""Of secure aggregation: masks ran, will run, are only counted, are assumed by the reader, are not there."""


@dataclass(frozen=True)
class TargetOutcome:
    """The target of a run, and what became of it.

    Args:
        adversary: Name of the row that it is about.
        epsilon: Epsilon that was asked for, at the delta of the report.
        over: What it counts for.
        spent: Epsilon over that.
        met: Is it kept, by masks that ran or will?
    """

    adversary: str
    epsilon: float
    over: Literal["run", "round"]
    spent: float
    met: bool


@dataclass(frozen=True)
class Bits:
    """Bits that one client sends and receives in a round, a parameter. None is not known.

    What they hold for is what stands around them: the mechanism at this epsilon, masks, rounds.

    Args:
        measured: Were they counted in a run, or are they those of a plan?
        update: Up: the message; masked where masks run.
        unmasked: Up: the message as it would be without masks.
        keys: Up: keys and shares of the masks, set-up left out.
        down: Down: the model.
        megabytes_up: Megabytes of all clients over the run, set-up included.
        megabytes_down: Megabytes to all clients over the run.
        rounds: Rounds of these, which are not those of an earlier training that were charged, too.
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
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


@dataclass(frozen=True)
class Origin:
    """Origin of a report: when, by which version, about which files.

    Args:
        made: Time of writing, UTC, to the minute; the day alone where cohorts are secret (S8).
        version: Version of this package.
        config: SHA-256 of the configuration's file; "" where there is none.
        model: SHA-256 of the model's file; "" where there is none.
    """

    made: str = field(default_factory=_current_origin)
    version: str = field(default_factory=lambda: version("lightning_fedq"))
    config: str = ""
    model: str = ""


@dataclass(frozen=True)
class PrivacyReport:
    """The statement of one run.

    Args:
        state: Is the run to come, under way, or over?
        mechanism: The mechanism, as it would be written in Python.
        dim: Parameters sent each round.
        cohort_size: Clients per round.
        rounds: Rounds accounted for.
        delta: Chance with which the guarantee may fail.
        secure_keys: Were the keys drawn from the operating system?
        masks: Did the masks of secure aggregation run?
        server: What the server behind them may do; "" without secure aggregation.
        simulated: Does one program play the server and all clients?
        rows: One per adversary.
        with_secure_keys: Rows that secure keys would give, where keys are reproducible. Else empty.
        notes: What the numbers leave out.
        samples: What DP-SGD inside the clients protects; None without it.
        charged: Spending of a finished run's clients (with reproducible keys: would have with
            secure ones), the worst first; empty for a run to come.
        leaves: What else left, without noise, a sentence each; empty where that is not known.
        times: What the times of a run's files and logs tell, where clients draw for themselves. "" elsewhere.
        secret: Row of an outsider who never learns who took part; None where cohorts are known.
        asked: The target; None where there was none.
        by_round: Rounds, and the epsilon of `about` after them; empty where it is not known.
        ended: What ended a run before its last round; "" for nothing.
        bits: Bits up and down; None where nothing is known of them.
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
    bits: Bits | None = None
    origin: Origin = field(default_factory=Origin)

    @property
    def masked(self) -> bool:
        """Do masks run, now or in a run to come?"""
        return self.masks in ("ran", "asked")

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows, and after them the one that counts on secret cohorts, if there is one."""
        return self.rows if self.secret is None else (*self.rows, self.secret)

    @property
    def readable_rows(self) -> tuple[Row, ...]:
        """The same, as secret keys would give them."""
        rows = self.with_secure_keys or self.rows
        return rows if self.secret is None else (*rows, self.secret)

    @property
    def about(self) -> Row:
        """The row that was asked for, or without a target the one of least epsilon that the run has."""
        rows, name = self.all_rows, "" if self.asked is None else self.asked.adversary
        return next((row for row in rows if row.name == name), None) or min(
            (row for row in self.rows if is_met(row, self.masked)), key=lambda row: row.epsilon
        )

    def row(self, adversary: Adversary) -> Row:
        """The row of one adversary."""
        return next(row for row in self.rows if row.adversary == adversary.name)


def privacy_report(
    run: Run, delta: float | None, state: State | None = None, target: PrivacyTarget | None = None
) -> PrivacyReport:
    """State what a run gives away, adversary by adversary.

    Every row is about the client that this adversary learns most about.

    Args:
        run: The run, to come or so far. The rows of a run to come average over who will be drawn.
        delta: In (0, 1 / num_clients), where the target says none.
        state: Is it to come, under way or over? None goes by its charges: without them it is to come. Secret
            cohorts have none, whatever the state.
        target: What was asked for. The report is at its delta.

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
        hidden = secret_row(outsider, account, broken)
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
        _notes(account, population),
        charged=population.histogram(),
        secret=hidden,
        origin=Origin(_current_origin().partition(" ")[0]) if run.sampling.law.secret else Origin(),
    )
    return report if target is None else replace(report, asked=_target_outcome(target, run, report))


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


def is_met(row: Row, masked: bool) -> bool:
    """Whether a run has this adversary as it runs, and not only where an assumption fails."""
    if row.adversary == Adversary.SECAGG_SERVER.name:
        return masked
    if row.adversary in (Adversary.SERVER.name, Adversary.EAVESDROPPER.name):
        return not masked
    return row.adversary != Adversary.SERVER_AND_PARTNER.name


def epsilon_after(run: Run, row: Row, most: int) -> float:
    """Epsilon towards a row's adversary where no client was charged for more than so many rounds."""
    if run.charges is not None:
        run = replace(run, charges=torch.as_tensor(run.charges).clamp(max=most), to_come=0)
    return current_epsilon(Account(run, row.delta), Adversary[row.adversary], most, row.cohorts == "secret")


def _notes(account: Account, population: Population) -> tuple[str, ...]:
    run = account.run
    law, most_rounds, masked = run.sampling.law, run.max_rounds, run.threat.secure_sum is not None
    public = "" if law.secret else ", cohorts and groups"
    notes = [
        "An epsilon bounds what an adversary learns about all updates of one client in the run: whatever set "
        "of outcomes it looks for, its chance under one of the two worlds that are compared is at most "
        f"e^epsilon times that under the other, plus delta = {account.delta:g}. (Delta is no bound on the "
        "chance of an outcome that changes the odds by more: for Gaussian noise that is 111 delta at epsilon "
        "0.1, 16 delta at 1 and 6 delta at 4, for delta = 1e-5.)",
        f"Ranges{public} are public and follow from released models only; they cost nothing.",
        "Statements that rest on a key agreement are computational.",
    ]
    if population.num_groups > 1:
        notes.append(
            "Clients have epsilons of their own: every row is that of the client with the least protection "
            f"(of {population.num_groups} kinds), whether a cohort held it or not."
        )
    if said := law.note(run.rounds, run.num_clients):
        notes.append(said)
    if population.finished:
        notes.append(
            "Every row is that of the most charged client: who was drawn how often is taken as known, "
            "repeated attempts count as often as they were made, and there is no amplification by sampling."
        )
    elif law.secret:
        lottery = (
            f"A client takes part in a round with chance {run.participation:.4g}, and the rows of others "
            "than the outsider average over that lottery: what a client has spent would tell who was drawn."
        )
        if most_rounds is not None:
            lottery = (
                f"A client takes part in one round of every block, {most_rounds} in all, and the rows of "
                "others than the outsider take it as known in which."
            )
        notes += [lottery, NOTE]
    elif run.participation < 1.0 and most_rounds is None:
        top = "" if run.charges is None else ", on top of what each client has been charged for"
        notes.append(
            f"A client takes part in a round with chance {run.participation:.4g}, whatever its data. "
            f"This is a run to come, and its epsilon averages over the lottery that draws the cohorts{top}: "
            "who is drawn more often than others will have spent more, and the report of the finished run "
            "says how much. "
            "In a round that a client takes part in there is no amplification by sampling."
        )
    if run.min_answers is not None:
        notes.append(
            "Clients may be silent. What hides a client in a sum is counted on "
            f"{run.min_answers} of {run.cohort_size} answers, "
            + (
                "without which no sum is opened (SecAgg(threshold=...) sets it), or as the mechanism says "
                "(max_dropped)."
                if masked
                else "its own, as nothing makes others answer; secure aggregation would, or a mechanism that "
                "says how many may be missing (max_dropped)."
            )
        )
    if run.sampling.dropout_probability > 0.0:
        notes.append("Dropouts are taken as independent of the data and caused by nobody.")
    if masked and run.min_survivors is None:
        notes.append(
            "The server behind secure aggregation follows the protocol: one that can force clients out voids "
            "the aggregate rows. SecAgg(active=True) makes clients insist on survivors, and counts on those "
            "alone."
        )
    notes.append(
        "A client is who is protected: people whose data several clients hold, and what the same people have "
        "spent in trainings with other ledgers, are not counted."
    )
    notes.append(
        "What was picked on validation data (a server learning rate, a checkpoint) is not accounted for."
    )
    return tuple(notes)


def _row_behind_masks(row: Row, masks: Masks, server: str, run: Run) -> Row:
    """Add masks to what the row of the server behind secure aggregation counts on."""
    if row.adversary != Adversary.SECAGG_SERVER.name:
        return row
    if run.min_survivors is not None:
        server += f"; at least {run.min_survivors} of {run.cohort_size} clients confirm each sum"
    said = {
        "counted": "masks run (they are only counted here)",
        "assumed": "masks run (assumed, no protocol does)",
    }
    return replace(row, assumptions=(*row.assumptions, f"{said.get(masks, 'masks run')}, {server}"))


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
    )
    if isinstance(claim.loss, NonPrivate):
        return replace(blank, reason=claim.loss.reason)
    run = account.spent(claim, rounds, participation, charges)
    any_two = account.epsilon_replace_one(claim, rounds, participation, charges)
    # the verdict is about any two updates, so that rows of different relations can be read side by side
    word, reason = _verdict(run, max(run.epsilon, any_two))
    # Pure epsilon of one unit in one round. A law that is known up to a distance only has none.
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
        advice="" if word in ("strong", "good") else _advice(claim, account),
    )


def _verdict(run: Spending, epsilon: float) -> tuple[str, str]:
    """Of the run, by an epsilon between any two updates."""
    if run.infinite_mass > run.delta:
        chance = f"{run.infinite_mass:.3g}"
        return (
            VACUOUS,
            f"with chance {chance}, above delta, an outcome occurs that excludes one of two updates",
        )
    if math.isinf(run.epsilon):
        return VACUOUS, run.method
    if math.isinf(epsilon):
        zero = f"epsilon {run.epsilon:.3g} tells an update from zero"
        return VACUOUS, f"{zero}; between any two updates nothing is left of delta"
    if epsilon > VACUOUS_EPSILON:
        return VACUOUS, f"epsilon is above {VACUOUS_EPSILON:g}: the bound excludes nothing"
    word = verdict(epsilon)
    if word != "weak":
        return word, ""
    return word, f"outcomes may be {_times(epsilon)} as likely under one update as under another"


def _advice(claim: PrivacyClaim, account: Account) -> str:
    """Setting that would do, as far as the loss can tell, and the mechanism's advice."""
    steps = claim.compositions * max(account.run.horizon, 1) * account.run.participation
    enough = claim.loss.advice(steps, account.delta)
    own = account.run.mechanism.advice(claim)
    return f"{enough}; or {own}" if enough else own
