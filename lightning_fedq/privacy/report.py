"""The privacy statement of a run: one row per adversary, for people and for programs.

Every row says how much, at which delta, for which neighbours, by which method and under which assumptions;
or "no guarantee", and why. `setting` finds the claim that fits the run, `page` prints the statement. A loss
above 20 nats, or outcomes of infinite loss more likely than delta, are called vacuous: such a bound excludes
nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Protocol, runtime_checkable

from lightning_fedq.dpsgd.statement import SampleStatement
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, Neighbours, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import Spending, check_delta
from lightning_fedq.privacy.charged import ChargedClients, Population
from lightning_fedq.privacy.run import Run
from lightning_fedq.privacy.secret_row import NOTE, SECRET_COHORTS, secret_row, title_of
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, VACUOUS_EPSILON, format_epsilon, verdict

OWN_CODE = (
    "every client runs code of its own (fedq flower client), or only trusted operators start runs and hold "
    "the SuperLink: Flower sends the client's code with each run"
)
_SECURE_ONLY = (
    "keys are reproducible: whoever knows the seed can compute every coin; run with secure keys (seed=None)"
)


@runtime_checkable
class Anonymous(Protocol):
    """A mechanism whose paper counts the codebook points that bits without a coin leave possible."""

    @property
    def anonymity_set_size(self) -> int:
        """Smallest number of points of a block that its bits leave possible."""

    @property
    def anonymity_by_stage(self) -> tuple[tuple[int, int], ...]:
        """For each of a block's bits: points that it leaves possible, at least, and all of them."""


_OTHER_WORLD = {
    Neighbours.SUBSTITUTION.value: "with any other one",
    Neighbours.ZERO_OUT.value: "with an update of zero",
}


def _times(epsilon: float) -> str:
    return f"{format_epsilon(math.exp(epsilon))} times" if epsilon < 300.0 else "any number of times"


@dataclass(frozen=True)
class Row:
    """Privacy of one client against one adversary.

    Args:
        adversary: Name of the `Adversary`.
        view: Adversary in words.
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
        remark: How secure aggregation bears on this view, whatever the verdict.
        epsilon_any_two: Epsilon of the run between any two updates: `epsilon_run`, unless `neighbours` are an
            update and one of zero.
        cohorts: "secret" for a row that counts on nobody but the server knowing who took part; else "known".
    """

    adversary: str
    view: str
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
    remark: str = ""
    epsilon_any_two: float = math.inf
    cohorts: str = "known"

    @property
    def name(self) -> str:
        """Name of the adversary, with what the row counts on."""
        return f"{self.adversary}{SECRET_COHORTS}" if self.cohorts == "secret" else self.adversary

    @property
    def title(self) -> str:
        """Name of the adversary for a reader, with what the row counts on."""
        return title_of(self.name)

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
    def words(self) -> str:
        """The row in a sentence or two."""
        if self.verdict == NO_GUARANTEE:
            words = f"No guarantee: {self.reason}."
        elif self.verdict == VACUOUS:
            words = f"Vacuous: {self.reason}."
        else:
            words = (
                f"Whatever it looks for is at most {_times(self.epsilon_run)} as likely with a client's "
                f"update as {_OTHER_WORLD[self.neighbours]}, plus {self.delta:g}."
            )
            if self.neighbours == Neighbours.ZERO_OUT.value:
                words += f" Between any two updates: {_times(self.epsilon_any_two)}."
        return f"{words} Secure aggregation: {self.remark}." if self.remark else words


@dataclass(frozen=True)
class PrivacyReport:
    """The statement of one run.

    Args:
        mechanism: The mechanism, as it would be written in Python.
        dim: Parameters sent each round.
        cohort_size: Clients per round.
        rounds: Rounds accounted for.
        delta: Chance with which the guarantee may fail.
        secure_keys: Were the keys drawn from the operating system?
        secure_aggregation: Was the server handed sums only?
        protocol: How: whether masks really ran, and what the server may do.
        rows: One per adversary.
        with_secure_keys: Rows that secure keys would give, where keys are reproducible. Else empty.
        notes: What the numbers leave out.
        figures: What the mechanism's paper counts and what guarantees nothing, as (name, value).
        samples: What DP-SGD inside the clients protects; None without it.
        charged: Spending of a finished run's clients (with reproducible keys: would have with
            secure ones), the worst first; empty for a run to come.
        leaves: What else left, without noise, a sentence each; empty where that is not known.
        secret: Row of an outsider who never learns who took part; None where cohorts are known.
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
    figures: tuple[tuple[str, str], ...] = ()
    samples: SampleStatement | None = None
    charged: tuple[ChargedClients, ...] = ()
    leaves: tuple[str, ...] = ()
    secret: Row | None = None

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows, and after them the one that counts on secret cohorts, if there is one."""
        return self.rows if self.secret is None else (*self.rows, self.secret)

    def row(self, adversary: Adversary) -> Row:
        """The row of one adversary."""
        return next(row for row in self.rows if row.adversary == adversary.name)

    def to_json(self) -> str:
        """JSON with infinite numbers as the string "inf"."""
        return json.dumps(_plain(asdict(self)), indent=2)


