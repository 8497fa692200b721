"""Base of mechanisms with an exact error distribution: clip, quantise with a dither, decode, claims.

Every client has, for every coordinate, a dither U, a step w and an offset, drawn from streams that it shares
with the server. It sends M = floor(x / w + U + 1/2), and the server decodes (M - U) w + offset. The error of
the mean over the cohort then has a distribution that was chosen in advance, for any updates.

* The cohort is fixed before anything is encoded. A client that drops out counts as one that sent zeros (whose
  message is all zeros, because dithers are centred), so the distribution of the sum's error stays exactly the
  same.
* The noise is the dither. A party that knows the dithers (always the server) sees no noise. The Gaussian
  claim holds against outsiders only, and the server has to be trusted. `claims` states this with numbers.
* Updates are clipped in l2, because a guarantee needs a bound on the update. Everything is computed in units
  of `clip_norm`, in float64.
* The decoded sum is rounded to a public grid, 2^-5 of the noise's std or finer, so that its low bits reveal
  nothing about the updates (Mironov 2012). This adds less than 1e-4 of the noise's variance. On that grid
  float64, finitely many random bits and tables change the distribution of the release by a bounded factor,
  `functional.exact_error.float_error`, which the claim charges to the budget.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.chunks import CHUNK, in_chunks
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.functional.exact_error.dither import dither_quantize_row, release_grid
from lightning_fedq.functional.exact_error.float_error import Inputs, LawError
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.claims import UNIFORM
from lightning_fedq.mechanisms.interface import (
    Adversary,
    GaussianLoss,
    Loss,
    Mechanism,
    Message,
    Neighbours,
    PrivacyClaim,
    RoundContext,
    Slack,
    Unit,
)
from lightning_fedq.wire.coding import Code, FromSmallest
from lightning_fedq.wire.entropy_coding import Elias
from lightning_fedq.wire.range_coding import ConditionalRange

Array = NDArray[np.float64]

GRID_BITS = 5
INEXACT = 1e-6
"""Relative tolerance of norms that a server computes from rounded messages."""

L1_UNBOUNDED = "l2 clipping does not bound the l1 norm, which Laplace noise protects"
FRESH = kind.SECRET_KEYS(
    "dithers are fresh in every round and attempt and known to nobody but their client and the server"
)
HONEST_SERVER = kind.MODELS_ONLY(
    "the server, which knows every dither, is honest and shows nothing but the released models"
)


class Quantizer(NamedTuple):
    """One client's dithers, steps and offsets, `(dim,)` float64, in units of the clipping norm."""

    dither: Array
    step: Array
    offset: Array


def fixed_length(quantizer: Quantizer, shortest: float) -> FromSmallest:
    """Return a code of fixed length for inputs in [-1, 1], for quantisers whose steps are bounded from below.

    Inputs may exceed the interval by `INEXACT`. Given dither and step, an interval of length t has at most t
    / step + 2 symbols. Proposition 2 of the paper states this for the shortest step of the shifted layers.

    Args:
        quantizer: Dithers and steps of the coordinates that are sent.
        shortest: Lower bound on all steps.
    """
    end = 1.0 + INEXACT
    # symbol of the smallest input
    smallest = np.floor(-end / quantizer.step + quantizer.dither + 0.5).astype(np.int64)
    return FromSmallest(smallest, max(math.ceil(math.log2(math.floor(2.0 * end / shortest) + 2)), 1))


def shortest_inputs(symbols: Tensor, quantizer: Quantizer) -> Array:
    """Return the smallest |x| `(dim,)` of which a quantiser makes these symbols, per coordinate."""
    rows: Array = symbols.numpy().astype(np.float64)
    # M - U - 1/2 <= x / w < M - U + 1/2
    shortest: Array = np.maximum(np.abs(rows - quantizer.dither) - 0.5, 0.0) * quantizer.step
    return shortest


