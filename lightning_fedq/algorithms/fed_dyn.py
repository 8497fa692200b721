"""FedDyn: a regulariser that makes the clients' optima agree with the optimum of the whole federation.

Client i adds -g_i + alpha (w - x) to its gradients, and then sets g_i <- g_i - alpha (y_i - x). The server
keeps h <- h - alpha s (mean update), with s the cohort's share of all clients, and continues from the mean -
h / alpha. Both of the server's values follow from the mean update, so no other values are sent.

Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_fedq.algorithms.local_algorithm import Correction, LocalAlgorithm, PersistentOffsets


class _Gradients(PersistentOffsets):
    """State of FedDyn: the vector g_i of each client, and h of the server."""

    def offsets(self, clients: Sequence[int]) -> Tensor:
        return -self.rows(clients)  # -g_i, while the pull is alpha (w - x)

    def keep(self, clients: Sequence[int], updates: Tensor, moved: float) -> None:
        rows = self.rows(clients) - self.pull * updates.to(self.server)  # g_i - alpha (y_i - x)
        self.pending.update(zip(clients, rows, strict=True))

    def end_round(self, before: Tensor, after: Tensor, share: float, moved: float) -> Tensor:
        # the new h is h - alpha s (mean update)
        self.server = self.server - self.pull * share * (after - before).to(self.server)
        return after - (self.server / self.pull).to(after)  # mean - h / alpha


@dataclass(frozen=True)
class FedDyn(LocalAlgorithm):
    """FedDyn: dynamic regularisation, for clients whose data differ.

    Args:
        alpha: Weight of the regulariser, > 0. The paper takes 0.001 to 0.1.

    Raises:
        ValueError: If alpha is not a finite number above 0.

    Examples:
        >>> FedDyn(alpha=0.1)  # Federated(..., algorithm=this)
        FedDyn(alpha=0.1)
    """

    remembers: ClassVar[bool] = True

    alpha: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < float("inf"):
            raise ValueError(f"alpha must be a finite number > 0, got {self.alpha}")

    def begin(self, dim: int) -> Correction:
        """Return state in which all vectors are zero."""
        return _Gradients(self.alpha, dim)
