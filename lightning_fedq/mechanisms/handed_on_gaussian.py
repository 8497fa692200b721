"""Gaussian noise that clients add and later clients subtract again, so that it cancels over rounds.

No party is trusted to add noise. Cohorts take turns. A client of round t draws discrete Gaussians H (its
share) and Y (fresh noise) and adds 5 H + Y to its message. The client at its place in the cohort of round t +
1 shares a key with it, so it knows H and adds -4 H to its own message. The noise of a model is a sum of
released noises, in which each round leaves a fifth of its noise. Only sums are meant to be seen. Shares come
from the pair's agreed key, so nothing more is sent.

Privacy. Take N clients of every round whose share the adversary does not know, and give it all other shares.
Let W = (W_t) be the noise of a coordinate in the releases of a block. Then cov W >= (5 tau)^2 sum_i G_i G_i^T
with G_i = I - 4/5 diag(p_i) Shift. Here p_it is 1 if share i of round t - 1 was subtracted, and 0 otherwise.
A client's updates move the releases by X, with rows of length <= Delta u_t. A -> A^-1 is convex in the order
of symmetric matrices, so X^T (sum_i G_i G_i^T)^-1 X <= 1/N max_i |G_i^-1 X|^2. For any p_i, the entries of
G_i^-1 = sum_k (I - G_i)^k lie between 0 and those of C = (I - 4/5 Shift)^-1. The divergence of order alpha is
therefore at most alpha / 2 Delta^2 |C u|^2 / (N (5 tau)^2). Shares that are not subtracted weaken nothing,
even if an attacker prevents it in response to earlier releases. If a client's rounds are b or more apart,

    |C u|^2 <= [k (1 + r) / (1 - r) - 2 r (1 - r^k) / (1 - r)^2] / (1 - l^2),  l = 4/5, r = l^b,

for k participations in all. Columns i <= j of C have the product sum_{t >= j} l^(2t - i - j) <= l^(j - i) /
(1 - l^2). All products are >= 0, so equal signs and the smallest gaps are the worst case. If a block ends,
products across its end are 0.

The bound is more than k times the cost of one participation, so adding charges one by one would claim too
little. `HandedOnLoss` composes by the total. An accountant that can't know the total charges the limit for
large k, (1 + r) / ((1 - l^2) (1 - r)), each time. Updates and p_i may depend on earlier releases: given
these, round t is a Gaussian of the t-th pivot of the p_i so far, and the squares of the shifts sum to the
bound above.

Integers. H and Y are discrete Gaussians of parameters tau and upsilon, and their coefficients are integers. Y
hides the lattice: without it, a release minus its data would be -4 H modulo 5. By Poisson summation over the
shares given W, the distribution of W is the discrete Gaussian of its covariance, up to a factor
e^(+-8.1 T e^(-2 pi^2 s^2)) a coordinate in T rounds, with 1 / s^2 = 1 / tau^2 + (9^2 + 5^2) / (N upsilon^2).
Conditional distributions are ratios of two of these, so the rounds of a block together cost
8.1 (T + 1)^2 e^(...). Sums of n discrete Gaussians are discrete Gaussians up to `sum_gap`. After 2^16 rounds
no share is subtracted, which bounds T. Upsilon follows from s^2 = 3 with a quarter of the cohort. With fewer
unknown shares there is no claim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.noise.discrete_gaussian import LARGEST_SIGMA, discrete_gaussian, sum_gap
from lightning_fedq.functional.noise.inversion import Words
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.claims import AUTHENTICATED
from lightning_fedq.mechanisms.ddg import DistributedDiscreteGaussian, Noise
from lightning_fedq.mechanisms.interface import (
    Adversary,
    ConcentratedLoss,
    HandOver,
    Loss,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
    Slack,
)
from lightning_fedq.privacy.losses import concentrated_epsilon

OWN, TAKEN_BACK = 5, 4
"""Coefficients of a client's own share, and of its predecessor's share, which it subtracts."""
KEPT = TAKEN_BACK / OWN
_SPREAD = (OWN + TAKEN_BACK) ** 2 + OWN**2
"""Squared length by which one share moves the fresh noise that must hide it, see the module."""
_MOST_ROUNDS = 1 << 16
"""Most rounds of a block in which shares are subtracted (T)."""
_SMOOTH = 3.0
"""Smoothness s^2 that the fresh noise of a quarter of the cohort must reach."""
_LEAST_SHARE, _LEAST_FRESH = 4.0, 2.5
_WRAPS = 6.0
"""Standard deviations of a round's sum in half the modulus, exceeded with probability 2e-9."""


