"""Local algorithms of clients, `Federated(algorithm=...)`, and server optimisers by name."""

from lightning_fedq.algorithms.error_feedback import ErrorFeedback
from lightning_fedq.algorithms.fed_dyn import FedDyn
from lightning_fedq.algorithms.fed_prox import FedProx
from lightning_fedq.algorithms.local_algorithm import Correction, LocalAlgorithm
from lightning_fedq.algorithms.scaffold import SCAFFOLD
from lightning_fedq.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi

__all__ = [
    "SCAFFOLD",
    "Correction",
    "ErrorFeedback",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedDyn",
    "FedProx",
    "FedYogi",
    "LocalAlgorithm",
]
