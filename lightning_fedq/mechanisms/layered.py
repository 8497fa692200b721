"""Layered quantisation, client by client: each message errs as N(0, n sigma^2), the mean as N(0, sigma^2).

Source: Hegazy et al., individual mechanisms with the direct and the shifted layered quantiser. The error is
exactly Gaussian for every update. Messages take H(M | S) bits and a little more through range coding. The
mechanism is not homomorphic: quantiser steps differ between clients, so the server decodes message by
message.

Departures from the paper: the dither is centred. If clients drop out, zeros are decoded for them, which
restores their noise.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.chunks import in_chunks
from lightning_fedq.functional.exact_error.float_error import LawError, layered_law_error
from lightning_fedq.functional.exact_error.layered import (
    WORDS_PER_COORDINATE,
    Law,
    Layering,
    layer_row,
    minimal_step,
)
from lightning_fedq.functional.exact_error.layered_cost import known_dither_delta
from lightning_fedq.keys.randomness import PublicRandomness, Stream
from lightning_fedq.mechanisms.bases.exact_error import L1_UNBOUNDED, Array, ExactError, Quantizer
from lightning_fedq.mechanisms.interface import (
    Adversary,
    GaussianLoss,
    Loss,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
)


def next_words(stream: Stream, size: int) -> NDArray[np.uint64]:
    """Return the random words of the next `size` coordinates of a layered quantiser."""
    return stream.words64(WORDS_PER_COORDINATE * size)


def layered_quantizer(
    stream: Stream, dim: int, sigma: float, layering: Layering, target: Law = "gaussian"
) -> Quantizer:
    """Draw one client's dithers and layers, so that its error has the target distribution.

    Args:
        stream: Stream that the client shares with the server. Four 64-bit words a coordinate are read.
        dim: Number of coordinates.
        sigma: Std of the client's error, > 0.
        layering: "direct" or "shifted".
        target: Distribution of the error, "gaussian" or "laplace".
    """
    quantizer = Quantizer(*(np.empty(dim) for _ in range(3)))

    def fill(part: slice, words: NDArray[np.uint64]) -> None:
        law = sigma, target == "gaussian", layering == "shifted"
        layer_row(words, *law, *(array[part] for array in quantizer))

    in_chunks(dim, partial(next_words, stream), fill)
    return quantizer


def selected_quantizer(
    words: NDArray[np.uint64], selected: NDArray[np.bool_] | slice, sigma: float, layering: Layering
) -> Quantizer:
    """Return dithers and layers as `layered_quantizer` draws them, for the selected coordinates of a chunk.

    Args:
        words: `(4 n,)`, the words that `layered_quantizer` reads for the chunk.
        selected: `(n,)` mask. None selects all.
        sigma: Std of the client's error, > 0.
        layering: "direct" or "shifted".
    """
    chosen = words.reshape(-1, WORDS_PER_COORDINATE)[selected]
    quantizer = Quantizer(*(np.empty(len(chosen)) for _ in range(3)))
    layer_row(chosen.ravel(), sigma, True, layering == "shifted", *quantizer)
    return quantizer


@dataclass(frozen=True)
class LayeredGaussian(ExactError):
    """Layered quantiser at every client with an exactly Gaussian mean error.

    Take it if you trust the server and the released model must have exactly Gaussian noise at few bits. For
    secure aggregation take AggregateGaussian.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, > 0. The noise is the error of the
            mean, whose sensitivity is 2 clip_norm / cohort size.
        entropy_code: "range", "elias" or, with the shifted layering, "fixed".
        layering: "direct" costs the fewest bits on average. "shifted" has a bounded number of symbols.
        error_law: Distribution of a message's error. "laplace" makes a message's error exactly Laplace, but
            not the mean's error. It has no claim, because l2 clipping does not bound the l1 norm.

    The claim is Gaussian and about the whole update, against outsiders, and against curious clients with the
    noise of the other clients. The server knows every dither and is trusted. An eavesdropper gets no
    guarantee.

    A message has a variable number of bits, often less than one per coordinate with entropy coding.

    References:
        Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024,
        individual mechanisms with the direct and the shifted layered quantiser

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context
        >>> mechanism = LayeredGaussian(clip_norm=1.0, noise_multiplier=2.0)
        >>> round(mechanism.sigma(make_context(mechanism, clients=range(10))), 3)  # of the mean, in clip_norm
        0.4
    """

    homomorphic = False

    layering: Layering = "direct"
    error_law: Law = "gaussian"

    @property
    def gaussian_error(self) -> bool:
        """Whether the error law is Gaussian. The error is then Gaussian up to the release grid."""
        return self.error_law == "gaussian"

    def spread(self, context: RoundContext) -> float:
        """Return the std of one message's error, in units of the clipping norm."""
        return self.sigma(context) * math.sqrt(len(context.cohort))

    @property
    def has_shortest_step(self) -> bool:
        """Whether the layering is shifted, so that steps are bounded from below."""
        return self.layering == "shifted"

    def shortest_step(self, context: RoundContext) -> float:
        # the bound of the shifted layers
        return minimal_step(self.error_law, self.spread(context))

    def quantizers(self, context: RoundContext, rand: PublicRandomness) -> Callable[[int], Quantizer]:
        sigma = self.spread(context)

        def make(client: int) -> Quantizer:
            stream = rand.shared_with_server(client, "layered dither")
            return layered_quantizer(stream, context.dim, sigma, self.layering, self.error_law)

        return make

    def _decoded(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Array:
        # chunk by chunk, because dithers and layers of a whole message would not fit the cache
        rows, sigma = symbols.reshape(len(clients), context.dim).contiguous().numpy(), self.spread(context)
        total = np.zeros(context.dim)

        def add(part: slice, words: NDArray[np.uint64], row: int) -> None:
            dither, step, offset = (np.empty(part.stop - part.start) for _ in range(3))
            law = sigma, self.error_law == "gaussian", self.layering == "shifted"
            layer_row(words, *law, dither, step, offset)
            total[part] += (rows[row, part] - dither) * step + offset

        for row, client in enumerate(clients):
            stream = rand.shared_with_server(client, "layered dither")
            in_chunks(context.dim, partial(next_words, stream), partial(add, row=row))
        return total

    def law_error(self, context: RoundContext) -> LawError:
        """Return the distance of the released sum's distribution from the exact one, per coordinate."""
        return layered_law_error(len(context.cohort), self.grid_in_stds(context), self.inputs(context))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # Gaussian against outsiders, and no guarantee against parties that know the dither
        size = len(context.cohort)
        spread = self.spread(context)
        delta = known_dither_delta(spread, spread, self.error_law, self.layering)
        dither = NonPrivate(
            "a party that knows the dither sees no noise, and inputs one noise std apart in one coordinate "
            f"are distinguished with probability {delta:.3f}, at any epsilon"
        )
        wire = NonPrivate("an integer's distribution depends on the update, even if the dither is unknown")
        # its own share of the variance is 1 / n
        others = self.noise_multiplier * math.sqrt((size - 1) / size)
        client: Loss = NonPrivate("the cohort has no other client, and this client knows all of the noise")
        if size > 1:
            client = GaussianLoss(others, "the other clients' noise, as the client knows its own")
        losses = {
            Adversary.EAVESDROPPER: wire,
            Adversary.SERVER: dither,
            Adversary.SERVER_AND_PARTNER: dither,
            Adversary.CLIENT: client,
            Adversary.SECAGG_SERVER: NonPrivate(
                "messages can't be summed before decoding, so the server sees every message: " + dither.reason
            ),
        }
        if self.error_law == "laplace":
            losses |= dict.fromkeys((Adversary.CLIENT, Adversary.OUTSIDER), NonPrivate(L1_UNBOUNDED))
            return tuple(PrivacyClaim(who, losses[who], 1) for who in Adversary)
        return self.gaussian_claims(losses, self.law_error(context), context)