def square_of_matrix(separation: int) -> float:
    """Bound |C u|^2 per participation, for a client whose rounds are at least `separation` apart."""
    power = KEPT**separation
    return (1.0 + power) / ((1.0 - KEPT**2) * (1.0 - power))


def square_of_participations(separation: int, count: int) -> float:
    """Bound |C u|^2 of `count` participations in all, which are at least `separation` rounds apart.

    Examples:
        >>> [round(square_of_participations(2, k), 6) for k in (1, 2, 10)]
        [2.777778, 9.111111, 99.42467]
    """
    power = KEPT**separation
    # the first and the last participations have fewer neighbours, so their common terms are taken off
    ends = 2.0 * power * (1.0 - power**count) / ((1.0 - power) ** 2 * (1.0 - KEPT**2))
    return count * square_of_matrix(separation) - ends


@dataclass(frozen=True)
class HandedOnLoss(ConcentratedLoss):
    """Zero-concentrated loss of `count` participations in one stream of noise that is handed on.

    Several participations cost more than the sum of single ones, so `composed` computes it from their number.

    Args:
        rho: Concentration of all participations together.
        note: Source of the loss, for reports.
        limit: Cost of one of very many participations, in rho.
        separation: Fewest rounds from one participation to the next.
        count: Number of participations.
    """

    limit: float = field(kw_only=True)
    separation: int = field(kw_only=True)
    count: int = field(default=1, kw_only=True)
    adds_up: ClassVar[bool] = False

    @classmethod
    def from_limit(cls, limit: float, separation: int, note: str, count: int = 1) -> HandedOnLoss:
        """Return the loss of `count` participations, from the cost `limit` of one of very many."""
        part = square_of_participations(separation, count) / square_of_matrix(separation)
        return cls(limit * part * (1.0 + 2.0**-40), note, limit=limit, separation=separation, count=count)

    @property
    def standalone(self) -> ConcentratedLoss:
        # all participations at the limit, which adds up with other losses
        return ConcentratedLoss(self.count * self.limit, self.note)

    def epsilon(self, delta: float, count: int) -> float:
        """Return epsilon of all participations together, see `concentrated_epsilon`."""
        return concentrated_epsilon(self.composed(count).rho, delta)

    def composed(self, count: int) -> HandedOnLoss:
        """Return the loss of `count` times as many participations."""
        return self.from_limit(self.limit, self.separation, self.note, self.count * count)

    def plus(self, other: Loss) -> Loss | None:
        """Add participations of the same stream, or add the limits of both losses for different streams.

        The rho of an independent loss is added by `ConcentratedLoss.plus`.
        """
        if not isinstance(other, HandedOnLoss):
            return super().plus(other)
        if (self.limit, self.separation) == (other.limit, other.separation):
            return self.from_limit(self.limit, self.separation, self.note, self.count + other.count)
        return self.standalone.plus(other.standalone)

    def spread(self, dim: int) -> HandedOnLoss:
        """Return the loss of one of `dim` coordinates, whose concentrated losses add up."""
        return self.from_limit(self.limit / dim, self.separation, self.note, self.count)


