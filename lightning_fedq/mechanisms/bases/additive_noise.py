"""Base of the Gaussian and Laplace baselines: clip, put on a grid, add integer noise, send the integer.

Values are truncated to a grid toward zero, which lengthens no vector, so the sensitivity is that of the
clipping bound with nothing to add for rounding. What floats do is bounded in `functional.noise.grid_noise`
and stated in every claim. Each client adds its own noise before anything leaves it, so that claim holds
against every adversary.

Behind a sum of n Gaussian messages the noise is sqrt(n) times larger, and that is claimed. A message is the
cell of width h that x + N(0, s^2) falls into, so a symbol's chance is h times the density of x + N(0, s^2) +
U(-h, 0) at the cell's end. Sampled on the grid and convolved, such densities differ from their convolution by
a relative 3 e^(-2 pi^2 (s / h)^2 / 2) a client (Poisson summation; below e^-600, as h <= s / 8), so a symbol
of the sum has the chance that the exact N(0, n s^2) + n - 1 such uniforms falls into its cell:
post-processing of the Gaussian mechanism with n times the variance. A message whose noise was cut off is no
such cell, which is counted, as is every client's sampler. Sums of Laplace noise have no such form, and count
one client's noise.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.functional.linear_decode import decode_sum
from lightning_fedq.functional.noise.fast_grid_noise import add_to_rows
from lightning_fedq.functional.noise.grid_noise import GridNoise
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.calibration import resolve_multiplier
from lightning_fedq.mechanisms.interface import (
    Adversary,
    AuditCase,
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


class Clipping(Protocol):
    """Clipping before noise is added.

    Two clipped updates are at most two bounds apart.

    Attributes:
        unit: What one bound is about.
    """

    unit: ClassVar[Unit]

    def units(self, context: RoundContext) -> Tensor:
        """The bound of each segment, `(len(segments),)` float64, in units of the update."""

    def factors(self, rows: Tensor, context: RoundContext) -> tuple[Tensor, int]:
        """Return what turns a row's segments into bounds, `(n, segments)`, and how many coordinates shrink.

        Args:
            rows: `(n, dim)`, less no centre yet.
        """

    def compositions(self, context: RoundContext) -> int:
        """Number of compositions of the noise's loss in one round."""

    def longest_update(self, dim: int) -> float | None:
        """Largest l2 norm of a clipped update of `dim` coordinates, None if there is no bound."""


@dataclass(frozen=True)
class WholeVector(Clipping):
    """One bound for the whole update, in the l1 or l2 norm (`order`)."""

    unit: ClassVar[Unit] = Unit.MESSAGE

    clip_norm: float
    order: int

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm)

    def units(self, context: RoundContext) -> Tensor:
        """The clipping norm, in every segment."""
        return torch.full_like(context.radius, self.clip_norm)

    def factors(self, rows: Tensor, context: RoundContext) -> tuple[Tensor, int]:
        """One factor a row. A row that is too long shrinks in every coordinate."""
        if context.center.any():
            rows = rows.double() - context.expand(context.center)
        factors, clipped = unit_ball_factors(rows, self.clip_norm, self.order)
        return factors[:, None].expand(-1, len(context.segments)), int(clipped.sum()) * rows.shape[1]

    def compositions(self, context: RoundContext) -> int:
        """Once."""
        return 1

    def longest_update(self, dim: int) -> float:
        """The bound, in l1 sqrt(pi / (2 dim)) of it."""
        return self.clip_norm * (1.0 if self.order == 2 else math.sqrt(math.pi / (2.0 * dim)))


class PerCoordinate(Clipping):
    """Every coordinate on its own, clipped to the round's range."""

    unit: ClassVar[Unit] = Unit.COORDINATE

    def units(self, context: RoundContext) -> Tensor:
        """The radius of each segment."""
        return context.radius

    def factors(self, rows: Tensor, context: RoundContext) -> tuple[Tensor, int]:
        """The inverse radius of every segment. The range itself is enforced, and counted, on the grid."""
        return (1.0 / context.radius).expand(len(rows), -1), 0

    def compositions(self, context: RoundContext) -> int:
        """Once a coordinate."""
        return context.dim

    def longest_update(self, dim: int) -> None:
        """Nothing but the range clips."""
        return


@dataclass(frozen=True)
class ClaimedNoise(GridNoise):
    """Grid noise, and what it gives away: what is drawn and what is claimed come from one scale."""

    def loss(self, count: int, size: int) -> tuple[Loss, Slack]:
        """Loss and slack of values within the clipping bound, which differ by two bounds at most.

        Args:
            count: Clients that add this noise to a sum and tell nobody, the victim too; 1 for a message,
                and for Laplace noise, whose sums have another law.
            size: Coordinates.
        """
        multiplier, drawn = self.scale / 2.0, count * size
        slack = Slack(drawn * self.total_variation, drawn * self.log_ratio)
        own = "noise added by the client itself; the others' noise is not counted"
        if self.law == "laplace":
            return LaplaceLoss(multiplier, own), slack
        if count == 1:
            return GaussianLoss(multiplier, own), slack
        note = f"noise of {count} clients, which add the same each"
        # in a sum of its own symbols, noise that is cut off shows
        slack = Slack(slack.distance + drawn * self.clipped, slack.log_ratio)
        return GaussianSumLoss.from_noises(multiplier, count, note), slack


