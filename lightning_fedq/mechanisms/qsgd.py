"""QSGD and TernGrad: coordinates are rounded at random to multiples of the update's own scale. Not private.

Sources: QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic 2017), s levels of |x| / s, and TernGrad (Wen et al.
2017), the three levels -s, 0 and s of the largest coordinate s = max |x_i|. Both are unbiased for any vector.

Departures: levels have a fixed length. QSGD's authors use Elias codes, and TernGrad would need log2(3) bits
instead of 2. The scale is the first 32 bits of a message, and never less than the exact scale. TernGrad's
clipping and the scaler that its workers share are left out, because the shared scaler is a maximum over exact
updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.scaled import ScaledLevels, longest_square, split_columns, widest
from lightning_fedq.mechanisms.interface import RoundContext

_BLOCK = 1 << 12
"""Coordinates that are rounded at once, so that their random words stay in the cache."""


@dataclass(frozen=True)
class QSGD(ScaledLevels):
    """Random rounding to multiples of |x| / s: sign and log2(s + 1) bits per coordinate. Not private.

    Take it as a baseline of unbiased compression without privacy.

    Args:
        levels: Number s of levels on each side of zero, 1 to 32767.

    Nothing is claimed against any adversary.

    A message has 1 + log2(s + 1) bits per coordinate, and a scale of 32 bits.

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization
        and Encoding, NeurIPS 2017

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = QSGD(levels=7)
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        128
    """

    levels: int = 7

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 32767:
            raise ValueError(f"levels must be in [1, 32767], got {self.levels}")

    @property
    def largest_level(self) -> int:
        return self.levels

    def lengths(self, rows: Tensor) -> Tensor:
        """Return the scale of each row, at least its largest coordinate."""
        return rows.square().sum(1).sqrt()

    def quantize(
        self, rows: Tensor, context: RoundContext, rand: ClientRandomness, levels: NDArray[np.int32]
    ) -> Tensor:
        # |x_i| s / scale is rounded up with the probability of its fraction
        exact = self.lengths(rows)
        scales = exact.float()  # may round down, which could put the largest coordinate beyond the last level
        above = torch.nextafter(scales, torch.tensor(torch.inf))
        scales = torch.where(scales.double() < exact, above, scales)
        factors = (self.levels / torch.where(scales > 0, scales, 1.0).double()).tolist()
        for row, put, factor, client in zip(rows.numpy(), levels, factors, rand.clients, strict=True):
            coins = rand.private(client, "rounding")
            for first in range(0, len(row), _BLOCK):
                values = row[first : first + _BLOCK]
                # the product may exceed the largest level by rounding
                units = np.minimum(np.abs(values) * factor, self.levels)
                floor = np.floor(units)
                # a uniform is never below 0, so an exact level stays unchanged
                sizes = floor + (coins.uniforms(len(values)) < units - floor)
                put[first : first + _BLOCK] = np.where(values < 0.0, -sizes, sizes)
        return scales

    def dequantize(
        self, levels: Tensor, scales: Tensor, clients: Sequence[int], dim: int, rand: PublicRandomness
    ) -> Tensor:
        total = torch.empty(dim, dtype=torch.float32)
        columns = split_columns(levels)
        for sums, part in zip(torch.split(total, [part.shape[1] for part in columns]), columns, strict=True):
            sums.copy_((scales @ part.double()).div_(self.levels))
        return total

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Bound the variance by (|x| / s)^2 / 4 over the number of clients, for updates in range."""
        worst = longest_square(context) / (4.0 * self.levels**2 * len(clients))
        return torch.full((len(context.segments),), worst, dtype=torch.float64)


@dataclass(frozen=True)
class TernGrad(QSGD):
    """Random rounding to -s, 0 or s, where s is the largest coordinate: 2 bits each. Not private.

    Take it as a baseline of unbiased compression without privacy.

    Nothing is claimed against any adversary.

    A message has 2 bits per coordinate, and a scale of 32 bits.

    References:
        Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, 2017

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = TernGrad()
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        96
    """

    levels: int = field(default=1, init=False, repr=False)

    def lengths(self, rows: Tensor) -> Tensor:
        """Return the largest absolute coordinate of each row."""
        return rows.abs().amax(1)

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Bound the variance by s^2 / 4 over the number of clients, for updates in range."""
        worst = float(widest(context).max()) ** 2 / (4.0 * len(clients))
        return torch.full((len(context.segments),), worst, dtype=torch.float64)
