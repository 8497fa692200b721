"""Error feedback: clients send their largest coordinates, and keep the rest for their next round.

Client i adds what it has kept to its update, v = u + e_i, hands the k largest coordinates of v to the
mechanism, and keeps e_i = v - top-k(v). With `TopK` of the same share the server gets exactly that. What a
mechanism adds or rounds off besides is not fed back.

A claim is about a message and any two updates, so it holds for these: with a private mechanism nothing is
charged besides. Which coordinates are large shows in its noisy values only.

References:
    Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018; Karimireddy, Rebjock, Stich, Jaggi,
    Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedq.algorithms.local_algorithm import Correction, LocalAlgorithm, PersistentOffsets
from lightning_fedq.functional.segments import num_kept


class _Memory(PersistentOffsets):
    share: float

    def offsets(self, clients: Sequence[int]) -> None:
        return None

    def sent(self, clients: Sequence[int], updates: Tensor) -> Tensor:
        wanted = updates + self.rows(clients).to(updates)
        places = wanted.abs().topk(num_kept(self.share, wanted.shape[1]), dim=1, sorted=False).indices
        sent = torch.zeros_like(wanted).scatter_(1, places, wanted.gather(1, places))
        # e_i of the next round, once this one counts
        self.pending.update(zip(clients, (wanted - sent).to(self.server), strict=True))
        return sent


@dataclass(frozen=True)
class ErrorFeedback(LocalAlgorithm):
    """Top-k updates with memory: what a client does not send it adds to its next update.

    Args:
        share: Share of the coordinates that is sent, in (0, 1]; that of `TopK`.

    Raises:
        ValueError: If the share is out of range.

    Example:
        >>> from lightning_fedq import Federated, TopK
        >>> federated = Federated(TopK(0.1), num_clients=5, algorithm=ErrorFeedback(0.1))
    """

    remembers: ClassVar[bool] = True

    share: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must be in (0, 1], got {self.share}")

    def num_handed(self, dim: int) -> int:
        """A share of them, one at least."""
        return num_kept(self.share, dim)

    def begin(self, dim: int) -> Correction:
        """Nothing is kept yet."""
        memory = _Memory(0.0, dim)
        memory.share = self.share
        return memory
