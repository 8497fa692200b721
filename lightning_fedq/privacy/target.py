"""Privacy targets: calibrate the free parameter of a mechanism to a target epsilon.

A mechanism with a free privacy parameter can be set to a level (`Mechanism.with_level`). The level is found
by root finding, with the accountant and the claims of the report. The cost of a run is then limited by a
number of charges per client, which the ledger enforces.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from scipy import stats

from lightning_fedq.functional.checks import check_fields
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, NonPrivate
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.cohorts import CohortLaw
from lightning_fedq.privacy.run import Run
from lightning_fedq.privacy.sampled import find_amplification_obstacle

_LARGEST_LEVEL, _SMALLEST_EXPONENT = 1e4, -6
_LONGEST_STEP = math.log(1e3)
_MANY_DROPOUTS = 1e-3
"""Probability that a round has more dropouts than the noise allows for, so that it is aborted."""
_MANY_CHARGES = 1e-2
"""Probability that a client is drawn more often than is paid for, so that the run stops."""
_MOST_ROUNDS = 1 << 20


def adversary_named(name: Adversary | str) -> Adversary:
    """Return a member of `Adversary`, given itself or its name in any case.

    Raises:
        ValueError: If there is no such member.

    Examples:
        >>> adversary_named("server").name
        'SERVER'
    """
    if isinstance(name, Adversary):
        return name
    if str(name).upper() not in Adversary.__members__:
        known = ", ".join(member.lower() for member in Adversary.__members__)
        raise ValueError(f"adversary must be one of {known}, got {name!r}")
    return Adversary[name.upper()]


@dataclass(frozen=True)
class PrivacyTarget:
    """Target epsilon of a run, or of each of its rounds, for every client, under replace-one adjacency.

    Args:
        epsilon: Privacy bound: any set of outcomes is at most e^epsilon times as likely for one of two inputs
            as for the other, plus delta. It is the target, > 0.
        delta: Additive slack in the bound of epsilon, below one divided by the number of protected units.
            Units are clients. It must be given.
        adversary: Member of `Adversary`, or its name in any case, such as "secagg_server".
        over: Scope of the target: the whole "run", or one "round".

    Raises:
        ValueError: If a value is missing or out of its range.
        TypeError: If a value has a wrong type.

    Examples:
        >>> target = PrivacyTarget(epsilon=8.0, delta=1e-5, adversary="secagg_server")
        >>> target.against.name
        'SECAGG_SERVER'
    """

    epsilon: float
    delta: float | None = None
    adversary: Adversary | str = Adversary.SERVER
    over: Literal["run", "round"] = "run"

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be > 0 and finite, got {self.epsilon}")
        check_delta(self.delta, None, "clients")
        adversary_named(self.adversary)

    @property
    def against(self) -> Adversary:
        """Adversary of the target, as a member of `Adversary`."""
        return adversary_named(self.adversary)

    def is_met(self, epsilon: float) -> bool:
        """Return whether a spent epsilon is within the target, up to a relative error of 1e-9."""
        return epsilon <= self.epsilon * (1.0 + 1e-9)

    def __str__(self) -> str:
        """Return the target in words."""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g} against {self.against.value}, {self.over}"


@dataclass(frozen=True)
class Calibration:
    """Setting of a mechanism that meets a privacy target.

    Args:
        mechanism: Mechanism set to the target.
        level: Level of the free parameter that was found.
        rounds: Number of rounds of the run for which it was found.
        charges: Number of rounds of one client that are paid for.
        epsilon: Epsilon that these rounds spend.
    """

    mechanism: Mechanism
    level: float
    rounds: int
    charges: int
    epsilon: float


def planned_charges(run: Run, secret: bool) -> int:
    """Return the number of rounds that one client must be able to pay for.

    With probability 99%, no client is drawn more often. With secret cohorts, it is the number of released
    rounds.
    """
    if secret:
        return run.rounds
    rounds, chance = run.sampling.law.lottery(run.rounds, run.num_clients)
    if chance >= 1.0:
        return rounds
    # union bound over the clients
    quantile = int(stats.binom.isf(_MANY_CHARGES / run.num_clients, rounds, chance))
    return max(min(quantile, rounds), 1)


def allowed_dropouts(run: Run) -> int:
    """Return the number of dropouts that noise must allow for if it is divided over a cohort."""
    size = run.cohort_size
    expected = 0
    if run.sampling.dropout_probability > 0.0:
        expected = int(stats.binom.isf(_MANY_DROPOUTS, size, run.sampling.dropout_probability))
    if run.min_survivors is not None:
        expected = max(expected, size - run.min_survivors)
    return min(expected, size - 1)


def spent_on(target: PrivacyTarget, run: Run, charges: int) -> float:
    """Return epsilon of some charges against the target's adversary, at its delta."""
    return make_account(target, run).epsilon(target.against, charges, secret=run.sampling.law.secret)


