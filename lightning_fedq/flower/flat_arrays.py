"""The float32 arrays of a Flower record as one vector, and back."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from lightning_fedq.flower.settings import RefusedError


class Flat:
    """A record of arrays as a vector.

    Args:
        record: Arrays by name, in their order.

    Attributes:
        vector: `(dim,)` float32, all float32 arrays one behind the other.
        sizes: Length of each of them.
        others: Names of the arrays that are not float32, such as counters; they are no part of it.

    Raises:
        RefusedError: If there is no float32 array, or one of another floating type.
    """

    def __init__(self, record: ArrayRecord) -> None:
        found = {name: array.numpy() for name, array in record.items()}
        self._record = record
        self._shapes = {name: value.shape for name, value in found.items() if value.dtype == np.float32}
        self.others = [name for name in found if name not in self._shapes]
        odd = [name for name in self.others if found[name].dtype.kind not in "iub"]
        if odd or not self._shapes:
            raise RefusedError(
                f"arrays {', '.join(odd) or sorted(found)} are not float32, so their update can't be encoded"
            )
        self.sizes = [int(np.prod(shape)) for shape in self._shapes.values()]
        self.vector = torch.from_numpy(np.concatenate([found[name].ravel() for name in self._shapes]))

    def vector_of(self, record: ArrayRecord) -> Tensor:
        """Vector `(dim,)` of the same arrays in another record.

        Raises:
            ValueError: If it has other names or shapes.
        """
        found = {name: array.numpy() for name, array in record.items()}
        if list(found) != list(self._record) or any(
            found[name].shape != shape or found[name].dtype != np.float32
            for name, shape in self._shapes.items()
        ):
            raise ValueError(
                f"the train function must return the arrays that it was given, {sorted(self._record)} with "
                f"their shapes; got {sorted(found)}"
            )
        return torch.from_numpy(np.concatenate([found[name].ravel() for name in self._shapes]))

    def record_of(self, vector: Tensor) -> ArrayRecord:
        """The record with another vector `(dim,)` in its float32 arrays. The others stay."""
        parts = zip(self._shapes.items(), torch.split(vector.cpu(), self.sizes), strict=True)
        changed = {name: Array(part.numpy().reshape(shape)) for (name, shape), part in parts}
        return ArrayRecord({name: changed.get(name, array) for name, array in self._record.items()})

    def like(self, record: ArrayRecord) -> ArrayRecord:
        """A strategy's version of the record, in float32 again. Arrays that are not float32 are these."""
        changed = {name: Array(record[name].numpy().astype(np.float32)) for name in self._shapes}
        return ArrayRecord({name: changed.get(name, array) for name, array in self._record.items()})
