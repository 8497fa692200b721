"""JoPEQ: Laplace noise and a dithered quantiser, tuned so that together they look like more Laplace noise.

Source: Lang, Sofer, Shaked, Shlezinger, Joint Privacy Enhancement and Quantization in Federated Learning,
scalar case, with the authors' constants. Departures, each for a reason:

* The paper wants noise whose sum with a uniform error is exactly Laplace. There is none: its
  characteristic function would have poles. As in the authors' code it is Laplace with the variance left.
* The server knows the dither, so only that smaller noise protects: the level is 2 / scale, which is
  *above* the epsilon asked for. The claims state the attained one, `attained_epsilon`.
* Updates are clipped to the round's public range; the authors normalise by each user's own mean and
  standard deviation and send both in the clear, which is not private. Their 2-D variant rounds in lattice
  coordinates, which is not the Voronoi quantiser, and is left out.

Its stated bias: noise that leaves the quantiser's range is cut off there, so large values shrink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.exact_error.dither import add_uniforms
from lightning_fedq.functional.linear_decode import decode_total, sum_of_rows
from lightning_fedq.functional.noise.quantile_table import quantile_table
from lightning_fedq.functional.private_levels import noisy_levels
from lightning_fedq.functional.segments import normalise_segments, segment_lines
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.bases.received import check_received
from lightning_fedq.mechanisms.interface import (
    LaplaceLoss,
    Loss,
    Mechanism,
    Message,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
    Unit,
    same_for_all,
)
from lightning_fedq.wire.coding import FixedLength

_MOST_SLACK = 1e-2
"""Nats that floats may add to a coordinate's epsilon; beyond, the levels are not resolved."""
_CHUNK = 1 << 16


@dataclass(frozen=True)
class JoPEQ(Mechanism):
    """Joint privacy and quantisation: Laplace noise, then subtractive dithering.

    Args:
        epsilon: Target per coordinate and round, > 0, in nats; what is attained is `attained_epsilon`.
        levels: Levels of the quantiser, >= 2; the authors' rate R has 2^R + 1.

    Example:
        >>> round(JoPEQ(epsilon=0.5, levels=3).attained_epsilon, 3)
        0.523
    """

    homomorphic = True
    level = "epsilon"
    unbiased = False

    epsilon: float
    levels: int = 3

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon)
        if not 2 <= self.levels <= 1 << 16:
            raise ValueError(f"levels must be in [2, 65536], got {self.levels}")
        if self._left_over <= 0:
            raise ValueError(
                f"{self.levels} levels are so coarse that no noise is left at epsilon = {self.epsilon}; "
                "choose more levels or a smaller epsilon"
            )

    @property
    def support(self) -> float:
        """gamma = 1.5 sqrt(1 + 2 (2 / epsilon)^2), half-width of the quantiser in units of the radius."""
        return 1.5 * math.sqrt(1.0 + 8.0 / self.epsilon**2)

    @property
    def step(self) -> float:
        """Delta = 2 gamma / levels, in units of the radius."""
        return 2.0 * self.support / self.levels

    @property
    def _left_over(self) -> float:
        return 8.0 / self.epsilon**2 - self.step**2 / 12.0

    @property
    def noise_scale(self) -> float:
        """b of the Laplace noise, 2 b^2 = 2 (2 / epsilon)^2 - Delta^2 / 12, in units of the radius."""
        return math.sqrt(self._left_over / 2.0)

    @property
    def attained_epsilon(self) -> float:
        """2 / b: the level against whoever knows the dither."""
        return 2.0 / self.noise_scale

    @property
    def float_slack(self) -> float:
        """Most that floats can add to the loss of a level, in nats.

        A level is an interval of noise that begins `support` + 1 away from 0 at most, so that its chance is
        at least p = e^(-(support + 1) / b) (1 - e^(-step / b)) / 2. Each end of it is off by the grid of
        uniforms, 2^-53, by the logarithm's error, z f(z) 2^-51 < 2^-53, and by the rounding of
        (x + noise) / step + dither, less than (support + 1) 2^-51 of noise at a density of 1 / (2 b) at most:
        together less than (1 + (support + 1) / b) 2^-51. That is a share of 2 ends of p, in both worlds.
        """
        far = (self.support + 1.0) / self.noise_scale
        chance = 0.5 * math.exp(-far) * -math.expm1(-self.step / self.noise_scale)
        share = 2.0 * (1.0 + far) * 2.0**-51 / chance if chance > 0.0 else math.inf
        # (1 + share) / (1 - share) <= 1 / (1 - share)^2
        return -2.0 * math.log1p(-share) if share < 0.5 else math.inf

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32 levels
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous().numpy()
        lines = segment_lines(context.segments, context.center, context.radius)
        index, units, clipped = np.empty(rows.shape, np.int32), np.empty(min(_CHUNK, context.dim)), 0
        law = self.noise_scale, self.step, self.levels, quantile_table("laplace")
        for row, client in enumerate(rand.clients):
            private, shared = rand.private(client, "jopeq noise"), self._dither(client, rand)
            for first in range(0, context.dim, _CHUNK):
                part = index[row, first : first + _CHUNK]
                clipped += normalise_segments(rows[row], first, lines, True, units[: len(part)])
                words = private.words64(len(part)), shared.words64(len(part))
                noisy_levels(units[: len(part)], *words, *law, part)
        symbols = torch.from_numpy(index).reshape(update.shape)
        return Message(symbols, self.code(context).num_bits(symbols), clipped)

    @staticmethod
    def _dither(client: int, rand: PublicRandomness) -> Stream:
        return rand.shared_with_server(client, "jopeq dither")

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        check_received(symbols, len(clients), context.dim, self.levels - 1)
        dithers, middle = np.zeros(context.dim), len(clients) * (self.levels - 1) / 2
        for client in clients:
            stream = self._dither(client, rand)
            for first in range(0, context.dim, _CHUNK):
                part = dithers[first : first + _CHUNK]
                add_uniforms(stream.words64(len(part)), part)
        steps = sum_of_rows(symbols).sub_(middle).sub_(torch.from_numpy(dithers))
        base, slope = len(clients) * context.center, context.radius * self.step
        return decode_total(steps, context.segments, base, slope)

    def code(self, context: RoundContext) -> FixedLength:
        """Enough bits for a level."""
        return FixedLength((self.levels - 1).bit_length())

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """The levels. Their code has room for more."""
        return 0, self.levels - 1

    def lever(self, client: int, context: RoundContext) -> float:
        """Outermost level and half a step of dither over the largest honest value, one radius."""
        return self.step * self.levels / 2

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """radius^2 2 (2 / epsilon)^2 / n without overload. Overload only lowers it (and adds bias)."""
        return context.radius**2 * (8.0 / self.epsilon**2) / len(clients)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """The Laplace noise of each coordinate, for every dither, against everybody. No more is counted."""
        slack = self.float_slack
        loss: Loss = NonPrivate(
            "floats of 53 bits do not resolve how unlikely the farthest levels are; choose a smaller epsilon "
            "or fewer levels"
        )
        if slack <= _MOST_SLACK:
            note = f"Laplace noise before the quantiser; epsilon = {self.epsilon:g} was asked for"
            loss = LaplaceLoss(1.0 / (self.attained_epsilon + slack), note)
        sent = f"only the level is sent; float noise costs {slack:.1e} of it, counted"
        return same_for_all(loss, context.dim, (ARBITRARY, FRESH, sent), unit=Unit.COORDINATE)
