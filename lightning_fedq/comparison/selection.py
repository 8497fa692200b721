"""Epsilon of choosing the best of a random number of private runs, towards who sees nothing but the winner.

A run draws a candidate from a list that was fixed before, trains it and scores it; candidates, seeds and
scores of all runs are independent. K runs are made and the best one is published, K being random and never
told. With D_a a bound on the Renyi divergence of order a of one run, both ways round, the winner has

    D'_a = D_a + (1 + eta)(1 - 1/c) D_c + (1 + eta) ln(1/gamma) / c + ln(E K) / (a - 1)

for K truncated negative binomial and any order c > 1, the same for all a. A run is all that it releases: all
rounds, and its score. Who sees more than the winner, a client or a server say, pays for every run: there the
runs compose. A fixed K has no such bound, and neither have tuners that look at earlier runs.

Where a run's law is known within a slack only (distance t, log-ratio r, `mechanism.Slack`), the divergence
grows by r (2a - 1) / (a - 1), because the integral of P^a Q^(1-a) grows by e^(r a + r (a - 1)) at most, and
the winner's distance is E K t at most, the chance that one of the runs is another one. A law that is cut
off at a largest number of runs is P(K > that number) away from its own, in both worlds.

**By privacy profiles.** Let delta(e) bound one run's hockey-stick divergence both ways round, m = E K, B and
B' the laws of one run, q(y) and q'(y) the chances of a worse outcome (ties are broken by chance, so these
have no jumps). The best run has the law phi'(q(y)) dB(y), phi the generating function of K, and phi'(s) is
proportional to (gamma + (1 - gamma)(1 - s))^-(1 + eta), phi'(1) = m. Take e1 >= 0 with (1 - gamma) delta(e1)
<= gamma (e^e1 - 1). As 1 - q' <= e^e1 (1 - q) + delta(e1), gamma + (1 - gamma)(1 - q') <= e^e1 (gamma +
(1 - gamma)(1 - q)), so that phi'(q) <= e^((1 + eta) e1) phi'(q'). With e = e2 + (1 + eta) e1 and any set S of
outcomes, W being the winner's law,

    W(S) - e^e W'(S) <= integral over S of phi'(q) (dB - e^e2 dB') <= m delta(e2),

so epsilon = e2 + (1 + eta) e1 where m delta(e2) is delta. Both bounds hold, so the smaller one is told, at
the same delta. A cut at a largest number of runs puts its mass on that number, for which neither holds: it is
paid as a distance.

References:
    Koskela, Redberg, Wang, Privacy Profiles for Private Selection, 2024 (such a bound; the proof is ours).
    Papernot, Steinke, Hyperparameter Tuning with Renyi Differential Privacy, ICLR 2022, theorem 2.
    Liu, Talwar, Private Selection from Private Candidates, STOC 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from lightning_fedq.keys.randomness import Stream
from lightning_fedq.mechanisms.interface import NO_SLACK, Slack
from lightning_fedq.privacy.accounting import check_delta, with_slack
from lightning_fedq.privacy.losses import ConcentratedLoss, GaussianLoss, Loss, RenyiLoss

ORDERS = tuple(1.0 + 10.0 ** (0.05 * k) for k in range(-40, 61))
"""Orders of a selection's curve, 1.01 to 1,001."""
_MOST_TRIALS = 10_000_000
_LARGEST_EPSILON = 1e6


