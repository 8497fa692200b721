"""Distributed discrete Gaussian: every client adds integer noise, and only the modular sum is revealed.

Source: Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation, ICML 2021. Hegazy et al. compare the aggregate Gaussian with it. A client rotates its update
(`functional.rotation`), clips it, scales it to a grid, rounds it conditionally, adds discrete Gaussian noise
and sends integers modulo 2^bits. The server adds the integers, centres the sum and rotates it back.

Unlike the exact-error mechanisms it also protects against the server, and protects each message a little even
without secure aggregation. Its error is larger because of rounding, Renyi accounting and wrapped sums.

Departures from the paper: Two rounds of signs and transforms replace one, so that sparse updates become flat
also. The noise's variance is (local_sigma / granularity)^2 in integer steps, as the accounting needs. The
sampler is exact. Replace-one adjacency doubles the sensitivity of the paper's zero-out adjacency. The clients
add the noise, and each dropout removes its share. Claims therefore allow for `max_dropped_clients` dropouts
only.
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

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.checks import check_at_least, check_positive
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
from lightning_fedq.mechanisms.bases.claims import FRESH_NOISE
from lightning_fedq.mechanisms.interface import (
    ANY_NUMBER,
    Adversary,
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
"""Probability beta of the paper, which determines the norm bound of conditional rounding."""


@dataclass(frozen=True)
class DistributedDiscreteGaussian(Mechanism):
    """Distributed discrete Gaussian: every client adds noise, and sums are modulo 2^bits.

    Take it for private training with secure aggregation, if you do not trust the server with single messages.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        local_sigma: Parameter (about the std) of one client's noise per coordinate, > 0, in units of
            clip_norm.
        granularity: Grid of the integers, > 0, in units of clip_norm.
        bits: Symbols are integers modulo 2^bits, 2 to 31. Sums beyond half the modulus wrap around.
        max_dropped_clients: Dropouts that the claims allow for. The noise of that many clients is not
            counted.

    The claims are about the whole update. Against outsiders, curious clients and the server behind secure
    aggregation, the noise of all other clients that answer is counted. Against an eavesdropper or a server
    that sees messages, only the client's own noise is counted.

    A message has `bits` bits per coordinate, with dimensions padded to a power of two.

    References:
        Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
        Aggregation, ICML 2021

    Examples:
        >>> mechanism = DistributedDiscreteGaussian(clip_norm=1.0, local_sigma=0.5, granularity=0.01)
        >>> mechanism.steps  # clip_norm in steps of the grid
        50.0
    """

    homomorphic = True
    has_exchangeable_clients = True
    clips_norm = True
    _multiple: ClassVar[int] = 1
    """Factor on the drawn noise, by which a subclass multiplies."""

    clip_norm: float
    local_sigma: float
    granularity: float
    bits: int = 16
    max_dropped_clients: int = 0

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm, local_sigma=self.local_sigma, granularity=self.granularity)
        if not 2 <= self.bits <= 31:
            raise ValueError(f"bits must be in [2, 31], got {self.bits}")
        check_at_least(0, max_dropped_clients=self.max_dropped_clients)
        if self.steps > self._multiple * LARGEST_SIGMA:
            raise ValueError(
                f"local_sigma must be at most {self._multiple * LARGEST_SIGMA:g} times granularity, got "
                f"{self.steps:g}. Use a larger granularity."
            )

    def with_level(
        self, level: float, context: RoundContext, max_dropped_clients: int
    ) -> DistributedDiscreteGaussian:
        # The level is one over a client's noise. The grid is the finest for which half the modulus holds four
        # standard deviations of a sum of identical updates after rotation.
        sigma, n, size = 1.0 / level, len(context.cohort), padded_size(context.dim)
        room = 2.0 ** (2 * self.bits) / 64.0 - n / 4.0  # in squared steps
        if room <= 0.0:
            raise ValueError(f"a modulus of 2^{self.bits} is too small for {n} clients. Use more bits.")
        grid = math.sqrt((n * n / size + n * sigma**2) / room)
        dropped = max(self.max_dropped_clients, max_dropped_clients)
        return replace(self, local_sigma=sigma, granularity=grid, max_dropped_clients=dropped)

    @property
    def steps(self) -> float:
        """Parameter of the noise in integer steps."""
        return self.local_sigma / self.granularity

    def bound(self, context: RoundContext) -> float:
        """Return the largest norm of a rounded update, in integer steps."""
        return rounded_norm_bound(1.0 / self.granularity, padded_size(context.dim), BETA)

    def _words(self, context: RoundContext, rand: PublicRandomness) -> Words:
        """Return the signs of the public rotation."""
        return rand.public("rotation signs").words(sign_words(padded_size(context.dim)))

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32 in [0, 2^bits), padded_size(dim) of them a client
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous()
        words, bound, size = self._words(context, rand), self.bound(context), padded_size(context.dim)
        symbols, clipped = np.empty((len(rows), size), np.int32), 0
        for row, client in enumerate(rand.clients):
            scaled, scale = float32_range(rows[row : row + 1].numpy())
            (rotated,) = rotate(scaled, words)  # spreads large coordinates, so a small modulus suffices
            factor, shortened = unit_ball_factor(rotated, self.clip_norm * scale)
            clipped += context.dim if shortened else 0
            draw = rand.private(client, "rounding").words64
            conditional_rounding(rotated, bound, draw, symbols[row], self.granularity / factor)
            noise = self._client_noise(client, context, rand)
            for first in range(0, size, CHUNK):
                part = symbols[row, first : first + CHUNK]
                # in two's complement the mask also gives the residue of a negative sum
                part[:] = (noise(len(part)) + part) & self._mask
        sent = torch.from_numpy(symbols).reshape((*update.shape[:-1], size))
        return Message(sent, self.bits * symbols.size, clipped)

    def _client_noise(self, client: int, context: RoundContext, rand: ClientRandomness) -> Noise:
        """Return a function that draws the noise of the client's next symbols, in integers."""
        words = rand.private(client, "noise").words64
        return lambda count: discrete_gaussian(self.steps, count, words)

    @property
    def _mask(self) -> int:
        return (1 << self.bits) - 1

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # `symbols` may also be the sum modulo 2^bits
        total, half = sum_of_rows(symbols).numpy(), 1 << (self.bits - 1)
        scale, centred = self.granularity * self.clip_norm, np.empty(len(total), np.float32)
        for first in range(0, len(total), CHUNK):
            # the true sum, if its size is below half of the modulus
            part = total[first : first + CHUNK].astype(np.int64)
            centred[first : first + CHUNK] = (((part + half) & self._mask) - half) * scale
        return torch.from_numpy(rotate_back(centred, self._words(context, rand), context.dim))

    def code(self, context: RoundContext) -> FixedLength:
        """Return `bits` bits per symbol."""
        return FixedLength(self.bits)

    def tolerated_dropouts(self, context: RoundContext) -> int:
        """Return `max_dropped_clients`, because a further dropout removes noise that the claims count."""
        return self.max_dropped_clients

    def num_symbols(self, context: RoundContext) -> int:
        """Return the number of rotated coordinates."""
        return padded_size(context.dim)

    def symbol_modulus(self, context: RoundContext) -> tuple[int, int]:
        """Return the modulus of the sum and the number of symbols of a message."""
        return 1 << self.bits, self.num_symbols(context)

    def influence(self, client: int, context: RoundContext) -> float:
        # a message may be half of the modulus in every coordinate, with and without masks
        return self.granularity * 2.0 ** (self.bits - 1) * math.sqrt(padded_size(context.dim))

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return the variance of noise and rounding over the number of clients. Wrapped sums are left out."""
        variance = (discrete_gaussian_variance(self.steps) + 0.25) * (self.granularity * self.clip_norm) ** 2
        return torch.full_like(context.radius, variance / len(clients))

    def _loss(self, summands: int, context: RoundContext, note: str) -> Loss:
        # replace-one adjacency: updates may be at opposite ends of the ball
        size, norm = padded_size(context.dim), 2.0 * self.bound(context)
        # |z| <= z^2 for integers, hence norm^2
        return self._sum_loss(norm, min(math.sqrt(size) * norm, norm**2), size, summands, note)

    def _sum_loss(self, norm: float, one_norm: float, size: int, summands: int, note: str) -> Loss:
        """Return the loss of a sum of `summands` noises, shifted by `norm` in l2 and `one_norm` in l1."""
        return ConcentratedLoss(concentration(norm, one_norm, size, summands, self.steps), note)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # single messages have the client's own noise, sums the noise of all clients that answered
        alone = self._loss(1, context, "the client's own noise")
        size, corrupt, claims = len(context.cohort), context.num_colluding, []
        there = max(size - self.max_dropped_clients, 1)
        answer = f"at least {there} of {size} clients answer, and a round with fewer is aborted"
        colluding = f"with {corrupt} clients at most" if corrupt else "with no clients"
        shared = (
            FRESH_NOISE,
            kind.DROPOUTS(f"{answer}, and nothing but the sum is seen", kind.SUM_ALONE),
            kind.COLLUSION(f"the server colludes {colluding}"),
        )
        summed = count_hidden_clients(context, self.max_dropped_clients)
        for who in Adversary:
            if who not in summed:
                claims.append(PrivacyClaim(who, alone, 1, assumptions=(FRESH_NOISE,), colluders=ANY_NUMBER))
                continue
            known, hidden = summed[who]
            but = f" except {known} that the adversary knows" if known else ""
            note = f"the noise of all counted clients{but}, at least the victim's noise"
            loss = self._loss(hidden, context, note)
            claims.append(PrivacyClaim(who, loss, 1, assumptions=shared, colluders=known))
        return tuple(claims)
