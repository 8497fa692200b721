"""PrivUnit, PrivUnitG and ProjUnit on a public codebook: one of K random directions, exactly epsilon-LDP.

Source: PrivUnit of Bhowmick et al. 2018, with the cap and the coin of Asi, Feldman, Talwar 2022: a random
vector that lies in a cap around the update's direction with chance p, and outside it else. PrivUnitG (the
same paper) takes normal vectors in place of the sphere's; ProjUnit (Asi, Feldman, Nelson, Nguyen, Talwar
2023) does it in k dimensions after a random projection.

Departure: the authors send the vector itself, 32 D bits, drawn in floats. That is not epsilon-LDP: where a
coordinate of the update is zero the sent one is a value of the sampler's float grid, almost never else. Here
K vectors are drawn in public, anew in every round, and the client names one of the k closest to its direction
or any other (`functional.direction_choice`). A message is log2(K) bits, its epsilon rests on integers alone,
and with K = 1024 the error is 0.2% above PrivUnit's at epsilon 2, 0.4% at 4, 3.4% at 8; 4096 bring that to
0.8%. Every client rotates by signs of its own first, so that errors of one codebook do not add up.

ProjUnit's decoder divides by E|W u|, which makes it unbiased; the authors' sqrt(k / D) does not. Its
projection W has orthonormal rows from normal entries: the authors' code draws them uniform on [0, 1], which
is no random subspace. All clients of a round share W, behind rotations of their own.

Client and server hold the codebook: K D numbers (K k and k D of ProjUnit), at most 2^26. The stated bias is
that of all chosen directions (`bases.own_rotation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from lightning_fedq.functional.direction_choice import DirectionChoice, best_direction_choice
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.keys.randomness import PublicRandomness, Stream
from lightning_fedq.mechanisms.bases.own_rotation import ChosenDirection, rotate_each_back
from lightning_fedq.mechanisms.interface import AuditCase, RoundContext
from lightning_fedq.wire.coding import FixedLength

_MOST = 1 << 26


@lru_cache(maxsize=2)
def _normals(key: bytes, rows: int, columns: int, unit: bool = False) -> Tensor:
    """Public standard normals, or unit rows. Kept: clients that encode one by one draw the same."""
    if rows * columns > _MOST:
        raise ValueError(
            f"a codebook must have at most {_MOST} numbers, got {rows} x {columns}; "
            "lower `directions`, or take RotatedAxes, whose codebook is never stored"
        )
    # uniforms are never 0 or 1, so that no normal is infinite
    drawn = torch.from_numpy(special.ndtri(Stream(key).uniforms(rows * columns)).reshape(rows, columns))
    return torch.nn.functional.normalize(drawn) if unit else drawn


@lru_cache(maxsize=1)
def _projection(key: bytes, rows: int, columns: int) -> Tensor:
    """`(rows, columns)`, orthonormal rows, uniform among all such: QR of normals, signs fixed."""
    basis, triangle = np.linalg.qr(_normals(key, columns, rows).numpy())
    # QR's signs are the library's choice; with a positive diagonal the basis is uniform
    return torch.from_numpy((basis * np.sign(triangle.diagonal())).T.copy())


@lru_cache(maxsize=1)
def _ordered(mechanism: PrivUnitG, dim: int, public: PublicRandomness) -> Tensor:
    """A rotated update of `dim` coordinates, an order, that is closest to the first k directions."""
    codebook = mechanism._lift(mechanism._codebook(dim, public), dim, public)
    ordered: Tensor = torch.linalg.pinv(codebook) @ mechanism._falling()
    return ordered


@dataclass(frozen=True)
class PrivUnitG(ChosenDirection):
    """A private one of K public normal vectors, close to the update's direction: log2(K) bits a client.

    Args:
        epsilon: Local budget of one message, > 0 and finite, in nats.
        clip_norm: Length that every decoded update is given, > 0, in units of the update.
        directions: K, a power of two, 2 to 65536: more are closer to the ideal error.

    References:
        Asi, Feldman, Talwar, Optimal Algorithms for Mean Estimation under Local Differential Privacy, 2022

    Example:
        >>> PrivUnitG(epsilon=4.0, clip_norm=1.0).choice(1024).num_top
        67
    """

    _coins = "direction"
    _options = "directions"
    _spherical: ClassVar[bool] = False

    directions: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.directions <= 2**16 or self.directions & (self.directions - 1):
            raise ValueError(f"directions must be a power of two from 2 to 65536, got {self.directions}")

    def codebook_dim(self, dim: int) -> int:
        """Dimension of the directions, at least 2."""
        return padded_size(max(dim, 2))

    def choice(self, dim: int) -> DirectionChoice:
        """Law of a message about `dim` coordinates."""
        return best_direction_choice(self.codebook_dim(dim), self.directions, self.epsilon, self._spherical)

    def num_options(self, dim: int) -> int:
        """K."""
        return self.directions

    def _preferred(self, rotated: Tensor, dim: int, rand: PublicRandomness) -> NDArray[np.int64]:
        closeness = self._project(rotated, rand) @ self._codebook(dim, rand).T
        top: NDArray[np.int64] = closeness.topk(self.choice(dim).num_top, sorted=False).indices.numpy()
        return np.sort(top)  # topk with sorted=False gives them in no set order

    def _directions(self, options: Tensor, dim: int, rand: PublicRandomness) -> Tensor:
        return self._lift(self._codebook(dim, rand)[options], dim, rand)

    def _width(self, dim: int) -> int:
        return max(self._size(dim), self.directions)

    def _size(self, dim: int) -> int:
        return padded_size(max(dim, 2))

    def _codebook(self, dim: int, rand: PublicRandomness) -> Tensor:
        """The directions, `(K, codebook_dim)`."""
        key = rand.public("directions").words(8).tobytes()
        return _normals(key, self.directions, self.codebook_dim(dim), self._spherical)

    def _project(self, rotated: Tensor, rand: PublicRandomness) -> Tensor:
        """Rotated updates in the codebook's dimensions. How long they are changes nothing."""
        return rotated

    def _lift(self, directions: Tensor, dim: int, rand: PublicRandomness) -> Tensor:
        """Directions as rotated updates: the transpose of `_project`."""
        return directions

    def code(self, context: RoundContext) -> FixedLength:
        """One of K."""
        return FixedLength(self.directions.bit_length() - 1)  # log2 of a power of two

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """clip_norm^2 E|sent|^2 / (m^2 D n): for uniformly random rotations."""
        square = self.choice(context.dim).mean_square / self.mean_length(context.dim) ** 2
        variance = self.clip_norm**2 * square / (self._size(context.dim) * len(clients))
        return torch.full((len(context.segments),), variance, dtype=torch.float64)

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # few directions: an update can prefer the same in all rounds
        few = min(self.directions, 8, max(self.codebook_dim(dim) // 2, 2))
        return (AuditCase(replace(self, directions=few), everybody=True),)

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        # closest to the first k directions, and its opposite
        dim = context.dim
        if dim == self._size(dim):  # nothing is padded, so what is solved in the codebook is turned
            ordered = _ordered(self, dim, public)[None].clone()
            first = rotate_each_back(ordered, [client], dim, public)[0]
            return first, -first
        codebook = self._lift(self._codebook(context.dim, public), context.dim, public).clone()
        seen = rotate_each_back(codebook, [client] * self.directions, context.dim, public)
        first = torch.linalg.pinv(seen) @ self._falling()
        return first, -first

    def _falling(self) -> Tensor:
        """Closeness of an update to each direction, falling from the first to the last, on average 0."""
        return torch.arange(self.directions, 0, -1, dtype=torch.float64) - (self.directions + 1) / 2.0

    def lever(self, client: int, context: RoundContext) -> float | None:
        """Length of one decoded message over that of an honest mean, `clip_norm`. Of unit vectors alone."""
        # a normal vector has no largest length
        return 1.0 / self.mean_length(context.dim) if self._spherical else None


@dataclass(frozen=True)
class PrivUnit(PrivUnitG):
    """A private one of K public unit vectors, close to the update's direction: log2(K) bits a client.

    Args:
        epsilon: Local budget of one message, > 0 and finite, in nats.
        clip_norm: Length that every decoded update is given, > 0, in units of the update.
        directions: K, a power of two, 2 to 65536: more are closer to the ideal error.

    References:
        Bhowmick, Duchi, Freudiger, Kapoor, Rogers, Protection Against Reconstruction and Its Applications in
        Private Federated Learning, 2018

    Example:
        >>> PrivUnit(epsilon=4.0, clip_norm=1.0).choice(1024).num_top  # of 1,024 directions
        67
    """

    _spherical: ClassVar[bool] = True


@dataclass(frozen=True)
class ProjUnit(PrivUnitG):
    """PrivUnitG in a random subspace that all clients share: log2(K) bits a client, a smaller codebook.

    Args:
        epsilon: Local budget of one message, > 0 and finite, in nats.
        clip_norm: Length that every decoded update is given, > 0, in units of the update.
        directions: K, a power of two, 2 to 65536: more are closer to the ideal error.
        subspace: k, dimensions of the subspace, >= 2; not more than the update has are used.

    References:
        Asi, Feldman, Nelson, Nguyen, Talwar, Fast Optimal Locally Private Mean Estimation via Random
        Projections, NeurIPS 2023

    Example:
        >>> ProjUnit(epsilon=4.0, clip_norm=1.0).choice(8192).num_top  # of 1,024 directions
        67
    """

    subspace: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subspace < 2:
            raise ValueError(f"subspace must be >= 2, got {self.subspace}")

    def codebook_dim(self, dim: int) -> int:
        return min(self.subspace, self._size(dim))

    def mean_length(self, dim: int) -> float:
        """m E|W u|, E|W u| = Gamma((k+1)/2) Gamma(D/2) / (Gamma(k/2) Gamma((D+1)/2))."""
        k, size = self.codebook_dim(dim), self._size(dim)
        halves = [special.gammaln(n / 2.0) for n in (k + 1, size, k, size + 1)]
        return self.choice(dim).mean_length * math.exp(halves[0] + halves[1] - halves[2] - halves[3])

    def _subspace(self, size: int, rand: PublicRandomness) -> Tensor:
        key = rand.public("subspace").words(8).tobytes()
        return _projection(key, min(self.subspace, size), size)

    def _project(self, rotated: Tensor, rand: PublicRandomness) -> Tensor:
        return rotated @ self._subspace(rotated.shape[1], rand).T

    def _lift(self, directions: Tensor, dim: int, rand: PublicRandomness) -> Tensor:
        return directions @ self._subspace(self._size(dim), rand)