@dataclass(frozen=True)
class NegativeBinomialTrials:
    """Number of runs: negative binomial, truncated so that there is one at least.

    P(K = k) is (1 - gamma)^k / (gamma^-eta - 1) times the product of (l + eta) / (l + 1) over l < k, and
    (1 - gamma)^k / (k ln(1 / gamma)) for eta = 0. The smaller eta, the smaller epsilon and the heavier the
    tail; eta = 1 is geometric.

    Args:
        eta: Shape, > -1.
        gamma: In (0, 1).
        at_most: Largest number of runs, >= 1: more are not made, and what that changes is in `beyond`.

    Raises:
        ValueError: If a number is out of range.
    """

    eta: float
    gamma: float
    at_most: int = _MOST_TRIALS

    def __post_init__(self) -> None:
        if not (-1.0 < self.eta < math.inf and 0.0 < self.gamma < 1.0):
            raise ValueError(f"eta > -1 and gamma in (0, 1) are needed, got {self.eta} and {self.gamma}")
        if not 1 <= self.at_most <= _MOST_TRIALS:
            raise ValueError(f"1 <= at_most <= {_MOST_TRIALS} is needed, got {self.at_most}")

    @classmethod
    def of_mean(cls, eta: float, mean: float, at_most: int = _MOST_TRIALS) -> NegativeBinomialTrials:
        """Those with a mean number of runs, before they are cut off.

        Args:
            eta: Shape, > -1.
            mean: > 1.
            at_most: Largest number of runs.

        Raises:
            ValueError: If the mean is 1 or less, or no gamma above 1e-12 has it.
        """
        cls(eta, 0.5)  # refuses eta
        low, high = -12.0 * math.log(10.0), math.log1p(-1e-12)

        def excess(log_gamma: float) -> float:
            return cls(eta, math.exp(log_gamma)).mean - mean

        if not 1.0 < mean < math.inf or excess(low) < 0.0 or excess(high) > 0.0:
            raise ValueError(f"a mean of more than one run is needed that eta = {eta} can have, got {mean}")
        return cls(eta, math.exp(optimize.brentq(excess, low, high, xtol=1e-14)), at_most)

    @property
    def mean(self) -> float:
        """Runs on average, before they are cut off."""
        if self.eta == 0.0:
            return (1.0 / self.gamma - 1.0) / -math.log(self.gamma)
        return self.eta * (1.0 - self.gamma) / (self.gamma * -math.expm1(self.eta * math.log(self.gamma)))

    @property
    def beyond(self) -> float:
        """P(K > at_most), rounded up: the sum of a geometric series that lies above it.

        Differences of `lgamma` of ten million are precise to 1e-7.
        """
        first = self.at_most + 1
        # P(k + 1) / P(k) for k >= first is this at most: it goes to 1 - gamma from one side
        falls = (1.0 - self.gamma) * max(1.0, (first + self.eta) / (first + 1.0))
        return min((1.0 + 1e-6) * self.probability(first) / (1.0 - falls), 1.0) if falls < 1.0 else 1.0

    def probability(self, count: int) -> float:
        """P(K = count), before it is cut off. 0 for none."""
        if count < 1:
            return 0.0
        power = count * math.log1p(-self.gamma)
        if self.eta == 0.0:
            return math.exp(power) / (count * -math.log(self.gamma))
        # eta (eta + 1) ... (eta + k - 1) / k!, its first factor over gamma^-eta - 1, which is > 0 together
        first = self.eta / math.expm1(-self.eta * math.log(self.gamma))
        rest = math.lgamma(count + self.eta) - math.lgamma(1.0 + self.eta) - math.lgamma(count + 1.0)
        return first * math.exp(power + rest)

    def draw(self, stream: Stream) -> int:
        """Draw a number of runs.

        Args:
            stream: Stream that nobody else knows; the number must stay as secret.
        """
        left, count = int(stream.words64(1)[0]), 0
        while left >= 0 and count < self.at_most:
            count += 1
            # inverse of the distribution function, in integers
            left -= round(self.probability(count) * 2**64)
        return count

    def price(self, divergences: Sequence[float], orders: Sequence[float]) -> float:
        """Term that is added to the divergence of every order, the least over c."""
        pairs = zip(orders, divergences, strict=True)
        # Papernot and Steinke, theorem 2
        return min(
            (1.0 + self.eta) * ((1.0 - 1.0 / c) * value - math.log(self.gamma) / c) for c, value in pairs
        )


def run_loss(loss: Loss, count: int) -> Loss:
    """Loss of `count` compositions of one run, known by its Renyi divergences.

    Where a loss is known by a largest value only, epsilon, it is zero-concentrated with rho = epsilon^2 / 2.

    Args:
        loss: Loss of one composition.
        count: Compositions of the whole run, its rounds and what it scores, >= 1.

    Raises:
        ValueError: If neither is finite.
    """
    if isinstance(loss, GaussianLoss):
        return ConcentratedLoss(0.5 * count / loss.noise_multiplier**2, loss.note)
    whole = loss.composed(count)
    if whole is not None and math.isfinite(whole.divergence(2.0)):
        return whole
    if not math.isfinite(loss.pure_epsilon):
        raise ValueError(
            f"a {type(loss).__name__} has no Renyi divergences and no largest loss, so nothing is known of "
            "the best of several runs; take GaussianNoise, DistributedDiscreteGaussian or RotatedCoins, or "
            "let runs compose"
        )
    return ConcentratedLoss(count * 0.5 * loss.pure_epsilon**2, loss.note)


Profile = Callable[[float], float]
"""delta of one whole run at an epsilon, or an upper bound, worst over both orders of the worlds."""


