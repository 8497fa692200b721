"""CSGM, the rival of SIGM: subsampled coordinates, stochastic rounding, and Gaussian noise from the server.

Source: Chen, Song, Ozgur, Kairouz, Privacy Amplification via Compression, NeurIPS 2023, in the form in which
Hegazy et al. compare with it.

Departure: the number of levels is odd, so that 0 is one of them. The paper's is a power of two, and an update
of zero is then rounded to one of two levels around 0 at random, so that "an update is replaced by zero" is
not "a message is removed", for which the paper proves its guarantee: with one bit, values of 1 and of 0 are
two units apart half of the time. `levels="even"` is that form, with a claim that is true for zero-out:

A released coordinate is a mixture, over the victim's selection and rounding, of Gaussians N(level, z^2).
Hockey sticks are jointly convex, so the mixtures of two updates are as far apart as the farthest pair of
levels at most, whatever is hidden: 1 from zero where 0 is a level, 1 + 1 / (2^bits - 1) where it is not.
With a level 0 the other world is one Gaussian, selected or not, and hidden selection amplifies as Chen et
al. say. Without one it amplifies less, by the same argument for two laws that share their unselected part
(`_HiddenSelection`).
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
from lightning_fedq.functional.sampled_loops import round_selected
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
    """A Gaussian about one of several levels with some probability, else about 0, in both worlds.

    P = (1 - g) N + g P1 and Q = (1 - g) N + g Q1, N about 0. With e^x = 1 + (e^y - 1) / g and b = e^(y - x),
    P - e^y Q = g (P1 - e^x ((1 - b) N + b Q1)), so H_y(P || Q) = g H_x(P1 || (1 - b) N + b Q1), at most
    g ((1 - b) H_x(P1 || N) + b H_x(P1 || Q1)) by convexity. P1 is a mixture over levels, at most 1 from 0;
    Q1 is half about `around` and half about -`around`, so that convexity again leaves the largest level
    against each of both with weight 1/2.

    Args:
        noise_multiplier: Std of the noise over the largest level, > 0.
        around: Distance from 0 of the two levels that an update of zero is sent as, in (0, 1].
        probability: g in (0, 1].

    References:
        Balle, Barthe, Gaboardi, Privacy Amplification by Subsampling, NeurIPS 2018, theorem 2 (advanced joint
        convexity).
    """

    noise_multiplier: float
    around: float
    probability: float
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        # both orders have the same bound
        size, g = np.minimum(np.abs(epsilons), 600.0), self.probability  # it falls: beyond, that at 600
        inner = np.log1p(np.expm1(size) / g)  # e^x = 1 + (e^y - 1) / g
        weight = np.exp(size - inner)  # b = e^(y - x)
        unselected, near, far = (
            gaussian_curve(inner, max(d / self.noise_multiplier, 1e-300))
            for d in (1.0, 1.0 - self.around, 1.0 + self.around)
        )
        found = g * ((1.0 - weight) * unselected + weight * 0.5 * (near + far))
        # H_(-x)(P || Q) = 1 - e^-x + e^-x H_x(Q || P)
        both: Array = np.where(epsilons >= 0.0, found, -np.expm1(-size) + np.exp(-size) * found)
        return both


@dataclass(frozen=True)
class CSGM(SubsampledMechanism):
    """Subsampled coordinates with stochastic rounding, to which a trusted server adds Gaussian noise.

    Args:
        clip_value: Largest absolute value of a coordinate, > 0.
        noise_multiplier: z > 0; the std of the mean's noise is z clip_value / (gamma n).
        sampling_probability: gamma in (0, 1].
        flatten: Rotate updates first, see `SubsampledMechanism`.
        bits: Bits per coordinate that is sent, 2 to 16; from 1 with even levels.
        levels: "odd" has 2^bits - 1 levels, 0 among them; "even" is the paper's form of 2^bits levels, whose
            claims are weaker, because an update of zero is sent as one of two levels around it.

    Example:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = CSGM(clip_value=1.0, noise_multiplier=1.0)
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        32
    """

    bits: int = 2
    levels: Literal["odd", "even"] = "odd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= 16 or (self.levels == "odd" and self.bits < 2):
            raise ValueError(
                f"bits must be in [2, 16], or 1 with levels='even', in which an update of zero is sent as "
                f"noise, got {self.bits}"
            )

    @property
    def _cells(self) -> int:
        """Levels - 1."""
        return (1 << self.bits) - (2 if self.levels == "odd" else 1)

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32, 1 for the lowest level and up, and 0 where nothing is sent
        rows = self._rows(update, context, rand)
        symbols, num_bits, clipped = torch.empty(rows.shape, dtype=torch.int32), 0, 0

        def put(part: slice, words: NDArray[np.uint32], row: int, selected: Mask) -> tuple[int, int]:
            units, out = np.empty(words.size), symbols[row].numpy()
            outside = self._to_units(rows[row].numpy(), part.start, units)
            return outside, round_selected(units, words, selected[part], self._cells, out[part])

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
        # Float64, not on the `grid` yet. If flattened, rounded and turned back. A symbol 0 adds nothing but
        # its client's share of the noise.
        rows = symbols.reshape(len(clients), -1).numpy()
        total = np.zeros(rows.shape[1])
        for row, client in enumerate(clients):
            level = (2 * (rows[row] - 1) - self._cells) / self._cells  # exactly 0 in the middle
            total += np.where(rows[row] > 0, level, 0.0) / self.sampling_probability
            total += self.noise_share(client, context, rand)
        return self._released(total, context, rand, symbols)

    def code(self, context: RoundContext) -> Code:
        """Fixed length with room for "nothing sent"."""
        # 2^bits - 1 levels leave a code for nothing sent, 2^bits do not
        return FixedLength(self.bits if self.levels == "odd" else self.bits + 1)

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """0 where nothing is sent, and the levels from 1 on. Codes have room for more."""
        return 0, self._cells + 1

    def message_code(self, client: int, context: RoundContext, rand: PublicRandomness) -> Code:
        return Subset(self.selected(client, context, rand), FixedLength(self.bits), smallest=1)

    def _input_variance(self) -> float:
        gamma = self.sampling_probability
        return super()._input_variance() + (1.0 / self._cells) ** 2 / gamma

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        size = len(context.cohort)
        client: Loss = NonPrivate("the cohort has no other client, and this one knows all of the noise")
        if size > 1:
            kept = math.sqrt((size - 1) / size)
            # largest distance between a level and one that an update of zero is sent as
            apart = 1.0 if self.levels == "odd" else 1.0 + 1.0 / self._cells
            note = "the noise less the curious client's own share"
            client = GaussianLoss(self.noise_multiplier / apart * kept, note)
        if self.levels == "odd":
            return self._subsampled_claims(client, context)
        law = self.noise_multiplier, 1.0 / self._cells, self.sampling_probability
        outsider = _HiddenSelection(*law, "zero is sent as one of two levels; selection hidden")
        return self._subsampled_claims(client, context, outsider)
