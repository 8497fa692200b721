"""Federated, private and cheap on the wire: one callback for PyTorch Lightning.

The names that a training needs stand here: callbacks, mechanisms, partitions, ranges, secure aggregation.
Each is imported when it is first used:

    import lightning_fedq as fedq
    fed = fedq.Federated(fedq.CorBin(epsilon=1.0), num_clients=20)
"""

from typing import TYPE_CHECKING

from lightning_fedq.imports import lazily

__version__ = "0.2.0"

if TYPE_CHECKING:
    from lightning_fedq.algorithms import (
        SCAFFOLD as SCAFFOLD,
        ErrorFeedback as ErrorFeedback,
        FedAdagrad as FedAdagrad,
        FedAdam as FedAdam,
        FedAvgM as FedAvgM,
        FedDyn as FedDyn,
        FedProx as FedProx,
        FedYogi as FedYogi,
    )
    from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation as RobustAggregation
    from lightning_fedq.callbacks import (
        DPSGD as DPSGD,
        ByzantineClients as ByzantineClients,
        Federated as Federated,
        Langevin as Langevin,
        PrivacyBudget as PrivacyBudget,
        ReloadBest as ReloadBest,
        RoundProgressBar as RoundProgressBar,
        RunFolder as RunFolder,
        TailAveraging as TailAveraging,
        TrackedRounds as TrackedRounds,
        WandbRounds as WandbRounds,
    )
    from lightning_fedq.clients.evaluation import ClientEvaluation as ClientEvaluation, NoisyMean as NoisyMean
    from lightning_fedq.data import (
        IID as IID,
        Dirichlet as Dirichlet,
        FeatureShards as FeatureShards,
        FederatedDataModule as FederatedDataModule,
        LabelShards as LabelShards,
        Natural as Natural,
        QuantitySkew as QuantitySkew,
    )
    from lightning_fedq.lab.callbacks import LeakageBudget as LeakageBudget, LeakageMonitor as LeakageMonitor
    from lightning_fedq.mechanisms import *  # noqa: F403
    from lightning_fedq.mechanisms.interface.ranges import (
        AdaptiveRange as AdaptiveRange,
        FixedRange as FixedRange,
        PreviousMinMax as PreviousMinMax,
    )
    from lightning_fedq.privacy.target import PrivacyTarget as PrivacyTarget
    from lightning_fedq.rounds import Deadline as Deadline, RoundEngine as RoundEngine
    from lightning_fedq.secagg import SecAgg as SecAgg

if not TYPE_CHECKING:  # a type checker knows the names from above, and a wrong one is an error to it
    __getattr__, __dir__, __all__ = lazily(__name__)
