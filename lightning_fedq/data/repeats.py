"""Find samples that are the same row of data, by their indices, or by their content.

`Subset` and `ConcatDataset`, also nested ones, tell the origin of a sample. A data set whose samples are
computed from another data set, one from each, tells it by its attribute `rows_of`. A wrapper with an
attribute `dataset` of the same length, or with `dataset` and `indices`, is taken for one that keeps the order
of its rows. All samples of any other data set count as different rows, unless their content is equal.
"""

import hashlib
import pickle
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_fedq.data.generator_turns import preserve_generators, seed_generators
from lightning_fedq.data.lazy_datasets import ClientDatasets
from lightning_fedq.data.sampling import find_length

_KEY = bytes(32)
"""Fixed key of the draws of random transforms, so that they treat equal rows equally."""
_SHORT = 32
"""Number of whole numbers from which equal rows are not a coincidence."""


def _find_source(dataset: Any, index: Any) -> tuple[Any, Any] | None:
    """Return the data set and the index from which a known kind of data set takes a sample, or None."""
    if isinstance(dataset, Subset):
        return dataset.dataset, dataset.indices[index]
    if isinstance(dataset, ConcatDataset):
        part = bisect_right(dataset.cumulative_sizes, index)
        begin = dataset.cumulative_sizes[part - 1] if part else 0
        return dataset.datasets[part], index - begin
    if hasattr(dataset, "rows_of"):
        return dataset.rows_of, index
    return None


def _find_source_of_wrapper(dataset: Any, index: Any) -> tuple[Any, Any] | None:
    """Return what `_find_source` returns, also for a wrapper that is not known and names its data set."""
    if (source := _find_source(dataset, index)) is not None:
        return source
    inner, indices = (getattr(dataset, name, None) for name in ("dataset", "indices"))
    if not isinstance(inner, Dataset):
        return None
    if indices is not None and find_length(indices) == len(dataset):
        return inner, indices[index]
    return (inner, index) if find_length(inner) == len(dataset) else None


def _find_origin(
    dataset: Any, index: Any, find: Callable[[Any, Any], tuple[Any, Any] | None]
) -> tuple[Any, Any]:
    """Return the innermost data set that `find` leads to, and the index or key of the sample in it."""
    while True:
        if hasattr(index, "__index__"):  # an integer of any type
            index = index.__index__() + (len(dataset) if index < 0 else 0)
        if (source := find(dataset, index)) is None:
            return dataset, index
        dataset, index = source


def find_row(dataset: Any, index: Any) -> tuple[Hashable, ...]:
    """Return the row of a sample: the identity of the innermost data set, and the index or key in it.

    Args:
        dataset: Map-style data set with a length.
        index: Index of the sample, or its key.

    Examples:
        >>> rows = list("abc")
        >>> find_row(ConcatDataset([Subset(rows, [2, 2, 0]), rows]), 1) == find_row(rows, -1)
        True
    """
    dataset, index = _find_origin(dataset, index, _find_source_of_wrapper)
    base = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset,)
    return (*map(id, base), index)


def max_repeats(dataset: Dataset[Any], held: Sequence[Tensor]) -> tuple[int, int]:
    """Return the largest number of samples, and of clients, that contain the same row. Nothing is read.

    Args:
        dataset: Data set to which the indices refer.
        held: Sample indices of each client.
    """
    return _max_counts(held, partial(find_row, dataset))


def max_equal_rows(dataset: Dataset[Any], held: Sequence[Tensor]) -> tuple[int, int]:
    """Return the largest number of samples, and of clients, that contain a row of the same content.

    Every sample is read once, all with the same draws of random transforms. Short or coarse rows of a
    `TensorDataset` are not compared, because different people have equal ones: fewer than 32 whole numbers,
    such as words of a sentence, and fractions that are all -1, 0 or 1, such as answers.

    Args:
        dataset: Data set to which the indices refer.
        held: Sample indices of each client.
    """

    def digest(index: int) -> Hashable:
        if isinstance(dataset, ClientDatasets):
            dataset.close_unused([index])
        row, key = _find_origin(dataset, index, _find_source)
        if type(row) is not TensorDataset:
            seed_generators(_KEY)
        elif not any(_identifies(part) for part in row[key]):
            return find_row(row, key)
        return _digest_sample(row[key]) or find_row(row, key)

    with preserve_generators():
        counts = _max_counts(held, digest)
    if isinstance(dataset, ClientDatasets):
        dataset.close_unused([])
    return counts


def _max_counts(held: Sequence[Tensor], name: Callable[[int], Hashable]) -> tuple[int, int]:
    """Return the largest numbers of samples, and of clients, whose samples have the same name."""
    samples, clients = Counter[Hashable](), Counter[Hashable]()
    for part in held:
        rows = [name(index) for index in part.tolist()]
        samples.update(rows)
        clients.update(set(rows))
    return max(samples.values(), default=0), max(clients.values(), default=0)


def _identifies(values: Tensor) -> bool:
    """Return whether a tensor of a sample is too rich to be equal to another person's by chance."""
    if values.is_floating_point() or values.is_complex():
        return not bool(((values == 0) | (values.abs() == 1)).all())
    return values.numel() >= _SHORT


def _digest_sample(sample: Any) -> bytes | None:
    """Return 16 bytes that equal samples have in common. None if the sample's content can't be compared."""
    leaves, structure = tree_flatten(sample)
    digest = hashlib.blake2b(str(structure).encode(), digest_size=16)
    try:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                values = leaf.detach().cpu().contiguous()
                digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
                digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
            elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
                digest.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
            else:
                digest.update(pickle.dumps(leaf))
    except Exception:  # an object of any kind may refuse to be pickled
        return None
    return digest.digest()