def check_law(
    kind: Literal["target", "budget"], against: Adversary, over: Literal["run", "round"], law: CohortLaw
) -> None:
    """Check that no target or budget limits single clients where cohorts are secret.

    Raises:
        ValueError: If it does, with the cure.
    """
    if law.secret and (against is not Adversary.OUTSIDER or over != "run"):
        raise ValueError(
            f"secret cohorts need S5, clients without a limit of their own, but a {kind} of a {over} against "
            f"{against.value} limits every client. Use adversary='outsider' over the run, or known cohorts."
        )


def make_account(target: PrivacyTarget, run: Run) -> Account:
    """Return the account of a run at a target's delta, of one round if the target is over one.

    Raises:
        ValueError: If delta is missing or not below 1 / clients, or the target limits clients of secret
            cohorts.
    """
    check_law("target", target.against, target.over, run.sampling.law)
    if target.over == "round" and run.rounds != 1:
        run = replace(run, rounds=1)
    return Account(run, check_delta(target.delta, run.num_clients, "clients"))


def calibrate(target: PrivacyTarget, run: Run, start: float | None = None) -> Calibration:
    """Find the setting with the least noise that still meets a target.

    Args:
        target: Target to meet.
        run: Planned run. The value of its mechanism's free parameter is ignored.
        start: Approximate level, from which the search starts. The result is then up to 2% more private than
            needed.

    Raises:
        ValueError: If the run has no rounds, or the mechanism has no free parameter, claims nothing against
            the adversary in this setting, or can't be private enough.
    """
    if target.over == "run" and run.rounds < 1:
        raise ValueError(
            f"a privacy target over the run needs rounds >= 1, got {run.rounds}. "
            "Set the number of rounds, or use PrivacyTarget(over='round')."
        )
    account = make_account(target, run)
    run, mechanism, adversary = account.run, account.run.mechanism, target.against
    secret = run.sampling.law.secret
    dropped, charges = allowed_dropouts(run), planned_charges(run, secret)

    def at(level: float) -> Mechanism:
        return mechanism.with_level(level, run.context, dropped)

    def priced(level: float) -> Account:
        return replace(account, run=replace(run, mechanism=at(level)))

    lowest = find_smallest_level(at)
    guess, within = (0.1, 2e-4) if start is None else (start, 0.02)
    guess = min(max(guess, lowest), _LARGEST_LEVEL)
    _check_claim(priced(_level(math.log(guess), lowest)), target)

    @cache
    def spends(log_level: float) -> float:
        try:
            return priced(_level(log_level, lowest)).epsilon(adversary, charges, secret=secret)
        except ValueError:  # a mechanism may refuse a level with so little noise
            return math.inf

    def excess(log_level: float) -> float:
        # clamped, because the steps of the search are as long as this value
        return math.log(min(max(spends(log_level), 1e-9), 1e9) / target.epsilon)

    log_level = _root(excess, math.log(lowest), math.log(_LARGEST_LEVEL), math.log(guess), within)
    if log_level is None:
        best = priced(lowest)
        claim = best.claims()[adversary]
        least = best.epsilon(adversary, charges, secret=secret)
        spends_least = f"spend {least:.3g}"
        if math.isinf(least):
            spends_least = f"have no finite epsilon: {best.spent(claim, charges).method}"
        raise ValueError(
            f"{type(mechanism).__name__} can't meet {target}: with its largest noise, {charges} rounds "
            f"of a client still {spends_least}. {_cure(best.epsilon_replace_one(claim, 1))}."
        )
    level = _level(log_level, lowest)
    return Calibration(at(level), level, run.rounds, charges, spends(log_level))


def _cure(one_round: float) -> str:
    """Return the cure of a target that can't be met, as the last sentence of the error.

    Args:
        one_round: Smallest epsilon of one round. Where it is infinite, neither fewer rounds nor more clients
            nor a larger epsilon help: an outcome excludes one of two updates, whoever else takes part.
    """
    if math.isfinite(one_round):
        return "Use fewer rounds, more clients, or a larger epsilon"
    return (
        "No number of rounds or clients changes that. Use a mechanism that protects every message by itself, "
        "such as LDPQ"
    )


class _Point(NamedTuple):
    """A log of the level, and log(epsilon / target) there."""

    place: float
    excess: float


