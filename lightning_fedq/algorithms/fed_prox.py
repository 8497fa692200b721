"""FedProx: a proximal term pulls clients back to the global weights.

Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from dataclasses import dataclass

from lightning_fedq.algorithms.local_algorithm import Correction, LocalAlgorithm


@dataclass(frozen=True)
class FedProx(LocalAlgorithm):
    """FedProx: adds mu / 2 |w - x|^2 to every client's loss, with x the global weights.

    Args:
        mu: Weight of the proximal term, >= 0. 0 is federated averaging.

    Raises:
        ValueError: If mu is negative or not finite.

    Examples:
        >>> FedProx(mu=0.1)  # Federated(..., algorithm=this)
        FedProx(mu=0.1)
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 <= self.mu < float("inf"):
            raise ValueError(f"mu must be a finite number >= 0, got {self.mu}")

    def begin(self, dim: int) -> Correction:
        """Return state with the pull mu, in which clients keep nothing."""
        return Correction(self.mu)
