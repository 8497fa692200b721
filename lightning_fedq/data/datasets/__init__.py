"""Data sets of the papers' experiments, as data modules with tensors in memory."""

from lightning_fedq.data.datasets.digits import DigitsDataModule
from lightning_fedq.data.datasets.tensors import TensorDataModule, split_indices
from lightning_fedq.data.datasets.vision import CIFAR10DataModule, MNISTDataModule

__all__ = ["CIFAR10DataModule", "DigitsDataModule", "MNISTDataModule", "TensorDataModule", "split_indices"]