@dataclass(frozen=True)
class HandedOnGaussian(DistributedDiscreteGaussian):
    """Handed-on Gaussian: client noise that the next cohort subtracts in part, sums modulo 2^bits.

    Take it for private training without a trusted server, if cohorts can take turns and secure aggregation
    hides single messages. A model then has less noise than with `DistributedDiscreteGaussian` at the same
    epsilon.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        local_sigma: Std of a client's own share per coordinate, > 0, in units of clip_norm.
        granularity: Grid of the integers, > 0, in units of clip_norm, and at most a twentieth of local_sigma.
        bits: Symbols are integers modulo 2^bits, 2 to 31. Sums beyond half the modulus wrap around.
        max_dropped_clients: Dropouts that the claims allow for. The shares of that many clients are not
            counted.
        num_cohorts: Number of disjoint cohorts that take turns (`cohort=Cyclic(...)`), >= 2. It is the fewest
            rounds between two participations of a client.

    Raises:
        ValueError: If a value is out of range.

    The claims are about the whole update, against outsiders, curious clients and the server behind secure
    aggregation. They count clients whose share the adversary does not know. Nothing is claimed about single
    messages, because the next client knows a message's share.

    A message has `bits` bits per coordinate, with dimensions padded to a power of two.

    References:
        Denisov, McMahan, Rush, Smith, Thakurta, Improved Differential Privacy for SGD via Optimal Private
        Linear Operators on Adaptive Streams, 2022 (noise correlated over rounds).
        Kalinin, McKenna, Upadhyay, Lampert, Back to Square Roots: An Optimal Bound on the Matrix
        Factorization Error for Multi-Epoch Differentially Private SGD, arXiv 2505.12128 (a banded inverse).
        Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
        Aggregation, ICML 2021.
        Feldman, Zrnic, Individual Privacy Accounting via a Renyi Filter, 2021. The hand-over and its proof
        are this project's.

    Examples:
        >>> mechanism = HandedOnGaussian(1.0, local_sigma=0.5, granularity=0.01, num_cohorts=10)
        >>> mechanism.share_std  # of the shares that are handed on, in units of the update
        10.0
    """

    reuses_noise = True
    _multiple = OWN

    bits: int = 18
    num_cohorts: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_cohorts < 2:
            raise ValueError(
                f"num_cohorts must be >= 2, got {self.num_cohorts}. "
                "Use DistributedDiscreteGaussian if every client takes part in every round."
            )
        if self.share_std < _LEAST_SHARE:
            raise ValueError(
                f"local_sigma must be at least {OWN * _LEAST_SHARE:g} times granularity, got {self.steps:g}. "
                "Use a smaller granularity and more bits."
            )

    @classmethod
    def example(cls) -> HandedOnGaussian:
        return cls(clip_norm=1.0, local_sigma=1.0, granularity=0.01, num_cohorts=10)

    @property
    def separation(self) -> int:
        return self.num_cohorts

    @property
    def share_std(self) -> float:
        """Parameter tau of a share, in integer steps."""
        return self.steps / OWN

    def _fewest(self, context: RoundContext) -> int:
        """Return a quarter of the clients that certainly answer: the unknown shares that claims need."""
        return max(-(-(len(context.cohort) - self.max_dropped_clients) // 4), 1)

    def fresh_std(self, context: RoundContext) -> float:
        """Return parameter upsilon of the fresh noise Y, which is never handed on, in integer steps."""
        least = _SPREAD / (self._fewest(context) * (1.0 / _SMOOTH - self.share_std**-2))
        return max(math.sqrt(least), _LEAST_FRESH)

    def with_level(self, level: float, context: RoundContext, max_dropped_clients: int) -> HandedOnGaussian:
        # half the modulus holds six standard deviations of a round's sum
        sigma, n, size = 1.0 / level, len(context.cohort), padded_size(context.dim)
        asked = replace(self, max_dropped_clients=max(self.max_dropped_clients, max_dropped_clients))
        fresh = max(_SPREAD / (asked._fewest(context) * (1.0 / _SMOOTH - _LEAST_SHARE**-2)), _LEAST_FRESH**2)
        room = (2.0 ** (self.bits - 1) / _WRAPS) ** 2 - n * (fresh + 0.25)  # in squared steps
        if room <= 0.0:
            raise ValueError(f"a modulus of 2^{self.bits} is too small for {n} clients. Use more bits.")
        grid = math.sqrt((n * n / size + n * sigma**2 * (1.0 + KEPT**2)) / room)
        grid = max(grid, sigma / (OWN * LARGEST_SIGMA) * (1.0 + 2.0**-40))
        if sigma < OWN * _LEAST_SHARE * grid:
            raise ValueError(
                f"with {self.bits} bits, noise of {sigma:.3g} clip_norm is below {OWN * _LEAST_SHARE:g} grid "
                "steps. Use more bits."
            )
        return replace(asked, local_sigma=sigma, granularity=grid)

    # ---- noise ------------------------------------------------------------------------------------------

    @staticmethod
    def _handed(context: RoundContext) -> HandOver:
        return context.hand_over or HandOver((context.round, context.attempt))

    def _words(self, context: RoundContext, rand: PublicRandomness) -> NDArray[np.uint32]:
        """Return the signs of the rotation of the block's first round.

        All rounds of a block share one rotation, so that noise is subtracted in the coordinates it was added
        to.
        """
        return super()._words(context, rand.for_round(*self._handed(context).since))

    def _client_noise(self, client: int, context: RoundContext, rand: ClientRandomness) -> Noise:
        """Return a function that draws the noise of the client's next symbols, 5 H + Y - 4 H'.

        H is the client's share (drawn privately if it has no successor) and H' its predecessor's share, if
        any.
        """
        handed, fresh_std = self._handed(context), self.fresh_std(context)
        before, after = dict(handed.before), dict(handed.after)
        fresh = rand.private(client, "noise").words64
        own: Words = rand.private(client, "noise share").words64
        if client in after:
            own = _share(client, after[client], handed.since, rand)
        taken: Words | None = None
        if client in before and (context.round - handed.since[0]) % _MOST_ROUNDS:
            first = context.round - 1 == handed.since[0]
            last = rand.for_round(context.round - 1, handed.since[1] if first else 0)
            taken = _share(before[client], client, handed.since, last)

        def noise(count: int) -> NDArray[np.int64]:
            total = OWN * self._noise(count, own) + discrete_gaussian(fresh_std, count, fresh)
            return total if taken is None else total - TAKEN_BACK * self._noise(count, taken)

        return noise

    def _noise(self, count: int, words: Words) -> NDArray[np.int64]:
        return discrete_gaussian(self.share_std, count, words)

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Bound the variance of the mean's noise in this round alone.

        It counts each client's own share and fresh noise, and the predecessors' shares as if all holders
        answered.
        """
        share = 1.0 + KEPT**2 * min(len(self._handed(context).before) / len(clients), 1.0)
        variance = share * self.steps**2 + self.fresh_std(context) ** 2 + 0.25
        variance *= (self.granularity * self.clip_norm) ** 2
        return torch.full_like(context.radius, variance / len(clients))

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float:
        # the part of a round's noise that stays in the model after the next round
        variance = (1.0 - KEPT) ** 2 * self.steps**2 + self.fresh_std(context) ** 2 + 0.25
        return context.dim * variance * (self.granularity * self.clip_norm) ** 2 / num_clients

    # ---- claims -----------------------------------------------------------------------------------------

    def _sum_loss(self, norm: float, one_norm: float, size: int, summands: int, note: str) -> Loss:
        square = square_of_matrix(self.num_cohorts) * (norm / self.steps) ** 2
        return HandedOnLoss.from_limit(square / (2.0 * summands) * (1.0 + 2.0**-40), self.num_cohorts, note)

    def slack(self, unknown: int, context: RoundContext) -> Slack:
        """Return the distance of a block's noise from Gaussian noise. Every charge pays for all of it.

        Args:
            unknown: Number of shares of every round that the adversary does not know.
            context: Public facts of the round.
        """
        fresh, clients = self.fresh_std(context), len(context.cohort)
        smoothness = 1.0 / (self.share_std**-2 + _SPREAD / (unknown * fresh**2))
        # noise on a lattice of integer points is this close to Gaussian noise in a whole block
        lattice = 8.1 * (_MOST_ROUNDS + 1.0) ** 2 * math.exp(-2.0 * math.pi**2 * smoothness)
        # a round sums own shares, predecessors' shares and fresh noise
        sums_of_a_round = 2.0 * sum_gap(clients, self.share_std) + sum_gap(clients, fresh)
        coordinate = lattice + _MOST_ROUNDS * sums_of_a_round
        return Slack(log_ratio=padded_size(context.dim) * coordinate)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # claims about the sum, by the number of shares that the adversary does not know
        there = len(context.cohort) - self.max_dropped_clients
        corrupt, needed = context.num_colluding, self._fewest(context)
        known = {
            Adversary.OUTSIDER: (0, kind.MODELS_ONLY("no party who sees only models knows a share")),
            Adversary.CLIENT: (1, kind.VIEW("the curious client knows its own share or its predecessor's")),
            Adversary.SECAGG_SERVER: (
                2 * corrupt,
                kind.COLLUSION(
                    f"the server colludes with {corrupt} clients of a cohort at most, and they know their "
                    "own shares and their predecessors' shares"
                ),
            ),
        }
        in_order = (
            f"a client's rounds are at least {self.num_cohorts} apart, or a new block begins",
            "each client's successor is dealt out once, before any data, one client to one client",
            "no client is set back to an earlier state, and no third client knows a pair's share",
            "updates do not depend on the clients' own noise or messages (no error feedback)",
        )
        answered = f"at least {there} of {len(context.cohort)} clients answer"
        base = (
            kind.DROPOUTS(f"{answered}, and nothing but the sum is seen", kind.SUM_ALONE),
            *map(kind.NOISE_IN_ORDER, in_order),
            AUTHENTICATED,
        )
        colluders = {Adversary.CLIENT: 1, Adversary.SECAGG_SERVER: corrupt}
        single = NonPrivate("noise protects the sum only: the next client knows a message's share")
        claims = []
        for who in Adversary:
            if who not in known:
                claims.append(PrivacyClaim(who, single, 1))
                continue
            insiders, whose = known[who]
            unknown = there - insiders
            if unknown < needed:
                few = NonPrivate(
                    f"{max(unknown, 0)} shares of a round are unknown, {needed} are needed: "
                    "take larger cohorts, fewer dropouts or fewer colluding clients"
                )
                claims.append(PrivacyClaim(who, few, 1))
                continue
            note = f"noise of {unknown} clients, which later rounds subtract in part"
            slack = self.slack(unknown, context)
            near = f"{slack.log_ratio:.1e} in log-ratio of Gaussian noise, charged to the budget"
            stated = (*base, whose, kind.FLOAT_ERROR(f"the noise's distribution is within {near}"))
            about: dict[str, Any] = {"assumptions": stated, "slack": slack, "colluders": colluders.get(who)}
            claims.append(PrivacyClaim(who, self._loss(unknown, context, note), 1, **about))
        return tuple(claims)


def _share(producer: int, successor: int, since: tuple[int, int], rand: ClientRandomness) -> Words:
    """Return the words of the share that `producer` adds in the round of `rand` and `successor` subtracts."""
    purpose = f"noise share of client {producer} in the block of round {since[0]}, attempt {since[1]}"
    return rand.peer((producer, successor), purpose).words64