def run_profile(losses: Sequence[tuple[Loss, int]]) -> Profile:
    """Privacy profile of one whole run of a sweep, the worst of its candidates.

    Args:
        losses: Loss of one composition of each candidate, and how many a whole run has. Gaussian ones are
            exact, others what `run_loss` says.

    Raises:
        ValueError: See `run_loss`.

    Example:
        >>> round(run_profile([(GaussianLoss(2.0, ""), 4)])(1.0), 6)
        0.126937
    """
    whole = [
        GaussianLoss(one.noise_multiplier / math.sqrt(count), one.note)
        if isinstance(one, GaussianLoss)
        else run_loss(one, count)
        for one, count in losses
    ]
    return lambda epsilon: max(min(float(one.curve(np.array([epsilon]))[0]), 1.0) for one in whole)


def profile_epsilon(
    profile: Profile, delta: float, trials: NegativeBinomialTrials, log_ratio: float = 0.0
) -> float:
    """Epsilon of the best of a random number of runs by the privacy profile of one.

    Args:
        profile: Privacy profile of one whole run.
        delta: In (0, 1).
        trials: Law of the number of runs, before it is cut off.
        log_ratio: Slack of one run's law: its profile at e is e^r times the known one at e - 2 r, at most.

    Example:
        >>> trials = NegativeBinomialTrials.of_mean(1.0, 5.0)
        >>> round(profile_epsilon(run_profile([(GaussianLoss(1.0, ""), 1)]), 1e-5, trials), 4)
        5.9599
    """

    def at(epsilon: float) -> float:
        return min(math.exp(log_ratio) * profile(epsilon - 2.0 * log_ratio), 1.0)

    def least(holds: Callable[[float], bool]) -> float:
        low, high = 0.0, 1.0
        if holds(low):
            return low
        while not holds(high):
            low, high = high, 2.0 * high
            if high > _LARGEST_EPSILON:
                return math.inf
        while high - low > 1e-10 * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high  # where it holds, rounded up

    own = least(lambda e: trials.mean * at(e) <= delta)
    gamma, eta = trials.gamma, trials.eta
    return own + (1.0 + eta) * least(lambda e: (1.0 - gamma) * at(e) <= gamma * math.expm1(e))


def selected(
    loss: Loss, trials: NegativeBinomialTrials, orders: Sequence[float] = ORDERS, log_ratio: float = 0.0
) -> RenyiLoss:
    """Renyi divergences of the best of a random number of runs, for whoever sees nothing else.

    Args:
        loss: Loss of one whole run.
        trials: Law of the number of runs.
        orders: Orders > 1, ascending.
        log_ratio: Slack of one run's law, see `Slack`.

    Raises:
        ValueError: If no divergence of the run is finite.
    """
    kept = [a for a in orders if math.isfinite(loss.divergence(a))]
    if not kept:
        raise ValueError(f"a {type(loss).__name__} has no Renyi divergence; see `run_loss`")
    base = [loss.divergence(a) + log_ratio * (2.0 * a - 1.0) / (a - 1.0) for a in kept]
    price = trials.price(base, kept)
    several = math.log(trials.mean)
    total = [d + price + several / (a - 1.0) for a, d in zip(kept, base, strict=True)]
    return RenyiLoss(tuple(kept), tuple(total), "best of a random number of runs")


def selection_epsilon(
    loss: Loss,
    delta: float,
    trials: NegativeBinomialTrials,
    *,
    slack: Slack = NO_SLACK,
    orders: Sequence[float] = ORDERS,
    profile: Profile | None = None,
) -> float:
    """Epsilon of the best of a random number of runs, towards who sees the winner and nothing else.

    The smaller one of what Renyi divergences and the privacy profile say.

    Args:
        loss: Loss of one whole run, `run_loss` say.
        delta: In (0, 1).
        trials: Law of the number of runs, which stays secret.
        slack: Slack of one whole run.
        orders: Orders > 1, ascending.
        profile: Privacy profile of one whole run (`run_profile`); None leaves Renyi divergences alone.

    Raises:
        ValueError: If delta is none, or no divergence of the run is finite.
    """
    check_delta(delta)
    curve = selected(loss, trials, orders, slack.log_ratio)

    def exact(left: float) -> float:
        by_orders = curve.epsilon(left, 1)
        if profile is None:
            return by_orders
        return min(by_orders, profile_epsilon(profile, left, trials, slack.log_ratio))

    distance = min(trials.mean * slack.distance + trials.beyond, 1.0)  # any of the runs, or one too many
    return with_slack(exact, delta, Slack(distance, 0.0))  # `exact` has the log-ratio already
