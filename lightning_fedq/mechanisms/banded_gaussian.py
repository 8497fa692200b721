"""Banded matrix factorisation: Gaussian noise of a trusted server that cancels over rounds.

Round t releases R_t = X_t + w_t, the sum of the cohort's clipped updates plus noise with C w = z. Here z is
fresh in every round, and C is the lower triangular Toeplitz matrix of the coefficients of (1 - x)^(-1/2), cut
to `band` diagonals. The noise of a model is the sum of all w so far, and later rounds subtract most of the
noise that a round adds. If a client takes part in every b-th of T rounds, this reduces the noise by a factor
of 2 at T = 100, b = 10. With all clients in every round the band is 1 and the noise is independent.

Privacy. Given all earlier releases, R_t carries the same information as (C X)_t + z_t. A client's update of
round i enters the rows i to i + band - 1, times c_0, c_1, .... These rows contain no other update of the
client if its rounds are at least `band` apart. One participation is therefore a Gaussian mechanism of
sensitivity 2 clip_norm |c|, even if other parties adapt to releases in between. k participations compose to
sqrt(k) times that. A ledger charges a participation as one round. If a client comes back earlier, or rounds
are repeated, the server begins with a new C and fresh z. Earlier releases compose with the new ones, so the
sum of all charges holds.

Integers. Updates are truncated toward zero to steps of a public grid. The C that counts is 2^6 C rounded to
integers. w_t is rounded to the grid before the next round uses it, which does not change the argument: 2^6
R_t is a rounding of 2^6 X_t + sum_i 2^6 c_i X_(t-i) + z_t - sum_i 2^6 c_i R_(t-i). For two exact discrete
Gaussians y and y' of parameter g, z = m y + y' is a discrete Gaussian of parameter g sqrt(m^2 + 1) up to a
factor e^(+-5 exp(-2 pi^2 g^2 / (m^2 + 1))) (Poisson summation over y given z), which is 1 + 2^-111 here. This
distribution is a rounded continuous Gaussian up to e^(+-2^-47) within 13.2 stds. The probability beyond is
less than 2^-126. A claim pays for both, in each of the `band` rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.functional.noise.discrete_gaussian import discrete_gaussian
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream
from lightning_fedq.mechanisms.bases.claims import UNIFORM, sampler_error
from lightning_fedq.mechanisms.interface import (
    ANY_NUMBER,
    Adversary,
    GaussianLoss,
    Loss,
    Mechanism,
    Message,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
    Slack,
)
from lightning_fedq.wire.coding import FixedLength

Integers = NDArray[np.int64]

_PART, _STRIDE = 2.0**13, 1 << 12
"""Parameters g and m of z = m y + y'."""
NOISE_STD = _PART * math.hypot(_STRIDE, 1.0)
"""Parameter of z, in grid steps over 2^6."""
_COEFFICIENT_BITS = 6
_MOST_BAND = 1024
_CHUNK = 1 << 20
_FEWEST_STEPS, _MOST_STEPS = 64.0, 2.0**29
_LOG_RATIO, _DISTANCE = 2.0**-47, 2.0**-126
"""Distance of z from the rounded Gaussian, for one coordinate of one row."""


@lru_cache(maxsize=16)
def coefficients(band: int) -> tuple[int, ...]:
    """Return 2^6 times the first `band` coefficients of (1 - x)^(-1/2), rounded to integers."""
    values, value = [], 1.0
    for i in range(band):
        values.append(round(value * 2.0**_COEFFICIENT_BITS))
        value *= (2 * i + 1) / (2 * i + 2)
    return tuple(values)


@lru_cache(maxsize=16)
def _gain(band: int, rows: int) -> float:
    """Return var(w) / var(z) after `rows` rounds: the summed squares of the coefficients of 1 / c."""
    first, *others = coefficients(band)
    inverse: list[float] = []
    for row in range(rows):
        known = sum(c * inverse[row - i] for i, c in enumerate(others, 1) if i <= row)
        inverse.append(((row == 0) * first - known) / first)
    return math.fsum(value * value for value in inverse)


def fresh_noise(stream: Stream, count: int) -> Integers:
    """Draw z, `(count,)` int64: discrete Gaussian of parameter `NOISE_STD` up to a factor 1 + 2^-111."""
    coarse = discrete_gaussian(_PART, count, stream.words64)
    return _STRIDE * coarse + discrete_gaussian(_PART, count, stream.words64)


