"""More habits of published trainings, one a class: schedules, data, what draws, what is asked of the Trainer.

Rows of the table of `published`. Those that draw can't be compared with a plain training, whose seeds are
others: their stacks are compared with the same clients alone.
"""

import collections
import functools
import math
import random
import tempfile
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from lightning_fedq._lightning import pl
from tests.isolation.published import BATCH, SIZE, Case, Data

cross_entropy = nn.functional.cross_entropy


# ---- what is asked of the Trainer and the module -----------------------------------------------------------
class CosineOfAllSteps(Case):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [
            {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, steps), "interval": "step"}
        ]


class WarmupInOptimizerStep(Case):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)


class WeighsByEpochAndBatches(Case):
    def training_step(self, batch, batch_idx):
        done = self.current_epoch + batch_idx / self.trainer.num_training_batches
        return self.loss(batch) * (1 + 0.5 * math.sin(done))


class LogsEverything(Case):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        rate = self.optimizers().param_groups[0]["lr"]
        self.log_dict({"a": loss, "b": 2 * loss}, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("lr", rate, batch_size=len(batch[0]))
        return {"loss": loss, "size": len(batch[0])}


class ClipsByItself(Case):
    flags: ClassVar[dict[str, Any]] = {"gradient_clip_val": 0.1}

    def configure_gradient_clipping(self, optimizer, *args, **more):
        nn.utils.clip_grad_norm_(self.parameters(), 0.2 if self.global_step < 2 else 0.1)


class UnfreezesByStep(Case):
    def build(self):
        self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        scale = 1.0 if self.global_step > 1 else 0.0
        return self.loss(batch) * (1 + scale)


class LayerwiseRates(Case):
    def configure_optimizers(self):
        groups = [
            {"params": layer.parameters(), "lr": 0.1 * 0.5**n}
            for n, layer in enumerate(self.net)
            if list(layer.parameters())
        ]
        return torch.optim.AdamW(groups, weight_decay=0.01)


class ConfiguredLate(Case):
    def build(self):
        del self.net
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class WeightsFromTheData(Case):
    def setup(self, stage):
        labels = self.trainer.datamodule.labels
        self.register_buffer("weights", 1 / (1 + torch.bincount(labels, minlength=3).float()))

    def loss(self, batch):
        return cross_entropy(self(batch[0]), batch[1], self.weights)


class SkipsLargeLosses(Case):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return None if loss > 1.15 else loss


class ReversesGradients(Case):
    def build(self):
        self.domain, self.strength = nn.Linear(3, 2), 0.0

    def training_step(self, batch, batch_idx):
        self.strength = 2 / (1 + math.exp(-self.global_step)) - 1
        out = self(batch[0])
        reversed_ = out.detach() * (1 + self.strength) - out * self.strength
        return cross_entropy(out, batch[1]) + cross_entropy(self.domain(reversed_), batch[1] % 2)


class StepsTwiceByHand(Case):
    def build(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for weight in (1.0, 0.3):
            optimizer.zero_grad()
            self.manual_backward(weight * self.loss(batch))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()


class Accumulates(Case):
    flags: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 4}


class LimitsBatches(Case):
    flags: ClassVar[dict[str, Any]] = {"limit_train_batches": 4}


class AnomaliesAndProfiler(Case):
    flags: ClassVar[dict[str, Any]] = {"detect_anomaly": True, "profiler": "simple"}


class InferenceModeOff(Case):
    flags: ClassVar[dict[str, Any]] = {"inference_mode": False, "deterministic": True}


class ComplexWeights(Case):
    refused = "turn are complex, and an update is a vector of real numbers; keep them as torch.view_as_real"

    def build(self):
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, inputs):
        return self.net((inputs * self.turn).abs())


class Jacobian(Case):
    def loss(self, batch):
        weights = dict(self.net.named_parameters())
        jacobian = torch.func.jacrev(lambda x: torch.func.functional_call(self.net, weights, (x,)))
        return super().loss(batch) + 0.01 * torch.func.vmap(jacobian)(batch[0]).square().mean()


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


class _ChangesRate(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + trainer.global_step)


class RateByCallback(Case):
    def callbacks(self):
        return [_ChangesRate()]


class ManyLambdas(Case):
    def callbacks(self):
        seen = []
        return [
            pl.callbacks.LambdaCallback(
                on_before_backward=lambda trainer, module, loss: seen.append(float(loss)),
                on_after_backward=lambda trainer, module: module.net[0].bias.grad.mul_(1 + 0.1 * len(seen)),
            )
        ]


# ---- data -------------------------------------------------------------------------------------------------
class _Named(Dataset[Any]):
    """Dictionaries with text, as many corpora have."""

    def __init__(self, data: Data) -> None:
        self.inputs, self.labels = data.inputs, data.labels

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {"x": self.inputs[index], "y": int(self.labels[index]), "name": f"sample {index}"}