@dataclass(frozen=True)
class ExactError(Mechanism):
    """Base of the mechanisms with an exact error distribution.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, > 0. The noise is the error of the
            mean, whose sensitivity is 2 clip_norm / cohort size.
        entropy_code: "range" codes each symbol with its distribution given dither and step. "elias" (gamma)
            needs no model, is faster, and is longer if the noise hides the update. "fixed" gives every symbol
            the same number of bits, so that a message's length reveals nothing, if steps are bounded from
            below.

    Raises:
        ValueError: If a value is out of range.
    """

    fixed_cohort = True
    clips_norm = True
    level = "noise_multiplier"
    symbol_dtype: ClassVar[torch.dtype] = torch.int32

    clip_norm: float
    noise_multiplier: float
    entropy_code: Literal["range", "elias", "fixed"] = "range"

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)
        if self.entropy_code == "fixed" and not self.has_shortest_step:
            raise ValueError(
                f'entropy_code="fixed" needs a shortest step, which {type(self).__name__} lacks. '
                'Take LayeredGaussian(layering="shifted"), IrwinHall or entropy_code="range".'
            )

    def sigma(self, context: RoundContext) -> float:
        """Return the std of the error of the mean over the cohort, in units of the clipping norm."""
        return 2.0 * self.noise_multiplier / len(context.cohort)

    @abstractmethod
    def quantizers(self, context: RoundContext, rand: PublicRandomness) -> Callable[[int], Quantizer]:
        """Return a function that makes a client's quantiser. Values common to all are computed once."""

    @property
    def has_shortest_step(self) -> bool:
        """Whether steps have a lower bound, `shortest_step`, so that symbols have a fixed length."""
        return False

    def shortest_step(self, context: RoundContext) -> float:
        """Return a lower bound on all steps, in units of the clipping norm, if `has_shortest_step`."""
        raise TypeError(f"steps of {type(self).__name__} have no lower bound")

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32 or int64
        rows = update.detach().reshape(len(rand.clients), context.dim)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        factors, shortened = unit_ball_factors(rows, self.clip_norm, 2)  # bounds the sensitivity
        symbols = torch.empty(rows.shape, dtype=self.symbol_dtype)
        # a cohort's sum stays within half of the integers
        room = torch.iinfo(self.symbol_dtype).max / (2 * len(context.cohort) if self.homomorphic else 2)
        quantizer_of = self.quantizers(context, rand)

        def encode_row(row: int) -> int:
            values, out = rows[row].contiguous().numpy(), symbols[row].numpy()
            quantizer, factor = quantizer_of(rand.clients[row]), factors[row].item()

            def quantize(part: slice, _: None) -> float:
                dither, step = quantizer.dither[part], quantizer.step[part]
                return dither_quantize_row(values[part], factor, dither, step, out[part])

            # dithering makes the error's distribution exact
            largest = max(in_chunks(context.dim, lambda _: None, quantize))
            if not largest < room:
                raise ValueError(
                    f"a symbol of client {rand.clients[row]} is {largest:.3g}, too large for the sum of "
                    f"{len(context.cohort)} clients. Raise noise_multiplier, got {self.noise_multiplier:.3g}."
                )
            return self._code(quantizer, context).num_bits(symbols[row])

        if context.dim > CHUNK:  # threads divide one client's coordinates, which takes less memory
            num_bits = [encode_row(row) for row in range(len(rows))]
        else:
            num_bits = in_chunks(len(rows), lambda _: None, lambda part, _: encode_row(part.start), 1)
        clipped = int(shortened.sum()) * context.dim
        return Message(symbols.reshape(update.shape), sum(num_bits), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # the result is float64, and not on the `grid` yet
        total = self._decoded(symbols.detach(), clients, context, rand)
        return torch.from_numpy(total * self.clip_norm)

    def grid(self, context: RoundContext) -> float:
        # 2^-6 to 2^-5 of the std of the sum's noise
        return release_grid(self.clip_norm * self.sigma(context) * len(context.cohort), GRID_BITS)

    def grid_in_stds(self, context: RoundContext) -> float:
        """Return the public grid in stds of the sum's noise."""
        return self.grid(context) / (self.clip_norm * (self.sigma(context) * len(context.cohort)))

    def inputs(self, context: RoundContext) -> Inputs:
        """Return the largest and the mean |coordinate| of a sum of clipped updates, in stds of its noise."""
        largest = 1.0 / self.sigma(context)
        return Inputs(largest, largest / math.sqrt(context.dim))

    @abstractmethod
    def _decoded(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Array:
        """Return the sum of the updates, `(dim,)`, in units of the clipping norm."""

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        # some update within `clip_norm` gives these symbols
        shortest = shortest_inputs(symbols, self.quantizers(context, rand)(client))
        return float(shortest @ shortest) <= 1.0 + 2.0 * INEXACT

    def code(self, context: RoundContext) -> Code:
        """Return Elias gamma, which a reader can decode without shared randomness."""
        return Elias()

    def message_code(self, client: int, context: RoundContext, rand: PublicRandomness) -> Code:
        return self._code(self.quantizers(context, rand)(client), context)

    def _code(self, quantizer: Quantizer, context: RoundContext) -> Code:
        if self.entropy_code == "elias":
            return Elias()
        if self.entropy_code == "fixed":
            return fixed_length(quantizer, self.shortest_step(context))
        return ConditionalRange(quantizer.dither, quantizer.step, context.segments)

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return sigma^2 if all clients answer, and (n / n')^2 times that for the mean of n' survivors."""
        std = self.clip_norm * self.sigma(context) * len(context.cohort) / len(clients)
        # rounding the released sum adds grid^2 / 12
        return torch.full_like(context.radius, std * std * (1.0 + 2.0 ** (-2 * GRID_BITS) / 12.0))

    def gaussian_claims(
        self, losses: dict[Adversary, Loss], error: LawError, context: RoundContext
    ) -> tuple[PrivacyClaim, ...]:
        """Return the losses as claims, with a Gaussian loss up to `error` per coordinate for outsiders."""
        noise = GaussianLoss(self.noise_multiplier, "noise of the released mean: all clients' dithers")
        return exact_claims({**losses, Adversary.OUTSIDER: noise}, 1, error, context)


def exact_claims(
    losses: dict[Adversary, Loss],
    compositions: int,
    error: LawError,
    context: RoundContext,
    neighbours: Neighbours = Neighbours.SUBSTITUTION,
    assumptions: tuple[str, ...] = (),
) -> tuple[PrivacyClaim, ...]:
    """Return one claim per adversary, with common assumptions and the charge for float errors.

    Args:
        losses: Loss by adversary.
        compositions: Number of compositions of each loss in a round.
        error: Error of one released coordinate.
        context: Public facts of the round.
        neighbours: Adjacency of the claims.
        assumptions: Further assumptions.
    """
    slack = Slack(context.dim * error.distance, context.dim * error.log_ratio)
    unit = Unit.MESSAGE if compositions == 1 else Unit.COORDINATE
    stated = (
        HONEST_SERVER,
        FRESH,
        UNIFORM,
        *assumptions,
        kind.FLOAT_ERROR(
            f"float64, grid and tables change the released distribution by at most {slack.log_ratio:.1e} in "
            f"log-ratio and {slack.distance:.1e} in total variation a round, charged to epsilon and delta"
        ),
    )
    return tuple(
        PrivacyClaim(who, losses[who], compositions, neighbours, stated, slack=slack, unit=unit)
        for who in Adversary
    )
