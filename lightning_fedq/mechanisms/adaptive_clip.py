"""Adaptive clipping: the clip follows a quantile of the updates' norms, and the budget pays for the bits.

Source: Andrew, Thakkar, McMahan, Ramaswamy, Differentially Private Learning with Adaptive Clipping, NeurIPS
2021. A client reports with one bit whether its update was shorter than the round's clip C. The noisy share of
such clients moves the clip: C <- C exp(-rate (share - quantile)). The rate is 1 until the share first crosses
the quantile. A first clip that is ten times too large is then right after 5 rounds, with a rate of 0.2 after
26.

Departure from the paper: the bit b is no second release with separate noise and a separate charge. It is one
more coordinate of the vector that the mechanism hides already: v = (x, k C (2b - 1)) with k^2 = f / (1 - f).
The norm of v is at most C sqrt(1 + k^2), and the mechanism encodes v at that norm. The mechanism clips v
itself, so its claim holds for any b, with one coordinate more. The bit takes the share f of the noise budget,
and the error of the model grows by 1 / (1 - f). The paper's count noise of n / 20 would take 43 % of the
budget of 30 rounds at epsilon 8 with 100 clients.

The charge does not depend on the path of the clip. A client divides by C sqrt(1 + k^2) before it encodes, and
the server multiplies after it has decoded and rounded. The mechanism therefore only sees vectors of norm at
most its own `clip_norm`, with constant noise. The factor and the rate are public, because they follow from
earlier releases, and rounds compose adaptively. A server that announces another clip, or a different clip to
each client, changes the messages of clients, but not the claims.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.wrapper import Wrapper
from lightning_fedq.mechanisms.interface import Mechanism, Message, PrivacyClaim, RoundContext
from lightning_fedq.mechanisms.interface.ranges import RangeRule, Ranges, Segments

_UNSEEN, _CROSSED = 2.0, 0.0


@dataclass(frozen=True)
class QuantileRule(RangeRule):
    """Rule of the clip: it is the radius of every segment, and the released share of short updates moves it.

    The centre of a range stores on which side of the quantile shares have been: 1 above, -1 below, 0 on both,
    2 before the first round. It is stored with the ranges, also in checkpoints, and is as public as they are.

    Args:
        initial: Clip of the first round, > 0, in units of the update.
        quantile: Target share of updates that are shorter than the clip.
        rate: Step of the clip's logarithm, once shares have been on both sides. Before, the step is 1.
        weight: Size k of the bit's coordinate, in units of the clip.
        floor: Smallest clip.
        ceiling: Largest clip.
    """

    initial: float
    quantile: float
    rate: float
    weight: float
    floor: float
    ceiling: float

    def first(self, weights: Tensor, segments: Segments) -> Ranges:
        # the initial clip in every segment
        return self._ranges(self.initial, _UNSEEN, segments)

    def following(
        self, ranges: Ranges, weights: Tensor, mean: Tensor, noise_variance: Tensor | None, segments: Segments
    ) -> Ranges:
        # the last coordinate of `mean` is the mean of the clients' bits
        clip, before = ranges.radius.min().item(), ranges.center.min().item()
        over = self.share(clip, mean[-1].item()) - self.quantile
        side = math.copysign(1.0, over) if before in (_UNSEEN, math.copysign(1.0, over)) else _CROSSED
        moved = clip * math.exp(-(self.rate if side == _CROSSED else 1.0) * over)
        return self._ranges(min(max(moved, self.floor), self.ceiling), side, segments)

    def share(self, clip: float, last: float) -> float:
        """Return the released share of updates that were shorter than the clip: noisy, clamped to [0, 1].

        Args:
            clip: Clip of the round, in units of the update.
            last: Mean of the last coordinate, in units of the update.
        """
        # `last` is the mean of k C (2b - 1), solved for the mean of b
        return min(max((last / (self.weight * clip) + 1.0) / 2.0, 0.0), 1.0)

    def _ranges(self, clip: float, side: float, segments: Segments) -> Ranges:
        ones = torch.ones(len(segments), dtype=torch.float64)
        return Ranges(side * ones, clip * ones)


@dataclass(frozen=True)
class AdaptiveClip(Wrapper):
    """Wrapper of an l2-clipping mechanism whose norm follows a quantile of the update norms.

    Take it if you do not know the updates' norms before the run. Wrap a mechanism that clips the l2 norm.

    Args:
        mechanism: Mechanism that hides the clipped update. Its `clip_norm` is the clip of the first round.
            Choose it rather too small than too large, because noise grows with it.
        quantile: Target share of updates that are shorter than the clip, in (0, 1). The source takes 0.5. If
            noise is most of the error, a smaller value is better, see the guide.
        rate: Step of the clip's logarithm, in (0, 1]: at most rate (1 - quantile) down and rate quantile up.
            It is 1 until the share of a round first crosses the quantile.
        fraction: Share f of the noise budget that the clients' bits take, in (0, 0.5]. 0.02 costs 2 % of the
            error. With few clients or a small epsilon, a larger share makes the clip steadier.
        floor: Smallest clip, > 0.
        ceiling: Largest clip, at most 1e12 times the floor.

    Raises:
        TypeError: If `mechanism` does not clip in l2.
        ValueError: If a value is out of its range.

    The claims are those of the wrapped mechanism, against the same adversaries, for one coordinate more.

    A message has the wrapped mechanism's bits for one coordinate more.

    References:
        Andrew, Thakkar, McMahan, Ramaswamy, Differentially Private Learning with Adaptive Clipping, NeurIPS
        2021

    Examples:
        >>> from lightning_fedq import AdaptiveClip, GaussianNoise
        >>> AdaptiveClip(GaussianNoise(clip_norm=0.1, noise_multiplier=4.0)).longest_update(10)
        0.1
    """

    widest: ClassVar[float] = 1e12
    """Largest ratio of ceiling to floor.

    Keep the import of ClassVar in this module. jsonargparse resolves the annotations of `Mechanism` with this
    module's names, and without it accepts any value for `mechanism`."""

    mechanism: Mechanism
    quantile: float = 0.2
    rate: float = 0.2
    fraction: float = 0.02
    floor: float = 1e-6
    ceiling: float = 1e6

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(f"mechanism of AdaptiveClip must be a mechanism, got {self.mechanism!r}")
        if not self.mechanism.clips_norm:
            raise TypeError(
                f"AdaptiveClip needs a mechanism that clips in l2, got {type(self.mechanism).__name__}. "
                "Take GaussianNoise, RotatedCoins, DistributedDiscreteGaussian, or another such one."
            )
        check_positive(rate=self.rate, fraction=self.fraction, floor=self.floor, ceiling=self.ceiling)
        if not 0.0 < self.quantile < 1.0:
            raise ValueError(f"quantile must be in (0, 1), got {self.quantile}")
        if self.rate > 1.0 or self.fraction > 0.5:
            raise ValueError(
                f"rate must be in (0, 1] and fraction in (0, 0.5], got {self.rate}, {self.fraction}"
            )
        if not self.floor <= self._unit <= self.ceiling <= self.widest * self.floor:
            raise ValueError(
                f"clip_norm = {self._unit} must be between floor and ceiling, whose ratio must be at most "
                f"{self.widest:g}, got {self.floor} and {self.ceiling}"
            )

    @property
    def _unit(self) -> float:
        """Clip of the wrapped mechanism, which stands for the round's longest vector."""
        return float(self.mechanism.clip_norm)  # type: ignore[attr-defined]

    @property
    def _weight(self) -> float:
        """Size k of the bit's coordinate, in units of the clip."""
        return math.sqrt(self.fraction / (1.0 - self.fraction))

    @property
    def range_rule(self) -> QuantileRule:
        return QuantileRule(self._unit, self.quantile, self.rate, self._weight, self.floor, self.ceiling)

    # ---- the wrapped mechanism's round: one coordinate more, in its own unit ----------------------------

    def core(self, context: RoundContext) -> tuple[Mechanism, RoundContext, float]:
        # the wrapped mechanism decodes a round of update and bit
        ones = torch.ones(len(context.segments) + 1, dtype=torch.float64)
        with_bit = replace(context, segments=(*context.segments, 1), center=0.0 * ones, radius=ones)
        return self.mechanism, with_bit, self._scale(context)

    def clip(self, context: RoundContext) -> float:
        """Return the norm to which updates of this round are clipped, in units of the update."""
        return context.radius.min().item()

    def _scale(self, context: RoundContext) -> float:
        """Return the unit of the wrapped mechanism's sum: C sqrt(1 + k^2) over its `clip_norm`."""
        return self.clip(context) * math.hypot(1.0, self._weight) / self._unit

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # update and bit are one vector, which the wrapped mechanism clips again
        rows = update.detach().reshape(len(rand.clients), context.dim).float()
        stretch = math.hypot(1.0, self._weight)
        factors, clipped = unit_ball_factors(rows, self.clip(context), 2)
        scaled = rows.double() * (factors * self._unit / stretch)[:, None]
        bits = torch.where(clipped, -1.0, 1.0).to(scaled) * (self._weight * self._unit / stretch)
        vectors = torch.cat([scaled, bits[:, None]], 1).float()
        if update.dim() == 1:
            vectors = vectors[0]
        message = self.mechanism.encode(vectors, self._inner(context), rand)
        return replace(message, num_clipped=int(clipped.sum()) * context.dim)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # the server reads the bits' sum, the last coordinate, through `core`
        total = self.mechanism.decode(symbols, clients, self._inner(context), rand)
        return total[:-1] * self._scale(context)

    # ---- claims and errors in units of the update ------------------------------------------------------

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return the wrapped mechanism's claims for one coordinate more, which hold for every clip."""
        share = f"{self.fraction:g} of this noise budget"
        paid = kind.VIEW(f"clip: public, moved by released counts that take {share}")
        inner = self.mechanism.claims(self._inner(context))
        return tuple(replace(claim, assumptions=(*claim.assumptions, paid)) for claim in inner)

    def grid(self, context: RoundContext) -> float | None:
        """Return the wrapped mechanism's grid, in units of the update."""
        grid = self.mechanism.grid(self._inner(context))
        return None if grid is None else grid * self._scale(context)

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor | None:
        """Return the wrapped mechanism's bound, in squared units of the update."""
        variance = self.mechanism.noise_variance(self._inner(context), clients)
        return None if variance is None else variance[:-1] * self._scale(context) ** 2

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float | None:
        """Return the wrapped mechanism's error in squared units of the update, with the bit's error."""
        error = self.mechanism.mean_error(self._inner(context), num_clients, homogeneity)
        return None if error is None else error * self._scale(context) ** 2

    def longest_update(self, dim: int) -> float:
        """Return the first clip."""
        return self._unit

    @classmethod
    def example(cls) -> Mechanism:
        """Return an adaptive clip around Gaussian noise."""
        from lightning_fedq.mechanisms.gaussian import GaussianNoise  # lazy: one of several to wrap

        return cls(GaussianNoise(clip_norm=1.0, noise_multiplier=1.0))

    def influence(self, client: int, context: RoundContext) -> float | None:
        """Return the wrapped mechanism's influence, which includes room for the bit, in units of the clip."""
        influence = self.mechanism.influence(client, self._inner(context))
        return None if influence is None else influence * math.hypot(1.0, self._weight)
