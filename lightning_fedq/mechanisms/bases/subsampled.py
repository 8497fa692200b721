"""Base of SIGM and CSGM: clients send some coordinates only, and the mean still has Gaussian noise.

Coordinate j of client i is selected with probability gamma, by a stream that the members of the federation
know. n_j clients send it. Inputs are bounded in every coordinate. A coordinate that no client sends also gets
Gaussian noise, so that the distribution of the release does not depend on the selection.

The trusted server adds the noise that no dither makes (CSGM's noise, and the noise of empty coordinates). It
draws equal shares from streams that it shares with each client, so the noise is complete for any dropouts. A
share is the output of a direct layered quantiser for 0, so one bound of the float errors covers all noise.
All parties except outsiders can know the selection, so only the claim against outsiders is amplified by
subsampling. The whole sum is rounded to a public grid, once. Rounding part by part would reveal the number of
parts.

With `flatten` updates are first rotated by a public random rotation (remark 1 of the paper,
`functional.rotation`), so that a range for coordinates fits vectors of a bounded l2 norm. Everything then
applies to the D rotated coordinates, padding included: clipping, claims and grid. The server rotates the
rounded sum back, so a release is a public map of a quantity that the claim covers. Rows of this map are
orthonormal, so independent Gaussian noise of one variance stays independent and Gaussian.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.chunks import in_chunks
from lightning_fedq.functional.exact_error.dither import release_grid, round_to_grid
from lightning_fedq.functional.exact_error.float_error import Inputs, LawError, layered_law_error
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.rotation import Words, rotate, rotate_back, sign_words
from lightning_fedq.functional.segments import normalise_segments
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.exact_error import GRID_BITS, Array, exact_claims
from lightning_fedq.mechanisms.interface import (
    Adversary,
    Loss,
    Mechanism,
    Neighbours,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
    SampledGaussianLoss,
)
from lightning_fedq.mechanisms.layered import next_words, selected_quantizer
from lightning_fedq.wire.coding import Code

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class SubsampledMechanism(Mechanism):
    """Base of SIGM and CSGM: selection of coordinates, noise on the mean, claims.

    Args:
        clip_value: Largest absolute value of a coordinate, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, z > 0. The std of the mean's noise is
            z clip_value / (gamma n).
        sampling_probability: Probability gamma in (0, 1] that a client sends a coordinate.
        flatten: Whether to rotate updates first, so that large coordinates are spread over all. `clip_value`
            then bounds a rotated coordinate, which is at most |x| sqrt(2 ln(2 D / beta) / D) except with
            probability beta. Claims count D coordinates, `padded_size(dim)`. The server keeps all messages
            until the round's end.
    """

    homomorphic = False
    level = "noise_multiplier"
    fixed_cohort = True

    clip_value: float
    noise_multiplier: float
    sampling_probability: float = 1.0
    flatten: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_positive(clip_value=self.clip_value, noise_multiplier=self.noise_multiplier)
        if not 2.0**-20 <= self.sampling_probability <= 1.0:
            raise ValueError(f"sampling_probability must be in [2^-20, 1], got {self.sampling_probability}")

    # ---- flattening -------------------------------------------------------------------------------------

    @property
    def joint(self) -> bool:
        # the whole sum is rounded before it is rotated back
        return self.flatten

    def num_symbols(self, context: RoundContext) -> int:
        """Return the number of coordinates that may be sent."""
        return self._round(context).dim

    def _round(self, context: RoundContext) -> RoundContext:
        """Return the round of the quantised coordinates, the rotated ones if flattened. It is idempotent."""
        if not self.flatten:
            return context
        one, size = torch.ones(1, dtype=torch.float64), padded_size(context.dim)
        return replace(context, segments=(size,), center=0.0 * one, radius=one)

    def longest_update(self, dim: int) -> float | None:
        """Return the norm up to which a flattened update is not clipped, except with probability 1e-6."""
        size = padded_size(dim)
        return self.clip_value * math.sqrt(size / (2.0 * math.log(2e6 * size))) if self.flatten else None

    def clipping_range(self, context: RoundContext) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(context.center), torch.full_like(context.radius, self.clip_value)

    @staticmethod
    def _words(context: RoundContext, rand: PublicRandomness) -> Words:
        """Return the signs of the public rotation."""
        return rand.public("flattening").words(sign_words(padded_size(context.dim)))

    def _released(self, total: Array, context: RoundContext, rand: PublicRandomness) -> Tensor:
        """Return a decoded sum `(D,)`, in units of clip_value, in the form that `decode` returns."""
        values = torch.from_numpy(total * self.clip_value)
        if self.flatten:
            values = round_to_grid(values, self._grid)
            back = rotate_back(values.numpy(), self._words(context, rand), context.dim)
            values = torch.from_numpy(back).float()
        return values

    # ---- selection and noise ----------------------------------------------------------------------------

    def selected(self, client: int, context: RoundContext, rand: PublicRandomness) -> Mask:
        """Return the mask of coordinates that a client sends, with probability floor(gamma 2^32) / 2^32."""
        mask = np.zeros(self._round(context).dim, np.bool_)
        self._add_selected(client, rand, mask)
        return mask

    def _add_selected(self, client: int, rand: PublicRandomness, total: NDArray[Any]) -> None:
        """Add 1 to `total` at the coordinates that a client sends."""
        threshold = math.floor(self.sampling_probability * 2.0**32)

        if threshold == 2**32:
            total += True
            return

        def add(part: slice, words: NDArray[np.uint32]) -> None:
            total[part] += words < np.uint32(threshold)

        in_chunks(total.size, rand.members(f"selection {client}").words, add)

    def counts(self, context: RoundContext, rand: PublicRandomness) -> NDArray[np.int32]:
        """Return the number of clients of the cohort that send each coordinate.

        Every party computes it, from O(n dim) words.
        """
        total = np.zeros(self._round(context).dim, np.int32)
        for client in context.cohort:
            self._add_selected(client, rand, total)
        return total

    def noise_share(
        self, client: int, context: RoundContext, rand: PublicRandomness, where: Mask | None = None
    ) -> Array:
        """Return one client's share of N(0, (z / gamma)^2), in units of clip_value, zero outside `where`."""
        std = self.noise_multiplier / self.sampling_probability / math.sqrt(len(context.cohort))
        stream, total = rand.shared_with_server(client, "noise share"), np.zeros(self._round(context).dim)

        def add(part: slice, words: NDArray[np.uint64]) -> None:
            chosen = slice(None) if where is None else where[part]
            dither, step, _ = selected_quantizer(words, chosen, std, "direct")
            # (M - U) w at M = 0, because a direct layer has no offset
            total[part][chosen] = -dither * step

        in_chunks(total.size, partial(next_words, stream), add)
        return total

    @property
    def _grid(self) -> float:
        """Step of the public grid, 2^-6 to 2^-5 of the std of the sum's noise."""
        return release_grid(self.clip_value * self.noise_multiplier / self.sampling_probability, GRID_BITS)

    def grid(self, context: RoundContext) -> float | None:
        # None if flattened, because `decode` then rounds
        return None if self.flatten else self._grid

    def law_error(self, context: RoundContext) -> LawError:
        """Return the distance of the released sum's distribution from the exact one, per coordinate.

        It holds for any selection. At most n clients send a coordinate, and each may have the largest value.
        """
        size = len(context.cohort)
        std = self.clip_value * self.noise_multiplier / self.sampling_probability
        largest = size / self.noise_multiplier
        return layered_law_error(size, self._grid / std, Inputs(largest, largest))

    def _rows(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Tensor:
        """Return updates `(n, dim)`, or rotated updates `(n, D)`, as float32 or float64."""
        rows = update.detach().reshape(len(rand.clients), context.dim)
        if self.flatten:  # larger values are clipped anyway, and their sums must be finite
            values = rows.double().clamp(-1e200, 1e200).numpy()
            rows = torch.from_numpy(rotate(values, self._words(context, rand)))
        return (rows if rows.dtype == torch.float32 else rows.double()).contiguous()

    def _to_units(self, values: NDArray[np.floating], first: int, units: Array) -> int:
        """Clip a chunk of an update, write it in units of clip_value, and return how many were clipped."""
        lines = np.array([[values.size], [0.0], [self.clip_value]])
        return int(normalise_segments(values, first, lines, True, units))

    @abstractmethod
    def message_code(self, client: int, context: RoundContext, rand: PublicRandomness) -> Code:
        """Return the code of the selected coordinates. The others are not sent."""

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return the variance of the noise and of subsampling coordinates of the largest size."""
        gamma, size = self.sampling_probability, len(clients)
        noise = (self.noise_multiplier / gamma / size) ** 2 * (1.0 + 2.0 ** (-2 * GRID_BITS) / 12.0)
        return torch.full_like(context.radius, self.clip_value**2 * (noise + self._input_variance() / size))

    def _input_variance(self) -> float:
        """Return the largest variance of a client's decoded coordinate without noise, over clip_value^2."""
        # variance of x B / gamma, with B one with probability gamma and |x| = 1
        return (1.0 - self.sampling_probability) / self.sampling_probability

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        # the updates are equal in coordinates that the adversary knows not to be sent
        selected = torch.from_numpy(self.selected(client, context, public))
        far = 4.0 * self.clip_value * selected.double()
        if self.flatten:
            far = torch.from_numpy(rotate_back(far.numpy(), self._words(context, public), context.dim))
        return far, torch.zeros_like(far)

    def _subsampled_claims(
        self, client: Loss, context: RoundContext, outsider: Loss | None = None
    ) -> tuple[PrivacyClaim, ...]:
        """Return the claims under zero-out adjacency, in which an update of zero is one that is not sent.

        Args:
            client: Loss against the curious client.
            context: Public facts of the round.
            outsider: Loss against outsiders. None takes that of a Gaussian with hidden selection.
        """
        context = self._round(context)
        trusted = NonPrivate(
            "the server is trusted: it knows selection, dithers and noise, and sees every message"
        )
        if outsider is None:
            note = "noise of the released mean, selection hidden"
            outsider = SampledGaussianLoss(self.noise_multiplier, self.sampling_probability, note)
        losses: dict[Adversary, Loss] = {who: trusted for who in Adversary}
        losses |= {Adversary.CLIENT: client, Adversary.OUTSIDER: outsider}
        hidden = kind.SECRET_SELECTION("who was selected is known to the members of the federation only")
        error = self.law_error(context)
        return exact_claims(losses, context.dim, error, context, Neighbours.ZERO_OUT, (hidden,))
