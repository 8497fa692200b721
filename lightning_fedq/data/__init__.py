"""Data of the clients: partitions, local batches, and data modules."""

from lightning_fedq.data.datamodule import FederatedDataModule
from lightning_fedq.data.lazy_datasets import ClientData
from lightning_fedq.data.partition import IID, Dirichlet, LabelShards, Partition, Sizes
from lightning_fedq.data.splits import FeatureShards, Natural, QuantitySkew

__all__ = [
    "IID",
    "ClientData",
    "Dirichlet",
    "FeatureShards",
    "FederatedDataModule",
    "LabelShards",
    "Natural",
    "Partition",
    "QuantitySkew",
    "Sizes",
]
