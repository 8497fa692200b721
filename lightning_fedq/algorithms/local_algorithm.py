"""Interface of local algorithms: a term that every client adds to its gradients.

FedProx, SCAFFOLD and FedDyn differ from federated averaging in this term. At local weights w, started from
the global weights x, client i adds

    offset_i + pull (w - x)

to each gradient. offset_i follows from the client's training in earlier rounds, and never leaves the client.
The server's corrections of the mean follow from the mean update alone. Clients therefore send only their
updates, which are quantised and charged as usual, and a mechanism's claims hold with each of these
algorithms.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class Correction:
    """State of an algorithm in one fit.

    Args:
        pull: Weight of (w - x) in the term, >= 0.
    """

    def __init__(self, pull: float = 0.0) -> None:
        self.pull = pull

    def offsets(self, clients: Sequence[int]) -> Tensor | None:
        """Return the clients' offsets `(len(clients), dim)` for the trained parameters. None: zeros."""
        return None

    def sent(self, clients: Sequence[int], updates: Tensor) -> Tensor:
        """Return the updates that clients give to the mechanism, `(len(clients), dim)`."""
        return updates

    def keep(self, clients: Sequence[int], updates: Tensor, moved: float) -> None:
        """Update the clients' own state after their training.

        Args:
            clients: Clients that have trained.
            updates: `(len(clients), dim)`, local - global.
            moved: Sum of the learning rates of a client's steps, by the round's schedule.
        """

    def end_round(self, before: Tensor, after: Tensor, share: float, moved: float) -> Tensor:
        """Apply the round's mean update, after `keep` was called for all clients that have answered.

        Args:
            before: `(dim,)`, the global parameters at the round's start.
            after: `(dim,)`, the global parameters after the mean update.
            share: Share of all clients whose updates are in the mean.
            moved: Sum of the learning rates of a client's steps, by the round's schedule.

        Returns:
            `(dim,)`, the global parameters of the next round.
        """
        return after

    def state_dict(self) -> dict[str, Any]:
        """Return the state between rounds, which contains clients' own state and so is not private."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`."""


class PersistentOffsets(Correction):
    """State with one vector per client, kept from round to round, and one vector of the server.

    New vectors of clients are `pending` until the server has counted the round, and then `committed`.

    Args:
        pull: Weight of (w - x) in the term, >= 0.
        dim: Number of trained parameters.
    """

    def __init__(self, pull: float, dim: int) -> None:
        super().__init__(pull)
        self.server = torch.zeros(dim)
        self.committed: dict[int, Tensor] = {}
        self.pending: dict[int, Tensor] = {}

    def rows(self, clients: Sequence[int]) -> Tensor:
        """Return the vectors of clients, `(len(clients), dim)`, which are zero before their first round."""
        nothing = torch.zeros_like(self.server)
        return torch.stack([self.committed.get(client, nothing) for client in clients])

    def state_dict(self) -> dict[str, Any]:
        """Return the server's vector and each client's vector."""
        return {"server": self.server, "own": dict(self.committed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        self.server, self.committed, self.pending = state["server"], dict(state["own"]), {}


class LocalAlgorithm(ABC):
    """Frozen settings of a local algorithm. The state of a fit is a `Correction`.

    Attributes:
        remembers: Whether clients keep state from one round to the next.
        alike: Whether all clients of a round must take the same number of steps.
        sends: Whether clients need the server's vector.
    """

    remembers: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    sends: ClassVar[bool] = False

    @abstractmethod
    def begin(self, dim: int) -> Correction:
        """Return the state of a new fit."""

    def num_handed(self, dim: int) -> int | None:
        """Return the number of coordinates that clients give to the mechanism. None: all."""
        return None

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse clients' optimisers that the algorithm does not support.

        Raises:
            ValueError: If an optimiser is not supported.
        """
        return
