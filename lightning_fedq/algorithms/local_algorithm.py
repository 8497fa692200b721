"""Contract of local algorithms: a term that every client adds to its gradients.

FedProx, SCAFFOLD and FedDyn differ from federated averaging in this one term. At local weights w, started
from the global ones x, client i adds

    offset_i + pull (w - x)

to each gradient; offset_i follows from what it has trained in earlier rounds and stays with it. What the
server does beside the mean follows from the mean update alone. So nothing but the update travels, it is
quantised and charged as ever, and what is claimed of a message holds with any of these.
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
        """`(len(clients), dim)` their offsets, over the trained parameters. None are zeros."""
        return None

    def sent(self, clients: Sequence[int], updates: Tensor) -> Tensor:
        """Updates as clients hand them to the mechanism, `(len(clients), dim)`: less what they hold back."""
        return updates

    def keep(self, clients: Sequence[int], updates: Tensor, moved: float) -> None:
        """Clients have trained.

        Args:
            updates: `(len(clients), dim)`, local - global.
            moved: Sum of the learning rates of a client's steps, as the round's schedule has them.
        """

    def end_round(self, before: Tensor, after: Tensor, share: float, moved: float) -> Tensor:
        """Take the round's mean update, after `keep` was called for all who have answered.

        Args:
            before: `(dim,)` the global parameters of its start.
            after: `(dim,)` those that the mean update leads to.
            share: Share of all clients whose updates are in the mean.
            moved: Sum of the learning rates of a client's steps, likewise.

        Returns:
            `(dim,)` the global parameters of the next round.
        """
        return after

    def state_dict(self) -> dict[str, Any]:
        """State between rounds, clients' own parts included: not private."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


class PersistentOffsets(Correction):
    """Vectors of clients, which each one keeps from round to round, and one of the server.

    Args:
        pull: Weight of (w - x) in the term, >= 0.
    """

    def __init__(self, pull: float, dim: int) -> None:
        super().__init__(pull)
        self.server = torch.zeros(dim)
        self.committed: dict[int, Tensor] = {}
        self.pending: dict[int, Tensor] = {}

    def rows(self, clients: Sequence[int]) -> Tensor:
        """`(len(clients), dim)` the vectors of clients, zeros before their first round."""
        nothing = torch.zeros_like(self.server)
        return torch.stack([self.committed.get(client, nothing) for client in clients])

    def state_dict(self) -> dict[str, Any]:
        """The server's vector, and each client's."""
        return {"server": self.server, "own": dict(self.committed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.server, self.committed, self.pending = state["server"], dict(state["own"]), {}


class LocalAlgorithm(ABC):
    """Settings of an algorithm, frozen. The state of a fit is a `Correction`.

    Attributes:
        remembers: Do clients keep anything from one round to the next?
        alike: Must all clients of a round take as many steps?
        sends: Do clients need the server's vector?
    """

    remembers: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    sends: ClassVar[bool] = False

    @abstractmethod
    def begin(self, dim: int) -> Correction:
        """State of a new fit."""

    def num_handed(self, dim: int) -> int | None:
        """Coordinates that clients hand to the mechanism and then forget. None: all."""
        return None

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse clients' optimisers that the algorithm is not made for.

        Raises:
            ValueError: With the cure.
        """
        return
