"""Several batches as one with a dimension more, where their shapes and everything else agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Flat = tuple[list[Any], TreeSpec]


class UnequalBatches(list[Any]):
    """Batches that do not stack as one: padded sequences of several lengths, strings."""


def groups_alike(batches: Sequence[Any]) -> list[list[int]]:
    """Group batches that stack: by structure, by shapes and dtypes of tensors, and by all else they hold.

    Returns:
        Indices of the batches of each group, ascending, groups in the order of their first batch.
    """
    groups: list[tuple[Flat, list[int]]] = []
    for index, batch in enumerate(batches):
        flat = tree_flatten(batch)
        for first, members in groups:
            if _alike(first, flat):
                members.append(index)
                break
        else:
            groups.append((flat, [index]))
    return [members for _, members in groups]


def _alike(left: Flat, right: Flat) -> bool:
    return left[1] == right[1] and all(map(_leaves_alike, left[0], right[0]))


def _leaves_alike(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype
    plain = isinstance(left, int | float | str | bytes | None)
    return plain and type(left) is type(right) and bool(left == right)


def stack_batches(batches: Sequence[Any]) -> Any:
    """Stack batches that are alike: tensors `(batches, *shape)`, what else they hold as it is."""
    flat = [tree_flatten(batch) for batch in batches]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return tree_unflatten(leaves, flat[0][1])


def stacked(batches: Sequence[Any]) -> Any:
    """All batches as one, or `UnequalBatches`."""
    return stack_batches(batches) if len(groups_alike(batches)) == 1 else UnequalBatches(batches)
