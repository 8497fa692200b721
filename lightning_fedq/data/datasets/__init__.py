"""Data of the papers' experiments, and of LEAF, as data modules, in memory as tensors."""

from lightning_fedq.data.datasets.digits import DigitsDataModule
from lightning_fedq.data.datasets.leaf import LEAFDataModule, leaf_clients
from lightning_fedq.data.datasets.tensors import TensorDataModule, split_indices
from lightning_fedq.data.datasets.vision import CIFAR10DataModule, MNISTDataModule

__all__ = [
    "CIFAR10DataModule",
    "DigitsDataModule",
    "LEAFDataModule",
    "MNISTDataModule",
    "TensorDataModule",
    "leaf_clients",
    "split_indices",
]
