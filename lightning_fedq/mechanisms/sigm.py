"""SIGM: subsampled coordinates, each quantised so that the noise of the mean is exactly Gaussian.

Source: Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section
5, with the shifted layered quantiser. Departures: the input condition is the l-infinity one that the paper's
proof needs, and a coordinate that nobody sends gets Gaussian noise where the paper divides by zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.core import (
    GaussianLoss,
    Message,
    PrivacyClaim,
    RoundContext,
)
from lightning_fedq.functional.exact_error.dither import dither_quantize_row
from lightning_fedq.mechanisms.bases.exact_error import INEXACT, Quantizer, shortest_inputs
from lightning_fedq.mechanisms.bases.subsampled import Mask, SubsampledMechanism
from lightning_fedq.mechanisms.layered import layered_quantizer
from lightning_fedq.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.wire.coding import Code
from lightning_fedq.wire.entropy_coding import Elias, Subset
from lightning_fedq.wire.range_coding import ConditionalRange


@dataclass(frozen=True)
class SIGM(SubsampledMechanism):
    """Subsampled individual Gaussian mechanism: some coordinates, the mean error is exactly Gaussian.

    Args:
        clip_value: Largest absolute value of a coordinate, > 0.
        noise_multiplier: z > 0; the std of the mean's noise is z clip_value / (gamma n).
        sampling_probability: gamma in (0, 1].
    """

    def quantizers(
        self, context: RoundContext, rand: PublicRandomness
    ) -> Callable[[int], tuple[Mask, Quantizer]]:
        """Return what makes a client's selection and its quantiser, with noise z / sqrt(n_j) in coordinate
        j."""
        scale = self.noise_multiplier / np.sqrt(np.maximum(self.counts(context, rand), 1))

        def make(client: int) -> tuple[Mask, Quantizer]:
            stream = rand.shared_with_server(client, "layered dither")
            quantizer = layered_quantizer(stream, context.dim, 1.0, "shifted")
            np.multiply(quantizer.step, scale, out=quantizer.step)
            np.multiply(quantizer.offset, scale, out=quantizer.offset)
            return self.selected(client, context, rand), quantizer

        return make

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `Mechanism.encode`. Symbols are int32, 0 where a coordinate is not sent."""
        rows, clipped = self._clipped(update, context, rand)
        symbols, num_bits = torch.empty(rows.shape, dtype=torch.int32), 0
        quantizer_of = self.quantizers(context, rand)
        for row, client in enumerate(rand.clients):
            selected, quantizer = quantizer_of(client)
            out = symbols[row].numpy()
            largest = dither_quantize_row(rows[row].numpy(), 1.0, quantizer.dither, quantizer.step, out)
            if not largest < 2.0**30:
                raise ValueError(f"a symbol of client {client} is {largest:.3g}; raise noise_multiplier")
            out[~selected] = 0
            num_bits += self._code(selected, quantizer, context).num_bits(symbols[row])
        return Message(symbols.reshape(update.shape).to(update.device), num_bits, clipped)

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        """See `Mechanism.can_send`: zeros where nothing is sent, else what some |x| <= clip_value gives."""
        selected, quantizer = self.quantizers(context, rand)(client)
        silent = symbols.cpu().numpy()[~selected]
        shortest = shortest_inputs(symbols, quantizer)[selected]
        return not silent.any() and bool((shortest <= 1.0 + INEXACT).all())

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """See `Mechanism.decode`. Float64, not on the `grid` yet."""
        rows, total = symbols.cpu().reshape(len(clients), context.dim).numpy(), np.zeros(context.dim)
        quantizer_of, empty = self.quantizers(context, rand), self.counts(context, rand) == 0
        for row, client in enumerate(clients):
            selected, (dither, step, offset) = quantizer_of(client)
            total += np.where(selected, (rows[row] - dither) * step + offset, 0.0) / self.sampling_probability
            if empty.any():
                total += np.where(empty, self.noise_share(client, context, rand), 0.0)
        return torch.from_numpy(total * self.clip_value).to(symbols.device)

    def code(self, context: RoundContext) -> Code:
        """Elias gamma: what can be read without any shared randomness."""
        return Elias()

    def message_code(self, client: int, context: RoundContext, rand: PublicRandomness) -> Code:
        """See `Mechanism.message_code`."""
        return self._code(*self.quantizers(context, rand)(client), context)

    @staticmethod
    def _code(selected: Mask, quantizer: Quantizer, context: RoundContext) -> Code:
        ends = np.cumsum(context.segments)
        sizes = (int(part.sum()) for part in np.split(selected, ends[:-1]))
        segments = tuple(size for size in sizes if size)
        return Subset(
            selected, ConditionalRange(quantizer.dither[selected], quantizer.step[selected], segments)
        )

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """See `Mechanism.claims`. A client knows at most half of the noise where another one takes part."""
        noise = "a coordinate's noise, of which a curious client knows its own part, one half at most"
        return self._subsampled_claims(GaussianLoss(self.noise_multiplier * math.sqrt(0.5), noise), context)