def _root(
    excess: Callable[[float], float], low: float, high: float, guess: float, within: float
) -> float | None:
    """Return where a rising excess is 0, at most `within` below 0.

    Every evaluation is an accounting of a run, so few are made. Epsilon grows about as fast as the level, so
    a bracket is found by steps of slope 1. It then shrinks by secants or by halves.

    Args:
        excess: log(epsilon / target) as a function of the log of the level.
        low: Smallest log of the level.
        high: Largest log of the level.
        guess: Log of the level where the search starts.
        within: Largest distance of the result's excess from 0.

    Returns:
        Log of the level, `high` if the excess is negative there, or None if the excess is positive at `low`.
    """
    here = _Point(guess, excess(guess))
    is_below = here.excess <= 0.0
    while not is_below or here.excess < -within:
        step = min(max(1.1 * abs(here.excess), within), _LONGEST_STEP)
        place = min(here.place + step, high) if is_below else max(here.place - step, low)
        if place == here.place:  # the end of the range
            return high if is_below else None
        there = _Point(place, excess(place))
        if (there.excess <= 0.0) != is_below:
            return _shrink_bracket(excess, here, there, within)
        here = there
    return here.place


def _shrink_bracket(excess: Callable[[float], float], last: _Point, new: _Point, within: float) -> float:
    """Return a place between two points on both sides of 0 where the excess is at most `within` below 0."""
    below, above = (last, new) if last.excess <= 0.0 else (new, last)
    while below.excess < -within and above.place - below.place > within:
        middle = place = 0.5 * (below.place + above.place)
        if new.excess != last.excess:  # a line through the last two points, aimed just below 0
            rise, run = new.excess - last.excess, new.place - last.place
            place = new.place - (new.excess + 0.5 * within) * run / rise
        converges = abs(new.excess) <= 0.5 * abs(last.excess)
        if not (converges and below.place < place < above.place):
            place = middle
        last, new = new, _Point(place, excess(place))
        below, above = (new, above) if new.excess <= 0.0 else (below, new)
    return below.place


def _level(log_level: float, lowest: float) -> float:
    return max(math.exp(log_level), lowest)  # by rounding, exp(log(lowest)) may be smaller than lowest


def find_smallest_level(at: Callable[[float], Mechanism]) -> float:
    """Return the smallest power of ten, up to 1, that a mechanism accepts as its level.

    Args:
        at: Function that returns the mechanism at a level, or raises a ValueError.
    """
    for exponent in range(_SMALLEST_EXPONENT, 0):
        try:
            at(10.0**exponent)
        except ValueError:
            continue
        return 10.0**exponent
    at(1.0)
    return 1.0


def _check_claim(account: Account, target: PrivacyTarget) -> None:
    """Check that the mechanism claims something against the target's adversary, also with secret cohorts.

    Raises:
        ValueError: If it does not, with the adversaries for which it does.
    """
    claims, run, law = account.claims(), account.run, account.run.sampling.law
    claim = claims[target.against]
    if not isinstance(claim.loss, NonPrivate):
        if law.secret and (why := find_amplification_obstacle(run.mechanism, claim, law, run.num_clients)):
            raise ValueError(f"secret cohorts need {why}")
        return
    others = [who.value for who, claim in claims.items() if not isinstance(claim.loss, NonPrivate)]
    instead = f"It could be against {', '.join(others)}" if others else "It claims nothing against others"
    raise ValueError(
        f"{type(run.mechanism).__name__} can't be private against {target.against.value} here: "
        f"{claim.loss.reason}. {instead}."
    )


def affordable(
    account: Account,
    adversary: Adversary,
    epsilon: float,
    *,
    secret: bool,
    at_least: int = 0,
    client: int | None = None,
) -> int:
    """Return the largest number of charges of a client, or of every client, that stay within an epsilon.

    Args:
        account: Account of the run.
        adversary: Adversary of the statement.
        epsilon: Epsilon that may be spent.
        secret: Whether the adversary never learns which clients took part.
        at_least: Number of charges that probably fits.
        client: Client of the statement. None is every client.
    """

    def cost(charges: int) -> float:
        return account.epsilon(adversary, charges, secret=secret, client=client)

    return max_charges_within(cost, epsilon, at_least)


def max_charges_within(cost: Callable[[int], float], epsilon: float, at_least: int = 0) -> int:
    """Return the largest number of charges whose cost stays within an epsilon, by doubling and bisection.

    Args:
        cost: Function that returns epsilon of a number of charges.
        epsilon: Epsilon that may be spent.
        at_least: Number of charges that probably fits.

    Examples:
        >>> max_charges_within(lambda rounds: 0.5 * rounds, 8.0)
        16
    """
    low = at_least if at_least and cost(at_least) <= epsilon else 0
    high = max(2 * at_least, 1)
    while high < _MOST_ROUNDS and cost(high) <= epsilon:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= epsilon else (low, middle)
    return low
