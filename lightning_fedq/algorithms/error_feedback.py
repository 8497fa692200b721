"""Error feedback: clients send their largest coordinates, and add the rest to their next update.

Client i adds its memory to its update, v = u + e_i. It gives the k largest coordinates of v to the mechanism,
and keeps e_i = v - top-k(v). `TopK` with the same share sends exactly these coordinates. Noise and rounding
errors of a mechanism are not fed back.

A claim is about a message and any two updates, so it holds for these sparse updates. A private mechanism
therefore charges nothing more. Only its noisy values reveal which coordinates are large.

References:
    Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018.
    Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other Gradient Compression Schemes,
    ICML 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedq.algorithms.local_algorithm import Correction, LocalAlgorithm, PersistentOffsets
from lightning_fedq.functional.segments import num_kept


class _Memory(PersistentOffsets):
    """State of error feedback: the memory e_i of each client."""

    fraction: float

    def offsets(self, clients: Sequence[int]) -> None:
        return None

    def sent(self, clients: Sequence[int], updates: Tensor) -> Tensor:
        total = updates + self.rows(clients).to(updates)  # v = u + e_i
        places = total.abs().topk(num_kept(self.fraction, total.shape[1]), dim=1, sorted=False).indices
        sent = torch.zeros_like(total).scatter_(1, places, total.gather(1, places))
        # the next round's e_i stays pending until the server has counted this round
        self.pending.update(zip(clients, (total - sent).to(self.server), strict=True))
        return sent


@dataclass(frozen=True)
class ErrorFeedback(LocalAlgorithm):
    """Top-k updates with memory: a client adds the coordinates that it does not send to its next update.

    Args:
        fraction: Fraction of the coordinates that is sent, in (0, 1], equal to the fraction of `TopK`.

    Raises:
        ValueError: If the share is out of range.

    Examples:
        >>> from lightning_fedq import Federated, TopK
        >>> federated = Federated(TopK(0.1), num_clients=5, algorithm=ErrorFeedback(0.1))
    """

    remembers: ClassVar[bool] = True

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction}")

    def num_handed(self, dim: int) -> int:
        """Return the number of coordinates that clients send, a share of `dim` and at least one."""
        return num_kept(self.fraction, dim)

    def begin(self, dim: int) -> Correction:
        """Return empty memories."""
        memory = _Memory(0.0, dim)
        memory.fraction = self.fraction
        return memory
