"""SCAFFOLD, whose control variates travel nowhere.

With K steps of rate eta a client ends at y_i, and its control variate becomes c_i - c + (x - y_i) / (K eta)
(option II of the paper). The server's own changes by the mean of these changes, times the cohort's share s of
all clients; that mean is -c + mean(x - y_i) / (K eta), the second part of which is the mean update that the
server has anyway:

    c <- (1 - s) c - s (mean update) / (K eta).

So the paper's second vector is not sent, nothing more is charged, and c is as noisy as the mean update. It
takes plain SGD and as many steps of every client.

K eta is the sum of the rates of a round as its schedule has them, which everybody knows beforehand. A step
that a client leaves out counts as one whose gradient is c_i - c, so that nothing moves: what it does with its
own data reaches others by the noisy mean alone.

Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_fedq.algorithms.local_algorithm import Correction, LocalAlgorithm, PersistentOffsets


class _Variates(PersistentOffsets):
    def offsets(self, clients: Sequence[int]) -> Tensor:
        return self.server - self.rows(clients)  # c - c_i

    def keep(self, clients: Sequence[int], updates: Tensor, moved: float) -> None:
        if moved == 0.0:
            return
        # option II: c_i - c + (x - y_i) / (K eta)
        rows = self.rows(clients) - self.server - updates.to(self.server) / moved
        self.pending.update(zip(clients, rows, strict=True))

    def end_round(self, before: Tensor, after: Tensor, share: float, moved: float) -> Tensor:
        if share and moved:  # the clients' mean change, weighted by their share s
            self.server = (1.0 - share) * self.server - share * (after - before).to(self.server) / moved
        return after


@dataclass(frozen=True)
class SCAFFOLD(LocalAlgorithm):
    """Every client corrects its gradients by how they have differed from the others' in earlier rounds.

    Example:
        >>> SCAFFOLD()  # Federated(..., algorithm=this)
        SCAFFOLD()
    """

    remembers: ClassVar[bool] = True
    alike: ClassVar[bool] = True
    sends: ClassVar[bool] = True

    def begin(self, dim: int) -> Correction:
        """All control variates are 0."""
        return _Variates(0.0, dim)

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Plain SGD: else the update does not say what the mean gradient was.

        Raises:
            ValueError: If it is another optimiser, or has momentum.
        """
        groups = [g for one in optimizers for g in one.param_groups]
        plain = [type(one) is SGD for one in optimizers] == [True] and not any(
            g["momentum"] or g["maximize"] for g in groups
        )
        if plain and len({float(g["lr"]) for g in groups}) > 1:
            raise ValueError(
                "SCAFFOLD divides by the learning rate, and this SGD has one for each of its groups; give "
                "all parameters the same, or use FedProx"
            )
        if not plain:
            raise ValueError(
                "SCAFFOLD takes one torch.optim.SGD without momentum, whose update is the sum of its "
                f"gradients; got {', '.join(type(one).__name__ for one in optimizers)}. Use it, or FedProx"
            )
