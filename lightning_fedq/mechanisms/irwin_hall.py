"""Irwin-Hall mechanism: one common step, so that integers add up and the mean has an Irwin-Hall error.

Source: Hegazy et al., section 4.2. The decoder needs the factor 1 / n that the paper's text leaves out. The
step is 2 sigma sqrt(3 n), and the error of the mean is the mean of n independent uniforms of variance n
sigma^2. The mechanism is homomorphic and has a fixed length. For large cohorts the error is nearly Gaussian,
but its support is bounded.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.chunks import in_chunks
from lightning_fedq.functional.exact_error.decompose import Special
from lightning_fedq.functional.exact_error.dither import centred_dither
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.bases.exact_error import Array, ExactError, Quantizer
from lightning_fedq.mechanisms.interface import Adversary, Loss, NonPrivate, PrivacyClaim, RoundContext

BOUNDED = (
    "Irwin-Hall noise has bounded support, so it has no pure and no Renyi guarantee, and none is claimed "
    "over many coordinates: take AggregateGaussian, which sends the same integers and has Gaussian noise"
)


@dataclass(frozen=True)
class CommonSteps(ExactError):
    """Base of the homomorphic exact-error mechanisms: all clients share step and offset, but not dithers."""

    homomorphic = True

    @abstractmethod
    def special(self, context: RoundContext, rand: PublicRandomness) -> Special:
        """Return coordinates with a step other than `base_step` or an offset, in units of clip_norm."""

    def common(self, context: RoundContext, rand: PublicRandomness) -> tuple[Array, Array]:
        """Return steps and offsets of one client's share, `(dim,)`, in units of the clipping norm."""
        step, offset = np.full(context.dim, self.base_step(context)), np.zeros(context.dim)
        places, steps, offsets = self.special(context, rand)
        step[places], offset[places] = steps, offsets
        return step, offset

    def base_step(self, context: RoundContext) -> float:
        """Return w = 2 sigma sqrt(3 n). A sum of n uniform errors of this width has variance n^2 sigma^2."""
        return 2.0 * self.sigma(context) * math.sqrt(3.0 * len(context.cohort))

    def quantizers(self, context: RoundContext, rand: PublicRandomness) -> Callable[[int], Quantizer]:
        step, offset = self.common(context, rand)

        def make(client: int) -> Quantizer:
            dither = np.zeros(context.dim)
            self._add_dither(client, rand, dither)
            return Quantizer(dither, step, offset)

        return make

    @staticmethod
    def _add_dither(client: int, rand: PublicRandomness, total: Array) -> None:
        def add(part: slice, words: NDArray[np.uint64]) -> None:
            total[part] += centred_dither(words)

        in_chunks(total.size, rand.shared_with_server(client, "dither").words64, add)

    def _decoded(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Array:
        summed = symbols.sum(0, dtype=torch.int64) if symbols.dim() == 2 else symbols
        (step, offset), dithers = self.common(context, rand), np.zeros(context.dim)
        for client in clients:
            self._add_dither(client, rand, dithers)
        return np.asarray((summed.numpy() - dithers) * step + len(clients) * offset)

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest symbol of any client per coordinate, from |x| <= clip_norm."""
        step, _ = self.common(context, rand)
        # a symbol is floor(x / w + U + 1/2) with |x| <= 1 and |U| < 1/2
        largest = torch.from_numpy(np.floor(1.0 / step + 1.0)).to(torch.int64)
        return -largest, largest

    def summed_claims(self, losses: Mapping[Adversary, Loss], behind: str) -> dict[Adversary, Loss]:
        """Add the losses of adversaries that know dithers or see single messages to the given ones.

        Args:
            losses: Losses by adversary, which replace the defaults.
            behind: Remark for the reports about a server that sees every message.
        """
        wire = NonPrivate("an integer's distribution depends on the update, even if the dither is unknown")
        dither = NonPrivate(
            "a party that knows the dithers sees every update up to one step, without noise, but " + behind
        )
        return {
            Adversary.EAVESDROPPER: wire,
            Adversary.SERVER: dither,
            Adversary.SERVER_AND_PARTNER: dither,
            Adversary.SECAGG_SERVER: NonPrivate(
                "the server knows all dithers, so the sum of the integers reveals the sum of the updates up "
                "to the spread of the dithers, and single clients hide in the sum only, without an epsilon"
            ),
            **losses,
        }


@dataclass(frozen=True)
class IrwinHall(CommonSteps):
    """Homomorphic dithered quantiser with a common step and an exact Irwin-Hall mean error.

    Take it to compare with AggregateGaussian, if you need no privacy guarantee.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, > 0. The noise is the error of the
            mean, and no guarantee is claimed.
        entropy_code: "range", "elias" or "fixed". Secure aggregation uses none of them.

    Nothing is claimed against any adversary, because the noise has bounded support.

    A message has a variable number of bits ("range", "elias"), or a fixed number per coordinate ("fixed").

    References:
        Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section
        4.2

    Examples:
        >>> mechanism = IrwinHall(clip_norm=1.0, noise_multiplier=1.0)
        >>> mechanism.noise_multiplier
        1.0
    """

    @property
    def has_shortest_step(self) -> bool:
        """True, because all steps are equal."""
        return True

    def shortest_step(self, context: RoundContext) -> float:
        return self.base_step(context)

    def special(self, context: RoundContext, rand: PublicRandomness) -> Special:
        """Return no coordinates."""
        return Special(np.empty(0, np.int64), np.empty(0), np.empty(0))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        bounded = NonPrivate(BOUNDED)
        models = {Adversary.CLIENT: bounded, Adversary.OUTSIDER: bounded}
        losses = self.summed_claims(models, "secure aggregation hides single messages")
        return tuple(PrivacyClaim(who, losses[who], 1) for who in Adversary)
