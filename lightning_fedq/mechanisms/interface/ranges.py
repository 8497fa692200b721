"""Rules for the quantiser's range: centre and radius per segment, from public quantities only.

A rule reads the released global model, the decoded (hence released) mean and the mechanism's public noise
bound, but never a client's update. By post-processing, a range therefore costs no privacy.

The rule of the CorBin-FL paper (min and max of the previous global model) feeds the decoding noise back into
the range. Even if updates change nothing, the radius of LDP-FL at epsilon = 0.5, 50 clients and 1e5
parameters grows 2.6-fold every round. It is included because the paper uses it. `AdaptiveRange` has no such
feedback.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_fields, check_positive

Segments = Sequence[int]
"""Length of each segment."""


class Ranges(NamedTuple):
    """One range per segment, float64 on the CPU, in units of the values that are quantised."""

    center: Tensor
    radius: Tensor


class RangeRule(ABC):
    """Rule for the quantiser's ranges, in the first round and in each next round."""

    @abstractmethod
    def first(self, weights: Tensor, segments: Segments) -> Ranges:
        """Return the ranges of round 0 from the public initial model `(dim,)`."""

    @abstractmethod
    def following(
        self, ranges: Ranges, weights: Tensor, mean: Tensor, noise_variance: Tensor | None, segments: Segments
    ) -> Ranges:
        """Return the ranges of the next round.

        Args:
            ranges: Ranges of this round.
            weights: `(dim,)`, the global model after this round's step.
            mean: `(dim,)`, the decoded mean of the updates (or weights) that clients sent in this round.
            noise_variance: `(len(segments),)`, a public upper bound on the variance of `mean`, or None.
            segments: Length of each segment.
        """


@dataclass(frozen=True)
class FixedRange(RangeRule):
    """Fixed public range, the same in every round and segment.

    Args:
        radius: Half-width, > 0, in units of the values that are quantised.
        center: Centre of the range.

    Examples:
        >>> FixedRange(0.1)  # Federated(..., ranges=this): [-0.1, 0.1] in every round
        FixedRange(radius=0.1, center=0.0)
    """

    radius: float
    center: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(radius=self.radius)
        if not math.isfinite(self.center):
            raise ValueError(f"center must be finite, got {self.center}")

    def first(self, weights: Tensor, segments: Segments) -> Ranges:
        ones = torch.ones(len(segments), dtype=torch.float64)
        return Ranges(self.center * ones, self.radius * ones)

    def following(
        self, ranges: Ranges, weights: Tensor, mean: Tensor, noise_variance: Tensor | None, segments: Segments
    ) -> Ranges:
        return ranges


@dataclass(frozen=True)
class PreviousMinMax(RangeRule):
    """Range from the previous global model's min and max in each segment, CorBin-FL's rule for weights.

    Args:
        margin: Factor on the half-range, >= 1. The paper uses 1.
        floor: Smallest radius, as a fraction of the largest segment's radius. It keeps an all-zero bias
            trainable.

    Examples:
        >>> PreviousMinMax(margin=1.2)  # Federated(..., ranges=this, sends="weights")
        PreviousMinMax(margin=1.2, floor=0.001)
    """

    margin: float = 1.1
    floor: float = 1e-3

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(margin=self.margin, floor=self.floor)
        if self.margin < 1:
            raise ValueError(f"margin must be >= 1, got {self.margin}. A smaller one would clip the model.")

    def first(self, weights: Tensor, segments: Segments) -> Ranges:
        parts = torch.split(weights.detach().double().cpu(), list(segments))
        low = torch.stack([part.min() for part in parts])
        high = torch.stack([part.max() for part in parts])
        radius = self.margin * (high - low) / 2
        smallest = self.floor * max(radius.max().item(), 1e-30)
        return Ranges((high + low) / 2, radius.clamp(min=smallest))

    def following(
        self, ranges: Ranges, weights: Tensor, mean: Tensor, noise_variance: Tensor | None, segments: Segments
    ) -> Ranges:
        return self.first(weights, segments)


@dataclass(frozen=True)
class AdaptiveRange(RangeRule):
    """Adaptive range that follows the size of the mean update, with the decoding noise subtracted.

    The target of the next radius is `multiple` times sqrt(mean square of the decoded mean - noise bound). The
    noise bound is at least the noise's variance, plus four standard deviations of its estimate from the
    segment's coordinates. Noise alone therefore hardly ever increases the radius, even for a short bias
    vector.

    If the noise hides the signal, the radius and the noise shrink until the signal appears or the floor is
    reached. They shrink slowly, because a client's update is larger than the mean that the rule sees.

    Args:
        initial: First radius, as a fraction of the root mean square of the initial weights, > 0.
        multiple: Target radius over the mean update's root mean square, > 0.
        growth: Largest growth factor of the radius in a round, >= 1.
        shrink: Smallest factor of the radius in a round, in (0, 1].
        floor: Smallest radius, in units of the update, > 0.

    Examples:
        >>> AdaptiveRange(initial=0.01)  # Federated(..., ranges=this)
        AdaptiveRange(initial=0.01, multiple=4.0, growth=2.0, shrink=0.95, floor=1e-06)
    """

    initial: float = 1.0
    multiple: float = 4.0
    growth: float = 2.0
    shrink: float = 0.95
    floor: float = 1e-6

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(initial=self.initial, multiple=self.multiple, floor=self.floor, shrink=self.shrink)
        if self.growth < 1 or self.shrink > 1:
            raise ValueError(f"growth must be >= 1 and shrink <= 1, got {self.growth} and {self.shrink}")

    def first(self, weights: Tensor, segments: Segments) -> Ranges:
        """Return one radius for all segments, because biases that start at zero have no size."""
        size = weights.detach().double().square().mean().sqrt().item() or 1.0
        radius = torch.full((len(segments),), max(self.initial * size, self.floor), dtype=torch.float64)
        return Ranges(torch.zeros_like(radius), radius)

    def following(
        self, ranges: Ranges, weights: Tensor, mean: Tensor, noise_variance: Tensor | None, segments: Segments
    ) -> Ranges:
        parts = torch.split(mean.detach().double().cpu(), list(segments))
        energy = torch.stack([part.square().mean() for part in parts])
        if noise_variance is not None:
            sizes = torch.tensor(segments, dtype=torch.float64)
            energy = (energy - noise_variance * (1 + 4 * (2 / sizes).sqrt())).clamp(min=0)
        aim = self.multiple * energy.sqrt()
        radius = torch.minimum(torch.maximum(aim, self.shrink * ranges.radius), self.growth * ranges.radius)
        return Ranges(torch.zeros_like(radius), radius.clamp(min=self.floor))
