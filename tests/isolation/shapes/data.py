"""Data modules, datasets, transforms and loaders. Data are shared, so a dataset with memory is refused."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from tests.isolation.shapes.objects import Meter
from tests.isolation.worlds import BATCH, Samples, Shape


class _HelperModule(Samples):
    def begin(self):
        self.meter = Meter()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer is not None and self.trainer.training:
            return [batch[0] - self.meter.update(float(batch[0].mean())), batch[1]]
        return batch


class BatchHookHelper(Shape):
    data = _HelperModule


class _PassiveModule(Samples):
    """No batch hooks of its own; the module writes to it."""

    def begin(self):
        self.kept = SimpleNamespace(mean=1.0)


class AttributeOfDataModule(Shape):
    data = _PassiveModule

    def scaled(self, loss):
        kept = self.trainer.datamodule.kept
        kept.mean = 0.5 * (kept.mean + loss.item())
        return loss / kept.mean


class _Remembering(Dataset[Any]):
    """Subtracts the mean of the samples that it has handed out."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets, self.mean = inputs, targets, torch.zeros(3)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.mean = 0.5 * (self.mean + self.inputs[index])
        return self.inputs[index] - self.mean, self.targets[index]


class _RememberingData(Samples):
    def train_set(self):
        return _Remembering(self.inputs, self.targets)


class DatasetWithMemory(Shape):
    data, refused = _RememberingData, r"(?i)client|dataset"


class _Collates:
    def __init__(self) -> None:
        self.meter = Meter()

    def __call__(self, samples):
        inputs, targets = default_collate(samples)
        return [inputs - self.meter.update(float(inputs.mean())), targets]


class _CollatedData(Samples):
    def train_dataloader(self):
        return DataLoader(self.train_set(), batch_size=BATCH, shuffle=True, collate_fn=_Collates())


class CollateWithMemory(Shape):
    data, refused = _CollatedData, r"(?i)client"


class _WrittenData(Samples):
    def train_set(self):
        self.written = TensorDataset(self.inputs, self.targets)
        return self.written


class BatchWrittenInPlace(Shape):
    """Batches are views of the dataset where a loader does not copy; here a sample is written to."""

    data, refused = _WrittenData, r"(?i)client|dataset"

    def scaled(self, loss):
        inputs = self.trainer.datamodule.written.tensors[0]
        inputs.add_(0.01 * loss.item())
        return loss
