"""Base of mechanisms with an exact error law: clip, quantise with a dither, decode, and who sees what.

Every client has, for every coordinate, a dither U, a step w and an offset, drawn from streams that it shares
with the server; it sends M = floor(x / w + U + 1/2) and the server decodes (M - U) w + offset. The mean over
the cohort then errs by a law that was chosen in advance, whatever the updates are.

* The cohort is fixed before anything is encoded. A client that drops out counts as one that sent zeros (whose
  message is all zeros, because dithers are centred), so the law of the error of the sum stays exactly what it
  was.
* The noise is the dither. Whoever holds the dithers (the server, always) sees no noise: Gaussian privacy is
  promised to outsiders only, and the server has to be trusted. `claims` says so with numbers.
* Updates are clipped in l2, because a guarantee without a bound on the update is none. Everything is computed
  in units of `clip_norm`, in float64.
* The decoded sum is rounded to a public grid, 2^-5 of the noise's std or finer, so that its low bits say
  nothing about the updates (Mironov 2012). This adds less than 1e-4 of the noise's variance. On that grid
  float64, finitely many random bits and tables change the law of what is released by a bounded factor,
  `functional.exact_error.float_error`, which the claim charges to the budget.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.chunks import CHUNK, in_chunks
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.functional.exact_error.dither import dither_quantize_row, release_grid
from lightning_fedq.functional.exact_error.float_error import Inputs, LawError
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.calibration import resolve_multiplier
from lightning_fedq.mechanisms.interface import (
    Adversary,
    AuditCase,
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
Row = NDArray[np.floating]
Symbols = NDArray[np.signedinteger]

GRID_BITS = 5
INEXACT = 1e-6
"""Relative, of norms that a server finds in what clients have rounded."""

UNIFORM = "all weights are equal; a client that did not answer counts as one that sent zeros"
L1_UNBOUNDED = "l2 clipping does not bound what Laplace noise protects"
FRESH = "dithers are fresh in every round and attempt and known to nobody but their client and the server"
HONEST_SERVER = "the server, which holds every dither, is honest and shows nothing but the released models"


RowEncoder = Callable[[int, Row, float, Symbols], tuple[float, Code]]
"""Client, its update, the factor that clips it, symbols to fill in; largest |symbol|, the message's code."""


class Quantizer(NamedTuple):
    """One client's dithers, steps and offsets, `(dim,)` float64, in units of the clipping norm."""

    dither: Array
    step: Array
    offset: Array


def refuse_laplace_budget(target: str, noise_multiplier: float | None) -> None:
    """Refuse a budget where the error's law carries no claim.

    Raises:
        ValueError: If the target is Laplace and no noise multiplier is given.
    """
    if target == "laplace" and noise_multiplier is None:
        raise ValueError(
            f'target="laplace" can\'t meet a budget: {L1_UNBOUNDED}; give noise_multiplier, or take '
            'target="gaussian"'
        )


def fixed_length(quantizer: Quantizer, shortest: float) -> FromSmallest:
    """A code of one length for inputs in [-1, 1], up to `INEXACT`, of quantisers with a shortest step.

    Given dither and step, symbols of an interval of length t number at most t / step + 2; proposition 2 of
    the paper has this with the shortest step of the shifted layers.

    Args:
        quantizer: Dithers and steps of what is sent.
        shortest: No step is shorter.
    """
    end = 1.0 + INEXACT
    # symbol of the least input
    smallest = np.floor(-end / quantizer.step + quantizer.dither + 0.5).astype(np.int64)
    return FromSmallest(smallest, max(math.ceil(math.log2(math.floor(2.0 * end / shortest) + 2)), 1))


def shortest_inputs(symbols: Tensor, quantizer: Quantizer) -> Array:
    """Least |x| `(dim,)` of every coordinate of which a quantiser makes these symbols."""
    rows: Array = symbols.numpy().astype(np.float64)
    # M - U - 1/2 <= x / w < M - U + 1/2
    shortest: Array = np.maximum(np.abs(rows - quantizer.dither) - 0.5, 0.0) * quantizer.step
    return shortest


