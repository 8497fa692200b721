"""The distributed discrete Gaussian: every client adds integer noise, and only the modular sum is meant to be
seen.

Source: Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation, ICML 2021, the rival of the aggregate Gaussian in Hegazy et al. A client rotates
(`functional.rotation`), clips, scales to a grid, rounds conditionally, adds discrete Gaussian noise and sends
integers modulo 2^bits; the server adds them up, recentres and rotates back.

Unlike the exact-error mechanisms it protects against the server too, and each message a little even without
secure aggregation. Its error is larger, though: rounding, the Renyi accounting and wrapped sums.

Departures: two rounds of signs and transforms in place of one, so that sparse updates are flat, too; the
noise's variance is (local_sigma / granularity)^2 in integer steps, as the accounting needs; the sampler is
exact; substitution doubles the sensitivity of the paper's zero-out. The noise is the clients': each dropout
takes its share away, so claims count on `max_dropped` dropouts and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.chunks import CHUNK
from lightning_fedq.functional.clip import float32_range, unit_ball_factor
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.linear_decode import sum_of_rows
from lightning_fedq.functional.noise.discrete_gaussian import (
    LARGEST_SIGMA,
    concentration,
    conditional_rounding,
    discrete_gaussian,
    discrete_gaussian_variance,
    rounded_norm_bound,
)
from lightning_fedq.functional.rotation import Words, rotate, rotate_back, sign_words
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.interface import (
    Adversary,
    AuditCase,
    ConcentratedLoss,
    Loss,
    Mechanism,
    Message,
    PrivacyClaim,
    RoundContext,
    count_hidden_clients,
)
from lightning_fedq.wire.coding import FixedLength

Noise = Callable[[int], NDArray[np.int64]]

BETA = math.exp(-0.5)
"""Chance in whose terms conditional rounding bounds the norm."""


@dataclass(frozen=True)
class DistributedDiscreteGaussian(Mechanism):
    """Distributed discrete Gaussian: every client adds noise, and sums are modulo 2^bits.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        local_sigma: Parameter of one client's noise per coordinate, > 0, in units of clip_norm.
        granularity: Grid of the integers, > 0, in units of clip_norm.
        bits: Symbols are integers modulo 2^bits, 2 to 31; sums beyond half the modulus wrap around.
        max_dropped: Dropouts that the claims allow for; noise of that many clients is not counted.

    Example:
        >>> mechanism = DistributedDiscreteGaussian(clip_norm=1.0, local_sigma=0.5, granularity=0.01)
        >>> mechanism.steps  # clip_norm in steps of the grid
        50.0
    """

    homomorphic = True
    alike_clients = True
    clips_norm = True
    _multiple: ClassVar[int] = 1
    """Noise is so many times what is drawn."""

    clip_norm: float
    local_sigma: float
    granularity: float
    bits: int = 16
    max_dropped: int = 0

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm, local_sigma=self.local_sigma, granularity=self.granularity)
        if not 2 <= self.bits <= 31:
            raise ValueError(f"bits must be in [2, 31], got {self.bits}")
        if self.max_dropped < 0:
            raise ValueError(f"max_dropped must be >= 0, got {self.max_dropped}")
        if self.steps > self._multiple * LARGEST_SIGMA:
            raise ValueError(
                f"local_sigma must be at most {self._multiple * LARGEST_SIGMA:g} of granularity, got "
                f"{self.steps:g} of them; use a coarser grid"
            )

    @classmethod
    def plan_settings(cls, params: int) -> dict[str, Mechanism]:
        """A granularity of a hundredth."""
        return {cls.__name__: cls(1.0, 0.05, 0.01)}

    def with_level(
        self, level: float, context: RoundContext, max_dropped: int
    ) -> DistributedDiscreteGaussian:
        # One over a client's noise. The finest grid that the modulus has room for. Sums stay within four
        # standard deviations of half the modulus if all updates are alike, after rotation.
        sigma, n, size = 1.0 / level, len(context.cohort), padded_size(context.dim)
        room = 2.0 ** (2 * self.bits) / 64.0 - n / 4.0  # of squares of steps
        if room <= 0.0:
            raise ValueError(f"a modulus of 2^{self.bits} has no room for {n} clients; take more bits")
        grid = math.sqrt((n * n / size + n * sigma**2) / room)
        dropped = max(self.max_dropped, max_dropped)
        return replace(self, local_sigma=sigma, granularity=grid, max_dropped=dropped)

    @property
    def steps(self) -> float:
        """Parameter of the noise in integer steps."""
        return self.local_sigma / self.granularity

    def bound(self, context: RoundContext) -> float:
        """Largest norm of a rounded update, in integer steps."""
        return rounded_norm_bound(1.0 / self.granularity, padded_size(context.dim), BETA)

    def _words(self, context: RoundContext, rand: PublicRandomness) -> Words:
        """Signs of the rotation."""
        return rand.public("rotation signs").words(sign_words(padded_size(context.dim)))

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32 in [0, 2^bits), padded_size(dim) of them a client
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous()
        words, bound, size = self._words(context, rand), self.bound(context), padded_size(context.dim)
        symbols, clipped = np.empty((len(rows), size), np.int32), 0
        for row, client in enumerate(rand.clients):
            scaled, scale = float32_range(rows[row : row + 1].numpy())
            (rotated,) = rotate(scaled, words)  # spread, so that the modulus may be small
            factor, shortened = unit_ball_factor(rotated, self.clip_norm * scale)
            clipped += context.dim if shortened else 0
            draw = rand.private(client, "rounding").words64
            conditional_rounding(rotated, bound, draw, symbols[row], self.granularity / factor)
            noise = self._client_noise(client, context, rand)  # a discrete Gaussian, in integers
            for first in range(0, size, CHUNK):
                part = symbols[row, first : first + CHUNK]
                # the residue of a negative sum, too, in two's complement
                part[:] = (noise(len(part)) + part) & self._mask
        sent = torch.from_numpy(symbols).reshape((*update.shape[:-1], size))
        return Message(sent, self.bits * symbols.size, clipped)

    def _client_noise(self, client: int, context: RoundContext, rand: ClientRandomness) -> Noise:
        """Gives the noise of a client's next symbols."""
        words = rand.private(client, "noise").words64
        return lambda count: discrete_gaussian(self.steps, count, words)

    @property
    def _mask(self) -> int:
        return (1 << self.bits) - 1

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # also takes the sum modulo 2^bits
        total, half = sum_of_rows(symbols).numpy(), 1 << (self.bits - 1)
        scale, centred = self.granularity * self.clip_norm, np.empty(len(total), np.float32)
        for first in range(0, len(total), CHUNK):
            # the true sum, if it lies within half of the modulus
            part = total[first : first + CHUNK].astype(np.int64)
            centred[first : first + CHUNK] = (((part + half) & self._mask) - half) * scale
        return torch.from_numpy(rotate_back(centred, self._words(context, rand), context.dim))

    def code(self, context: RoundContext) -> FixedLength:
        """As many bits a symbol as the modulus has."""
        return FixedLength(self.bits)

    def tolerated_dropouts(self, context: RoundContext) -> int:
        """`max_dropped`: every further dropout would take away noise that the claims count on."""
        return self.max_dropped

    def symbol_modulus(self, context: RoundContext) -> tuple[int, int]:
        """Modulus of the sum and number of symbols of a message."""
        return 1 << self.bits, padded_size(context.dim)

    def lever(self, client: int, context: RoundContext) -> float:
        # half of the modulus in every coordinate, behind masks or not
        return self.granularity * 2.0 ** (self.bits - 1) * math.sqrt(padded_size(context.dim))

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Noise plus a quarter step for rounding, over the number of clients. Wrapped sums are not in it."""
        one = (discrete_gaussian_variance(self.steps) + 0.25) * (self.granularity * self.clip_norm) ** 2
        return torch.full_like(context.radius, one / len(clients))

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # And once with a client that drops out and is allowed for. Twice the noise, as bounds of integer
        # orders say nothing about larger losses; and a fifth of the grid, on which rounding lengthens an
        # update by next to nothing, so that a little less noise shows.
        little = replace(
            self, local_sigma=2.0 * self.local_sigma / math.sqrt(dim), granularity=0.2 * self.granularity
        )
        dropped = replace(little, max_dropped=max(self.max_dropped, 1))
        return (
            AuditCase(little),
            AuditCase(dropped, title="one dropout", num_dropped=1),
            AuditCase(self, concentrated=True, title="one coordinate"),
        )

    def _loss(self, summands: int, context: RoundContext, note: str) -> Loss:
        # substitution: from one end of the ball to the other
        size, norm = padded_size(context.dim), 2.0 * self.bound(context)
        # |z| <= z^2 for integers, hence norm^2
        return self._sum_loss(norm, min(math.sqrt(size) * norm, norm**2), size, summands, note)

    def _sum_loss(self, norm: float, one_norm: float, size: int, summands: int, note: str) -> Loss:
        """Loss of a sum of `summands` noises that is shifted by `norm`, in l1 by `one_norm`."""
        return ConcentratedLoss(concentration(norm, one_norm, size, summands, self.steps), note)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # the client's own noise alone, or that of all who answered
        alone = self._loss(1, context, "the client's own noise")
        base = (
            "noise is fresh in every round and attempt and comes from keys that the adversary does not hold",
        )
        size, corrupt, claims = len(context.cohort), context.num_corrupt, []
        answer = f"at least {max(size - self.max_dropped, 1)} of {size} clients answer"
        colluding = f"with {corrupt} clients at most" if corrupt else "with no clients"
        shared = (f"{answer}; nothing but the sum is seen", f"the server colludes {colluding}")
        summed = count_hidden_clients(context, self.max_dropped)
        for who in Adversary:
            if who not in summed:
                claims.append(PrivacyClaim(who, alone, 1, assumptions=base))
                continue
            known, hidden = summed[who]
            but = f" but {known} that the adversary knows" if known else ""
            loss = self._loss(
                hidden, context, f"the noise of all clients counted{but}, the victim's at least"
            )
            claims.append(PrivacyClaim(who, loss, 1, assumptions=base + shared))
        return tuple(claims)
