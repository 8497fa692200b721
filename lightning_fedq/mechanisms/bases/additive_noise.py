"""Base of the Gaussian and Laplace baselines: clip, put on a grid, add integer noise, send the integer.

Values are truncated to a grid toward zero, which lengthens no vector. The sensitivity is therefore that of
the clipping bound, with no addition for rounding. `functional.noise.grid_noise` bounds the errors of floats,
and every claim states them. Each client adds its own noise before it sends anything, so that claim holds
against every adversary.

The noise of a sum of n Gaussian messages is sqrt(n) times larger, and this is claimed. A message is the cell
of width h that x + N(0, s^2) falls into, so a symbol's probability is h times the density of x + N(0, s^2) +
U(-h, 0) at the cell's end. Sampled on the grid and convolved, such densities differ from their convolution by
a relative 3 e^(-2 pi^2 (s / h)^2 / 2) per client (Poisson summation, below e^-600, as h <= s / 8). A symbol
of the sum therefore has the probability that the exact N(0, n s^2) plus n - 1 such uniforms falls into its
cell. This is post-processing of the Gaussian mechanism with n times the variance. A message whose noise was
cut off is no such cell, which the slack counts, as it counts every client's sampler. Sums of Laplace noise
have no such form, so only one client's noise counts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.functional.linear_decode import decode_sum
from lightning_fedq.functional.noise.fast_grid_noise import add_to_rows
from lightning_fedq.functional.noise.grid_noise import GridNoise
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.claims import FRESH_NOISE, sampler_error
from lightning_fedq.mechanisms.interface import (
    ANY_NUMBER,
    Adversary,
    Mechanism,
    Message,
    PrivacyClaim,
    RoundContext,
    Slack,
    Unit,
    count_hidden_clients,
)
from lightning_fedq.privacy.losses import GaussianLoss, GaussianSumLoss, LaplaceLoss, Loss
from lightning_fedq.wire.coding import FixedLength


@dataclass(frozen=True)
class ClaimedNoise(GridNoise):
    """Grid noise together with its privacy loss, so that drawn and claimed noise have one scale."""

    def loss(self, count: int, size: int) -> tuple[Loss, Slack]:
        """Return loss and slack of values within the clipping bound, which differ by at most two bounds.

        Args:
            count: Number of clients, including the victim, that add this noise to a sum and keep it secret.
                It is 1 for a message, and for Laplace noise, whose sums have another distribution.
            size: Number of coordinates.
        """
        multiplier, drawn = self.scale / 2.0, count * size
        slack = Slack(drawn * self.total_variation, drawn * self.log_ratio)
        own = "noise added by the client itself, without the other clients' noise"
        if self.law == "laplace":
            return LaplaceLoss(multiplier, own), slack
        if count == 1:
            return GaussianLoss(multiplier, own), slack
        note = f"noise of {count} clients, of the same variance each"
        # a sum can reveal that a client's noise was cut off, so its probability is charged
        slack = Slack(slack.distance + drawn * self.clipped, slack.log_ratio)
        return GaussianSumLoss.from_noises(multiplier, count, note), slack


@dataclass(frozen=True)
class AdditiveNoise(Mechanism):
    """Base of the noise baselines: a distribution, a clipping rule and a multiplier define a mechanism.

    Two clipped updates are at most two bounds apart.
    """

    homomorphic = True
    has_exchangeable_clients = True
    law: ClassVar[Literal["gaussian", "laplace"]]
    claim_unit: ClassVar[Unit]
    """Unit of the claim that one bound belongs to."""

    def __post_init__(self) -> None:
        _ = self.noise  # refuses invalid parameters

    @property
    @abstractmethod
    def multiplier(self) -> float:
        """Noise scale (std or mean absolute value) over sensitivity under replace-one adjacency."""

    @abstractmethod
    def bounds(self, context: RoundContext) -> Tensor:
        """Return the bound of each segment, `(len(segments),)` float64, in units of the update."""

    @abstractmethod
    def clipping_factors(self, rows: Tensor, context: RoundContext) -> tuple[Tensor, int]:
        """Return factors `(n, segments)` that scale segments to bounds, and the number of clipped values.

        Args:
            rows: `(n, dim)` updates, before the centre is subtracted.
            context: Public facts of the round.
        """

    def clipping_range(self, context: RoundContext) -> tuple[Tensor, Tensor]:
        return context.center, context.radius

    @property
    def noise(self) -> ClaimedNoise:
        """Noise in units of the clipping bound."""
        return ClaimedNoise(self.law, 2.0 * self.multiplier)

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int16 or int32
        rows = update.detach().reshape(len(rand.clients), context.dim)
        rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.double()
        factors, clipped = self.clipping_factors(rows, context)  # bounds the sensitivity of the noise
        noise = self.noise
        dtype = torch.int16 if noise.bits <= 16 else torch.int32
        symbols = torch.empty(rows.shape, dtype=dtype)
        sources = (rand.private(client, "noise").words64 for client in rand.clients)
        # values are rounded to the grid of the noise, so that symbols contain no low bits of an update
        clipped += add_to_rows(rows, context.segments, context.center, factors, noise, sources, symbols)
        return Message(symbols.reshape(update.shape), noise.bits * symbols.numel(), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        steps = self.bounds(context) * self.noise.step  # the noise has mean 0
        return decode_sum(symbols, context.segments, len(clients) * context.center.double(), steps)

    def code(self, context: RoundContext) -> FixedLength:
        """Return signed integers wide enough for any noise."""
        return FixedLength(self.noise.bits, signed=True)

    def influence(self, client: int, context: RoundContext) -> float:
        # a message may have the smallest integer of the code in every coordinate
        return 2.0 ** (self.noise.bits - 1) * self.noise.step

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return the noise's variance over the number of clients."""
        return self.bounds(context) ** 2 * (self.noise.variance / len(clients))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return the loss of the client's own noise, and for sums of all hidden clients' Gaussian noise."""
        hidden = count_hidden_clients(context) if self.law == "gaussian" else {}
        compositions = 1 if self.claim_unit is Unit.MESSAGE else context.dim
        claims = []
        for who in Adversary:
            colluders, unknown = hidden.get(who, (ANY_NUMBER, 1))
            loss, slack = self.noise.loss(unknown, context.dim)
            slack = replace(slack, per_loss=compositions == context.dim)
            stated: tuple[str, ...] = (FRESH_NOISE, sampler_error(slack))
            if unknown > 1:
                stated += (kind.SUM_ALONE("nothing but the plain sum of all messages is seen"),)
                if who is Adversary.SECAGG_SERVER:
                    colluding = f"the server colludes with {context.num_colluding or 'no'} clients at most"
                    stated += (kind.COLLUSION(colluding),)
            about: dict[str, Any] = {"slack": slack, "unit": self.claim_unit, "colluders": colluders}
            claims.append(PrivacyClaim(who, loss, compositions, assumptions=stated, **about))
        return tuple(claims)


@dataclass(frozen=True)
class ClippedVector(AdditiveNoise):
    """Noise on whole updates, clipped to one norm: l2 for Gaussian noise and l1 for Laplace.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, > 0.
    """

    claim_unit = Unit.MESSAGE

    clip_norm: float

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm)
        super().__post_init__()

    @property
    def _order(self) -> int:
        return 2 if self.law == "gaussian" else 1

    def bounds(self, context: RoundContext) -> Tensor:
        return torch.full_like(context.radius, self.clip_norm)

    def clipping_factors(self, rows: Tensor, context: RoundContext) -> tuple[Tensor, int]:
        # one factor per row, as a row that is too long shrinks in every coordinate
        if context.center.any():
            rows = rows.double() - context.expand(context.center)
        factors, clipped = unit_ball_factors(rows, self.clip_norm, self._order)
        return factors[:, None].expand(-1, len(context.segments)), int(clipped.sum()) * rows.shape[1]

    def longest_update(self, dim: int) -> float:
        """Return the bound for l2, and sqrt(pi / (2 dim)) times the bound for l1."""
        return self.clip_norm * (1.0 if self._order == 2 else math.sqrt(math.pi / (2.0 * dim)))

    def influence(self, client: int, context: RoundContext) -> float:
        dims: float = context.dim ** (1.0 / self._order)
        return super().influence(client, context) * dims


@dataclass(frozen=True)
class VectorNoise(ClippedVector):
    """Noise per update, of a given multiplier.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, > 0.
    """

    level = "noise_multiplier"

    noise_multiplier: float

    def __post_init__(self) -> None:
        check_positive(noise_multiplier=self.noise_multiplier)
        super().__post_init__()

    @property
    def multiplier(self) -> float:
        return self.noise_multiplier


@dataclass(frozen=True)
class CoordinateNoise(AdditiveNoise):
    """Noise per coordinate, so that each coordinate is private in one round.

    Args:
        epsilon_per_coordinate: Budget per coordinate and round, > 0, in nats.
    """

    level = "epsilon_per_coordinate"
    claim_unit = Unit.COORDINATE

    epsilon_per_coordinate: float

    def __post_init__(self) -> None:
        check_positive(epsilon_per_coordinate=self.epsilon_per_coordinate)
        super().__post_init__()

    def bounds(self, context: RoundContext) -> Tensor:
        return context.radius

    def clipping_factors(self, rows: Tensor, context: RoundContext) -> tuple[Tensor, int]:
        # `encode` clips to the range later, on the grid
        return (1.0 / context.radius).expand(len(rows), -1), 0
