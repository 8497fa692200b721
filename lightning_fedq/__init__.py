"""Federated, private and cheap on the wire: one callback for PyTorch Lightning.

The names that a training needs stand here: callbacks, mechanisms, partitions, ranges, secure aggregation.
Each is imported when it is first used:

    import lightning_fedq as fedq
    fed = fedq.Federated(fedq.CorBin(epsilon=1.0), num_clients=20)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightning_fedq.aggregation import RobustAggregation
    from lightning_fedq.callbacks import (
        DPSGD,
        ByzantineClients,
        Federated,
        LeakageBudget,
        LeakageMonitor,
        PrivacyBudget,
        ReloadBest,
        RoundProgressBar,
        RunFolder,
        WandbRounds,
    )
    from lightning_fedq.data import IID, Dirichlet, FederatedDataModule, LabelShards
    from lightning_fedq.mechanisms import (
        CPA,
        CSGM,
        LDPQ,
        MVU,
        SIGM,
        AggregateGaussian,
        AugCorBin,
        CorBin,
        CorrelatedQuantization,
        DistributedDiscreteGaussian,
        FedAvg,
        GaussianNoise,
        IrwinHall,
        JoPEQ,
        LaplaceNoise,
        LayeredGaussian,
        NearOptimalUtility,
        PairedCoins,
        PerCoordinateGaussian,
        PerCoordinateLaplace,
        RotatedAxes,
        RotatedCoins,
        SignRR,
        Skellam,
        StratifiedCorBin,
        SubtractiveDither,
    )
    from lightning_fedq.privacy.target import PrivacyTarget
    from lightning_fedq.ranges import AdaptiveRange, FixedRange, PreviousMinMax
    from lightning_fedq.rounds import RoundEngine
    from lightning_fedq.secagg import SecAgg

__all__ = [
    "CPA",
    "CSGM",
    "DPSGD",
    "IID",
    "LDPQ",
    "MVU",
    "SIGM",
    "AdaptiveRange",
    "AggregateGaussian",
    "AugCorBin",
    "ByzantineClients",
    "CorBin",
    "CorrelatedQuantization",
    "Dirichlet",
    "DistributedDiscreteGaussian",
    "FedAvg",
    "Federated",
    "FederatedDataModule",
    "FixedRange",
    "GaussianNoise",
    "IrwinHall",
    "JoPEQ",
    "LabelShards",
    "LaplaceNoise",
    "LayeredGaussian",
    "LeakageBudget",
    "LeakageMonitor",
    "NearOptimalUtility",
    "PairedCoins",
    "PerCoordinateGaussian",
    "PerCoordinateLaplace",
    "PreviousMinMax",
    "PrivacyBudget",
    "PrivacyTarget",
    "ReloadBest",
    "RobustAggregation",
    "RotatedAxes",
    "RotatedCoins",
    "RoundEngine",
    "RoundProgressBar",
    "RunFolder",
    "SecAgg",
    "SignRR",
    "Skellam",
    "StratifiedCorBin",
    "SubtractiveDither",
    "WandbRounds",
]
_NAMES = {
    "aggregation": ("RobustAggregation",),
    "callbacks": (
        *("DPSGD", "ByzantineClients", "Federated", "LeakageBudget", "LeakageMonitor", "PrivacyBudget"),
        *("ReloadBest", "RoundProgressBar", "RunFolder", "WandbRounds"),
    ),
    "data": ("IID", "Dirichlet", "FederatedDataModule", "LabelShards"),
    "mechanisms": (
        *("CPA", "CSGM", "LDPQ", "MVU", "SIGM", "AggregateGaussian", "AugCorBin", "CorBin"),
        *("CorrelatedQuantization", "DistributedDiscreteGaussian", "FedAvg", "GaussianNoise", "IrwinHall"),
        *("JoPEQ", "LaplaceNoise", "LayeredGaussian", "NearOptimalUtility", "PairedCoins"),
        *("PerCoordinateGaussian", "PerCoordinateLaplace", "RotatedAxes", "RotatedCoins", "SignRR"),
        *("Skellam", "StratifiedCorBin", "SubtractiveDither"),
    ),
    "privacy.target": ("PrivacyTarget",),
    "ranges": ("AdaptiveRange", "FixedRange", "PreviousMinMax"),
    "rounds": ("RoundEngine",),
    "secagg": ("SecAgg",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker knows the names from above, and a wrong one is an error to it

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used (PEP 562)."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
