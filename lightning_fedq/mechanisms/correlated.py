"""Correlated quantisation (CQ): the cohort stratifies a uniform variable, and errors cancel. Not private.

Source: Suresh, Sun, Ro, Yu, Correlated Quantization for Distributed Mean Estimation and Optimization, ICML
2022, algorithms 1 (one bit) and 2 (k levels). Departures from the paper: the permutation is a random order of
the cohort, rotated by a uniform offset per coordinate, as in the authors' code. Probabilities are integers
over 2^32 instead of floats. Offsets are public, because nothing needs to be hidden. If clients drop out, a
stratum is empty: the mean of the others stays unbiased, with more variance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.linear_decode import decode_sum, decode_total, sum_of_rows
from lightning_fedq.functional.one_bit.multi_level import (
    level_step,
    multi_level_dequantize_sum,
    multi_level_quantize,
    multi_level_shifts,
)
from lightning_fedq.functional.one_bit.threshold_coin import stratify_words, worst_group_variance
from lightning_fedq.functional.segments import normalise_segments, segment_lines
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism, Message, PrivacyClaim, RoundContext, no_guarantee
from lightning_fedq.wire.coding import FixedLength

_CHUNK = 1 << 16


@dataclass(frozen=True)
class CorrelatedQuantization(Mechanism):
    """Correlated stochastic quantiser with `levels` levels, whose errors cancel in a cohort. Not private.

    Take it for unbiased compression without privacy, if most clients of a cohort answer.

    Args:
        levels: Number k of levels, in [2, 256].

    Nothing is claimed against any adversary.

    A message has ceil(log2 levels) bits per coordinate.

    References:
        Suresh, Sun, Ro, Yu, Correlated Quantization for Distributed Mean Estimation and Optimization, ICML
        2022, algorithms 1 (one bit) and 2 (k levels)

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = CorrelatedQuantization(levels=16)
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        64
    """

    homomorphic = True

    levels: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= 256:
            raise ValueError(f"levels must be in [2, 256], got {self.levels}")

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Return one group, the whole cohort."""
        return (num_clients,)

    def _shifts(self, rand: PublicRandomness) -> Callable[[int], NDArray[np.float64]]:
        """Return a function that draws the public shifts of the next coordinates."""
        if self.levels == 2:
            return np.zeros
        words = rand.public("level shifts").words
        return lambda count: multi_level_shifts(words(count))

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are uint8 levels
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous().numpy()
        symbols, clipped = np.empty(rows.shape, np.uint8), 0
        lines = segment_lines(context.segments, context.center, context.radius)
        strata, number = rand.public("strata"), len(context.cohort)
        shifts_of, units = self._shifts(rand), np.empty(_CHUNK)
        places = [context.place(client)[1] for client in rand.clients]
        streams = [rand.private(client, "strata") for client in rand.clients]
        for first in range(0, context.dim, _CHUNK):
            part = slice(first, min(first + _CHUNK, context.dim))
            size = part.stop - first
            offsets, shifts, x = strata.uniform_below(number, size), shifts_of(size), units[:size]
            for row, (place, stream) in enumerate(zip(places, streams, strict=True)):
                words = stratify_words(stream.words(size), offsets, place, number)
                clipped += normalise_segments(rows[row], first, lines, True, x)
                symbols[row, part] = multi_level_quantize(x, words, shifts, self.levels)
        sent = torch.from_numpy(symbols).reshape(update.shape)
        return Message(sent, self.code(context).num_bits(sent), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        count, base = len(clients), len(clients) * context.center
        if self.levels == 2:
            return decode_sum(symbols, context.segments, base, context.radius, 2, count)
        total, shifts_of = sum_of_rows(symbols).numpy(), self._shifts(rand)
        for first in range(0, context.dim, _CHUNK):
            part = total[first : first + _CHUNK]
            part[:] = multi_level_dequantize_sum(part, count, shifts_of(len(part)), self.levels)
        return decode_total(torch.from_numpy(total), context.segments, base, context.radius)

    def code(self, context: RoundContext) -> FixedLength:
        """Return ceil(log2 levels) bits per coordinate."""
        return FixedLength((self.levels - 1).bit_length())

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """Return the smallest and the largest level. The code may have room for more."""
        return 0, self.levels - 1

    def influence(self, client: int, context: RoundContext) -> float:
        # with more than two levels, the shift moves levels up to 2 / k beyond the range
        return 1.0 if self.levels == 2 else 1.0 + 2.0 / self.levels

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Bound the variance by (step / n)^2 times the variance of the number of clients that round up."""
        whole = len(clients) == len(context.cohort)
        ones = worst_group_variance(len(clients), 1.0) if whole else len(clients) / 4
        return (context.radius * level_step(self.levels) / len(clients)) ** 2 * ones

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return no guarantee, because inputs at the ends of the range determine their message."""
        return no_guarantee(
            "correlated quantisation adds no noise, so an extreme input determines its message", context.dim
        )
