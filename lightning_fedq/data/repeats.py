"""Find samples that are the same row of data, by their indices and without reading a sample.

`Subset` and `ConcatDataset`, also nested ones, tell the origin of a sample. A data set whose samples are
computed from another data set, one from each, tells it by its attribute `rows_of`. All samples of any other
data set count as different rows.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset


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
    while True:
        if hasattr(index, "__index__"):  # an integer of any type
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
    """Return the largest number of samples, and of clients, that contain the same row.

    Args:
        dataset: Data set to which the indices refer.
        held: Sample indices of each client.
    """
    samples, clients = Counter[Any](), Counter[Any]()
    for part in held:
        rows = [find_row(dataset, index) for index in part.tolist()]
        samples.update(rows)
        clients.update(set(rows))
    return max(samples.values(), default=0), max(clients.values(), default=0)