class NamedSamples(Case):
    class data(Data):
        def train_set(self):
            return _Named(self)

    def training_step(self, batch, batch_idx):
        assert all(isinstance(name, str) for name in batch["name"])
        return cross_entropy(self(batch["x"]), batch["y"])


class DropsTheLast(Case):
    class data(Data):
        def train_dataloader(self):
            return DataLoader(self.train_set(), batch_size=7, drop_last=True)


class WithWorkers(Case):
    class data(Data):
        def train_dataloader(self):
            return DataLoader(
                self.train_set(), batch_size=BATCH, num_workers=1, persistent_workers=True, prefetch_factor=3
            )


class NumpyDoubles(Case):
    class data(Data):
        def train_set(self):
            inputs = self.inputs.numpy().astype(np.float64)
            return [(inputs[n], np.int64(self.labels[n])) for n in range(SIZE)]

    def loss(self, batch):
        return cross_entropy(self(batch[0].float()), batch[1])


class _Batched(Dataset[Any]):
    """Fetches whole batches at once."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        raise AssertionError("one at a time")

    def __getitems__(self, indices):
        return [(self.data.inputs[i], self.data.labels[i]) for i in indices]


class FetchesBatches(Case):
    class data(Data):
        def train_set(self):
            return _Batched(self)


class OwnTransfer(Case):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return [part.to(device).clone() for part in batch]


class MemoryMapped(Case):
    class data(Data):
        def setup(self, stage):
            with tempfile.TemporaryFile() as file:
                self.mapped = np.memmap(file, np.float32, "w+", shape=(SIZE, 6))
            self.mapped[:] = self.inputs.numpy()

        def train_set(self):
            return [(torch.tensor(self.mapped[n]), self.labels[n]) for n in range(SIZE)]


class ReloadsEachEpoch(Case):
    flags: ClassVar[dict[str, Any]] = {"reload_dataloaders_every_n_epochs": 1}

    class data(Data):
        def train_dataloader(self):
            kept = SIZE - 4 * (self.trainer.current_epoch > 0)
            return DataLoader(Subset(self.train_set(), range(kept)), batch_size=BATCH)


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


class BatchSamplerOfTorch(Case):
    class data(Data):
        def train_dataloader(self):
            data = self.train_set()
            return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), BATCH, False))


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


class MixupOfTorch(_Draws):
    def training_step(self, batch, batch_idx):
        share = torch.distributions.Beta(0.4, 0.4).sample()
        out = self(share * batch[0] + (1 - share) * batch[0].flip(0))
        return share * cross_entropy(out, batch[1]) + (1 - share) * cross_entropy(out, batch[1].flip(0))


class GeneratorOfTheModule(_Draws):
    def build(self):
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch, batch_idx):
        return self.loss((batch[0] + torch.randn(batch[0].shape, generator=self.generator), batch[1]))


class NumpyGeneratorOfTheModule(_Draws):
    def build(self):
        self.rng = np.random.default_rng(3)

    def training_step(self, batch, batch_idx):
        noise = torch.from_numpy(self.rng.normal(size=tuple(batch[0].shape))).float()
        return self.loss((batch[0] + noise, batch[1]))


class GeneratorOfAFunction(_Draws):
    def build(self):
        self.noise = functools.partial(
            _noise, np.random.RandomState(3), collections.deque([random.Random(1)])
        )

    def training_step(self, batch, batch_idx):
        return self.loss((batch[0] + self.noise(batch[0].shape), batch[1]))


def _noise(rng, others, shape):
    return torch.from_numpy(rng.normal(size=tuple(shape))).float() * others[0].random()


class NegativeSamples(_Draws):
    def training_step(self, batch, batch_idx):
        wrong = torch.randint(0, 3, (len(batch[1]),))
        return self.loss(batch) - 0.1 * cross_entropy(self(batch[0]), wrong)


class _Jitters(Dataset[Any]):
    """Transforms with draws of three kinds."""

    def __init__(self, data: Data) -> None:
        self.data, self.rng = data, np.random.default_rng(0)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x = self.data.inputs[index] * random.uniform(0.5, 1.5) + torch.rand(()) + float(self.rng.random())
        return x, self.data.labels[index]


class Augments(_Draws):
    class data(Data):
        def train_set(self):
            return _Jitters(self)


class AugmentsInWorkers(_Draws):
    class data(Data):
        def train_dataloader(self):
            return DataLoader(_Jitters(self), batch_size=BATCH, num_workers=1)


class Shuffles(_Draws):
    class data(Data):
        def train_dataloader(self):
            return DataLoader(self.train_set(), BATCH, True, generator=torch.Generator().manual_seed(3))


class SamplesWithReplacement(_Draws):
    class data(Data):
        def train_dataloader(self):
            data = self.train_set()
            return DataLoader(data, BATCH, sampler=RandomSampler(data, replacement=True, num_samples=16))
