"""JoPEQ: Laplace noise and a dithered quantiser, tuned so that their sum resembles Laplace noise.

Source: Lang, Sofer, Shaked, Shlezinger, Joint Privacy Enhancement and Quantization in Federated Learning,
scalar case, with the authors' constants. Departures from the paper:

* The paper wants noise whose sum with a uniform error is exactly Laplace. No such noise exists, because its
  characteristic function would have poles. As in the authors' code, the noise is Laplace with the remaining
  variance.
* The server knows the dither, so only the smaller Laplace noise protects. The level is 2 / scale, which is
  *above* the requested epsilon. The claims state the attained level, `attained_epsilon`.
* Updates are clipped to the round's public range. The authors normalise by each user's own mean and standard
  deviation and send both in the clear, which is not private. Their 2-D variant is left out, because it rounds
  in lattice coordinates and so is not the Voronoi quantiser.

The mechanism is biased: noise beyond the quantiser's range is cut off, so large values shrink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.linear_decode import decode_total, sum_of_rows
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
"""Most nats that floats may add to a coordinate's epsilon. Beyond, floats do not resolve the levels."""
_CHUNK = 1 << 16


@dataclass(frozen=True)
class JoPEQ(Mechanism):
    """Joint privacy and quantisation: Laplace noise, then subtractive dithering.

    Take it to reproduce the paper, or for local privacy per coordinate with few bits and summable messages.

    Args:
        epsilon_per_coordinate: Target per coordinate and round, > 0, in nats. The attained level is
            `attained_epsilon`.
        levels: Number of levels of the quantiser, >= 2. The authors' rate R has 2^R + 1.

    The claim is `attained_epsilon` per coordinate and round, against every adversary. Hiding by other clients
    is not counted.

    A message has ceil(log2 levels) bits per coordinate.

    References:
        Lang, Sofer, Shaked, Shlezinger, Joint Privacy Enhancement and Quantization in Federated Learning,
        scalar case, with the authors' constants

    Examples:
        >>> round(JoPEQ(epsilon_per_coordinate=0.5, levels=3).attained_epsilon, 3)
        0.523
    """

    homomorphic = True
    level = "epsilon_per_coordinate"
    unbiased = False

    epsilon_per_coordinate: float
    levels: int = 3

    def __post_init__(self) -> None:
        check_positive(epsilon_per_coordinate=self.epsilon_per_coordinate)
        if not 2 <= self.levels <= 1 << 16:
            raise ValueError(f"levels must be in [2, 65536], got {self.levels}")
        if self._left_over <= 0:
            raise ValueError(
                f"{self.levels} levels are too coarse at epsilon = {self.epsilon_per_coordinate}, because "
                "no noise is left. "
                "Choose more levels or a smaller epsilon."
            )

    @property
    def support(self) -> float:
        """Half-width of the quantiser, gamma = 1.5 sqrt(1 + 2 (2 / epsilon)^2), in units of the radius."""
        return 1.5 * math.sqrt(1.0 + 8.0 / self.epsilon_per_coordinate**2)

    @property
    def step(self) -> float:
        """Step of the quantiser, Delta = 2 gamma / levels, in units of the radius."""
        return 2.0 * self.support / self.levels

    @property
    def _left_over(self) -> float:
        """Variance of the Laplace noise, 2 (2 / epsilon)^2 - Delta^2 / 12, in squared units of the radius."""
        return 8.0 / self.epsilon_per_coordinate**2 - self.step**2 / 12.0

    @property
    def noise_scale(self) -> float:
        """Scale b of the Laplace noise, 2 b^2 = 2 (2 / epsilon)^2 - Delta^2 / 12, in units of the radius."""
        return math.sqrt(self._left_over / 2.0)

    @property
    def attained_epsilon(self) -> float:
        """Level 2 / b against adversaries that know the dither."""
        return 2.0 / self.noise_scale

    @property
    def float_slack(self) -> float:
        """Largest amount that floats can add to the loss of a level, in nats.

        A level is an interval of noise that begins at most `support` + 1 away from 0. Its probability is
        therefore at least p = e^(-(support + 1) / b) (1 - e^(-step / b)) / 2. Each end of it has three
        errors: the grid of uniforms, 2^-53, the logarithm's error, z f(z) 2^-51 < 2^-53, and the rounding of
        (x + noise) / step + dither, which is less than (support + 1) 2^-51 of noise at a density of at most 1
        / (2 b). Together they are less than (1 + (support + 1) / b) 2^-51. Two ends of a level make this
        share of p, for both inputs.
        """
        farthest = (self.support + 1.0) / self.noise_scale
        smallest = 0.5 * math.exp(-farthest) * -math.expm1(-self.step / self.noise_scale)
        if smallest <= 0.0:
            return math.inf
        error_of_an_end = (1.0 + farthest) * 2.0**-51
        share = 2.0 * error_of_an_end / smallest
        # (1 + share) / (1 - share) <= 1 / (1 - share)^2
        return -2.0 * math.log1p(-share) if share < 0.5 else math.inf

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32 levels, drawn with private noise and a dither that the server knows
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous().numpy()
        lines = segment_lines(context.segments, context.center, context.radius)
        index, units, clipped = np.empty(rows.shape, np.int32), np.empty(min(_CHUNK, context.dim)), 0
        for row, client in enumerate(rand.clients):
            private, shared = rand.private(client, "jopeq noise"), self._dither(client, rand)
            for first in range(0, context.dim, _CHUNK):
                part = index[row, first : first + _CHUNK]
                clipped += normalise_segments(rows[row], first, lines, True, units[: len(part)])
                noise, dither = private.uniforms(len(part)), shared.uniforms(len(part))
                law = self.noise_scale, self.step
                part[:] = noisy_levels(units[: len(part)], noise, dither, *law, self.levels)
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
                part += stream.uniforms(len(part)) - 0.5
        steps = sum_of_rows(symbols).sub_(middle).sub_(torch.from_numpy(dithers))
        base, slope = len(clients) * context.center, context.radius * self.step
        return decode_total(steps, context.segments, base, slope)

    def code(self, context: RoundContext) -> FixedLength:
        """Return a fixed-length code with enough bits for a level."""
        return FixedLength((self.levels - 1).bit_length())

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """Return the smallest and the largest level. The code has room for more."""
        return 0, self.levels - 1

    def influence(self, client: int, context: RoundContext) -> float:
        """Return the outermost level plus half a step of dither, over one radius (the honest maximum)."""
        return self.step * self.levels / 2

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return radius^2 2 (2 / epsilon)^2 / n without overload, which only lowers it (and adds bias)."""
        return context.radius**2 * (8.0 / self.epsilon_per_coordinate**2) / len(clients)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return the loss of each coordinate's Laplace noise, for any dither, against every adversary."""
        slack = self.float_slack
        loss: Loss = NonPrivate(
            "floats of 53 bits do not resolve the probabilities of the farthest levels: choose a smaller "
            "epsilon or fewer levels"
        )
        if slack <= _MOST_SLACK:
            note = f"Laplace noise before the quantiser, requested epsilon = {self.epsilon_per_coordinate:g}"
            loss = LaplaceLoss(1.0 / (self.attained_epsilon + slack), note)
        sent = kind.FLOAT_ERROR(
            f"only the level is sent, and float noise costs {slack:.1e} of epsilon, which is counted",
            kind.VIEW,
        )
        return same_for_all(loss, context.dim, (ARBITRARY, FRESH, sent), unit=Unit.COORDINATE)
