"""Who holds what, and the batches of each client."""

from lightning_fedq.data.datamodule import FederatedDataModule
from lightning_fedq.data.partition import IID, Dirichlet, LabelShards, Partition

__all__ = ["IID", "Dirichlet", "FederatedDataModule", "LabelShards", "Partition"]
