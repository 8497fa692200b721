"""A rotation of each client's own, and a private choice among public directions.

A client rotates its update by signs that it shares with the server (two sign flips, two Walsh-Hadamard
transforms), so that errors of one codebook do not point the same way at every client.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.hadamard import padded_size, rotate, rotate_back
from lightning_fedq.keys.randomness import PublicRandomness, Stream

_ROTATION = "rotation"
_CHUNK = 1 << 22
"""Coordinates of a stack that are rotated at once."""


def parts(count: int, size: int) -> list[tuple[int, int]]:
    """First and last row, exclusive, of each part of a stack that is rotated at once."""
    step = max(_CHUNK // size, 1)
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def _signs(clients: Sequence[int], size: int, rand: PublicRandomness) -> tuple[Tensor, Tensor]:
    """The outer and the inner sign flips of each client, `(clients, D)` of +1 and -1."""
    words = np.empty((2, len(clients), -(-size // 8)), np.uint8)
    for row, client in enumerate(clients):
        if row and client == clients[row - 1]:
            words[:, row] = words[:, row - 1]
            continue
        packed = rand.shared_with_server(client, _ROTATION)
        packed.fill(words[0, row])
        packed.fill(words[1, row])
    outer, inner = 1.0 - 2.0 * np.unpackbits(words, axis=2, count=size)
    return torch.from_numpy(outer), torch.from_numpy(inner)


def rotate_each(rows: Tensor, clients: Sequence[int], dim: int, rand: PublicRandomness) -> Tensor:
    """Rotate one row a client: `(clients, dim)` float64 to `(clients, D)`, D = padded_size(dim)."""
    outer, inner = _signs(clients, padded_size(dim), rand)
    return rotate(rotate(rows, inner), outer)


def rotate_each_back(rows: Tensor, clients: Sequence[int], dim: int, rand: PublicRandomness) -> Tensor:
    """Inverse of `rotate_each`: `(clients, D)` to `(clients, dim)`."""
    outer, inner = _signs(clients, rows.shape[1], rand)
    return rotate_back(rotate_back(rows, outer, rows.shape[1]), inner, dim)


def draw_preferred(preferred: NDArray[np.int64], num_options: int, threshold: int, stream: Stream) -> int:
    """One option: a preferred one if a word is below the threshold, else one of the others.

    The coin and both draws below a bound are exact on the stream's words.

    Args:
        preferred: The preferred options, without repetition, in an order that does not follow the data.
        num_options: All options are 0 to `num_options - 1`.
        threshold: Chance of a preferred one times 2^64.
        stream: The client's private coins.
    """
    k = len(preferred)
    if int(stream.words64(1)[0]) < threshold:
        return int(preferred[int(stream.uniform_below(k, 1)[0])])
    drawn = int(stream.uniform_below(num_options - k, 1)[0])
    others = np.ones(num_options, bool)
    others[preferred] = False
    return int(np.flatnonzero(others)[drawn])
