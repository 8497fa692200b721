"""Data of the papers' experiments as ordinary data modules, in memory as tensors."""

from lightning_fedq.datasets.digits import DigitsDataModule
from lightning_fedq.datasets.tensors import TensorDataModule, split_indices
from lightning_fedq.datasets.vision import CIFAR10DataModule, MNISTDataModule

__all__ = ["CIFAR10DataModule", "DigitsDataModule", "MNISTDataModule", "TensorDataModule", "split_indices"]
