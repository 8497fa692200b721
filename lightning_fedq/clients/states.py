"""State of a client between two rounds: tensors of its own, and its half of a local algorithm.

A training opens a new state, and the end of its round keeps it: where the round is given up, or the client's
answer is in no sum, the old one stands. Rows lie in memory; a deployed client has a file of them
(`flower.kept`), and ranks exchange what they have opened (`training.ranks`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

State = dict[str, Any]
"""One client's rows by what keeps them, in the types that a checkpoint may hold."""


Packed = dict[str, tuple[list[int], Tensor]]
"""Rows of several clients by what keeps them."""


class Keeps(Protocol):
    """Rows of clients. `clients.personal.OwnTensors` and `algorithms.local_algorithm.KeptOffsets` are such.

    Attributes:
        kept: Rows that count, by client.
        opened: Rows of the open round.
    """

    kept: dict[int, Tensor]
    opened: dict[int, Tensor]


class ClientStates:
    """States of all clients of a fit, over everything that keeps rows of them.

    Args:
        parts: By the name that it has in a `State`.

    Example:
        >>> import torch
        >>> from lightning_fedq.clients.personal import OwnTensors
        >>> states = ClientStates({"own": OwnTensors()})
        >>> states.put(3, {"own": torch.ones(2)})
        >>> states.opened()
        {}
    """

    def __init__(self, parts: Mapping[str, Keeps]) -> None:
        self._parts = dict(parts)

    def put(self, client: int, state: Mapping[str, Any]) -> None:
        """Let a client go on with what it has kept elsewhere.

        Args:
            state: Its state; a part that is missing begins anew.
        """
        for name, part in self._parts.items():
            if name in state:
                part.kept[client] = state[name]

    def packed(self) -> Packed:
        """Rows of the open round, by part: the clients and `(clients, values)`."""
        return {
            name: (list(part.opened), torch.stack(list(part.opened.values())))
            for name, part in self._parts.items()
            if part.opened
        }

    def unpack(self, packed: Packed) -> None:
        """Take the rows of clients that have trained elsewhere. Those that have trained here have theirs."""
        for name, (clients, rows) in packed.items():
            opened = self._parts[name].opened
            for client, row in zip(clients, rows, strict=True):
                if client not in opened:
                    opened[client] = row.clone()  # or one row would hold the memory of all

    def opened(self) -> dict[int, State]:
        """States of the open round, by client."""
        clients = sorted({client for part in self._parts.values() for client in part.opened})
        return {
            client: {n: part.opened[client] for n, part in self._parts.items() if client in part.opened}
            for client in clients
        }

    def begin_round(self) -> None:
        """Forget what a round that was given up has opened."""
        for part in self._parts.values():
            part.opened.clear()

    def commit(self, counted: Collection[int]) -> None:
        """The round has ended: clients whose answers are in its sum keep what they have opened."""
        for part in self._parts.values():
            part.kept.update({client: row for client, row in part.opened.items() if client in counted})
            part.opened.clear()
