"""The distributed discrete Gaussian: every client adds integer noise, and only the modular sum is meant to be
seen.

Source: Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation, ICML 2021, the rival of the aggregate Gaussian in Hegazy et al. A client clips, rotates by a
randomised Hadamard transform, scales to a grid, rounds conditionally, adds discrete Gaussian noise and sends
integers modulo 2^bits; the server adds them up, recentres and rotates back.

Unlike the exact-error mechanisms it protects against the server too, and each message a little even without
secure aggregation. Its error is larger, though: rounding, the Renyi accounting and wrapped sums.

Departures: the noise's variance is (local_sigma / granularity)^2 in integer steps, as the accounting needs;
the sampler is exact; substitution doubles the sensitivity of the paper's zero-out. The noise is the clients':
each dropout takes its share away, so claims count on `max_dropped` dropouts and no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from lightning_fedq.core import (
    Adversary,
    AuditCase,
    ConcentratedLoss,
    Loss,
    Mechanism,
    Message,
    PrivacyClaim,
    RoundContext,
)
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.functional.hadamard import padded_size, rotate, rotate_back
from lightning_fedq.functional.noise.discrete_gaussian import (
    concentration,
    conditional_rounding,
    discrete_gaussian,
    discrete_gaussian_variance,
    renyi_divergence,
    rounded_norm_bound,
)
from lightning_fedq.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.wire.coding import FixedLength

_BETA = math.exp(-0.5)


@dataclass(frozen=True)
class DistributedDiscreteGaussian(Mechanism):
    """Distributed discrete Gaussian: noise at every client, sums modulo 2^bits.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        local_sigma: Parameter of one client's noise per coordinate, > 0, in units of clip_norm.
        granularity: Grid of the integers, > 0, in units of clip_norm.
        bits: Symbols are integers modulo 2^bits, 2 to 31; sums beyond half the modulus wrap around.
        max_dropped: Dropouts that the claims allow for; noise of that many clients is not counted.
    """

    homomorphic = True

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

    def at_level(self, level: float, context: RoundContext, max_dropped: int) -> DistributedDiscreteGaussian:
        """See `Mechanism.at_level`: one over a client's noise. The finest grid that the modulus has room for.

        Sums stay within four standard deviations of half the modulus if all updates are alike, after
        rotation.
        """
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
        return rounded_norm_bound(1.0 / self.granularity, padded_size(context.dim), _BETA)

    @staticmethod
    def _signs(context: RoundContext, rand: PublicRandomness) -> Tensor:
        size = padded_size(context.dim)
        words = rand.public("hadamard signs").words((size + 31) // 32)
        bits = np.unpackbits(words.view(np.uint8))[:size]
        return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64))

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `Mechanism.encode`. Symbols are int32 in [0, 2^bits), padded_size(dim) of them a client."""
        rows = update.detach().reshape(len(rand.clients), context.dim).cpu().double()
        factors, shortened = unit_ball_factors(rows, self.clip_norm, 2)
        signs, bound = self._signs(context, rand), self.bound(context)
        symbols = torch.empty(len(rows), len(signs), dtype=torch.int32)
        for row, client in enumerate(rand.clients):
            rotated = rotate(rows[row] * (factors[row] / self.granularity), signs).numpy()
            words = rand.private(client, "rounding").words64
            rounded = conditional_rounding(rotated, bound, words)
            rounded += discrete_gaussian(self.steps, len(rounded), rand.private(client, "noise").words64)
            symbols[row] = torch.from_numpy(rounded % (1 << self.bits))
        shape = (*update.shape[:-1], len(signs))
        clipped = int(shortened.sum()) * context.dim
        return Message(symbols.reshape(shape).to(update.device), self.bits * symbols.numel(), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """See `Mechanism.decode`. Also takes the sum modulo 2^bits."""
        total = symbols.cpu().reshape(-1, symbols.shape[-1]).sum(0, dtype=torch.int64)
        half = 1 << (self.bits - 1)
        centred = (total + half) % (2 * half) - half
        decoded = rotate_back(centred.double(), self._signs(context, rand), context.dim)
        return (decoded * (self.granularity * self.clip_norm)).float().to(symbols.device)

    def code(self, context: RoundContext) -> FixedLength:
        """As many bits a symbol as the modulus has."""
        return FixedLength(self.bits)

    def tolerated_dropouts(self, context: RoundContext) -> int:
        """`max_dropped`: every further dropout would take away noise that the claims count on."""
        return self.max_dropped

    def symbol_modulus(self, context: RoundContext) -> tuple[int, int]:
        """Modulus of the sum and number of symbols of a message."""
        return 1 << self.bits, padded_size(context.dim)

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Noise plus a quarter step for rounding, over the number of clients. Wrapped sums are not in it."""
        one = (discrete_gaussian_variance(self.steps) + 0.25) * (self.granularity * self.clip_norm) ** 2
        return torch.full_like(context.radius, one / len(clients))

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        """See `Mechanism.audit_cases`, and once with a client that drops out and is allowed for."""
        little = replace(self, local_sigma=self.local_sigma / math.sqrt(dim))
        dropped = replace(little, max_dropped=max(self.max_dropped, 1))
        return (
            AuditCase(little),
            AuditCase(dropped, title="one dropout", num_dropped=1),
            AuditCase(self, concentrated=True, title="one coordinate"),
        )

    def _loss(self, summands: int, context: RoundContext, note: str) -> Loss:
        size, norm = padded_size(context.dim), 2.0 * self.bound(context)
        one_norm = min(math.sqrt(size) * norm, norm**2)
        return ConcentratedLoss(concentration(norm, one_norm, size, summands, self.steps), note)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """See `Mechanism.claims`: the client's own noise alone, or that of all who answered."""
        hidden = max(len(context.cohort) - self.max_dropped, 1)  # the victim's own noise is always there
        alone = self._loss(1, context, "the client's own discrete Gaussian noise")
        summed = self._loss(hidden, context, "discrete Gaussian noise of all clients counted")
        others = self._loss(
            max(hidden - 1, 1), context, "the noise of the other clients, the victim's at least"
        )
        corrupt = context.num_corrupt
        behind = summed
        if corrupt:
            honest = max(hidden - corrupt, 1)
            behind = self._loss(honest, context, "the noise of the clients that do not collude")
        losses = {
            Adversary.EAVESDROPPER: alone,
            Adversary.SERVER: alone,
            Adversary.SERVER_AND_PARTNER: alone,
            Adversary.CLIENT: others,
            Adversary.SECAGG_SERVER: behind,
            Adversary.OUTSIDER: summed,
        }
        base = (
            "noise is fresh in every round and attempt and comes from keys that the adversary does not hold",
        )
        answer = f"at least {hidden} of {len(context.cohort)} clients answer"
        colluding = f"with {corrupt} clients at most" if corrupt else "with no clients"
        shared = (f"{answer}; nothing but the sum is seen", f"the server colludes {colluding}")
        alone_only = (Adversary.EAVESDROPPER, Adversary.SERVER, Adversary.SERVER_AND_PARTNER)
        return tuple(
            PrivacyClaim(who, losses[who], 1, assumptions=base + (() if who in alone_only else shared))
            for who in Adversary
        )


def ddg_for_budget(
    epsilon: float, delta: float, clip_norm: float, num_clients: int, dim: int, bits: int, spread: float = 2.0
) -> DistributedDiscreteGaussian:
    """Choose noise and grid for a zero-out budget over one round, as the paper's experiments do.

    The noise is the least that meets the budget by the three Renyi bounds over orders 2 to 256; the grid is
    the finest for which sums stay within `spread` standard deviations of the modulus' half.

    Args:
        epsilon: Target, in nats, under zero-out (half the sensitivity of substitution).
        delta: Target.
        clip_norm: Largest l2 norm of an update.
        num_clients: n.
        dim: Length of the update.
        bits: log2 of the modulus.
        spread: k in 2^bits g = 2 k sqrt((c n)^2 / d + (g^2 / 4 + s^2) n).

    Raises:
        ValueError: If no grid fits the modulus.
    """
    size, orders = padded_size(dim), [*range(2, 129), 256]

    def spent(grid: float, sigma: float) -> float:
        norm = rounded_norm_bound(1.0 / grid, size, _BETA)
        one = min(math.sqrt(size) * norm, norm**2)
        levels = [
            renyi_divergence(a, norm, one, size, num_clients, sigma / grid)
            + math.log1p(-1.0 / a)
            - (math.log(delta) + math.log(a)) / (a - 1)
            for a in orders
        ]
        return float(min(levels))

    def noise(grid: float) -> float:
        return float(
            math.exp(
                optimize.brentq(
                    lambda s: spent(grid, math.exp(s)) - epsilon, math.log(1e-6), math.log(1e4), xtol=1e-10
                )
            )
        )

    def room(log_grid: float) -> float:
        grid = math.exp(log_grid)
        variance = num_clients**2 / size + (grid**2 / 4.0 + noise(grid) ** 2) * num_clients
        return 2.0**bits * grid - 2.0 * spread * math.sqrt(variance)

    low, high = math.log(1e-9), math.log(10.0)
    if room(low) > 0 or room(high) < 0:
        raise ValueError(f"no grid fits a modulus of 2^{bits} for {num_clients} clients; take more bits")
    grid = math.exp(optimize.brentq(room, low, high, xtol=1e-10))
    return DistributedDiscreteGaussian(clip_norm, noise(grid), grid, bits)
