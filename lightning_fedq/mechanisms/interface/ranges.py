"""Where the quantiser's range comes from: centre and radius per segment, from public quantities only.

A rule sees the released global model, the decoded (hence released) mean and the mechanism's public
noise variance, never a client's update: by post-processing a range costs no privacy.

The paper's rule (CorBin-FL: min and max of the previous global model) feeds the decoding noise back
into the range: with updates that change nothing, the radius of LDP-FL at epsilon = 0.5, 50 clients
and 1e5 parameters grows 2.6-fold every round. It is here because the paper uses it; `AdaptiveRange`
is the rule that survives.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_fields, check_positive


class Ranges(NamedTuple):
    """One range per segment, float64 on the CPU, in units of what is quantised."""

    center: Tensor
    radius: Tensor


class RangeRule(ABC):
    """Rule for the quantiser's ranges of the first round and of each next one."""

    @abstractmethod
    def first(self, weights: Tensor, segments: Sequence[int]) -> Ranges:
        """Ranges of round 0, from the public initial model `(dim,)`."""

    @abstractmethod
    def following(
        self,
        ranges: Ranges,
        weights: Tensor,
        mean: Tensor,
        noise_variance: Tensor | None,
        segments: Sequence[int],
    ) -> Ranges:
        """Ranges of the next round.

        Args:
            weights: `(dim,)`, the global model after this round's step.
            mean: `(dim,)`, the decoded mean of what the clients sent in this round.
            noise_variance: `(len(segments),)`, a public upper bound on the variance of `mean`, or None.
            segments: Segment lengths.
        """


@dataclass(frozen=True)
class FixedRange(RangeRule):
    """Fixed public range, the same in every round and segment.

    Args:
        radius: Half-width, > 0, in units of what is quantised.
        center: Centre.

    Example:
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

    def first(self, weights: Tensor, segments: Sequence[int]) -> Ranges:
        ones = torch.ones(len(segments), dtype=torch.float64)
        return Ranges(self.center * ones, self.radius * ones)

    def following(
        self,
        ranges: Ranges,
        weights: Tensor,
        mean: Tensor,
        noise_variance: Tensor | None,
        segments: Sequence[int],
    ) -> Ranges:
        return ranges


@dataclass(frozen=True)
class PreviousMinMax(RangeRule):
    """Range from the previous global model's min and max in each segment, CorBin-FL's rule for weights.

    Args:
        margin: Factor on the half-range, >= 1; the paper's is 1.
        floor: Smallest radius, as a fraction of the largest segment's; keeps an all-zero bias from freezing.

    Example:
        >>> PreviousMinMax(margin=1.2)  # Federated(..., ranges=this, target="weights")
        PreviousMinMax(margin=1.2, floor=0.001)
    """

    margin: float = 1.1
    floor: float = 1e-3

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(margin=self.margin, floor=self.floor)
        if self.margin < 1:
            raise ValueError(f"margin must be >= 1, got {self.margin}; less would clip the model itself")

    def first(self, weights: Tensor, segments: Sequence[int]) -> Ranges:
        parts = torch.split(weights.detach().double().cpu(), list(segments))
        low = torch.stack([part.min() for part in parts])
        high = torch.stack([part.max() for part in parts])
        radius = self.margin * (high - low) / 2
        smallest = self.floor * max(radius.max().item(), 1e-30)
        return Ranges((high + low) / 2, radius.clamp(min=smallest))

    def following(
        self,
        ranges: Ranges,
        weights: Tensor,
        mean: Tensor,
        noise_variance: Tensor | None,
        segments: Sequence[int],
    ) -> Ranges:
        return self.first(weights, segments)


@dataclass(frozen=True)
class AdaptiveRange(RangeRule):
    """Adaptive range that follows the size of the mean update, with the decoding noise taken out.

    The next radius aims at `multiple` times sqrt(mean square of the decoded mean - noise bound). The
    bound is never below the noise's variance, and is raised by four standard deviations of a mean of
    as many squares of normal values as the segment has coordinates: noise alone hardly ever pushes the
    radius up, not even that of a small bias. Where the noise hides the signal, the radius (and with it
    the noise) shrinks slowly until the signal shows or the floor is met; slowly, because a client's
    update is larger than the mean that the rule can see.

    Args:
        initial: First radius, as a fraction of the root mean square of the initial weights, > 0.
        multiple: Aim, in units of the mean update's root mean square, > 0.
        growth: Largest factor up per round, >= 1.
        shrink: Largest factor down per round, in (0, 1].
        floor: Smallest radius, in units of the update, > 0.

    Example:
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

    def first(self, weights: Tensor, segments: Sequence[int]) -> Ranges:
        """One radius for all segments: per-segment ones would be wrong for biases that start at zero."""
        size = weights.detach().double().square().mean().sqrt().item() or 1.0
        radius = torch.full((len(segments),), max(self.initial * size, self.floor), dtype=torch.float64)
        return Ranges(torch.zeros_like(radius), radius)

    def following(
        self,
        ranges: Ranges,
        weights: Tensor,
        mean: Tensor,
        noise_variance: Tensor | None,
        segments: Sequence[int],
    ) -> Ranges:
        parts = torch.split(mean.detach().double().cpu(), list(segments))
        energy = torch.stack([part.square().mean() for part in parts])
        if noise_variance is not None:
            sizes = torch.tensor(segments, dtype=torch.float64)
            energy = (energy - noise_variance * (1 + 4 * (2 / sizes).sqrt())).clamp(min=0)
        aim = self.multiple * energy.sqrt()
        radius = torch.minimum(torch.maximum(aim, self.shrink * ranges.radius), self.growth * ranges.radius)
        return Ranges(torch.zeros_like(radius), radius.clamp(min=self.floor))
