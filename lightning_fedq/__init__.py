"""Federated learning with differential privacy and few bits: one callback for PyTorch Lightning.

This module has the names that a training needs: callbacks, mechanisms, partitions, ranges and secure
aggregation. Each name is imported at its first use:

    import lightning_fedq as fedq
    fed = fedq.Federated(fedq.CorBin(epsilon_per_coordinate=1.0), num_clients=20)
"""

from typing import TYPE_CHECKING

from lightning_fedq import mechanisms
from lightning_fedq.imports import lazily

__version__ = "0.3.0"

if TYPE_CHECKING:
    from lightning_fedq.algorithms import (
        SCAFFOLD,
        ErrorFeedback,
        FedAdagrad,
        FedAdam,
        FedAvgM,
        FedDyn,
        FedProx,
        FedYogi,
    )
    from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation
    from lightning_fedq.callbacks import (
        DPSGD,
        ByzantineClients,
        Federated,
        Langevin,
        PrivacyBudget,
        ReloadBest,
        RoundProgressBar,
        RunFolder,
        WandbRounds,
    )
    from lightning_fedq.clients.evaluation import ClientEvaluation
    from lightning_fedq.data import (
        IID,
        ClientData,
        Dirichlet,
        FeatureShards,
        FederatedDataModule,
        LabelShards,
        Natural,
        QuantitySkew,
        Sizes,
    )
    from lightning_fedq.leakage import LeakageBudget, LeakageMonitor
    from lightning_fedq.mechanisms import *  # noqa: F403
    from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange, FixedRange, PreviousMinMax
    from lightning_fedq.privacy.cohorts import Available, Cyclic, DisjointOnce, Everybody, FixedSize, Poisson
    from lightning_fedq.privacy.target import PrivacyTarget
    from lightning_fedq.rounds import Deadline, Statistics
    from lightning_fedq.secagg import SecAgg

__all__ = [
    "DPSGD",
    "IID",
    "SCAFFOLD",
    "AdaptiveRange",
    "Available",
    "ByzantineClients",
    "ClientData",
    "ClientEvaluation",
    "Cyclic",
    "Deadline",
    "Dirichlet",
    "DisjointOnce",
    "ErrorFeedback",
    "Everybody",
    "FeatureShards",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedDyn",
    "FedProx",
    "FedYogi",
    "Federated",
    "FederatedDataModule",
    "FixedRange",
    "FixedSize",
    "LabelShards",
    "Langevin",
    "LeakageBudget",
    "LeakageMonitor",
    "Natural",
    "Poisson",
    "PreviousMinMax",
    "PrivacyBudget",
    "PrivacyTarget",
    "QuantitySkew",
    "ReloadBest",
    "RobustAggregation",
    "RoundProgressBar",
    "RunFolder",
    "SecAgg",
    "Sizes",
    "Statistics",
    "WandbRounds",
]
__all__ += mechanisms.__all__

if not TYPE_CHECKING:  # type checkers use the imports above and report misspelt names
    __getattr__, __dir__ = lazily(__name__)
