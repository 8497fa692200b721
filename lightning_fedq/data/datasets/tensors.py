"""Data module with inputs and labels as two tensors in memory, and the split of the papers.

CorBin-FL splits the pooled set at random, 80/20 into train and test, and takes 20% of train for validation.
The paper does not give the seed. `pooled=False` keeps the official test set instead.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.data.models import FixedFeatures


def split_indices(num_samples: int, num_test: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split samples at random into train, validation (20% of the samples without test) and test.

    Args:
        num_samples: Number of samples, >= 3.
        num_test: Number of test samples, >= 0.
        seed: Seed of the permutation.

    Returns:
        Indices of train, validation and test samples: disjoint int64 tensors that cover all samples.

    Raises:
        ValueError: If a part would be empty.
    """
    num_val = round(0.2 * (num_samples - num_test))
    if num_test < 0 or num_val < 1 or num_samples - num_test - num_val < 1:
        raise ValueError(
            f"{num_samples} samples with {num_test} for testing leave an empty part. Use more samples."
        )
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    return order[num_test + num_val :], order[num_test : num_test + num_val], order[:num_test]


class TensorDataModule(pl.LightningDataModule, ABC):
    """Data module with train, validation and test loaders over two tensors.

    Subclasses implement `load`. For quick runs, training and validation can be limited to their first samples
    in the random order of the split. The test set is never limited.

    Args:
        batch_size: Number of samples per training batch, >= 1. Evaluation uses batches of 512.
        pooled: Whether to pool all samples and split them at random, 80/20 into train and test, as CorBin-FL
            does. False keeps the official test set.
        num_train: Number of training samples to use, >= 1. None uses all.
        num_val: Number of validation samples to use, >= 1. None uses all.
        seed: Seed of the random split.
        keep_features: Whether to serve features in place of inputs, computed once by the `FixedFeatures` of
            the Trainer's model.

    Raises:
        ValueError: If a number is not positive. On set-up, if a limit exceeds the number of samples.
    """

    def __init__(
        self,
        batch_size: int,
        pooled: bool,
        num_train: int | None,
        num_val: int | None,
        seed: int,
        keep_features: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("num_train", num_train), ("num_val", num_val)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.batch_size, self.pooled, self.seed = batch_size, pooled, seed
        self.num_train, self.num_val = num_train, num_val
        self.train_set: TensorDataset | None = None
        self._keeps, self._kept = keep_features, dict[tuple[str, str], TensorDataset]()

    @abstractmethod
    def load(self) -> tuple[Tensor, Tensor, int]:
        """Return inputs, labels, and the size of the official test set, which comes last (0 if none)."""

    def setup(self, stage: str) -> None:
        """Load and split the data once."""
        if self.train_set is not None:
            return
        inputs, labels, num_official = self.load()
        if num_official and not self.pooled:
            total = len(labels) - num_official
            train, val, _ = split_indices(total, 0, self.seed)
            test = torch.arange(total, len(labels))
        else:
            train, val, test = split_indices(len(labels), round(0.2 * len(labels)), self.seed)
        for name, limit, part in (("num_train", self.num_train, train), ("num_val", self.num_val, val)):
            if limit is not None and limit > len(part):
                raise ValueError(f"{name} is {limit}, but there are only {len(part)} such samples")
        train, val = train[: self.num_train], val[: self.num_val]
        self.train_set, self.val_set, self.test_set = (
            TensorDataset(inputs[part], labels[part]) for part in (train, val, test)
        )

    def _served(self, name: str) -> TensorDataset:
        """Return a part of the data, or its features with `keep_features`.

        Features are computed on first use, which is after a checkpoint of the model is loaded.

        Raises:
            ValueError: If the Trainer's model does not have exactly one `FixedFeatures`.
        """
        part: TensorDataset = getattr(self, name)
        if not self._keeps:
            return part
        module = None if self.trainer is None else self.trainer.lightning_module
        features = [] if module is None else [m for m in module.modules() if isinstance(m, FixedFeatures)]
        if len(features) != 1:
            raise ValueError(
                f"keep_features needs a Trainer whose model has one FixedFeatures, got {len(features)}. Use "
                "Linear(features=FixedFeatures(...)), or leave keep_features out."
            )
        key = (name, features[0].sha256)
        if key not in self._kept:
            self._kept[key] = features[0].compute_features(part)
        return self._kept[key]

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches of the training samples."""
        return DataLoader(self._served("train_set"), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of the validation samples, in order."""
        return DataLoader(self._served("val_set"), batch_size=512)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of the test samples, in order."""
        return DataLoader(self._served("test_set"), batch_size=512)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of the test samples, in order."""
        return self.test_dataloader()
