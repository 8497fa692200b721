"""SCAFFOLD whose control variates are never sent.

With K steps of rate eta a client ends at y_i, and its control variate becomes c_i - c + (x - y_i) / (K eta)
(option II of the paper). The server's control variate c changes by the mean of these changes, times the
cohort's share s of all clients. This mean is -c + mean(x - y_i) / (K eta), and its second part is the mean
update, which the server has anyway:

    c <- (1 - s) c - s (mean update) / (K eta).

The paper's second vector is therefore not sent, nothing more is charged, and c is as noisy as the mean
update. The algorithm needs plain SGD and the same number of steps of every client.

K eta is the sum of the learning rates of a round by its schedule, which all parties know in advance. A step
that a client leaves out counts as a step with gradient c_i - c, so that nothing moves. A client's data
therefore affect other clients through the noisy mean alone.

Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_fedq.algorithms.local_algorithm import Correction, LocalAlgorithm, PersistentOffsets


class _Variates(PersistentOffsets):
    """State of SCAFFOLD: the control variates c_i of clients, and c of the server."""

    def offsets(self, clients: Sequence[int]) -> Tensor:
        return self.server - self.rows(clients)  # c - c_i

    def keep(self, clients: Sequence[int], updates: Tensor, moved: float) -> None:
        if moved == 0.0:
            return
        # option II of the paper, c_i - c + (x - y_i) / (K eta)
        rows = self.rows(clients) - self.server - updates.to(self.server) / moved
        self.pending.update(zip(clients, rows, strict=True))

    def end_round(self, before: Tensor, after: Tensor, share: float, moved: float) -> Tensor:
        if share and moved:  # the mean change of c_i, times the share s of all clients
            self.server = (1.0 - share) * self.server - share * (after - before).to(self.server) / moved
        return after


@dataclass(frozen=True)
class SCAFFOLD(LocalAlgorithm):
    """SCAFFOLD: clients correct their gradients by their earlier difference from the mean gradient.

    Take it if clients' data differ. It needs plain SGD without momentum.

    Examples:
        >>> SCAFFOLD()  # Federated(..., algorithm=this)
        SCAFFOLD()
    """

    remembers: ClassVar[bool] = True
    alike: ClassVar[bool] = True
    sends: ClassVar[bool] = True

    def begin(self, dim: int) -> Correction:
        """Return state in which all control variates are zero."""
        return _Variates(0.0, dim)

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Require plain SGD with one learning rate, whose update is its rate times the sum of its gradients.

        Raises:
            ValueError: If it is another optimiser, has momentum, or has several learning rates.
        """
        groups = [g for optimizer in optimizers for g in optimizer.param_groups]
        plain = [type(optimizer) is SGD for optimizer in optimizers] == [True] and not any(
            g["momentum"] or g["maximize"] for g in groups
        )
        if plain and len({float(g["lr"]) for g in groups}) > 1:
            raise ValueError(
                "SCAFFOLD needs one learning rate, but the groups of this SGD differ. "
                "Give all parameters the same rate, or use FedProx."
            )
        if not plain:
            raise ValueError(
                "SCAFFOLD needs one torch.optim.SGD without momentum, got "
                f"{', '.join(type(optimizer).__name__ for optimizer in optimizers)}. Use it, or FedProx."
            )
