"""Banded matrix factorisation: Gaussian noise of a trusted server that cancels over rounds.

Round t releases R_t = X_t + w_t: the sum of the cohort's clipped updates, and noise with C w = z, where z is
fresh in every round and C the lower triangular Toeplitz matrix of the coefficients of (1 - x)^(-1/2), cut to
`band` diagonals. The noise of a model is a sum of all w so far, and most of what a round adds the next ones
take back. Where a client takes part every b-th of T rounds, that is worth a factor of 2 in this noise at
T = 100, b = 10; with everybody in every round the band is 1 and the noise independent.

Privacy. Given all that was released before, R_t tells as much as (C X)_t + z_t. A client's update of round i
enters the rows i to i + band - 1, times c_0, c_1, ..., and these rows are nobody else's of its updates as
long as its rounds lie `band` apart. So one participation is a Gaussian mechanism of sensitivity 2 clip_norm
|c|, whatever the others see and choose in between, and k of them compose to sqrt(k) times that. A ledger
charges it as one round. Where a client comes back earlier, or rounds are repeated, the server begins with a
new C and fresh z, and what was released before is a composition with that: the sum of all charges holds.

Everything is in integers. Updates are truncated toward zero to steps of a public grid; 2^6 C is rounded to
integers, which is the C that counts; w_t is rounded to the grid before the next round takes it up, which
leaves the argument as it is: 2^6 R_t is a rounding of 2^6 X_t + sum_i 2^6 c_i X_(t-i) + z_t - sum_i 2^6 c_i
R_(t-i). And z = m y + y' from two exact discrete Gaussians of parameter g is one of parameter g sqrt(m^2 + 1)
but for a factor e^(+-5 exp(-2 pi^2 g^2 / (m^2 + 1))) (Poisson summation over y given z), which is 1 + 2^-111
here. That law is a rounded continuous Gaussian's up to e^(+-2^-47) out to 13.2 stds, beyond which lies less
than 2^-126; a claim pays for both, in each of the `band` rows.

References:
    Denisov, McMahan, Rush, Smith, Thakurta, Improved Differential Privacy for SGD via Optimal Private Linear
    Operators on Adaptive Streams, 2022 (adaptive streams); Choquette-Choo, McMahan, Rush, Thakurta,
    Multi-Epoch Matrix Factorization Mechanisms for Private Machine Learning, arXiv 2211.06530 (several
    participations); Choquette-Choo et al., (Amplified) Banded Matrix Factorization, arXiv 2306.08153.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.functional.noise.discrete_gaussian import discrete_gaussian
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream
from lightning_fedq.mechanisms.interface import (
    Adversary,
    AuditCase,
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
"""g and m."""
NOISE_STD = _PART * math.hypot(_STRIDE, 1.0)
"""Parameter of z, in steps of the grid over 2^6."""
_COEFFICIENT_BITS = 6
_MOST_BAND = 1024
_CHUNK = 1 << 20
_FEWEST_STEPS, _MOST_STEPS = 64.0, 2.0**29
_LOG_RATIO, _DISTANCE = 2.0**-47, 2.0**-126
"""Of one coordinate of one row."""


@lru_cache(maxsize=16)
def coefficients(band: int) -> tuple[int, ...]:
    """2^6 times the first `band` coefficients of (1 - x)^(-1/2), to the nearest integer."""
    values, value = [], 1.0
    for i in range(band):
        values.append(round(value * 2.0**_COEFFICIENT_BITS))
        value *= (2 * i + 1) / (2 * i + 2)
    return tuple(values)


@lru_cache(maxsize=16)
def _gain(band: int, rows: int) -> float:
    """Variance of w over that of z after so many rows: the squares of the coefficients of 1 / c."""
    first, *others = coefficients(band)
    inverse: list[float] = []
    for row in range(rows):
        known = sum(c * inverse[row - i] for i, c in enumerate(others, 1) if i <= row)
        inverse.append(((row == 0) * first - known) / first)
    return math.fsum(value * value for value in inverse)


def fresh_noise(stream: Stream, count: int) -> Integers:
    """Draw z: discrete Gaussian of parameter `NOISE_STD`, but for a factor 1 + 2^-111. `(count,)` int64."""
    coarse = discrete_gaussian(_PART, count, stream.words64)
    return _STRIDE * coarse + discrete_gaussian(_PART, count, stream.words64)


_kept: dict[tuple[bytes, int, int], tuple[int, tuple[NDArray[np.int32], ...]]] = {}
"""Of the block whose noise was asked for last: how far it has come, and the rows that the next one needs. All
of it follows from the server's key; to keep it saves time, and nothing else."""


