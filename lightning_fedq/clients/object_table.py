"""Table of the objects and pieces of memory that a snapshot's bytes do not contain (`clients.snapshot`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class SharedObject(NamedTuple):
    """Marker for an object that all clients share, even if the snapshot also has a copy of it."""

    value: Any


class ClonedMemory(NamedTuple):
    """Marker for a piece of memory that each load clones.

    Args:
        number: Index in the table.
    """

    number: int


class ObjectTable:
    """Objects and pieces of memory, which a load takes from here.

    Attributes:
        entries: Objects, and pieces of memory as uint8 tensors.
        has_overlap: Whether a piece contains only a part of a memory that was visited later.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.has_overlap = False
        self._numbers: dict[int, int] = {}
        # addresses of the first byte and behind the last one, and index in the table, of pieces by device
        self._pieces: dict[torch.device, list[tuple[int, int, int]]] = {}
        self._clones: dict[int, Tensor] = {}

    def number(self, value: Any) -> int:
        """Return the index of an object, and add the object if it is new."""
        number = self._numbers.setdefault(id(value), len(self.entries))
        if number == len(self.entries):
            self.entries.append(value)
        return number

    def memory(self, storage: Tensor) -> tuple[ClonedMemory, int]:
        """Return the piece of memory that contains these bytes, and their offset in it in bytes.

        Tensors that share memory refer to one piece, so their copies share memory, too. The bytes become a
        new piece if no piece contains all of them.

        Args:
            storage: All bytes of a storage or of an array, uint8.
        """
        start, end = storage.data_ptr(), storage.data_ptr() + storage.numel()
        pieces = self._pieces.setdefault(storage.device, [])
        for first, last, number in pieces:
            if end <= first or last <= start:
                continue
            if first <= start and end <= last:
                return ClonedMemory(number), start - first
            self.has_overlap = True
        pieces.append((start, end, len(self.entries)))
        self.entries.append(storage)
        return ClonedMemory(pieces[-1][2]), 0

    def search_largest_first(self) -> None:
        """Let `memory` find the largest piece that contains some bytes."""
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0] - piece[1])

    def clone(self, number: int) -> Tensor:
        """Clone a piece of memory. The last clone's memory is reused if nothing refers to it."""
        piece, last = self.entries[number], self._clones.get(number)
        if last is None or torch._C._storage_Use_Count(last.untyped_storage()._cdata) > 2:
            last = self._clones[number] = torch.empty_like(piece)
        return last.copy_(piece)
