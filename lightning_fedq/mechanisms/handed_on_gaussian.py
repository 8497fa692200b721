"""Gaussian noise of the clients that cancels over rounds, with no trusted server: every noise is handed on.

Cohorts take turns. A client of round t adds 5 H + Y to its message, H and Y fresh discrete Gaussians, and the
client at its place in the cohort of round t + 1, who shares a key with it and so knows H, adds -4 H to its
own. So a model's noise is a sum in which a round leaves a fifth of itself behind; only sums are meant to be
seen. The shares come from the pair's agreed key: nothing more is sent.

Privacy. Take N clients of every round whose share the adversary does not know, and give it all others. With
W = (W_t) the noise of a coordinate in the releases of a block, cov W >= (5 tau)^2 sum_i G_i G_i^T, where G_i
= I - 4/5 diag(p_i) Shift and p_it is 1 where share i of round t - 1 was taken back, and else 0. A client's
updates move the releases by X, rows of length <= Delta u_t. As A -> A^-1 is convex in the order of symmetric
matrices, X^T (sum_i G_i G_i^T)^-1 X <= 1/N max_i |G_i^-1 X|^2, and G_i^-1 = sum_k (I - G_i)^k has entries
between 0 and those of C = (I - 4/5 Shift)^-1, whatever p_i is. So the divergence of order alpha is at most
alpha / 2 Delta^2 |C u|^2 / (N (5 tau)^2): shares that are not taken back, whoever sees to that and by
whatever was released before, weaken nothing. Where a client's rounds lie b or more apart,

    |C u|^2 <= [k (1 + r) / (1 - r) - 2 r (1 - r^k) / (1 - r)^2] / (1 - l^2),  l = 4/5, r = l^b,

for k participations in all: columns i <= j of C have the product sum_{t >= j} l^(2t - i - j) <= l^(j - i) /
(1 - l^2), and all are >= 0, so equal signs and the least gaps are worst; where a block ends, products across
it are 0. This is more than k times what one participation costs: whoever adds charges one by one claims too
little. So a `HandedOnLoss` composes by the total, and what can't know the total charges the limit for large
k, (1 + r) / ((1 - l^2) (1 - r)), each time. Updates and p_i may follow from earlier releases: given those,
round t is a Gaussian of the t-th pivot of what p_i is so far, and the shifts' squares sum up to the above.

Integers. H and Y are discrete Gaussians of parameters tau and upsilon, the coefficients whole numbers; Y
keeps the lattice from showing (without it a release less its data is -4 H modulo 5). By Poisson summation
over the shares given W, the law of W is the discrete Gaussian of its covariance up to e^(+-8.1 T e^(-2 pi^2
s^2)) a coordinate in T rounds, 1 / s^2 = 1 / tau^2 + (9^2 + 5^2) / (N upsilon^2). Conditional laws are ratios
of two of these, so the rounds of a block together cost 8.1 (T + 1)^2 e^(...); and sums of n discrete
Gaussians are one up to `sum_gap`. After 2^16 rounds nothing is taken back, which bounds T. Upsilon follows
from s^2 = 3 with a quarter of the cohort; fewer unknown shares claim nothing.

References:
    Denisov, McMahan, Rush, Smith, Thakurta, Improved Differential Privacy for SGD via Optimal Private Linear
    Operators on Adaptive Streams, 2022 (noise correlated over rounds); Kalinin, McKenna, Upadhyay, Lampert,
    Back to Square Roots: An Optimal Bound on the Matrix Factorization Error for Multi-Epoch Differentially
    Private SGD, arXiv 2505.12128 (a banded inverse); Kairouz, Liu, Steinke, The Distributed Discrete Gaussian
    Mechanism for Federated Learning with Secure Aggregation, ICML 2021; Feldman, Zrnic, Individual Privacy
    Accounting via a Renyi Filter, 2021. The hand-over and its proof are this project's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.noise.discrete_gaussian import LARGEST_SIGMA, discrete_gaussian, sum_gap
from lightning_fedq.functional.noise.inversion import Words
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.ddg import DistributedDiscreteGaussian, Noise
from lightning_fedq.mechanisms.interface import (
    Adversary,
    AuditCase,
    ConcentratedLoss,
    HandOver,
    Loss,
    Mechanism,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
    Slack,
)
from lightning_fedq.privacy.losses import concentrated_epsilon

OWN, TAKEN_BACK = 5, 4
"""Coefficients of a client's own share, and of the one that it takes back."""
KEPT = TAKEN_BACK / OWN
_MOST_ROUNDS = 1 << 16
"""Rounds in a row in which noise is taken back."""
_SMOOTH = 3.0
"""s^2 with a quarter of the cohort."""
_LEAST_SHARE, _LEAST_FRESH = 4.0, 2.5
_WRAPS = 6.0
"""Standard deviations of a round's sum in half the modulus; beyond lie 2e-9 of a normal law."""