@dataclass(frozen=True)
class BandedGaussian(Mechanism):
    """Banded matrix factorisation: a trusted server adds Gaussian noise that cancels over rounds.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        noise_multiplier: Std of the fresh noise over what one participation can move in all rows together,
            2 clip_norm |c|; > 0.
        band: Diagonals of C, in [1, 1024]: rounds from one participation of a client to its next, at least.
            1 is independent noise, for cohorts that are drawn anew or hold everybody; b cohorts that take
            turns (`cohort=Cyclic(...)`) allow for b.

    Raises:
        ValueError: If a value is out of range.

    Example:
        >>> round(BandedGaussian(clip_norm=1.0, noise_multiplier=0.5, band=1).sigma, 6)  # of the sum
        1.0
    """

    homomorphic = True
    level = "noise_multiplier"
    alike_clients = True
    noise_of_adder = True
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
                f"noise_multiplier = {self.noise_multiplier:g} makes {self._steps:.3g} steps of clip_norm, "
                f"{_FEWEST_STEPS:g} to {_MOST_STEPS:g} can be sent; more noise leaves no signal (loosen the "
                "budget), less protects nobody (use FedAvg)"
            )

    @classmethod
    def example(cls) -> BandedGaussian:
        # the band that any cohorts allow for
        return cls(clip_norm=1.0, noise_multiplier=1.0, band=1)

    @classmethod
    def plan_settings(cls, params: int) -> Mapping[str, Mechanism]:
        # independent noise, as a plan's cohorts are all alike
        return {"BandedGaussian, band 1": cls.example()}

    @property
    def joint(self) -> bool:
        # the noise is added to the whole sum, once
        return True

    @property
    def separation(self) -> int:
        return self.band

    @property
    def _length(self) -> float:
        """|c|, in units of 2^-6."""
        return math.sqrt(sum(c * c for c in coefficients(self.band)))

    @property
    def _steps(self) -> float:
        """Steps of the grid that clip_norm is."""
        return NOISE_STD / (2.0 * self.noise_multiplier * self._length)

    @property
    def _sent_steps(self) -> float:
        """The same, but for what a product of floats may add to the norm."""
        return self._steps * (1.0 - 2.0**-50)

    @property
    def sigma(self) -> float:
        """Std of the fresh noise on the sum, in units of the update."""
        return self.clip_norm * NOISE_STD / 2.0**_COEFFICIENT_BITS / self._sent_steps

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32, and no coin is thrown
        rows = update.detach().reshape(len(rand.clients), context.dim)
        parts, clipped = [], 0
        for part in torch.split(rows, max(_CHUNK // context.dim, 1)):  # float64 of a few clients at a time
            values = part.double()
            factors, shortened = unit_ball_factors(values, self.clip_norm, 2)  # sensitivity of one round
            parts.append((values * factors[:, None] * self._sent_steps).to(torch.int32))
            clipped += int(shortened.sum()) * context.dim
        symbols = torch.cat(parts)
        num_bits = self.code(context).num_bits(symbols)
        return Message(symbols.reshape(update.shape), num_bits, clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # the noise is that of the round, whoever has answered
        total = symbols.sum(0, dtype=torch.int64) if symbols.dim() == 2 else symbols.to(torch.int64)
        noise = torch.from_numpy(self.noise(context, rand).astype(np.int64))
        return ((total + noise).double() * (self.clip_norm / self._sent_steps)).float()

    def noise(self, context: RoundContext, rand: PublicRandomness) -> NDArray[np.int32]:
        """w of a round, `(dim,)`, in steps of the grid: what all rounds of the block so far lead to.

        Args:
            rand: The server's streams of it.

        Raises:
            ValueError: If the round is no part of its block.
        """
        since, attempt = context.since or (context.round, context.attempt)
        if context.round < since or context.attempt != (attempt if context.round == since else 0):
            raise ValueError(
                f"round {context.round}, attempt {context.attempt} is no part of a block of rounds that "
                f"begins with {since}, attempt {attempt}; a repeated round begins a new one"
            )

        def streams(round: int) -> PublicRandomness:
            return rand.for_round(round, attempt if round == since else 0)

        name = streams(since).server("name of a block").words64(4).tobytes(), self.band, context.dim
        done, rows = _kept.get(name, (since - 1, ()))
        if done > context.round:
            done, rows = since - 1, ()
        if self.band == 1:
            done, rows = context.round - 1, ()
        first, *others = coefficients(self.band)
        recent = deque(rows, maxlen=max(self.band - 1, 1))
        for round in range(done + 1, context.round + 1):
            sums = fresh_noise(streams(round).server("noise"), context.dim)
            for c, row in zip(others, reversed(recent), strict=False):
                sums -= c * row.astype(np.int64)
            recent.append(((sums + (first >> 1)) >> _COEFFICIENT_BITS).astype(np.int32))
        _kept.clear()
        _kept[name] = context.round, tuple(recent)
        return recent[-1]

    def code(self, context: RoundContext) -> FixedLength:
        """Signed integers wide enough for `clip_norm` in one coordinate."""
        return FixedLength((math.floor(self._steps) + 1).bit_length() + 1, signed=True)

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        # `clip_norm` in one coordinate
        most = math.floor(self._steps)
        return -most, most

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        # nothing longer than `clip_norm`, as messages carry no noise
        return bool(symbols.double().norm() <= self._steps * (1.0 + 1e-9))

    def lever(self, client: int, context: RoundContext) -> float:
        # one, as messages carry no noise and the server checks their length
        return 1.0

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """That of this round's w, over the square of the number of clients."""
        since, _ = context.since or (context.round, 0)
        gain = _gain(self.band, 1 if self.band == 1 else max(context.round - since + 1, 1))
        std = self.sigma / len(clients)
        return torch.full_like(context.radius, std * std * gain * (1.0 + 2.0**-30))

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float:
        # of a round's noise, what later ones leave in the model
        left = coefficients(self.band)[0] / sum(coefficients(self.band))
        return context.dim * (self.sigma * left / num_clients) ** 2

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # one round, and the cohort of an audit is everybody: band 1
        one = replace(self, band=1)
        little = replace(one, noise_multiplier=self.noise_multiplier / math.sqrt(dim))
        return AuditCase(little), AuditCase(one, concentrated=True, title="one coordinate")

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # towards those who see released models, as the server is trusted
        rows = self.band * context.dim
        slack = Slack(rows * _DISTANCE, rows * _LOG_RATIO)
        released = GaussianLoss(self.noise_multiplier, "noise that the server adds to the sum, over rounds")
        wire = NonPrivate("messages carry no noise: the server adds it to their sum")
        server = NonPrivate("the server is trusted: it adds the noise, and knows it")
        losses: dict[Adversary, Loss] = dict.fromkeys(Adversary, server)
        losses |= {Adversary.EAVESDROPPER: wire, Adversary.CLIENT: released, Adversary.OUTSIDER: released}
        stated = (
            "the server adds the noise, from a key that nobody else holds, and shows nothing but the "
            "released models",
            f"a client's rounds lie {self.band} apart, or the server begins with fresh noise",
            "all weights are equal; a client that did not answer counts as one that sent zeros",
            f"the sampler's law is within {slack.distance:.1e} in total variation and {slack.log_ratio:.1e} "
            "in log-ratio of the exact one a round, paid for in delta and epsilon",
        )
        return tuple(PrivacyClaim(who, losses[who], 1, assumptions=stated, slack=slack) for who in Adversary)