def privacy_report(run: Run, delta: float | None) -> PrivacyReport:
    """State what a run gives away, adversary by adversary.

    Every row is about the client that this adversary learns most about.

    Args:
        run: The run, to come or so far. The rows of a run to come average over who will be drawn.
        delta: In (0, 1 / num_clients).

    Raises:
        ValueError: If delta is missing or out of range.
    """
    checked = check_delta(delta, run.num_clients, "clients")
    account, threat = Account(run, checked), run.threat
    population = Population(account)
    rows = tuple(_row(*population.worst(adversary), account) for adversary in Adversary)
    if run.sampling.real_clients:
        rows = tuple(replace(row, assumptions=(*row.assumptions, OWN_CODE)) for row in rows)
    if threat.secure_sum is not None:
        rows = tuple(_with_remark(row, threat.secure_sum.statement, run) for row in rows)
    hidden = None
    if run.sampling.secret:
        broken = run.sampling.broken or ("" if threat.secure_keys else f"S1, a secret key: {_SECURE_ONLY}")
        outsider = next(row for row in rows if row.adversary == Adversary.OUTSIDER.name)
        hidden = secret_row(outsider, account, broken)
    shown = rows if threat.secure_keys else tuple(row.refused(_SECURE_ONLY, "use seed=None") for row in rows)
    return PrivacyReport(
        repr(run.mechanism),
        run.context.dim,
        run.cohort_size,
        run.num_clients,
        run.rounds,
        checked,
        threat.secure_keys,
        threat.secure_sum is not None,
        "" if threat.secure_sum is None else threat.secure_sum.statement,
        shown,
        () if threat.secure_keys else rows,
        _notes(account, population),
        _figures(run.mechanism),
        charged=population.histogram(),
        secret=hidden,
    )


def _figures(mechanism: Mechanism) -> tuple[tuple[str, str], ...]:
    """Figures that papers print beside guarantees."""
    if not isinstance(mechanism, Anonymous):
        return ()
    name = "k-anonymity: codebook points that one round's bits of a block would leave possible without a coin"
    stages = mechanism.anonymity_by_stage
    value = f"{mechanism.anonymity_set_size} of {math.prod(points for _, points in stages)}, at least"
    if len(stages) > 1:
        value += f" (stage by stage {', '.join(f'{left} of {points}' for left, points in stages)})"
    return ((name, value),)


def _notes(account: Account, population: Population) -> tuple[str, ...]:
    run = account.run
    most_rounds, secret, masked = run.most_rounds, run.sampling.secret, run.threat.secure_sum is not None
    public = "" if secret else ", cohorts and groups"
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
    if run.sampling.own_draws:
        notes.append(
            f"Every client draws for itself whether it takes part: a cohort has {run.cohort_size} clients on "
            f"average, the mean divides by {run.cohort_size} in every round, and nobody learns how many there"
            " were."
        )
    elif most_rounds is not None and most_rounds <= 1:
        notes.append(
            "Cohorts are disjoint and public: a client is asked in one round at most, so one round's epsilon "
            "is that of its whole run (parallel composition)."
        )
    elif most_rounds is not None:
        notes.append(
            f"Cohorts are disjoint and public and take turns: a client is asked in {most_rounds} rounds at "
            "most, with no lottery about it."
        )
    if population.finished:
        notes.append(
            "Every row is that of the most charged client: who was drawn how often is taken as known, "
            "repeated attempts count as often as they were made, and there is no amplification by sampling."
        )
    elif secret:
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
        notes.append(
            f"A client takes part in a round with chance {run.participation:.4g}, whatever its data. "
            "This is a run to come, and its epsilon averages over the lottery that draws the cohorts: who is "
            "drawn more often than others will have spent more, and the report of the finished run says how "
            "much. "
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
    if masked:
        notes.append("The rows of views that see single messages hold if the secure aggregation is broken.")
    if (population.finished or secret) and run.min_answers is None:
        notes.append(
            "This was a simulation: one program played the server and all clients and held their data, exact "
            "updates and keys, also where masking really ran. Whoever ran it saw everything. The row of "
            "outsiders is about what was released of it. The other rows say what each party would see in a "
            "federation of separate machines with these settings."
        )
    notes.append(
        "A client is who is protected: people whose data several clients hold, and what the same people have "
        "spent in trainings with other ledgers, are not counted."
    )
    notes.append(
        "What was picked on validation data (a server learning rate, a checkpoint) is not accounted for."
    )
    return tuple(notes)


def _with_remark(row: Row, protocol: str, run: Run) -> Row:
    if row.adversary == Adversary.SERVER.name:
        remark = "the server is handed the sum only, see the row of the server behind secure aggregation"
        return replace(row, remark=f"{remark} ({protocol}); this row is for messages seen one by one")
    if row.adversary == Adversary.SECAGG_SERVER.name:
        if run.min_survivors is not None:
            protocol += f"; at least {run.min_survivors} of {run.cohort_size} clients confirm each sum"
        return replace(row, remark=protocol, assumptions=(*row.assumptions, protocol))
    return row


def _row(claim: PrivacyClaim, rounds: int, account: Account) -> Row:
    participation = account.run.participation
    blank = Row(
        claim.adversary.name,
        claim.adversary.value,
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
    run = account.spent(claim, rounds, participation)
    any_two = account.between_any_two(claim, rounds, participation)
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


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "inf"
    return value
