"""Layered quantisation, client by client: each message errs as N(0, n sigma^2), the mean as N(0, sigma^2).

Source: Hegazy et al., individual mechanisms with the direct and the shifted layered quantiser. The error is
exactly Gaussian for every update, and the messages take H(M | S) bits and a little more through range coding.
Not homomorphic: steps differ from client to client, so the server decodes message by message.

Departures: the dither is centred; the noise that dropouts take with them is put back by decoding zeros for
them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.chunks import in_chunks
from lightning_fedq.functional.exact_error.dither import add_dequantized_row
from lightning_fedq.functional.exact_error.float_error import LawError, layered_law_error
from lightning_fedq.functional.exact_error.layered import (
    WORDS_PER_COORDINATE,
    Law,
    Layering,
    layer_row,
    minimal_step,
)
from lightning_fedq.functional.exact_error.layered_cost import known_dither_delta
from lightning_fedq.functional.sampled_loops import take_words
from lightning_fedq.keys.randomness import PublicRandomness, Stream
from lightning_fedq.mechanisms.bases.exact_error import (
    L1_UNBOUNDED,
    Array,
    ExactError,
    Quantizer,
    refuse_laplace_budget,
)
from lightning_fedq.mechanisms.interface import (
    Adversary,
    GaussianLoss,
    Loss,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
)


def next_words(stream: Stream, size: int) -> NDArray[np.uint64]:
    """Words of the next `size` coordinates of a layered quantiser."""
    return stream.words64(WORDS_PER_COORDINATE * size)


def layered_quantizer(
    stream: Stream, dim: int, sigma: float, layering: Layering, target: Law = "gaussian"
) -> Quantizer:
    """Draw one client's dithers and layers for errors of a law.

    Args:
        stream: What the client shares with the server; four 64-bit words a coordinate are read.
        sigma: Std of the client's error, > 0.
    """
    quantizer = Quantizer(*(np.empty(dim) for _ in range(3)))

    def fill(part: slice, words: NDArray[np.uint64]) -> None:
        layer_row(
            words, sigma, target == "gaussian", layering == "shifted", *(array[part] for array in quantizer)
        )

    in_chunks(dim, partial(next_words, stream), fill)
    return quantizer


def selected_quantizer(
    words: NDArray[np.uint64], selected: NDArray[np.bool_] | None, sigma: float, layering: Layering
) -> Quantizer:
    """Dithers and layers of `layered_quantizer` where a coordinate is selected, of a stretch of coordinates.

    Args:
        words: `(4 n,)`, what `layered_quantizer` reads for the stretch.
        selected: `(n,)`; None for all.
        sigma: Std of the client's error, > 0.
    """
    taken, size = words, words.size // WORDS_PER_COORDINATE
    if selected is not None:
        taken = np.empty(words.size + WORDS_PER_COORDINATE, np.uint64)
        size = take_words(words, selected, taken)
    quantizer = Quantizer(*(np.empty(size) for _ in range(3)))
    layer_row(taken[: WORDS_PER_COORDINATE * size], sigma, True, layering == "shifted", *quantizer)
    return quantizer


@dataclass(frozen=True)
class LayeredGaussian(ExactError):
    """Layered quantiser at every client with an exactly Gaussian mean error.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        noise_multiplier: Std of the error of the mean over its sensitivity, 2 clip_norm / cohort size; or
            leave it out and give a budget:
        epsilon: Budget of one client over the whole run, towards outsiders, > 0, in nats.
        delta: Delta of the whole run, in (0, 1).
        rounds: Rounds that the budget has to last for, >= 1.
        entropy_code: "range", "elias" or, with the shifted layering, "fixed".
        layering: "direct" costs the least on average; "shifted" never more than a fixed number of symbols.
        target: Law of a message's error. "laplace" makes it Laplace exactly, and the mean's the law of a mean
            of Laplace errors, which is none; it carries no claim, because l2 clipping does not bound the l1
            norm.

    Example:
        >>> mechanism = LayeredGaussian(clip_norm=1.0, epsilon=8.0, delta=1e-5, rounds=30)
        >>> round(mechanism.multiplier, 3)  # noise over the distance of any two updates
        3.315
    """

    homomorphic = False

    layering: Layering = "direct"
    target: Law = "gaussian"

    def __post_init__(self) -> None:
        refuse_laplace_budget(self.target, self.noise_multiplier)
        super().__post_init__()

    @property
    def gaussian_error(self) -> bool:
        """With the Gaussian target, up to the release grid."""
        return self.target == "gaussian"

    def spread(self, context: RoundContext) -> float:
        """Std of one message's error, in units of the clipping norm."""
        return self.sigma(context) * math.sqrt(len(context.cohort))

    @property
    def has_shortest_step(self) -> bool:
        """With the shifted layering."""
        return self.layering == "shifted"

    def shortest_step(self, context: RoundContext) -> float:
        # that of the shifted layers
        return minimal_step(self.target, self.spread(context))

    def quantizers(self, context: RoundContext, rand: PublicRandomness) -> Callable[[int], Quantizer]:
        sigma = self.spread(context)

        def make(client: int) -> Quantizer:
            stream = rand.shared_with_server(client, "layered dither")
            return layered_quantizer(stream, context.dim, sigma, self.layering, self.target)

        return make

    def _decoded(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Array:
        # chunk by chunk: dithers and layers of a whole message would leave the cache
        rows, sigma = symbols.reshape(len(clients), context.dim).contiguous().numpy(), self.spread(context)
        total = np.zeros(context.dim)

        def add(part: slice, words: NDArray[np.uint64], row: int) -> None:
            quantizer = Quantizer(*(np.empty(part.stop - part.start) for _ in range(3)))
            layer_row(words, sigma, self.target == "gaussian", self.layering == "shifted", *quantizer)
            add_dequantized_row(rows[row, part], *quantizer, total[part])

        for row, client in enumerate(clients):
            stream = rand.shared_with_server(client, "layered dither")
            in_chunks(context.dim, partial(next_words, stream), partial(add, row=row))
        return total

    def law_error(self, context: RoundContext) -> LawError:
        """Distance of the released sum's law from the exact one, a coordinate."""
        size = len(context.cohort)
        std = self.sigma(context) * size
        return layered_law_error(size, self.grid(context) / (self.clip_norm * std), self.inputs(context))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # Gaussian towards outsiders, nothing towards whoever holds the dither
        size = len(context.cohort)
        spread = self.spread(context)
        delta = known_dither_delta(spread, spread, self.target, self.layering)
        dither = NonPrivate(
            "whoever holds the dither sees no noise: inputs one noise std apart in one coordinate are told "
            f"apart with probability {delta:.3f}, at any epsilon"
        )
        wire = NonPrivate("the law of an integer moves with the update even if the dither is unknown")
        others = self.multiplier * math.sqrt((size - 1) / size)  # its own share of the variance is 1 / n
        client: Loss = NonPrivate("the cohort has no other client, and this one knows all of the noise")
        if size > 1:
            client = GaussianLoss(others, "the noise of the other clients; its own is known to the client")
        losses = {
            Adversary.EAVESDROPPER: wire,
            Adversary.SERVER: dither,
            Adversary.SERVER_AND_PARTNER: dither,
            Adversary.CLIENT: client,
            Adversary.SECAGG_SERVER: NonPrivate(
                "not homomorphic: the server has to see every message, and " + dither.reason
            ),
        }
        if self.target == "laplace":
            losses |= dict.fromkeys((Adversary.CLIENT, Adversary.OUTSIDER), NonPrivate(L1_UNBOUNDED))
            return tuple(PrivacyClaim(who, losses[who], 1) for who in Adversary)
        return self.gaussian_claims(losses, self.law_error(context), context)
