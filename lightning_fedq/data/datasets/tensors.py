"""A data module whose samples are two tensors in memory, and the split that the papers use.

CorBin-FL splits the pooled set 80/20 into train and test at random and takes 20% of train for
validation; which seed is not said. `pooled=False` keeps the official test set instead.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.data.models import FixedFeatures


def split_indices(num_samples: int, num_test: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split samples at random into train, validation (20% of what is not test) and test.

    Args:
        num_samples: All samples, >= 3.
        num_test: How many go to the test part, >= 0.
        seed: Seed of the permutation.

    Returns:
        Three int64 index tensors, disjoint, covering every sample once.

    Raises:
        ValueError: If a part would be empty.
    """
    num_val = round(0.2 * (num_samples - num_test))
    if num_test < 0 or num_val < 1 or num_samples - num_test - num_val < 1:
        raise ValueError(
            f"{num_samples} samples with {num_test} for testing leave an empty part; use more samples"
        )
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    return order[num_test + num_val :], order[num_test : num_test + num_val], order[:num_test]


class TensorDataModule(pl.LightningDataModule, ABC):
    """Train, validation and test loaders over two tensors.

    Children implement `load`. Training and validation may be limited to their first samples (in the
    split's random order), for quick runs; the test set always stays whole.

    Args:
        batch_size: Samples per training batch; evaluation uses batches of 512.
        pooled: Split train and official test set together 80/20, as CorBin-FL does.
        num_train: Use only so many training samples; None is all.
        num_val: Use only so many validation samples; None is all.
        seed: Seed of the split.
        keep_features: Serve what the `FixedFeatures` of the Trainer's model make of the inputs, made once.
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
        """Return inputs, labels, and how many of the last samples are the official test set, 0 if none."""

    def setup(self, stage: str) -> None:
        """Load and split, once."""
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
                raise ValueError(f"{name} = {limit}, but there are only {len(part)} such samples")
        train, val = train[: self.num_train], val[: self.num_val]
        self.train_set, self.val_set, self.test_set = (
            TensorDataset(inputs[part], labels[part]) for part in (train, val, test)
        )

    def _served(self, name: str) -> TensorDataset:
        """A part, or its features, made when they are asked for: after a checkpoint is read."""
        part: TensorDataset = getattr(self, name)
        if not self._keeps:
            return part
        module = None if self.trainer is None else self.trainer.lightning_module
        found = [] if module is None else [m for m in module.modules() if isinstance(m, FixedFeatures)]
        if len(found) != 1:
            raise ValueError(
                f"keep_features needs a Trainer whose model has one FixedFeatures, found {len(found)}; give "
                "Linear(features=FixedFeatures(...)), or leave keep_features out"
            )
        key = (name, found[0].sha256)
        if key not in self._kept:
            self._kept[key] = found[0].compute_features(part)
        return self._kept[key]

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled batches."""
        return DataLoader(self._served("train_set"), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches in order."""
        return DataLoader(self._served("val_set"), batch_size=512)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches in order."""
        return DataLoader(self._served("test_set"), batch_size=512)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The test set."""
        return self.test_dataloader()