def square_of_matrix(separation: int) -> float:
    """Bound on |C u|^2 a participation, where a client's rounds lie `separation` apart or more."""
    power = KEPT**separation
    return (1.0 + power) / ((1.0 - KEPT**2) * (1.0 - power))


def square_of_participations(separation: int, count: int) -> float:
    """Bound on |C u|^2 of so many participations in all, which lie `separation` rounds apart or more.

    Example:
        >>> [round(square_of_participations(2, k), 6) for k in (1, 2, 10)]
        [2.777778, 9.111111, 99.42467]
    """
    power = KEPT**separation
    ends = 2.0 * power * (1.0 - power**count) / ((1.0 - power) ** 2 * (1.0 - KEPT**2))
    return count * square_of_matrix(separation) - ends


@dataclass(frozen=True)
class HandedOnLoss(ConcentratedLoss):
    """Zero-concentrated loss of `count` participations in one stream of noise that is handed on.

    Several participations cost more than the sum of single ones, so `composed` goes by the total.

    Args:
        rho: Concentration of all of them.
        limit: What one of very many participations costs.
        separation: Rounds from one participation to the next, at least.
        count: Participations.
    """

    limit: float = field(kw_only=True)
    separation: int = field(kw_only=True)
    count: int = field(default=1, kw_only=True)
    adds_up: ClassVar[bool] = False

    @classmethod
    def from_limit(cls, limit: float, separation: int, note: str, count: int = 1) -> HandedOnLoss:
        """The loss of so many participations, by what one of very many costs."""
        part = square_of_participations(separation, count) / square_of_matrix(separation)
        return cls(limit * part * (1.0 + 2.0**-40), note, limit=limit, separation=separation, count=count)

    @property
    def standalone(self) -> ConcentratedLoss:
        return ConcentratedLoss(self.count * self.limit, self.note)

    def epsilon(self, delta: float, count: int) -> float:
        """Epsilon of all participations together, see `concentrated_epsilon`."""
        return concentrated_epsilon(self.composed(count).rho, delta)

    def composed(self, count: int) -> HandedOnLoss:
        """Participations add up."""
        return self.from_limit(self.limit, self.separation, self.note, self.count * count)

    def plus(self, other: Loss) -> Loss | None:
        """Add up participations in one stream, rhos of something independent, and limits of all else."""
        if not isinstance(other, HandedOnLoss):
            return super().plus(other)
        if (self.limit, self.separation) == (other.limit, other.separation):
            return self.from_limit(self.limit, self.separation, self.note, self.count + other.count)
        return self.standalone.plus(other.standalone)

    def spread(self, dim: int) -> HandedOnLoss:
        """Concentrated losses of independent coordinates add up."""
        return self.from_limit(self.limit / dim, self.separation, self.note, self.count)


