"""SIGM: subsampled coordinates, each quantised so that the noise of the mean is exactly Gaussian.

Source: Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section
5, with the shifted layered quantiser. Departures from the paper: inputs are bounded in the l-infinity norm,
as the paper's proof needs. A coordinate that no client sends gets Gaussian noise, while the paper divides by
zero.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.chunks import in_chunks
from lightning_fedq.functional.exact_error.dither import dither_quantize_row
from lightning_fedq.functional.exact_error.layered import minimal_step
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.exact_error import (
    INEXACT,
    Array,
    Quantizer,
    fixed_length,
    shortest_inputs,
)
from lightning_fedq.mechanisms.bases.subsampled import Mask, SubsampledMechanism
from lightning_fedq.mechanisms.interface import GaussianLoss, Message, PrivacyClaim, RoundContext
from lightning_fedq.mechanisms.layered import layered_quantizer, next_words, selected_quantizer
from lightning_fedq.wire.coding import Code
from lightning_fedq.wire.entropy_coding import Elias, Subset
from lightning_fedq.wire.range_coding import ConditionalRange


@dataclass(frozen=True)
class SIGM(SubsampledMechanism):
    """Subsampled individual Gaussian mechanism: some coordinates, and an exactly Gaussian mean error.

    Take it if you trust the server and want less than one bit per coordinate with exactly Gaussian noise.

    Args:
        clip_value: Largest absolute value of a coordinate, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, z > 0. The std of the mean's noise is
            z clip_value / (gamma n).
        sampling_probability: Probability gamma in (0, 1] that a client sends a coordinate.
        flatten: Whether to rotate updates first, see `SubsampledMechanism`.
        entropy_code: "range" codes each symbol with its distribution given dither and step. "fixed" gives
            every symbol the same number of bits.

    The claims are per coordinate under zero-out adjacency, against outsiders (with amplification by hidden
    selection) and curious clients. The server is trusted.

    A message has a variable number of bits for the selected coordinates ("range"), or a fixed number for each
    ("fixed").

    References:
        Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section
        5, with the shifted layered quantiser

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = SIGM(clip_value=1.0, noise_multiplier=1.0)
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        208
    """

    entropy_code: Literal["range", "fixed"] = "range"

    def quantizers(
        self, context: RoundContext, rand: PublicRandomness
    ) -> Callable[[int], tuple[Mask, Quantizer]]:
        """Return a function that makes a client's selection and its quantiser.

        The noise in coordinate j has std z / sqrt(n_j), with n_j the number of clients that send it.
        """
        scale = self._scales(context)[self.counts(context, rand)]
        context = self._round(context)

        def make(client: int) -> tuple[Mask, Quantizer]:
            stream = rand.shared_with_server(client, "layered dither")
            quantizer = layered_quantizer(stream, context.dim, 1.0, "shifted")
            np.multiply(quantizer.step, scale, out=quantizer.step)
            np.multiply(quantizer.offset, scale, out=quantizer.offset)
            return self.selected(client, context, rand), quantizer

        return make

    def _scales(self, context: RoundContext) -> Array:
        """Return the std of a client's noise, in units of clip_value, by the number of clients that send."""
        # n_j errors of variance z^2 / n_j have a sum of variance z^2 for any selection
        return self.noise_multiplier / np.sqrt(np.maximum(np.arange(len(context.cohort) + 1), 1))

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32, and 0 for a coordinate that is not sent
        rows, counts = self._rows(update, context, rand), self.counts(context, rand)
        scales, symbols = self._scales(context), torch.empty(rows.shape, dtype=torch.int32)
        num_bits, clipped = 0, 0

        def quantize(part: slice, words: NDArray[np.uint64], row: int, selected: Mask) -> tuple[Any, ...]:
            """Return the number of values outside of the range, the largest |symbol|, and what is sent."""
            chosen, units = selected[part], np.empty(part.stop - part.start)
            outside = self._to_units(rows[row].numpy(), part.start, units)
            # layers are drawn for selected coordinates only
            dither, step, _ = selected_quantizer(words, chosen, 1.0, "shifted")
            step *= scales[counts[part][chosen]]
            sent, out = np.empty(len(step), np.int32), symbols[row].numpy()
            largest = dither_quantize_row(units[chosen], 1.0, dither, step, sent)
            out[part] = 0
            out[part][chosen] = sent
            return outside, largest, dither, step, sent

        for row, client in enumerate(rand.clients):
            selected = self.selected(client, context, rand)
            words = partial(next_words, rand.shared_with_server(client, "layered dither"))
            one = partial(quantize, row=row, selected=selected)
            outside, largest, *drawn = zip(*in_chunks(rows.shape[1], words, one), strict=True)
            dithers, steps, sent = map(np.concatenate, drawn)
            if not (size := max(largest)) < 2.0**30:
                raise ValueError(f"a symbol of client {client} is {size:.3g}. Raise noise_multiplier.")
            clipped += min(sum(outside), context.dim)
            if sent.size:
                code = self._code(selected, dithers, steps, context).inner
                num_bits += code.num_bits(torch.from_numpy(sent))
        return Message(symbols.reshape((*update.shape[:-1], rows.shape[1])), num_bits, clipped)

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        # zero for coordinates that are not sent, otherwise a symbol that some |x| <= clip_value gives
        selected, quantizer = self.quantizers(context, rand)(client)
        silent = symbols.numpy()[~selected]
        shortest = shortest_inputs(symbols, quantizer)[selected]
        return not silent.any() and bool((shortest <= 1.0 + INEXACT).all())

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # the result is float64, and not on the `grid` yet unless it is flattened
        rows = symbols.reshape(len(clients), -1).contiguous().numpy()
        total, counts = np.zeros(rows.shape[1]), self.counts(context, rand)
        empty, scales = counts == 0, self._scales(context)

        def add(part: slice, words: NDArray[np.uint64], row: int, selected: Mask) -> None:
            chosen = selected[part]
            dither, step, offset = selected_quantizer(words, chosen, 1.0, "shifted")
            scale = scales[counts[part][chosen]]
            decoded = (rows[row, part][chosen] - dither) * (step * scale) + offset * scale
            total[part][chosen] += decoded / self.sampling_probability

        for row, client in enumerate(clients):
            words = partial(next_words, rand.shared_with_server(client, "layered dither"))
            selected = self.selected(client, context, rand)
            in_chunks(total.size, words, partial(add, row=row, selected=selected))
            if empty.any():
                total += self.noise_share(client, context, rand, empty)
        return self._released(total, context, rand)

    def code(self, context: RoundContext) -> Code:
        """Return Elias gamma, which a reader can decode without shared randomness."""
        return Elias()

    def message_code(self, client: int, context: RoundContext, rand: PublicRandomness) -> Code:
        selected, (dither, step, _) = self.quantizers(context, rand)(client)
        return self._code(selected, dither[selected], step[selected], context)

    def _code(self, selected: Mask, dither: Array, step: Array, context: RoundContext) -> Subset:
        if self.entropy_code == "fixed":  # a coordinate that all clients send has the shortest step
            shortest = minimal_step("gaussian", self._scales(context)[-1])
            return Subset(selected, fixed_length(Quantizer(dither, step, np.zeros(0)), shortest))
        ends = np.cumsum(self._round(context).segments)
        sizes = (int(part.sum()) for part in np.split(selected, ends[:-1]))
        segments = tuple(size for size in sizes if size)
        return Subset(selected, ConditionalRange(dither, step, segments))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # a client knows at most half of the noise of a coordinate that another client also sends
        noise = "a coordinate's noise, of which a curious client knows its own part, at most half"
        return self._subsampled_claims(GaussianLoss(self.noise_multiplier * math.sqrt(0.5), noise), context)