_kept: dict[tuple[bytes, int, int], tuple[int, tuple[NDArray[np.int32], ...]]] = {}
"""Cache of the last requested block: its last round, and the rows of w that the next round needs.

The server's key determines all of it, so the cache only saves time."""


@dataclass(frozen=True)
class BandedGaussian(Mechanism):
    """Banded matrix factorisation: a trusted server adds Gaussian noise that cancels over rounds.

    Take it if you trust the server and clients take part rarely, in cohorts that take turns. The model then
    has less noise than with independent noise at the same epsilon.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, > 0. The sensitivity is that of one
            participation in all rows together, 2 clip_norm |c|.
        band: Number of diagonals of C, in [1, 1024], and the fewest rounds between two participations of a
            client. With b cohorts that take turns (`cohort=Cyclic(...)`) it may be b. A band of 1 is
            independent noise, for cohorts that are drawn in every round or contain all clients.

    Raises:
        ValueError: If a value is out of range.

    The claim is about the whole update, against outsiders and curious clients, who see released models. The
    server is trusted, and messages carry no noise, so nothing is claimed against the server or an
    eavesdropper.

    A message has a fixed number of bits per coordinate, about 20, because it holds clip_norm in grid steps.

    References:
        Denisov, McMahan, Rush, Smith, Thakurta, Improved Differential Privacy for SGD via Optimal Private
        Linear Operators on Adaptive Streams, 2022 (adaptive streams).
        Choquette-Choo, McMahan, Rush, Thakurta, Multi-Epoch Matrix Factorization Mechanisms for Private
        Machine Learning, arXiv 2211.06530 (several participations).
        Choquette-Choo et al., (Amplified) Banded Matrix Factorization, arXiv 2306.08153.

    Examples:
        >>> round(BandedGaussian(clip_norm=1.0, noise_multiplier=0.5, band=1).sigma, 6)  # of the sum
        1.0
    """

    homomorphic = True
    level = "noise_multiplier"
    has_exchangeable_clients = True
    has_central_noise = True
    clips_norm = True
    fixed_cohort = True

    clip_norm: float
    noise_multiplier: float
    band: int

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)
        if not 1 <= self.band <= _MOST_BAND:
            raise ValueError(f"band must be in [1, {_MOST_BAND}], got {self.band}")
        if not _FEWEST_STEPS <= self._steps <= _MOST_STEPS:
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier:g} makes clip_norm {self._steps:.3g} grid steps, "
                f"expected {_FEWEST_STEPS:g} to {_MOST_STEPS:g}. "
                "Loosen the budget for less noise, or use FedAvg without noise."
            )

    @classmethod
    def example(cls) -> BandedGaussian:
        # band 1 fits cohorts of every kind
        return cls(clip_norm=1.0, noise_multiplier=1.0, band=1)

    @property
    def joint(self) -> bool:
        # the noise is added once, to the whole sum
        return True

    @property
    def separation(self) -> int:
        return self.band

    @property
    def _length(self) -> float:
        """Norm |c| of the coefficients, in units of 2^-6."""
        return math.sqrt(sum(c * c for c in coefficients(self.band)))

    @property
    def _steps(self) -> float:
        """Number of grid steps in clip_norm."""
        return NOISE_STD / (2.0 * self.noise_multiplier * self._length)

    @property
    def _sent_steps(self) -> float:
        """Number of grid steps in clip_norm, less the amount that rounding of floats may add to the norm."""
        return self._steps * (1.0 - 2.0**-50)

    @property
    def sigma(self) -> float:
        """Std of the fresh noise on the sum, in units of the update."""
        return self.clip_norm * NOISE_STD / 2.0**_COEFFICIENT_BITS / self._sent_steps

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32, and encoding draws nothing
        rows = update.detach().reshape(len(rand.clients), context.dim)
        parts, clipped = [], 0
        for part in torch.split(rows, max(_CHUNK // context.dim, 1)):  # float64 of a few clients at a time
            values = part.double()
            factors, shortened = unit_ball_factors(values, self.clip_norm, 2)  # bounds the sensitivity
            parts.append((values * factors[:, None] * self._sent_steps).to(torch.int32))
            clipped += int(shortened.sum()) * context.dim
        symbols = torch.cat(parts)
        num_bits = self.code(context).num_bits(symbols)
        return Message(symbols.reshape(update.shape), num_bits, clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # the noise depends on the round only, not on the clients that answered
        total = symbols.sum(0, dtype=torch.int64) if symbols.dim() == 2 else symbols.to(torch.int64)
        noise = torch.from_numpy(self.noise(context, rand).astype(np.int64))
        return ((total + noise).double() * (self.clip_norm / self._sent_steps)).float()

    def noise(self, context: RoundContext, rand: PublicRandomness) -> NDArray[np.int32]:
        """Return the noise w of a round, `(dim,)`, in grid steps, from all rounds of the block so far.

        Args:
            context: Public facts of the round.
            rand: Streams of the server in this round.

        Raises:
            ValueError: If the round is not part of its block.
        """
        since, attempt = context.since or (context.round, context.attempt)
        if context.round < since or context.attempt != (attempt if context.round == since else 0):
            raise ValueError(
                f"round {context.round}, attempt {context.attempt} is not part of the block that begins with "
                f"{since}, attempt {attempt}. Begin a new block at a repeated round."
            )

        def streams(round: int) -> PublicRandomness:
            return rand.for_round(round, attempt if round == since else 0)

        block = streams(since).server("name of a block").words64(4).tobytes(), self.band, context.dim
        last, rows = _kept.get(block, (since - 1, ()))
        if self.band == 1:  # no earlier round counts
            last, rows = context.round - 1, ()
        elif last > context.round:  # the cache is ahead, so the block is computed again
            last, rows = since - 1, ()
        recent = deque(rows, maxlen=max(self.band - 1, 1))
        first, *others = coefficients(self.band)
        for round in range(last + 1, context.round + 1):
            fresh = fresh_noise(streams(round).server("noise"), context.dim)
            # w = C^-1 z, rounded to the grid: w_t = (z_t - sum_i c_i w_(t-i)) / c_0
            for coefficient, row in zip(others, reversed(recent), strict=False):
                fresh -= coefficient * row.astype(np.int64)
            recent.append(((fresh + (first >> 1)) >> _COEFFICIENT_BITS).astype(np.int32))
        _kept.clear()
        _kept[block] = context.round, tuple(recent)
        return recent[-1]

    def code(self, context: RoundContext) -> FixedLength:
        """Return signed integers wide enough for `clip_norm` in one coordinate."""
        return FixedLength((math.floor(self._steps) + 1).bit_length() + 1, signed=True)

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        # an update of norm `clip_norm` may lie in one coordinate
        largest = math.floor(self._steps)
        return -largest, largest

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        # messages carry no noise, so no honest message is longer than `clip_norm`
        return bool(symbols.double().norm() <= self._steps * (1.0 + 1e-9))

    def influence(self, client: int, context: RoundContext) -> float:
        # messages carry no noise, and the server checks their length
        return 1.0

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return the variance of this round's w over the squared number of clients."""
        since, _ = context.since or (context.round, 0)
        gain = _gain(self.band, 1 if self.band == 1 else max(context.round - since + 1, 1))
        std = self.sigma / len(clients)
        return torch.full_like(context.radius, std * std * gain * (1.0 + 2.0**-30))

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float:
        # the part of a round's noise that stays in the model after later rounds
        share = coefficients(self.band)[0] / sum(coefficients(self.band))
        return context.dim * (self.sigma * share / num_clients) ** 2

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # claims against adversaries that see released models, because the server is trusted
        rows = self.band * context.dim
        slack = Slack(rows * _DISTANCE, rows * _LOG_RATIO)
        released = GaussianLoss(self.noise_multiplier, "noise that the server adds to the sum, over rounds")
        wire = NonPrivate("messages carry no noise: the server adds it to their sum")
        server = NonPrivate("the server is trusted: it adds the noise, and knows it")
        losses: dict[Adversary, Loss] = dict.fromkeys(Adversary, server)
        losses |= {Adversary.EAVESDROPPER: wire, Adversary.CLIENT: released, Adversary.OUTSIDER: released}
        stated = (
            kind.TRUSTED_SERVER(
                "the server adds the noise, from a key that no other party has, and shows nothing but the "
                "released models",
                kind.MODELS_ONLY,
            ),
            kind.NOISE_IN_ORDER(
                f"a client's rounds are at least {self.band} apart, or the server begins with fresh noise"
            ),
            UNIFORM,
            sampler_error(slack),
        )
        # no client has any noise, so any number may collude
        return tuple(
            PrivacyClaim(who, losses[who], 1, assumptions=stated, slack=slack, colluders=ANY_NUMBER)
            for who in Adversary
        )