@dataclass(frozen=True)
class ExactError(Mechanism):
    """Base of the mechanisms with an exact error law.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        noise_multiplier: Std of the error of the mean over its sensitivity, 2 clip_norm / cohort size; or
            leave it out and give a budget:
        epsilon: Budget of one client over the whole run, towards outsiders, > 0, in nats.
        delta: Delta of the whole run, in (0, 1).
        rounds: Rounds that the budget has to last for, >= 1.
        entropy_code: "range" codes each symbol on its law given dither and step; "elias" (gamma) needs no
            model, counts faster and is longer where the noise hides the update; "fixed" gives every symbol as
            many bits, so that a message's length says nothing, where steps have a shortest one.

    Raises:
        ValueError: If neither or both of noise and budget are given, or a value is out of range.
    """

    fixed_cohort = True
    clips_norm = True
    symbol_dtype: ClassVar[torch.dtype] = torch.int32

    clip_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    rounds: int | None = None
    entropy_code: Literal["range", "elias", "fixed"] = "range"

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm)
        if self.entropy_code == "fixed" and not self.has_shortest_step:
            raise ValueError(
                f'entropy_code="fixed" wants steps with a shortest one, which {type(self).__name__} as set '
                'here has not: take LayeredGaussian(layering="shifted") or IrwinHall, or entropy_code="range"'
            )
        _ = self.multiplier  # refuses a budget that makes no sense

    @property
    def multiplier(self) -> float:
        """Std of the error of the mean over its l2 sensitivity under substitution."""
        budget = self.epsilon, self.delta, self.rounds
        return resolve_multiplier(self.noise_multiplier, *budget, "gaussian", kept=0.01)  # floats: see claims

    def with_level(self, level: float, context: RoundContext, max_dropped: int) -> ExactError:
        return self._with_multiplier(1.0 / level)

    def _with_multiplier(self, multiplier: float) -> ExactError:
        return replace(self, noise_multiplier=multiplier, epsilon=None, delta=None, rounds=None)

    def sigma(self, context: RoundContext) -> float:
        """Std of the error of the mean over the cohort, in units of the clipping norm."""
        return 2.0 * self.multiplier / len(context.cohort)

    @abstractmethod
    def quantizers(self, context: RoundContext, rand: PublicRandomness) -> Callable[[int], Quantizer]:
        """Return what makes the quantiser of a client. What all clients have in common is made once, here."""

    @property
    def has_shortest_step(self) -> bool:
        """Do steps have a shortest one, `shortest_step`, so that symbols have a fixed length?"""
        return False

    def shortest_step(self, context: RoundContext) -> float:
        """A lower bound on all steps, in units of the clipping norm, where `has_shortest_step`."""
        raise TypeError(f"steps of {type(self).__name__} have no shortest one")

    def row_encoder(self, context: RoundContext, rand: PublicRandomness) -> RowEncoder:
        """Return what fills in one client's symbols. What all clients have in common is made once, here."""
        quantizer_of = self.quantizers(context, rand)

        def encode_row(client: int, values: Row, factor: float, out: Symbols) -> tuple[float, Code]:
            quantizer = quantizer_of(client)
            largest = dither_quantize_row(values, factor, quantizer.dither, quantizer.step, out)
            return largest, self._code(quantizer, context)

        return encode_row

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # Symbols are int32 or int64.
        rows = update.detach().reshape(len(rand.clients), context.dim)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        factors, shortened = unit_ball_factors(rows, self.clip_norm, 2)  # what sigma is made for
        symbols = torch.empty(rows.shape, dtype=self.symbol_dtype)
        # a cohort's sum stays within half of the integers
        room = torch.iinfo(self.symbol_dtype).max / (2 * len(context.cohort) if self.homomorphic else 2)
        encoder = self.row_encoder(context, rand)  # dithered: the error's law is that of the noise, exactly

        def encode_row(row: int) -> int:
            values, out = rows[row].contiguous().numpy(), symbols[row].numpy()
            largest, code = encoder(rand.clients[row], values, factors[row].item(), out)
            if not largest < room:
                raise ValueError(
                    f"a symbol of client {rand.clients[row]} is {largest:.3g}, too large for the sum of "
                    f"{len(context.cohort)} clients; raise noise_multiplier, got {self.multiplier:.3g}"
                )
            return code.num_bits(symbols[row])

        if context.dim > CHUNK:  # threads share one client's coordinates, which takes less memory
            num_bits = [encode_row(row) for row in range(len(rows))]
        else:
            num_bits = in_chunks(len(rows), lambda _: None, lambda part, _: encode_row(part.start), 1)
        clipped = int(shortened.sum()) * context.dim
        return Message(symbols.reshape(update.shape), sum(num_bits), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # float64, not on the `grid` yet
        total = self._decoded(symbols.detach(), clients, context, rand)
        return torch.from_numpy(total * self.clip_norm)

    def grid(self, context: RoundContext) -> float:
        # 2^-6 to 2^-5 of the std of the sum's noise
        return release_grid(self.clip_norm * self.sigma(context) * len(context.cohort), GRID_BITS)

    def inputs(self, context: RoundContext) -> Inputs:
        """Largest and mean |coordinate| of a sum of clipped updates, in stds of its noise."""
        largest = 1.0 / self.sigma(context)
        return Inputs(largest, largest / math.sqrt(context.dim))

    @abstractmethod
    def _decoded(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Array:
        """Sum of the updates, `(dim,)` in units of the clipping norm."""

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        # an update that gives them exists within `clip_norm`
        shortest = shortest_inputs(symbols, self.quantizers(context, rand)(client))
        return float(shortest @ shortest) <= 1.0 + 2.0 * INEXACT

    def code(self, context: RoundContext) -> Code:
        """Elias gamma: what can be read without any shared randomness."""
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
        """sigma^2 where everybody answers, (n / n')^2 times as much for the mean of n' survivors."""
        std = self.clip_norm * self.sigma(context) * len(context.cohort) / len(clients)
        # grid^2 / 12 of the released sum besides
        return torch.full_like(context.radius, std * std * (1.0 + 2.0 ** (-2 * GRID_BITS) / 12.0))

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # And once with a client that drops out. Codes only cost time.
        plain = replace(self._with_multiplier(self.multiplier), entropy_code="elias")
        little = replace(plain, noise_multiplier=self.multiplier / math.sqrt(dim))
        return (
            AuditCase(little),
            AuditCase(little, title="one dropout", num_dropped=1),
            AuditCase(plain, concentrated=True, title="one coordinate"),
        )

    def gaussian_claims(
        self, losses: dict[Adversary, Loss], error: LawError, context: RoundContext
    ) -> tuple[PrivacyClaim, ...]:
        """Complete the given losses by the outsider's, who sees Gaussian noise up to `error` a coordinate."""
        noise = GaussianLoss(self.multiplier, "noise of the released mean: all clients' dithers")
        return exact_claims({**losses, Adversary.OUTSIDER: noise}, 1, error, context)


def exact_claims(
    losses: dict[Adversary, Loss],
    compositions: int,
    error: LawError,
    context: RoundContext,
    neighbours: Neighbours = Neighbours.SUBSTITUTION,
    assumptions: tuple[str, ...] = (),
) -> tuple[PrivacyClaim, ...]:
    """One claim for every adversary, with what all of them rest on and what floats cost.

    Args:
        compositions: Number of compositions of each loss in a round.
        error: Error of one released coordinate.
    """
    slack = Slack(context.dim * error.distance, context.dim * error.log_ratio)
    unit = Unit.MESSAGE if compositions == 1 else Unit.COORDINATE
    stated = (
        HONEST_SERVER,
        FRESH,
        UNIFORM,
        *assumptions,
        f"float64, grid and tables move the released law by at most {slack.log_ratio:.1e} in log-ratio and "
        f"{slack.distance:.1e} in total variation a round, paid for in epsilon and delta",
    )
    return tuple(
        PrivacyClaim(who, losses[who], compositions, neighbours, stated, slack=slack, unit=unit)
        for who in Adversary
    )
