"""What claims cost together: over coordinates, rounds and cohorts, at a stated delta.

Routes, in this order: a randomised response composes exactly in closed form, a Gaussian stays Gaussian,
zero-concentrated losses add their rhos and are converted once, and everything else goes through a loss grid
(`grid`, pessimistic). A run in which a client takes part with some
probability a round composes the round's loss mixed with no loss at all: that the client was there is taken as
known to the adversary, so sampling buys fewer rounds and no amplification.

A loss of an unknown kind is refused, and so is `NonPrivate`: there is nothing to add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scipy import optimize

from lightning_fedq.core import (
    NO_SLACK,
    CoinSum,
    ConcentratedLoss,
    GaussianLoss,
    HiddenPair,
    Loss,
    PmfPairs,
    Slack,
)
from lightning_fedq.functional.one_bit_privacy import (
    coin_count_quantile,
    gaussian_epsilon,
    randomized_response_epsilon,
)
from lightning_fedq.privacy.grid import LossGrid
from lightning_fedq.privacy.losses import infinite_mass, loss_grid

_TAIL_SHARE = 1e-3
"""Share of delta that truncated tails may take."""


def check_delta(delta: float | None, count: int | None = None, counted: str = "clients or samples") -> float:
    """Return delta if it is a delta.

    Args:
        delta: Chance with which a guarantee may fail.
        count: How many are protected; None where it is not known.
        counted: What they are, for the message.

    Raises:
        ValueError: If it is missing, not in (0, 1), or not below 1 / count.
    """
    if delta is None:
        raise ValueError(f"delta is missing; choose one below 1 / {counted}, 1e-5 say")
    limit, known = (1.0, "") if count is None else (1.0 / count, f" = 1 / {count} {counted}")
    if not 0.0 < delta < limit:
        raise ValueError(
            f"delta must be > 0 and below {limit:g}{known}, got {delta}; above 1 over the number of "
            f"{counted}, publishing one of them outright would count as private"
        )
    return delta


@dataclass(frozen=True)
class Spending:
    """An (epsilon, delta) statement and how it was found.

    Args:
        epsilon: In nats; infinite where the infinite mass exceeds delta.
        delta: The delta at which it holds.
        infinite_mass: Chance that an outcome occurs which only one of the two worlds can produce.
        method: How it was computed.
    """

    epsilon: float
    delta: float
    infinite_mass: float
    method: str


def _response_level(loss: Loss) -> float | None:
    """Level of a randomised response, if the loss is one."""
    if isinstance(loss, PmfPairs) and len(loss.pairs) == 1:
        p, q = loss.pairs[0]
        if len(p) == 2 and p == q[::-1] and min(p) > 0.0:
            return abs(math.log(p[0] / p[1]))
    return None


def composed_mass(mass: float, count: float) -> float:
    """Chance that an event of probability `mass` occurs at least once in `count` trials."""
    return -math.expm1(count * math.log1p(-mass)) if mass < 1.0 else 1.0


def spent(
    loss: Loss,
    delta: float,
    *,
    compositions: int = 1,
    rounds: int = 1,
    participation: float = 1.0,
    slack: Slack = NO_SLACK,
) -> Spending:
    """Epsilon of `rounds` rounds of `compositions` losses each, at `delta`.

    Args:
        loss: Loss of one composition.
        delta: In (0, 1).
        compositions: Compositions in one round, >= 1.
        rounds: >= 0; with none, nothing is spent.
        participation: Chance that the client takes part in a round, known to the adversary afterwards.
        slack: How far what is released in one round may be from what `loss` describes, see `with_slack`.

    Raises:
        ValueError: If delta is no delta, or the loss is `NonPrivate`.
        TypeError: If the loss is of an unknown kind.
    """
    check_delta(delta)
    if compositions < 1 or rounds < 0 or not 0.0 <= participation <= 1.0:
        raise ValueError(
            "compositions >= 1, rounds >= 0 and participation in [0, 1] are needed, "
            f"got {compositions}, {rounds} and {participation}"
        )
    mass = infinite_mass(loss)
    if rounds == 0 or participation == 0.0:
        return Spending(0.0, delta, 0.0, "nothing was released")
    round_mass = participation * composed_mass(mass, compositions)
    run_mass = composed_mass(round_mass, rounds)
    if run_mass > delta:
        return Spending(math.inf, delta, run_mass, "infinite-loss mass above delta")

    def exact(left: float) -> float:
        return _spent_exactly(loss, left, compositions, rounds, participation)

    method = _method(loss, participation)
    if slack == NO_SLACK:
        return Spending(exact(delta), delta, run_mass, method)
    total = Slack(composed_mass(min(participation * slack.distance, 1.0), rounds), rounds * slack.log_ratio)
    epsilon = with_slack(exact, delta, total)
    if math.isinf(epsilon):
        reason = (
            f"the released law is known to a distance of {total.distance:.2g} only, too much for this delta; "
            f"exact arithmetic would give epsilon {exact(delta):.3g}"
        )
        return Spending(epsilon, delta, run_mass, reason)
    price = f"(1 + e^epsilon) {total.distance:.2g} of delta and {2 * total.log_ratio:.2g} of epsilon"
    return Spending(epsilon, delta, run_mass, f"{method}; {price} pay for the sampler")


def with_slack(exact: Callable[[float], float], delta: float, slack: Slack) -> float:
    """Smallest epsilon at delta of laws P', Q' that are within a slack of laws P, Q that are known.

    With t the distance and r the log-ratio, P'(S) <= e^r P(S) + t <= e^r (e^x Q(S) + d) + t
    <= e^(x + 2 r) (Q'(S) + t) + e^r d + t: an epsilon of x + 2 r where the known laws reach x at
    d = (delta - (1 + e^epsilon) t) e^-r. The search starts at 0 and only rises, so it ends at the smallest
    solution, or where nothing is left of delta.

    Args:
        exact: Epsilon of the known laws at a delta.
        delta: In (0, 1).
        slack: Of the whole run.

    Returns:
        Rounded up by 1e-9 where there is slack; infinite where no epsilon will do in 100 steps.
    """
    if slack == NO_SLACK:
        return exact(delta)
    epsilon = 0.0
    for _ in range(100):  # a handful, unless a solution hardly exists
        if epsilon > 700.0 or (left := delta - (1.0 + math.exp(epsilon)) * slack.distance) <= 0.0:
            break
        wanted = exact(left * math.exp(-slack.log_ratio)) + 2.0 * slack.log_ratio
        if wanted <= epsilon:
            return epsilon
        epsilon = wanted * (1.0 + 1e-9)
    return math.inf


def _spent_exactly(loss: Loss, delta: float, compositions: int, rounds: int, participation: float) -> float:
    """Epsilon of a run whose infinite mass is below delta."""
    count = compositions * rounds
    if isinstance(loss, ConcentratedLoss):  # rounds without the client cost nothing, and none is assumed
        return concentrated_epsilon(count * loss.rho, delta)
    level = _response_level(loss)
    if participation == 1.0 and level is not None:
        return randomized_response_epsilon(level, count, delta)
    if participation == 1.0 and isinstance(loss, GaussianLoss):
        return gaussian_epsilon(math.sqrt(count) / loss.noise_multiplier, delta)
    return composed_grid(loss, delta, compositions, rounds, participation).epsilon(delta)


def concentrated_epsilon(rho: float, delta: float) -> float:
    """Smallest epsilon at delta over all orders: a rho + ln(1 - 1/a) - (ln delta + ln a) / (a - 1), a > 1.

    References:
        Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, 2020, proposition 12.
    """

    def bound(log_rest: float) -> float:
        r = math.exp(log_rest)
        return (1.0 + r) * rho + math.log(r / (1.0 + r)) - (math.log(delta) + math.log1p(r)) / r

    best = min((0.1 * k for k in range(-92, 139)), key=bound)
    refined = optimize.minimize_scalar(bound, bounds=(best - 0.1, best + 0.1), method="bounded")
    return max(min(bound(best), float(refined.fun)), 0.0)


def _method(loss: Loss, participation: float) -> str:
    if isinstance(loss, ConcentratedLoss):
        return "zero-concentrated differential privacy, every round counted"
    if participation == 1.0 and _response_level(loss) is not None:
        return "exact binomial composition"
    if participation == 1.0 and isinstance(loss, GaussianLoss):
        return "Gaussian differential privacy, exact"
    text = "privacy loss distribution, connect-the-dots, pessimistic"
    if isinstance(loss, CoinSum) and any(victim.num_coins > 200 for victim in loss.victims):
        text += "; nine splits of the other clients' coins scanned (within 0.1%, no strict certificate)"
    return text


def composed_grid(
    loss: Loss, delta: float, compositions: int, rounds: int, participation: float = 1.0
) -> LossGrid:
    """The dominating loss distribution of a run; see `spent`."""
    tail = _TAIL_SHARE * delta
    if isinstance(loss, ConcentratedLoss):  # rhos add up; rounds without the client are not counted on
        return loss_grid(ConcentratedLoss(compositions * rounds * loss.rho), tail)
    if isinstance(loss, GaussianLoss):  # many Gaussian losses are one, which a grid can hold more exactly
        loss, compositions = GaussianLoss(loss.noise_multiplier / math.sqrt(compositions)), 1
    if participation == 1.0:
        count = compositions * rounds
        return loss_grid(loss, tail / count).composed(count, tail)
    one = loss_grid(loss, tail / (2 * compositions * rounds)).composed(compositions, tail / (2 * rounds))
    return one.coarser().sometimes(participation).composed(rounds, tail / 2)


def epsilon_by_rdp(loss: Loss, delta: float, compositions: int) -> float:
    """The same by Renyi divergences of the finite part, infinite mass added to delta: looser, never slow.

    Used as a cross-check: it can only exceed the grid's epsilon.
    """
    check_delta(delta)
    grid = loss_grid(loss, _TAIL_SHARE * delta / compositions)
    rest = delta - composed_mass(grid.infinite, compositions)
    if rest <= 0.0:
        return math.inf
    best = math.inf
    for exponent in range(-140, 60):
        order = 1.0 + 10.0 ** (exponent / 20.0)
        bound = compositions * grid.renyi(order) + math.log1p(-1.0 / order)
        bound -= math.log(order * rest) / (order - 1.0)
        best = min(best, bound)
    return max(best, 0.0)


def with_dropouts(
    loss: CoinSum, group_sizes: Sequence[int], probability: float, failure: float, num_corrupt: int = 0
) -> CoinSum:
    """The claim behind a sum when clients may not answer: fewer coins hide the victim.

    Except with probability `failure` a round, at least that many independent coins answer. A victim whose
    partner dropped out is a lone coin itself, so that place is added.

    Args:
        loss: The claim when everybody answers.
        group_sizes: Sizes of all groups of the round.
        probability: Chance that a client does not answer, independent of everything, caused by nobody.
        failure: Probability that goes to delta, per round.
        num_corrupt: Clients that tell the server all they know; a coin of their groups hides nobody.
    """
    groups = [size for size in group_sizes if size > 1]
    # the victim's group and a curious client's do not count; which they are is unknown, so the best ones go
    groups.sort(key=lambda size: size * probability ** (size - 1), reverse=True)
    others = tuple(groups[1 + max(num_corrupt, 1) :])
    victims = [
        HiddenPair(
            victim.p,
            victim.q,
            coin_count_quantile((1,) * victim.num_coins + others, probability, failure),
            victim.weight,
        )
        for victim in loss.victims
    ]
    fewest = min(victim.num_coins for victim in victims)
    alone = HiddenPair((loss.high, loss.low), (loss.low, loss.high), fewest)
    return CoinSum(loss.low, loss.high, (*victims, alone), f"{loss.note}, after dropouts")


class _Spent(NamedTuple):
    """What one kind of round costs."""

    loss: Loss
    compositions: int
    slack: Slack


@dataclass
class ClaimAccountant:
    """Adds up the rounds of one client against one adversary, in the verbs that accountants share.

    Args:
        losses: What was spent so far: a kind of round, and how many rounds of it.
    """

    losses: dict[_Spent, int] = field(default_factory=dict)

    def step(self, loss: Loss, compositions: int, rounds: int = 1, slack: Slack = NO_SLACK) -> None:
        """Spend rounds of a claim.

        Raises:
            ValueError: If the loss is `NonPrivate`, or rounds < 1.
            TypeError: If the loss is of an unknown kind.
        """
        infinite_mass(loss)
        if rounds < 1:
            raise ValueError(f"rounds must be >= 1, got {rounds}")
        key = _Spent(loss, compositions, slack)
        self.losses[key] = self.losses.get(key, 0) + rounds

    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far at `delta`."""
        check_delta(delta)
        if not self.losses:
            return 0.0
        if len(self.losses) == 1:
            ((loss, compositions, slack), rounds) = next(iter(self.losses.items()))
            return spent(loss, delta, compositions=compositions, rounds=rounds, slack=slack).epsilon
        distance = sum(rounds * kind.slack.distance for kind, rounds in self.losses.items())
        log_ratio = sum(rounds * kind.slack.log_ratio for kind, rounds in self.losses.items())
        return with_slack(self._exact_epsilon, delta, Slack(distance, log_ratio))

    def would_exceed(
        self,
        epsilon: float,
        delta: float,
        loss: Loss,
        compositions: int,
        rounds: int = 1,
        slack: Slack = NO_SLACK,
    ) -> bool:
        """Would these rounds on top take more than `epsilon` at `delta`?"""
        later = ClaimAccountant(dict(self.losses))
        later.step(loss, compositions, rounds, slack)
        return later.get_epsilon(delta) > epsilon

    def _exact_epsilon(self, delta: float) -> float:
        """Of several kinds of rounds: rhos add up, and then all losses on one grid."""
        parts: list[tuple[Loss, int, int]] = []
        rho = 0.0
        for kind, rounds in self.losses.items():
            if isinstance(kind.loss, ConcentratedLoss):
                rho += kind.loss.rho * kind.compositions * rounds
            else:
                parts.append((kind.loss, kind.compositions, rounds))
        if not parts:
            return concentrated_epsilon(rho, delta)
        if rho:
            parts.append((ConcentratedLoss(rho), 1, 1))
        grids = [
            composed_grid(loss, delta / len(parts), compositions, rounds)
            for loss, compositions, rounds in parts
        ]
        step = max(grid.coarser().step for grid in grids)
        total = grids[0].on(step)
        for grid in grids[1:]:
            total = total.plus(grid.on(step))
        return total.epsilon(delta)

    def __len__(self) -> int:
        """Rounds spent."""
        return sum(self.losses.values())
