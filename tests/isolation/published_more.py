"""More habits of published trainings, one a class: schedules, data, what draws, what is asked of the Trainer.

Rows of the table of `published`. Those that draw can't be compared with a plain training, whose seeds are
others: their stacks are compared with the same clients alone.
"""

import collections
import functools
import random
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_fedq._lightning import pl
from tests.isolation.published import BATCH, SIZE, Case, Data

cross_entropy = nn.functional.cross_entropy


# ---- what is asked of the Trainer and the module -----------------------------------------------------------
class ComplexWeights(Case):
    refused = "turn are complex, but an update is a vector of real numbers. Use torch.view_as_real"

    def build(self):
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, inputs):
        return self.net((inputs * self.turn).abs())


# ---- callbacks --------------------------------------------------------------------------------------------
class _CountsSamples(pl.Callback):
    def __init__(self) -> None:
        self.samples, self.losses = 0, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, *args):
        self.samples += len(batch[0])
        self.losses.append(float(outputs["loss"]))

    def state_dict(self):
        return {"samples": self.samples}


class CountsSamples(Case):
    def callbacks(self):
        return [_CountsSamples(), pl.callbacks.LearningRateMonitor("step"), pl.callbacks.Timer("00:01:00:00")]

    flags: ClassVar[dict[str, Any]] = {"logger": pl.loggers.logger.DummyLogger()}


class _Epochs(Sampler[int]):
    """Begins elsewhere in each epoch, by `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter([(n + 5 * self.epoch) % SIZE for n in range(SIZE)])


class SamplerOfEpochs(Case):
    class data(Data):
        def train_dataloader(self):
            return DataLoader(self.train_set(), batch_size=BATCH, sampler=_Epochs())


# ---- what draws -------------------------------------------------------------------------------------------
class _Draws(Case):
    draws = True


class Dropout(_Draws):
    def build(self):
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.AlphaDropout(0.2), nn.Linear(16, 3)
        )


class Mixup(_Draws):
    def training_step(self, batch, batch_idx):
        share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(batch[0]))  # noqa: NPY002
        out = self(share * batch[0] + (1 - share) * batch[0][order])
        return share * cross_entropy(out, batch[1]) + (1 - share) * cross_entropy(out, batch[1][order])


class GeneratorOfAFunction(_Draws):
    def build(self):
        self.noise = functools.partial(
            _noise, np.random.RandomState(3), collections.deque([random.Random(1)])
        )

    def training_step(self, batch, batch_idx):
        return self.loss((batch[0] + self.noise(batch[0].shape), batch[1]))


def _noise(rng, others, shape):
    return torch.from_numpy(rng.normal(size=tuple(shape))).float() * others[0].random()


class _Jitters(Dataset[Any]):
    """Transforms with draws of three kinds."""

    def __init__(self, data: Data) -> None:
        self.data, self.rng = data, np.random.default_rng(0)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x = self.data.inputs[index] * random.uniform(0.5, 1.5) + torch.rand(()) + float(self.rng.random())
        return x, self.data.labels[index]


class AugmentsInWorkers(_Draws):
    class data(Data):
        def train_dataloader(self):
            return DataLoader(_Jitters(self), batch_size=BATCH, num_workers=1)


class Shuffles(_Draws):
    class data(Data):
        def train_dataloader(self):
            return DataLoader(self.train_set(), BATCH, True, generator=torch.Generator().manual_seed(3))
