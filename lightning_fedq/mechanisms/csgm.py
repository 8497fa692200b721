"""CSGM: subsampled coordinates, stochastic rounding, and Gaussian noise from a trusted server.

Source: Chen, Song, Ozgur, Kairouz, Privacy Amplification via Compression, NeurIPS 2023, in the form in which
Hegazy et al. compare SIGM with it.

Departure: the number of levels is odd, so that 0 is a level. The paper's number is a power of two. An update
of zero is then rounded at random to one of two levels around 0. For this form "an update is replaced by zero"
is not "a message is removed", for which the paper proves its guarantee: with one bit, values of 1 and of 0
are two units apart half of the time. `rounding="even"` is this form, with a claim that is true for zero-out
adjacency.

A released coordinate is a mixture, over the victim's selection and rounding, of Gaussians N(level, z^2).
Hockey sticks are jointly convex, so the mixtures of two updates are at most as far apart as the farthest pair
of levels, for any hidden randomness: 1 from zero if 0 is a level, and 1 + 1 / (2^bits - 1) otherwise. If 0 is
a level, the input of zero gives one Gaussian, selected or not, and hidden selection amplifies as Chen et al.
prove. Otherwise it amplifies less, by the same argument for two distributions that share their unselected
part (`_HiddenSelection`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.chunks import in_chunks
from lightning_fedq.functional.divergences import Array, gaussian_curve
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.subsampled import Mask, SubsampledMechanism
from lightning_fedq.mechanisms.interface import (
    GaussianLoss,
    Loss,
    Message,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
)
from lightning_fedq.wire.coding import Code, FixedLength
from lightning_fedq.wire.entropy_coding import Subset


@dataclass(frozen=True)
class _HiddenSelection(Loss):
    """Loss of a Gaussian that is around one of several levels with some probability, and around 0 otherwise.

    P = (1 - g) N + g P1 and Q = (1 - g) N + g Q1, with N around 0. With e^x = 1 + (e^y - 1) / g and b = e^(y
    - x), P - e^y Q = g (P1 - e^x ((1 - b) N + b Q1)). Hence H_y(P || Q) = g H_x(P1 || (1 - b) N + b Q1),
      which is at most
    g ((1 - b) H_x(P1 || N) + b H_x(P1 || Q1)) by convexity. P1 is a mixture over levels at most 1 from 0. Q1
    is around `around` and -`around` with probability 1/2 each. By convexity again, the worst case is the
    largest level against each of the two with weight 1/2.

    Args:
        noise_multiplier: Std of the noise over the largest level, > 0.
        around: Distance from 0 of the two levels that encode an update of zero, in (0, 1].
        probability: Selection probability g in (0, 1].
        note: Source of the loss, for reports.

    References:
        Balle, Barthe, Gaboardi, Privacy Amplification by Subsampling, NeurIPS 2018, theorem 2 (advanced joint
        convexity).
    """

    noise_multiplier: float
    around: float
    probability: float
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        # the bound falls, so it may stop at 600, and is the same for both orders of the two distributions
        size = np.minimum(np.abs(epsilons), 600.0)
        inner = np.log1p(np.expm1(size) / self.probability)  # e^x = 1 + (e^y - 1) / g
        selected = np.exp(size - inner)  # b = e^(y - x)

        def against(distance: float) -> Array:
            """Return H_x of two Gaussians whose means are this many largest levels apart."""
            return gaussian_curve(inner, max(distance / self.noise_multiplier, 1e-300))

        either_level = 0.5 * (against(1.0 - self.around) + against(1.0 + self.around))
        bound = self.probability * ((1.0 - selected) * against(1.0) + selected * either_level)
        # H_(-x)(P || Q) = 1 - e^-x + e^-x H_x(Q || P)
        swapped = -np.expm1(-size) + np.exp(-size) * bound
        return np.asarray(np.where(epsilons >= 0.0, bound, swapped))


@dataclass(frozen=True)
class CSGM(SubsampledMechanism):
    """Subsampled coordinates with stochastic rounding, to which a trusted server adds Gaussian noise.

    Take it to compare with SIGM, or if you trust the server and want few bits per coordinate that is sent.

    Args:
        clip_value: Largest absolute value of a coordinate, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, z > 0. The std of the mean's noise is
            z clip_value / (gamma n).
        sampling_probability: Probability gamma in (0, 1] that a client sends a coordinate.
        flatten: Whether to rotate updates first, see `SubsampledMechanism`.
        bits: Bits per coordinate that is sent, 2 to 16, or 1 to 16 with even levels.
        rounding: "odd" has 2^bits - 1 levels, including 0. "even" is the paper's form with 2^bits levels. Its
            claims are weaker, because an update of zero is sent as one of two levels around it.

    The claims are per coordinate under zero-out adjacency, against outsiders (with amplification by hidden
    selection) and curious clients. The server is trusted.

    A message has `bits` bits per selected coordinate.

    References:
        Chen, Song, Ozgur, Kairouz, Privacy Amplification via Compression, NeurIPS 2023, in the form in which
        Hegazy et al. compare with it

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = CSGM(clip_value=1.0, noise_multiplier=1.0)
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        32
    """

    bits: int = 2
    rounding: Literal["odd", "even"] = "odd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= 16 or (self.rounding == "odd" and self.bits < 2):
            raise ValueError(f"bits must be in [2, 16], or 1 with rounding='even', got {self.bits}")

    @property
    def _cells(self) -> int:
        """Number of levels minus one."""
        return (1 << self.bits) - (2 if self.rounding == "odd" else 1)

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32: 1 is the lowest level, and 0 a coordinate that is not sent
        rows = self._rows(update, context, rand)
        symbols, num_bits, clipped = torch.empty(rows.shape, dtype=torch.int32), 0, 0

        def put(part: slice, words: NDArray[np.uint32], row: int, selected: Mask) -> tuple[int, int]:
            units, out = np.empty(words.size), symbols[row].numpy()
            outside = self._to_units(rows[row].numpy(), part.start, units)
            place = (units + 1.0) * (0.5 * self._cells)
            floor = np.minimum(np.floor(place), self._cells - 1)
            # at +1 the fraction is 1, and 2^32 above every word
            up = words < ((place - floor) * 2.0**32).astype(np.int64)
            out[part] = np.where(selected[part], floor + up + 1, 0)
            return outside, int(selected[part].sum())

        for row, client in enumerate(rand.clients):
            stream = rand.private(client, "stochastic rounding")
            one = partial(put, row=row, selected=self.selected(client, context, rand))
            outside, sent = zip(*in_chunks(rows.shape[1], stream.words, one), strict=True)
            clipped += min(sum(outside), context.dim)
            num_bits += self.bits * sum(sent)
        shape = (*update.shape[:-1], rows.shape[1])
        return Message(symbols.reshape(shape), num_bits, clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # The result is float64, and not on the `grid` yet unless it is flattened. A symbol 0 adds only its
        # client's share of the noise.
        rows = symbols.reshape(len(clients), -1).numpy()
        total = np.zeros(rows.shape[1])
        for row, client in enumerate(clients):
            level = (2 * (rows[row] - 1) - self._cells) / self._cells  # exactly 0 in the middle
            total += np.where(rows[row] > 0, level, 0.0) / self.sampling_probability
            total += self.noise_share(client, context, rand)
        return self._released(total, context, rand)

    def code(self, context: RoundContext) -> Code:
        """Return a fixed-length code with room for a coordinate that is not sent."""
        # 2^bits - 1 levels leave one code word for a coordinate that is not sent, 2^bits levels do not
        return FixedLength(self.bits if self.rounding == "odd" else self.bits + 1)

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """Return 0 (a coordinate that is not sent) and the number of levels. The code has room for more."""
        return 0, self._cells + 1

    def message_code(self, client: int, context: RoundContext, rand: PublicRandomness) -> Code:
        return Subset(self.selected(client, context, rand), FixedLength(self.bits), smallest=1)

    def _input_variance(self) -> float:
        gamma = self.sampling_probability
        return super()._input_variance() + (1.0 / self._cells) ** 2 / gamma

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        size = len(context.cohort)
        client: Loss = NonPrivate("the cohort has no other client, and this client knows all of the noise")
        if size > 1:
            share = math.sqrt((size - 1) / size)
            # largest distance between a level and a level that encodes zero
            apart = 1.0 if self.rounding == "odd" else 1.0 + 1.0 / self._cells
            note = "the noise less the curious client's own share"
            client = GaussianLoss(self.noise_multiplier / apart * share, note)
        if self.rounding == "odd":
            return self._subsampled_claims(client, context)
        law = self.noise_multiplier, 1.0 / self._cells, self.sampling_probability
        outsider = _HiddenSelection(*law, "zero is sent as one of two levels, and the selection is hidden")
        return self._subsampled_claims(client, context, outsider)
