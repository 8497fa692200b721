"""EDEN and DRIVE: a random rotation, then 1 to 4 bits a coordinate, at a scale that makes the mean right.

Source: Vargaftik et al., DRIVE (2021) and EDEN (2022). The coordinates of the rotated update R x are close to
normal. They are rounded to the 2^b levels of the Lloyd-Max quantiser Q of a normal. The decoded vector is S
R^T Q(y), with y = R x sqrt(D) / |x| and S = |x|^2 / <R x, Q(y)>. DRIVE sends one bit, the signs.

Departure: R is two sign flips and two Walsh-Hadamard transforms (`functional.rotation`) in place of a
uniformly random rotation. The authors' code uses one of each. With a uniform rotation the mean is exact, and
with this one it is close: exact for one-sparse updates, and otherwise up to errors of fourth order. The class
is therefore not marked as unbiased. Each client has a separate rotation, so that errors of the codebook do
not point in the same direction.

The mean squared error is |x|^2 times 1 / (1 - D_b) - 1, with D_b the distortion of Q: .5708, .1331, .0358,
.0096 for 1 to 4 bits (pi / 2 - 1 for one). A message reveals every sign of the rotated update, so even one
bit is not private.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.rotation import Words, rotate, rotate_back, sign_words
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.scaled import ScaledLevels, ScaleFirst, longest_square
from lightning_fedq.mechanisms.interface import RoundContext
from lightning_fedq.wire.coding import FixedLength


@lru_cache(maxsize=8)
def lloyd_max(bits: int) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return levels, inner edges and distortion of a standard normal's best quantiser with 2^bits levels.

    Levels are the means of their cells, and edges the midpoints of levels. Both are updated until levels are
    constant.
    """
    levels = special.ndtri((np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(20_000):
        edges = (levels[:-1] + levels[1:]) / 2.0
        cells = np.diff(special.ndtr(np.concatenate([[-np.inf], edges, [np.inf]])))
        ends = np.concatenate([[0.0], np.asarray(np.exp(-edges * edges / 2.0) / np.sqrt(2.0 * np.pi)), [0.0]])
        # mean of a normal in [a, b]: (phi(a) - phi(b)) / (Phi(b) - Phi(a))
        moved = (ends[:-1] - ends[1:]) / cells
        moved = (moved - moved[::-1]) / 2.0  # exactly antisymmetric in spite of rounding
        still = np.abs(moved - levels).max() < 1e-14
        levels = moved
        if still:
            break
    # E (y - Q)^2 = 1 - E Q^2, as levels are means of their cells
    return levels, (levels[:-1] + levels[1:]) / 2.0, float(1.0 - cells @ levels**2)


def _words(client: int, dim: int, rand: PublicRandomness) -> Words:
    """Return the signs of a client's rotation."""
    return rand.shared_with_server(client, "rotation").words(sign_words(padded_size(dim)))


@dataclass(frozen=True)
class EDEN(ScaledLevels):
    """Random rotation and the best quantiser for a normal: 1 to 4 bits per coordinate. Not private.

    Take it for compression without privacy, with a small error per bit.

    Args:
        bits: Bits per coordinate, 1 to 4.

    Nothing is claimed against any adversary.

    A message has `bits` bits per coordinate, with dimensions padded to a power of two, and a scale of 32
    bits.

    References:
        Vargaftik et al., EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated
        Learning, ICML 2022

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = EDEN(bits=2)
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        96
    """

    unbiased = False

    bits: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 4:
            raise ValueError(f"bits must be in [1, 4], got {self.bits}")

    @property
    def largest_level(self) -> int:
        # levels are counted from 0
        return int(2**self.bits - 1)

    def num_symbols(self, context: RoundContext) -> int:
        """Return the number of symbols: the scale and one level per rotated coordinate."""
        return 1 + padded_size(context.dim)

    def code(self, context: RoundContext) -> ScaleFirst:
        """Return 32 bits for the scale, and `bits` per rotated coordinate."""
        return ScaleFirst(FixedLength(self.bits))

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        return int(symbols[1:].min()) >= 0 and super().can_send(symbols, client, context, rand)

    def quantize(
        self, rows: Tensor, context: RoundContext, rand: ClientRandomness, levels: NDArray[np.int32]
    ) -> Tensor:
        cells, edges, _ = lloyd_max(self.bits)
        squares, along = torch.empty(2, len(rows), dtype=torch.float64)
        for row, client in enumerate(rand.clients):
            (rotated,) = rotate(rows[row : row + 1].numpy(), _words(client, context.dim, rand))
            squares[row] = square = float(np.square(rotated).sum())
            levels[row] = np.searchsorted(edges, rotated * math.sqrt(len(rotated) / (square or 1.0)))
            along[row] = float((rotated * cells[levels[row]]).sum())  # <R x, Q(y)>
        return torch.where(squares > 0, squares / along.where(along > 0, 1.0), 0.0)

    def dequantize(
        self, levels: Tensor, scales: Tensor, clients: Sequence[int], dim: int, rand: PublicRandomness
    ) -> Tensor:
        total = np.zeros(dim)
        for client, picked, scale in zip(clients, levels.numpy(), scales.tolist(), strict=True):
            values = (scale * lloyd_max(self.bits)[0])[picked]
            total += rotate_back(values, _words(client, dim, rand), dim)
        return torch.from_numpy(total)

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return |x|^2 (1 / (1 - D_b) - 1) / (D n), for normal coordinates and updates in range."""
        error = 1.0 / (1.0 - lloyd_max(self.bits)[2]) - 1.0
        worst = longest_square(context) * error / (padded_size(context.dim) * len(clients))
        return torch.full((len(context.segments),), worst, dtype=torch.float64)


@dataclass(frozen=True)
class DRIVE(EDEN):
    """Random rotation, then signs and one scale: one bit per coordinate. Not private.

    Take it for compression to one bit without privacy.

    Nothing is claimed against any adversary.

    A message has one bit per coordinate, with dimensions padded to a power of two, and a scale of 32 bits.

    References:
        Vargaftik et al., DRIVE: One-bit Distributed Mean Estimation, NeurIPS 2021

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = DRIVE()
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        80
    """

    bits: int = field(default=1, init=False, repr=False)
