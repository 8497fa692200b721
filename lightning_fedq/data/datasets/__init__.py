"""Data of the papers' experiments as data modules, in memory as tensors."""

from typing import TYPE_CHECKING

from lightning_fedq import gone
from lightning_fedq.data.datasets.digits import DigitsDataModule
from lightning_fedq.data.datasets.tensors import TensorDataModule, split_indices
from lightning_fedq.data.datasets.vision import CIFAR10DataModule, MNISTDataModule

__all__ = ["CIFAR10DataModule", "DigitsDataModule", "MNISTDataModule", "TensorDataModule", "split_indices"]

if not TYPE_CHECKING:  # to a type checker any other name is an error
    __getattr__ = gone.names_of(__name__)