@dataclass(frozen=True)
class HandedOnGaussian(DistributedDiscreteGaussian):
    """Clients add noise that the next cohort subtracts, and sums are modulo 2^bits.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        local_sigma: Std of what a client adds of its own share per coordinate, > 0, in units of clip_norm.
        granularity: Grid of the integers, > 0, in units of clip_norm; at most a twentieth of local_sigma.
        bits: Symbols are integers modulo 2^bits, 2 to 31; sums beyond half the modulus wrap around.
        max_dropped: Dropouts that the claims allow for; shares of that many clients are not counted.
        num_cohorts: Disjoint cohorts that take turns (`cohort=Cyclic(...)`), >= 2: rounds from one
            participation of a client to its next, at least.

    Raises:
        ValueError: If a value is out of range.

    Example:
        >>> mechanism = HandedOnGaussian(1.0, local_sigma=0.5, granularity=0.01, num_cohorts=10)
        >>> mechanism.share_std  # of the shares that are handed on, in units of the update
        10.0
    """

    hands_on = True
    _multiple = OWN

    bits: int = 18
    num_cohorts: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_cohorts < 2:
            raise ValueError(
                f"num_cohorts must be >= 2, got {self.num_cohorts}: noise is handed on to another cohort; "
                "where everybody takes part in every round, use DistributedDiscreteGaussian"
            )
        if self.share_std < _LEAST_SHARE:
            raise ValueError(
                f"local_sigma must be at least {OWN * _LEAST_SHARE:g} of granularity, got {self.steps:g} of "
                "them; use a finer grid, which takes more bits"
            )

    @classmethod
    def example(cls) -> HandedOnGaussian:
        return cls(clip_norm=1.0, local_sigma=1.0, granularity=0.01, num_cohorts=10)

    @classmethod
    def plan_settings(cls, params: int) -> dict[str, Mechanism]:
        # none, as a plan's cohorts are drawn anew or hold everybody
        return {}

    @property
    def separation(self) -> int:
        return self.num_cohorts

    @property
    def share_std(self) -> float:
        """Parameter tau of a share, in integer steps."""
        return self.steps / OWN

    def _fewest(self, context: RoundContext) -> int:
        """Unknown shares that Y is made for: a quarter of those that are sure to be there."""
        return max(-(-(len(context.cohort) - self.max_dropped) // 4), 1)

    def fresh_std(self, context: RoundContext) -> float:
        """Parameter upsilon of what is never handed on, in integer steps."""
        spread = (OWN + TAKEN_BACK) ** 2 + OWN**2
        least = spread / (self._fewest(context) * (1.0 / _SMOOTH - self.share_std**-2))
        return max(math.sqrt(least), _LEAST_FRESH)

    def with_level(self, level: float, context: RoundContext, max_dropped: int) -> HandedOnGaussian:
        # sums stay within six standard deviations of half the modulus
        sigma, n, size = 1.0 / level, len(context.cohort), padded_size(context.dim)
        asked = replace(self, max_dropped=max(self.max_dropped, max_dropped))
        spread = (OWN + TAKEN_BACK) ** 2 + OWN**2
        fresh = max(spread / (asked._fewest(context) * (1.0 / _SMOOTH - _LEAST_SHARE**-2)), _LEAST_FRESH**2)
        room = (2.0 ** (self.bits - 1) / _WRAPS) ** 2 - n * (fresh + 0.25)  # of squares of steps
        if room <= 0.0:
            raise ValueError(f"a modulus of 2^{self.bits} has no room for {n} clients; take more bits")
        grid = math.sqrt((n * n / size + n * sigma**2 * (1.0 + KEPT**2)) / room)
        grid = max(grid, sigma / (OWN * LARGEST_SIGMA) * (1.0 + 2.0**-40))
        if sigma < OWN * _LEAST_SHARE * grid:
            raise ValueError(
                f"with {self.bits} bits noise of {sigma:.3g} clip_norm is less than {OWN * _LEAST_SHARE:g} "
                "steps of the grid; take more bits"
            )
        return replace(asked, local_sigma=sigma, granularity=grid)

    # ---- noise ------------------------------------------------------------------------------------------

    @staticmethod
    def _handed(context: RoundContext) -> HandOver:
        return context.hand_over or HandOver((context.round, context.attempt))

    def _words(self, context: RoundContext, rand: PublicRandomness) -> NDArray[np.uint32]:
        """Those of the first round of the block, so that noise cancels in the coordinates it was added in."""
        return super()._words(context, rand.for_round(*self._handed(context).since))

    def _client_noise(self, client: int, context: RoundContext, rand: ClientRandomness) -> Noise:
        """5 H + Y - 4 H', as many as there are."""
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
        """That of everybody's own noise, and of what is taken back: as much as everybody who answers may."""
        share = 1.0 + KEPT**2 * min(len(self._handed(context).before) / len(clients), 1.0)
        one = share * self.steps**2 + self.fresh_std(context) ** 2 + 0.25
        one *= (self.granularity * self.clip_norm) ** 2
        return torch.full_like(context.radius, one / len(clients))

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float:
        # of a round's noise, what the next one leaves in the model
        one = (1.0 - KEPT) ** 2 * self.steps**2 + self.fresh_std(context) ** 2 + 0.25
        return context.dim * one * (self.granularity * self.clip_norm) ** 2 / num_clients

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # Blocks of three rounds, in which fifty cohorts would not come back. On a fine grid, so that the
        # bounds on rounding and what is never handed on count for little.
        one = replace(self, num_cohorts=50, granularity=0.02 * self.granularity, bits=min(self.bits + 4, 31))
        little = replace(one, local_sigma=2.0 * self.local_sigma / math.sqrt(dim))
        dropped = replace(little, max_dropped=max(self.max_dropped, 1))
        return (
            AuditCase(little),
            AuditCase(dropped, title="one dropout", num_dropped=1),
            AuditCase(one, concentrated=True, title="one coordinate"),
        )

    # ---- claims -----------------------------------------------------------------------------------------

    def _sum_loss(self, norm: float, one_norm: float, size: int, summands: int, note: str) -> Loss:
        square = square_of_matrix(self.num_cohorts) * (norm / self.steps) ** 2
        return HandedOnLoss.from_limit(square / (2.0 * summands) * (1.0 + 2.0**-40), self.num_cohorts, note)

    def slack(self, unknown: int, context: RoundContext) -> Slack:
        """Distance of a block's law from the Gaussian one, whole for every charge.

        Args:
            unknown: Shares of every round that the adversary does not know.
        """
        fresh, clients = self.fresh_std(context), len(context.cohort)
        spread = ((OWN + TAKEN_BACK) ** 2 + OWN**2) / (unknown * fresh**2)
        smooth = 1.0 / (self.share_std**-2 + spread)
        lattice = 8.1 * (_MOST_ROUNDS + 1.0) ** 2 * math.exp(-2.0 * math.pi**2 * smooth)
        sums = 2.0 * sum_gap(clients, self.share_std) + sum_gap(clients, fresh)
        return Slack(log_ratio=padded_size(context.dim) * (lattice + _MOST_ROUNDS * sums))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # of the sum, by the shares that the adversary does not know
        there = len(context.cohort) - self.max_dropped
        corrupt = context.num_corrupt
        known = {
            Adversary.OUTSIDER: (0, "nobody who sees only models knows a share"),
            Adversary.CLIENT: (1, "the curious client knows its own share or its predecessor's"),
            Adversary.SECAGG_SERVER: (
                2 * corrupt,
                f"the server colludes with {corrupt} clients of a cohort at most, who know their own shares "
                "and their predecessors'",
            ),
        }
        base = (
            f"at least {there} of {len(context.cohort)} clients answer; nothing but the sum is seen",
            f"a client's rounds lie {self.num_cohorts} apart, or a new block begins",
            "who hands on to whom is dealt out once, before any data, one client to one client",
            "public keys are authenticated and the key agreement is unbroken (computational)",
            "no client is set back to an earlier state, and nobody's share is known to a third client",
            "updates do not depend on the clients' own noise or messages (no error feedback)",
        )
        one = NonPrivate("noise is made for the sum: the next client knows a message's share")
        claims = []
        for who in Adversary:
            insiders, whose = known.get(who, (0, ""))
            unknown = there - insiders
            if who not in known:
                claims.append(PrivacyClaim(who, one, 1))
            elif unknown < self._fewest(context):
                few = NonPrivate(
                    f"{max(unknown, 0)} shares of a round are unknown, and {self._fewest(context)} are "
                    "needed; larger cohorts, fewer dropouts or fewer who collude"
                )
                claims.append(PrivacyClaim(who, few, 1))
            else:
                note = f"noise of {unknown} clients that later rounds take back in part"
                loss, slack = self._loss(unknown, context, note), self.slack(unknown, context)
                near = f"{slack.log_ratio:.1e} in log-ratio of the Gaussian one, paid for"
                law = f"the noise's law is within {near}"
                claims.append(PrivacyClaim(who, loss, 1, assumptions=(*base, whose, law), slack=slack))
        return tuple(claims)


def _share(producer: int, successor: int, since: tuple[int, int], rand: ClientRandomness) -> Words:
    """Words of the share that a client makes in the round of `rand`, and its successor takes back."""
    purpose = f"noise share of client {producer} in the block of round {since[0]}, attempt {since[1]}"
    return rand.peer((producer, successor), purpose).words64
