"""Stacking of several batches to one batch with an additional first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map, tree_unflatten

Flat = tuple[list[Any], TreeSpec]


class UnequalBatches(list[Any]):
    """List of batches that can't be stacked, such as sequences of several lengths or different strings."""


class _Fields:
    """Fields of a dataclass as a node of torch's trees, which would treat the dataclass as a leaf."""

    def __init__(self, value: Any) -> None:
        self.kind, self.held = type(value), {name: _opened(held) for name, held in vars(value).items()}


def _made(values: Any, context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)
    vars(made).update(zip(names, values, strict=True))
    return made


register_pytree_node(_Fields, lambda one: (list(one.held.values()), (one.kind, tuple(one.held))), _made)


def _opened(batch: Any) -> Any:
    def opened(leaf: Any) -> Any:
        is_one = is_dataclass(leaf) and not isinstance(leaf, type | dict | list | tuple)
        return _Fields(leaf) if is_one and hasattr(leaf, "__dict__") else leaf

    return tree_map(opened, batch)


def flat_batch(batch: Any) -> Flat:
    """Return the leaves of a batch and its structure, from which `tree_unflatten` rebuilds the batch.

    Dataclasses and the containers that torch's trees know are opened. Other objects are leaves.

    Examples:
        >>> flat_batch({"tokens": torch.zeros(2), "paths": ["a", "b"]})[0]
        [tensor([0., 0.]), 'a', 'b']
    """
    leaves, spec = tree_flatten(batch)
    return tree_flatten(_opened(batch)) if any(map(is_dataclass, leaves)) else (leaves, spec)


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to each leaf of a batch."""
    leaves, spec = flat_batch(batch)
    return tree_unflatten(map(function, leaves), spec)


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply a function to each tensor of a batch. Other leaves stay unchanged."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def group_stackable(batches: Sequence[Any]) -> list[list[int]]:
    """Group batches that can be stacked.

    These have the same structure, tensors of the same shapes and dtypes, and equal other leaves.

    Returns:
        Indices of the batches of each group, ascending, groups in the order of their first batch.
    """
    groups: list[tuple[Flat, list[int]]] = []
    for index, batch in enumerate(batches):
        flat = flat_batch(batch)
        for first, members in groups:
            if first[1] == flat[1] and all(map(_is_stackable_leaf, first[0], flat[0])):
                members.append(index)
                break
        else:
            groups.append((flat, [index]))
    return [members for _, members in groups]


def _is_stackable_leaf(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype
    plain = isinstance(left, int | float | str | bytes | None)
    return plain and type(left) is type(right) and bool(left == right)


def stack_batches(batches: Sequence[Any]) -> Any:
    """Stack batches of one group. Tensors become `(batches, *shape)`, and other leaves stay unchanged."""
    flat = [flat_batch(batch) for batch in batches]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return tree_unflatten(leaves, flat[0][1])


def stacked(batches: Sequence[Any]) -> Any:
    """Return all batches stacked to one, or `UnequalBatches` if they can't be stacked."""
    return stack_batches(batches) if len(group_stackable(batches)) == 1 else UnequalBatches(batches)


def unstack(batch: Any) -> list[Any]:
    """Return the batch of each client, the inverse of `stacked`."""
    if isinstance(batch, UnequalBatches):
        return list(batch)
    number = next((len(leaf) for leaf in flat_batch(batch)[0] if isinstance(leaf, Tensor)), 0)
    return [map_tensors(itemgetter(row), batch) for row in range(number)]
