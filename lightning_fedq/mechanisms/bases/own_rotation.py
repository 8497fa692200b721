"""A rotation of each client's own.

A client rotates its update by signs that it shares with the server (two sign flips, two Walsh-Hadamard
transforms), so that errors of one codebook do not point the same way at every client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.hadamard import flip, flip_over, padded_size, transform
from lightning_fedq.keys.randomness import PublicRandomness

_ROTATION = "rotation"
_CHUNK = 1 << 22
"""Coordinates of a stack that are rotated at once."""


def parts(count: int, size: int) -> list[tuple[int, int]]:
    """First and last row, exclusive, of each part of a stack that is rotated at once."""
    step = max(_CHUNK // size, 1)
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def _signs(clients: Sequence[int], size: int, rand: PublicRandomness) -> NDArray[np.uint8]:
    """The outer and the inner sign flips of each client, `(clients, 2, bytes)`, a bit for each."""
    words = np.empty((len(clients), 2, -(-size // 8)), np.uint8)
    for row, client in enumerate(clients):
        if row and client == clients[row - 1]:
            words[row] = words[row - 1]
        else:
            rand.shared_with_server(client, _ROTATION).fill(words[row])
    return words


def rotate_each(rows: Tensor, clients: Sequence[int], dim: int, rand: PublicRandomness) -> Tensor:
    """Rotate one row a client: `(clients, dim)` float64 to `(clients, D)`, D = padded_size(dim)."""
    size = padded_size(dim)
    rotated, root = np.empty((len(clients), size)), math.sqrt(size)
    for row, (outer, inner), out in zip(rows.numpy(), _signs(clients, size, rand), rotated, strict=True):
        flip(row, inner, 1.0, out)
        transform(out)
        flip_over(out, outer, root)
        transform(out)
        out /= root
    return torch.from_numpy(rotated)


def rotate_each_back(rows: Tensor, clients: Sequence[int], dim: int, rand: PublicRandomness) -> Tensor:
    """Inverse of `rotate_each`, in place: `(clients, D)` float64 to `(clients, dim)`."""
    size = rows.shape[1]
    for row, (outer, inner) in zip(rows.numpy(), _signs(clients, size, rand), strict=True):
        for signs in (outer, inner):
            transform(row)
            flip_over(row, signs, math.sqrt(size))
    return rows[:, :dim]
