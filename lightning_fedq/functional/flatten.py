"""Parameters to one flat vector and back, with one segment per tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one vector.

    Args:
        tensors: Any shapes, one dtype and device.

    Returns:
        `(dim,)`, a copy, `dim` the sum of the tensors' sizes.

    Raises:
        ValueError: If there is no tensor.

    Examples:
        >>> flatten([torch.ones(2, 2), torch.zeros(1)])
        tensor([1., 1., 1., 1., 0.])
    """
    if not tensors:
        raise ValueError("flatten needs at least one tensor, got none. Has the model trainable parameters?")
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cut a vector into views of the given shapes. Leading dimensions of `vector` are kept.

    Args:
        vector: `(..., dim)`.
        shapes: Shapes whose sizes sum to `dim`.

    Returns:
        One view per shape, each `(..., *shape)`.

    Raises:
        ValueError: If the sizes do not sum to `dim`.

    Examples:
        >>> [part.shape for part in unflatten(torch.arange(5.0), [torch.Size([2, 2]), torch.Size([1])])]
        [torch.Size([2, 2]), torch.Size([1])]
    """
    sizes = [shape.numel() for shape in shapes]
    if sum(sizes) != vector.shape[-1]:
        raise ValueError(f"shapes hold {sum(sizes)} values, the vector has {vector.shape[-1]}")
    parts = torch.split(vector, sizes, dim=-1)
    return [part.reshape((*vector.shape[:-1], *shape)) for part, shape in zip(parts, shapes, strict=True)]


def copy_into(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors in place with the values of a flat vector `(dim,)`, casting to their dtype.

    Raises:
        ValueError: If the sizes do not sum to `dim`.
    """
    with torch.no_grad():
        for tensor, part in zip(tensors, unflatten(vector, [t.shape for t in tensors]), strict=True):
            tensor.copy_(part)


def rearrange(
    vector: Tensor, segments: Sequence[int], origins: Sequence[int | None], new: Sequence[Tensor]
) -> Tensor:
    """Return a flat vector with other segments. Old segments keep their values, new segments get new values.

    Args:
        vector: Old vector, `(dim,)`.
        segments: Lengths of the old segments, which sum to `dim`.
        origins: Index of the old segment for each segment of the result, or None for a new segment.
        new: One vector for each segment of the result. It is used if the segment has no old one.

    Returns:
        `(new_dim,)`, of the dtype and device of `vector`.
    """
    old = torch.split(vector, list(segments))
    parts = [part.to(vector) if at is None else old[at] for at, part in zip(origins, new, strict=True)]
    return torch.cat(parts)