@dataclass(frozen=True)
class AdditiveNoise(Mechanism):
    """Base of the noise baselines: a law, a clipping rule and a multiplier, from which all else follows."""

    homomorphic = True
    alike_clients = True
    law: ClassVar[Literal["gaussian", "laplace"]]

    def __post_init__(self) -> None:
        _ = self.noise, self.clipping  # both refuse what makes no sense

    @property
    @abstractmethod
    def multiplier(self) -> float:
        """Noise scale (std or mean absolute value) over sensitivity under substitution."""

    @property
    @abstractmethod
    def clipping(self) -> Clipping:
        """The clipping rule."""

    def longest_update(self, dim: int) -> float | None:
        return self.clipping.longest_update(dim)

    def clipping_range(self, context: RoundContext) -> tuple[Tensor, Tensor]:
        return context.center, context.radius

    @property
    def noise(self) -> ClaimedNoise:
        """The noise, in units of the clipping bound."""
        return ClaimedNoise(self.law, 2.0 * self.multiplier)

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int16 or int32
        rows = update.detach().reshape(len(rand.clients), context.dim)
        rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.double()
        factors, clipped = self.clipping.factors(rows, context)  # to the norm that the noise is made for
        noise = self.noise
        dtype = torch.int16 if noise.bits <= 16 else torch.int32
        symbols = torch.empty(rows.shape, dtype=dtype)
        sources = (rand.private(client, "noise").words64 for client in rand.clients)
        # rounded to the grid of the noise, so that no low bit of an update is left
        clipped += add_to_rows(rows, context.segments, context.center, factors, noise, sources, symbols)
        return Message(symbols.reshape(update.shape), noise.bits * symbols.numel(), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        steps = self.clipping.units(context) * self.noise.step  # noise is of mean 0: nothing to undo
        return decode_sum(symbols, context.segments, len(clients) * context.center.double(), steps)

    def code(self, context: RoundContext) -> FixedLength:
        """Signed integers wide enough for any noise."""
        return FixedLength(self.noise.bits, signed=True)

    def lever(self, client: int, context: RoundContext) -> float:
        # the smallest integer of the code, in every coordinate of a whole vector
        reach = 2.0 ** (self.noise.bits - 1) * self.noise.step
        rule = self.clipping
        return reach * context.dim ** (1.0 / rule.order) if isinstance(rule, WholeVector) else reach

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """The noise's variance over the number of clients."""
        return self.clipping.units(context) ** 2 * (self.noise.variance / len(clients))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """The client's own noise against everybody, and Gaussian noise of all that hide it in a sum."""
        hidden = count_hidden_clients(context) if self.law == "gaussian" else {}
        return tuple(self._claim(who, hidden.get(who, (0, 1))[1], context) for who in Adversary)

    def _claim(self, adversary: Adversary, num_noises: int, context: RoundContext) -> PrivacyClaim:
        loss, slack = self.noise.loss(num_noises, context.dim)
        fresh = (
            "noise is fresh in every round and attempt and comes from keys that the adversary does not hold"
        )
        extra: tuple[str, ...] = ()
        if num_noises > 1:
            extra = ("nothing but the plain sum of all messages is seen",)
            if adversary is Adversary.SECAGG_SERVER:
                extra += (f"the server colludes with {context.num_corrupt or 'no'} clients at most",)
        sampled = (
            f"the sampler's law is within {slack.distance:.1e} in total variation and {slack.log_ratio:.1e} "
            "in log-ratio of the exact one a round, paid for in delta and epsilon"
        )
        return PrivacyClaim(
            adversary,
            loss,
            self.clipping.compositions(context),
            assumptions=(fresh, sampled, *extra),
            slack=slack,
            unit=self.clipping.unit,
        )


@dataclass(frozen=True)
class VectorNoise(AdditiveNoise):
    """Noise per update: one clipping norm, l2 for Gaussian noise and l1 for Laplace, one budget for a run.

    Args:
        clip_norm: Largest norm of an update, > 0.
        noise_multiplier: Noise scale over sensitivity, > 0; or leave it out and give a budget:
        epsilon: Budget of one client over the whole run, > 0, in nats.
        delta: Delta of the whole run.
        rounds: Rounds that the budget has to last for, >= 1.
    """

    clip_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    rounds: int | None = None

    @property
    def multiplier(self) -> float:
        return resolve_multiplier(self.noise_multiplier, self.epsilon, self.delta, self.rounds, self.law)

    def _with_multiplier(self, multiplier: float) -> VectorNoise:
        return replace(self, noise_multiplier=multiplier, epsilon=None, delta=None, rounds=None)

    def with_level(self, level: float, context: RoundContext, max_dropped: int) -> VectorNoise:
        return self._with_multiplier(1.0 / level)

    @property
    def clipping(self) -> WholeVector:
        return WholeVector(self.clip_norm, 2 if self.law == "gaussian" else 1)

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # the claim is about a whole vector, and Gaussian sums have one, too
        gaussian = self.law == "gaussian"
        little = self._with_multiplier(self.multiplier / (math.sqrt(dim) if gaussian else dim))
        cases = (AuditCase(little), AuditCase(self, concentrated=True, title="one coordinate"))
        return (*cases, *AuditCase(little).without_clients()) if gaussian else cases


@dataclass(frozen=True)
class CoordinateNoise(AdditiveNoise):
    """Noise per coordinate, each private on its own in one round.

    Args:
        epsilon: Budget per coordinate and round, > 0, in nats.
    """

    level = "epsilon"

    epsilon: float

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon)
        super().__post_init__()

    @property
    def clipping(self) -> PerCoordinate:
        return PerCoordinate()
