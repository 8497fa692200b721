"""Correlated quantisation (CQ): the cohort stratifies one uniform variable, errors cancel. No privacy.

Source: Suresh, Sun, Ro, Yu, Correlated Quantization for Distributed Mean Estimation and Optimization,
ICML 2022, algorithms 1 (one bit) and 2 (k levels). Departures: the permutation is a random order of the
cohort rotated by a uniform offset per coordinate, as in the authors' code; probabilities are integers
over 2^32 instead of floats. Offsets are public, since nothing here hides anything from anybody. Clients that
drop out leave a hole in the strata: the mean over the others stays unbiased, with more variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.core import Adversary, Mechanism, Message, NonPrivate, PrivacyClaim, RoundContext
from lightning_fedq.functional.one_bit.multi_level import (
    level_step,
    multi_level_dequantize_sum,
    multi_level_quantize,
    multi_level_shifts,
)
from lightning_fedq.functional.one_bit.threshold_coin import worst_group_variance
from lightning_fedq.mechanisms.bases.one_bit import RotatedStrata
from lightning_fedq.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.wire.coding import FixedLength

_CHUNK = 1 << 16


@dataclass(frozen=True)
class CorrelatedQuantization(Mechanism):
    """Correlated stochastic quantiser to `levels` levels, errors cancel over the cohort. Not private.

    Args:
        levels: k in [2, 256]; 2 is one bit a coordinate, k costs ceil(log2 k) bits.
    """

    homomorphic = True

    levels: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= 256:
            raise ValueError(f"levels must be in [2, 256], got {self.levels}")

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """The whole cohort is one group."""
        return (num_clients,)

    def _shifts(self, context: RoundContext, rand: PublicRandomness) -> Tensor:
        words = rand.public("level shifts").words(context.dim if self.levels > 2 else 0)
        return multi_level_shifts(torch.from_numpy(words), self.levels, context.dim)

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `Mechanism.encode`. Symbols are uint8 levels."""
        rows = update.detach().reshape(len(rand.clients), context.dim).float()
        symbols, clipped = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device), 0
        center, radius = context.expand(context.center), context.expand(context.radius)
        strata, shifts = (
            RotatedStrata(rand.public("strata"), len(context.cohort)),
            self._shifts(context, rand),
        )
        streams = [rand.private(client, "strata") for client in rand.clients]
        for first in range(0, context.dim, _CHUNK):
            part = slice(first, min(first + _CHUNK, context.dim))
            center_, radius_, shift = (t[part].to(rows.device) for t in (center, radius, shifts))
            offsets = strata.draw(part.stop - first)
            for row, (client, stream) in enumerate(zip(rand.clients, streams, strict=True)):
                words = stream.words(len(offsets))
                strata.apply(words, offsets, context.place(client)[1])
                drawn = torch.from_numpy(words.astype(np.int64)).to(rows.device)
                x = (rows[row, part].double() - center_) / radius_
                clipped += int((x.abs() > 1.0).sum())
                symbols[row, part] = multi_level_quantize(x, drawn, shift, self.levels)
        return Message(symbols.reshape(update.shape), self.code(context).num_bits(symbols), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """See `Mechanism.decode`."""
        total = symbols.sum(0, dtype=torch.int64) if symbols.dim() == 2 else symbols
        shifts = self._shifts(context, rand).to(total.device)
        center, radius = (context.expand(t.to(total.device)) for t in (context.center, context.radius))
        unit = multi_level_dequantize_sum(total, len(clients), shifts, self.levels)
        return (len(clients) * center + radius * unit).float()

    def code(self, context: RoundContext) -> FixedLength:
        """ceil(log2 levels) bits a coordinate."""
        return FixedLength((self.levels - 1).bit_length())

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """The levels. Their code may have room for more."""
        return 0, self.levels - 1

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """At most (step / n)^2 times the variance of the rounded-up count."""
        whole = len(clients) == len(context.cohort)
        ones = worst_group_variance(len(clients), 1.0) if whole else len(clients) / 4
        return (context.radius * level_step(self.levels) / len(clients)) ** 2 * ones

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """No guarantee against anybody: at the ends of the range the message is certain."""
        reason = NonPrivate("correlated quantisation adds no noise; an extreme input decides its message")
        return tuple(PrivacyClaim(adversary, reason, context.dim) for adversary in Adversary)
