"""FedProx: clients are pulled back to where they have started.

Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from dataclasses import dataclass

from lightning_fedq.algorithms.local_algorithm import Correction, LocalAlgorithm


@dataclass(frozen=True)
class FedProx(LocalAlgorithm):
    """Adds mu / 2 |w - x|^2 to every client's loss, x being the global weights.

    Args:
        mu: >= 0; 0 is federated averaging.

    Raises:
        ValueError: If mu is negative or not finite.

    Example:
        >>> FedProx(mu=0.1)  # Federated(..., algorithm=this)
        FedProx(mu=0.1)
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 <= self.mu < float("inf"):
            raise ValueError(f"mu must be a finite number >= 0, got {self.mu}")

    def begin(self, dim: int) -> Correction:
        """The pull, and nothing to keep."""
        return Correction(self.mu)
