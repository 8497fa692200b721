"""Which samples are one and the same row, seen by the indices of data sets without reading a sample.

`Subset` and `ConcatDataset` say where a sample comes from, and so do those of them that lie in each other.
Any other data set is taken at its word: its samples are as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset


def rows_behind(dataset: Dataset[Any]) -> Tensor:
    """Number of the row behind each sample of a data set, `(samples,)` int64; equal where a row repeats.

    Args:
        dataset: Map-style, with a length.

    Example:
        >>> rows = TensorDataset(torch.zeros(3, 2))
        >>> rows_behind(ConcatDataset([Subset(rows, [2, 2, 0]), rows])).tolist()
        [2, 2, 0, 0, 1, 2]
    """
    everything = np.arange(len(dataset))  # type: ignore[arg-type]
    left: list[tuple[Any, Any, Any]] = [(dataset, everything, everything)]
    found: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}
    while left:
        data, samples, places = left.pop()
        if isinstance(data, Subset):
            own = np.asarray(data.indices)[places]
            # what is asked for by other keys than numbers ends here, as rows of their own
            if own.dtype.kind in "iu" and hasattr(data.dataset, "__len__"):
                own = np.where(own < 0, own + len(data.dataset), own)
                left.append((data.dataset, samples, own))
                continue
            data, places = data.dataset, own
        elif isinstance(data, ConcatDataset):
            part = np.searchsorted(data.cumulative_sizes, places, side="right")
            order = np.argsort(part, kind="stable")
            present, starts = np.unique(part[order], return_index=True)
            for number, own in zip(present.tolist(), np.split(order, starts[1:]), strict=True):
                begin = data.cumulative_sizes[number - 1] if number else 0
                left.append((data.datasets[number], samples[own], places[own] - begin))
            continue
        base = data.tensors if isinstance(data, TensorDataset) else (data,)
        found.setdefault(tuple(map(id, base)), []).append((samples, places))
    rows, count = np.empty(len(everything), dtype=np.int64), 0
    for pieces in found.values():
        samples, places = (np.concatenate(column) for column in zip(*pieces, strict=True))
        values, numbers = np.unique(places, return_inverse=True, axis=0)
        rows[samples] = numbers.reshape(-1) + count
        count += len(values)
    return torch.from_numpy(rows)


def most_repeated(dataset: Dataset[Any] | None, held: Sequence[Tensor]) -> tuple[int, int]:
    """Samples, and clients, in which some row of the training data stands at most.

    Args:
        dataset: Data set that the indices are of; None takes every sample for a row.
        held: Sample indices of each client.
    """
    samples = torch.cat(list(held))
    if not len(samples):
        return 0, 0
    owner = torch.repeat_interleave(torch.tensor([len(part) for part in held]))
    rows = samples if dataset is None else rows_behind(dataset)[samples]
    pairs = torch.unique(torch.stack([rows, owner]), dim=1)
    return int(torch.bincount(rows).max()), int(torch.bincount(pairs[0]).max())
