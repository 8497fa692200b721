"""Which samples are one and the same row, seen by the indices of data sets without reading a sample.

`Subset` and `ConcatDataset` say where a sample comes from, and so do those of them that lie in each other.
So does a data set whose samples are made of another's, one of each, by its attribute `rows_of`. Any other is
taken at its word: its samples are as many rows.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset


def find_row(dataset: Any, index: Any) -> tuple[Hashable, ...]:
    """The row behind a sample: the data set that it is of, by identity, and its index or key there.

    Args:
        dataset: Map-style, with a length.
        index: Index of the sample, or its key.

    Example:
        >>> rows = list("abc")
        >>> find_row(ConcatDataset([Subset(rows, [2, 2, 0]), rows]), 1) == find_row(rows, -1)
        True
    """
    while True:
        if hasattr(index, "__index__"):  # a number, of any kind
            index = index.__index__() + (len(dataset) if index < 0 else 0)
        if isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        elif isinstance(dataset, ConcatDataset):
            part = bisect_right(dataset.cumulative_sizes, index)
            begin = dataset.cumulative_sizes[part - 1] if part else 0
            dataset, index = dataset.datasets[part], index - begin
        elif hasattr(dataset, "rows_of"):
            dataset = dataset.rows_of
        else:
            base = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset,)
            return (*map(id, base), index)


def max_repeats(dataset: Dataset[Any], held: Sequence[Tensor]) -> tuple[int, int]:
    """Samples, and clients, in which some row of the training data stands at most.

    Args:
        dataset: Data set that the indices are of.
        held: Sample indices of each client.
    """
    samples, clients = Counter[Any](), Counter[Any]()
    for part in held:
        rows = [find_row(dataset, index) for index in part.tolist()]
        samples.update(rows)
        clients.update(set(rows))
    return max(samples.values(), default=0), max(clients.values(), default=0)
