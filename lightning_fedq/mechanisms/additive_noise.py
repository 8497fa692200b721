"""What the Gaussian and Laplace baselines share: clip, put on a grid, add integer noise, send the integer.

Values are truncated to a grid toward zero, which lengthens no vector, so the sensitivity is that of the
clipping bound with nothing to add for rounding. What floats do is bounded in `functional.grid_noise` and
stated in every claim. Each client adds its own noise before anything leaves it, so the same claim holds
against every adversary; that the other clients' noise hides a client better in the sum is not counted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from lightning_fedq.coding import FixedLength
from lightning_fedq.core import (
    Adversary,
    GaussianLoss,
    LaplaceLoss,
    Mechanism,
    Message,
    PrivacyClaim,
    RoundContext,
    Slack,
    Unit,
)
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.clip import truncate_to_grid, unit_ball_factors
from lightning_fedq.functional.grid_noise import FINE_BITS, GridNoise
from lightning_fedq.randomness import ClientRandomness, PublicRandomness, Stream

_CHUNK = 1 << 16


class Clipping(Protocol):
    """What is bounded before noise is added; two clipped updates are at most two bounds apart.

    Attributes:
        unit: What one bound is about.
    """

    unit: ClassVar[Unit]

    def units(self, context: RoundContext) -> Tensor:
        """The bound of each segment, `(len(segments),)` float64, in units of the update."""

    def factors(self, rows: Tensor, context: RoundContext) -> tuple[Tensor, int]:
        """Return what turns `(n, dim)` rows into bounds, same shape, and how many coordinates it clips."""

    def compositions(self, context: RoundContext) -> int:
        """How often the noise's loss composes in one round."""


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
        """One factor a row; a row that is too long shrinks in every coordinate."""
        factors, clipped = unit_ball_factors(rows, self.clip_norm, self.order)
        return factors[:, None].expand_as(rows), int(clipped.sum()) * rows.shape[1]

    def compositions(self, context: RoundContext) -> int:
        """Once."""
        return 1


class PerCoordinate(Clipping):
    """Every coordinate on its own, clipped to the round's range."""

    unit: ClassVar[Unit] = Unit.COORDINATE

    def units(self, context: RoundContext) -> Tensor:
        """The radius of each segment."""
        return context.radius

    def factors(self, rows: Tensor, context: RoundContext) -> tuple[Tensor, int]:
        """The inverse radius of every coordinate; the range itself is enforced on the grid."""
        factors = (1.0 / context.expand(context.radius).to(rows.device)).expand_as(rows)
        return factors, int(((rows * factors).abs() > 1.0).sum())

    def compositions(self, context: RoundContext) -> int:
        """Once a coordinate."""
        return context.dim


@dataclass(frozen=True)
class AdditiveNoise(Mechanism):
    """Base of the noise baselines; children say what is clipped and how much noise is added."""

    homomorphic = True
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
        """What is clipped."""

    @property
    def noise(self) -> GridNoise:
        """The noise, in units of the clipping bound."""
        return GridNoise(self.law, 2.0 * self.multiplier)

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `Mechanism.encode`; symbols are int16 or int32."""
        rows = update.detach().reshape(len(rand.clients), context.dim)
        rows = rows.double() - context.expand(context.center).to(rows.device)
        factors, clipped = self.clipping.factors(rows, context)
        noise = self.noise
        dtype = torch.int16 if noise.bits <= 16 else torch.int32
        symbols = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        for row, client in enumerate(rand.clients):
            self._encode_row(rows[row], factors[row], noise, rand.private(client, "noise"), symbols[row])
        return Message(symbols.reshape(update.shape), noise.bits * symbols.numel(), clipped)

    @staticmethod
    def _encode_row(row: Tensor, factor: Tensor, noise: GridNoise, stream: Stream, out: Tensor) -> None:
        for first in range(0, len(row), _CHUNK):
            part = slice(first, first + _CHUNK)
            fine = truncate_to_grid((row[part] * factor[part]).clamp(-1.0, 1.0), FINE_BITS)
            out[part] = noise.add(fine, stream.words64)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """See `Mechanism.decode`."""
        total = symbols.sum(0, dtype=torch.int64) if symbols.dim() == 2 else symbols
        steps = context.expand(self.clipping.units(context) * self.noise.step).to(total.device)
        center = context.expand(context.center).to(total.device)
        return (len(clients) * center + steps * total.double()).float()

    def code(self, context: RoundContext) -> FixedLength:
        """Signed integers wide enough for any noise."""
        return FixedLength(self.noise.bits, signed=True)

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """The noise's variance over the number of clients."""
        return self.clipping.units(context) ** 2 * (self.noise.variance / len(clients))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """The same against everybody."""
        kind = GaussianLoss if self.law == "gaussian" else LaplaceLoss
        loss = kind(self.multiplier, "noise added by the client itself; the others' noise is not counted")
        noise, dim = self.noise, context.dim
        slack = Slack(dim * noise.total_variation, dim * noise.log_ratio)
        assumptions = (
            "noise is fresh in every round and attempt and comes from keys that the adversary does not hold",
            f"the sampler's law is within {slack.distance:.1e} in total variation and {slack.log_ratio:.1e} "
            "in log-ratio of the exact one a round, paid for in delta and epsilon",
        )
        count = self.clipping.compositions(context)
        return tuple(
            PrivacyClaim(
                adversary, loss, count, assumptions=assumptions, slack=slack, unit=self.clipping.unit
            )
            for adversary in Adversary
        )
