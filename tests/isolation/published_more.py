"""More habits of published trainings, one a class: schedules, data, what draws, what is asked of the Trainer.

Rows of the table of `published`. Those that draw can't be compared with a plain training, whose seeds are
others: their stacks are compared with the same clients alone.
"""

from __future__ import annotations

import collections
import functools
import math
import random
import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightning_fedq._lightning import pl
from tests.isolation.published import BATCH, SIZE, Case, Data

cross_entropy = nn.functional.cross_entropy

# ---- what is asked of the Trainer and the module -----------------------------------------------------------


class CosineOfAllSteps(Case):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [
            {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, steps), "interval": "step"}
        ]


class WarmupThenDecay(Case):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, nesterov=True)
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        chained = lr_scheduler.ChainedScheduler([warm, lr_scheduler.ExponentialLR(optimizer, 0.9)])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": chained, "interval": "step"}}


class Polynomial(Case):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), lr=0.01)
        lambdas = lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / 20) ** 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": lambdas, "interval": "step", "frequency": 2},
        }


class SchedulerStepOverridden(Case):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
                "interval": "step",
            },
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.global_step / 2)


class WarmupInOptimizerStep(Case):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)


class AnnealsByGlobalStep(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = min(1.0, self.global_step / 5)
        return self.loss(batch) + weight * 0.1 * self(batch[0]).square().mean()


class WeighsByEpochAndBatches(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        done = self.current_epoch + batch_idx / self.trainer.num_training_batches
        return self.loss(batch) * (1 + 0.5 * math.sin(done))


class LogsEverything(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.log_dict({"a": loss, "b": 2 * loss}, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("lr", rate, batch_size=len(batch[0]))
        return {"loss": loss, "size": len(batch[0])}


class NormsOfGradients(Case):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("grad", torch.stack(norms).norm())


class ClipsByItself(Case):
    flags: ClassVar[dict[str, Any]] = {"gradient_clip_val": 0.1}

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **more: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.2 if self.global_step < 2 else 0.1)


class ClipsValues(Case):
    flags: ClassVar[dict[str, Any]] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class UnfreezesByStep(Case):
    def build(self) -> None:
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = 1.0 if self.global_step > 1 else 0.0
        return self.loss(batch) * (1 + scale)


class LayerwiseRates(Case):
    def configure_optimizers(self) -> Any:
        groups = [
            {"params": layer.parameters(), "lr": 0.1 * 0.5**n}
            for n, layer in enumerate(self.net)
            if list(layer.parameters())
        ]
        return torch.optim.AdamW(groups, weight_decay=0.01)


class NoDecayOfBiases(Case):
    def configure_optimizers(self) -> Any:
        decay = [p for n, p in self.named_parameters() if not n.endswith("bias")]
        rest = [p for n, p in self.named_parameters() if n.endswith("bias")]
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0}], 0.01
        )


class ForeachAdam(Case):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, foreach=True, amsgrad=True)


class ConfiguredLate(Case):
    def build(self) -> None:
        del self.net
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class WeightsFromTheData(Case):
    def setup(self, stage: str) -> None:
        labels = self.trainer.datamodule.labels  # type: ignore[attr-defined]
        self.register_buffer("weights", 1 / (1 + torch.bincount(labels, minlength=3).float()))

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1], self.weights)


class Positions(Case):
    def build(self) -> None:
        self.register_buffer("positions", torch.linspace(0, 1, 6), persistent=False)

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs + self.positions)


class LearnedLoss(Case):
    """The uncertainties of two tasks weigh them."""

    def build(self) -> None:
        self.criterion = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})

    def loss(self, batch: Any) -> Tensor:
        out, terms = self(batch[0]), self.criterion
        first = cross_entropy(out, batch[1]) * (-terms["a"]).exp() + terms["a"]
        return first + out.square().mean() * (-terms["b"]).exp() + terms["b"]


class Nested(Case):
    def build(self) -> None:
        self.inner = _Inner()

    def forward(self, inputs: Tensor) -> Any:
        return self.inner(self.net(inputs))


class _Inner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.save_hyperparameters({"width": 3})

    def forward(self, inputs: Tensor) -> Any:
        return self.head(inputs) * self.hparams["width"]


class HparamsThatChange(Case):
    def build(self) -> None:
        self.save_hyperparameters({"smooth": 0.3, "net": {"width": 5}})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hparams.smooth = 0.9 * self.hparams.smooth
        return cross_entropy(self(batch[0]), batch[1], label_smoothing=self.hparams.smooth)


class MetricsByStage(Case):
    def build(self) -> None:
        accuracy = torchmetrics.MetricCollection({"acc": torchmetrics.MeanMetric()})
        self.metrics_of = nn.ModuleDict({"fit": accuracy.clone("fit_"), "val": accuracy.clone("val_")})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict(self.metrics_of["fit"](loss.detach()))
        return loss


class RunningMeanOfLosses(Case):
    def build(self) -> None:
        self.window: collections.deque[float] = collections.deque(maxlen=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.window.append(float(loss))
        return loss / (1 + sum(self.window) / len(self.window))


class SkipsLargeLosses(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if loss > 1.15 else loss


class ReversesGradients(Case):
    def build(self) -> None:
        self.domain, self.strength = nn.Linear(3, 2), 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.strength = 2 / (1 + math.exp(-self.global_step)) - 1
        out = self(batch[0])
        reversed_ = out.detach() * (1 + self.strength) - out * self.strength
        return cross_entropy(out, batch[1]) + cross_entropy(self.domain(reversed_), batch[1] % 2)


class StepsTwiceByHand(Case):
    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for weight in (1.0, 0.3):
            optimizer.zero_grad()
            self.manual_backward(weight * self.loss(batch))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()


class AccumulatesByHand(Case):
    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()
        schedule: Any = self.lr_schedulers()
        schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 2)]


class Accumulates(Case):
    flags: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 4}


class LimitsBatches(Case):
    flags: ClassVar[dict[str, Any]] = {"limit_train_batches": 4}


class AnomaliesAndProfiler(Case):
    flags: ClassVar[dict[str, Any]] = {"detect_anomaly": True, "profiler": "simple"}


class InferenceModeOff(Case):
    flags: ClassVar[dict[str, Any]] = {"inference_mode": False, "deterministic": True}


class ChannelsLast(Case):
    def build(self) -> None:
        conv = nn.Conv2d(2, 4, 2)
        self.net = nn.Sequential(  # type: ignore[assignment]
            nn.Unflatten(1, (2, 1, 3)), nn.ZeroPad2d((0, 0, 0, 1)), conv, nn.Flatten(), nn.LazyLinear(3)
        )
        self.net(torch.ones(1, 6))
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Normalised(Case):
    def build(self) -> None:
        self.net = nn.Sequential(  # type: ignore[assignment]
            nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.GELU(), nn.LayerNorm(8), nn.PReLU(), nn.Linear(8, 3)
        )


class ComplexWeights(Case):
    refused = "turn are complex, and an update is a vector of real numbers; keep them as torch.view_as_real"

    def build(self) -> None:
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Any:
        return self.net((inputs * self.turn).abs())


class Einsum(Case):
    def build(self) -> None:
        self.left, self.right = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 3))

    def forward(self, inputs: Tensor) -> Any:
        return torch.einsum("bi,ij,jk->bk", inputs, self.left, self.right.softmax(0))


class GradientPenalty(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = batch[0].clone().requires_grad_()
        out = self(inputs)
        slope = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)[0]
        return cross_entropy(out, batch[1]) + 0.01 * slope.square().mean()


class Jacobian(Case):
    def loss(self, batch: Any) -> Tensor:
        weights = dict(self.net.named_parameters())
        jacobian = torch.func.jacrev(lambda x: torch.func.functional_call(self.net, weights, (x,)))
        return super().loss(batch) + 0.01 * torch.func.vmap(jacobian)(batch[0]).square().mean()


# ---- callbacks --------------------------------------------------------------------------------------------


class _CountsSamples(pl.Callback):
    def __init__(self) -> None:
        self.samples, self.losses = 0, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.samples += len(batch[0])
        self.losses.append(float(outputs["loss"]))

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}


class CountsSamples(Case):
    def callbacks(self) -> list[pl.Callback]:
        return [_CountsSamples(), pl.callbacks.LearningRateMonitor("step"), pl.callbacks.Timer("00:01:00:00")]

    flags: ClassVar[dict[str, Any]] = {"logger": pl.loggers.logger.DummyLogger()}


class _AddsNoiseless(pl.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad -= parameter.grad.mean()


class CentralisesGradients(Case):
    def callbacks(self) -> list[pl.Callback]:
        return [_AddsNoiseless()]


class _HoldsWeights(pl.Callback):
    """Projects the weights after each step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.clamp_(-0.5, 0.5)


class Projects(Case):
    def callbacks(self) -> list[pl.Callback]:
        return [_HoldsWeights()]


class _ChangesRate(pl.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + trainer.global_step)


class RateByCallback(Case):
    def callbacks(self) -> list[pl.Callback]:
        return [_ChangesRate()]


class ManyLambdas(Case):
    def callbacks(self) -> list[pl.Callback]:
        seen: list[float] = []
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

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {"x": self.inputs[index], "y": int(self.labels[index]), "name": f"sample {index}"}


class NamedSamples(Case):
    class data(Data):
        def train_set(self) -> Any:
            return _Named(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert all(isinstance(name, str) for name in batch["name"])
        return cross_entropy(self(batch["x"]), batch["y"])


class _Pair(NamedTuple):
    x: Tensor
    y: Tensor


class NamedTuples(Case):
    class data(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(
                [_Pair(x, y) for x, y in zip(self.inputs, self.labels, strict=True)],  # type: ignore[arg-type]
                batch_size=BATCH,
            )

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self(batch[0] if isinstance(batch, list) else batch.x), batch[1])


def _padded(samples: list[Any]) -> Any:
    ys = [y for _, y in samples]
    lengths = torch.tensor([2 + int(y) for y in ys])
    return nn.utils.rnn.pad_sequence([x[: 2 + int(y)] for x, y in samples], True), lengths, torch.stack(ys)


class Padded(Case):
    class data(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set(), batch_size=BATCH, collate_fn=_padded)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, lengths, labels = batch
        mask = torch.arange(inputs.shape[1]) < lengths[:, None]
        return cross_entropy(self(nn.functional.pad(inputs * mask, (0, 6 - inputs.shape[1]))), labels)


class DropsTheLast(Case):
    class data(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set(), batch_size=7, drop_last=True)


class UnevenBatches(Case):
    class data(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set(), batch_size=5)


class WithWorkers(Case):
    class data(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(
                self.train_set(), batch_size=BATCH, num_workers=1, persistent_workers=True, prefetch_factor=3
            )


class SubsetOfConcatenated(Case):
    class data(Data):
        def train_set(self) -> Any:
            halves = [TensorDataset(self.inputs[i::2], self.labels[i::2]) for i in range(2)]
            return Subset(Subset(ConcatDataset(halves), range(2, SIZE)), range(0, SIZE - 2, 2))


class NumpyDoubles(Case):
    class data(Data):
        def train_set(self) -> Any:
            inputs = self.inputs.numpy().astype(np.float64)
            return [(inputs[n], np.int64(self.labels[n])) for n in range(SIZE)]

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self(batch[0].float()), batch[1])


class _Batched(Dataset[Any]):
    """Fetches whole batches at once."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one at a time")

    def __getitems__(self, indices: list[int]) -> Any:
        return [(self.data.inputs[i], self.data.labels[i]) for i in indices]


class FetchesBatches(Case):
    class data(Data):
        def train_set(self) -> Any:
            return _Batched(self)


class Normalises(Case):
    class data(Data):
        def setup(self, stage: str) -> None:
            self.mean, self.std = self.inputs.mean(0), self.inputs.std(0)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return (batch[0] - self.mean) / self.std, batch[1]


class AugmentsOnDevice(Case):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0].flip(1) if self.trainer.training else batch[0]), batch[1]


class OwnTransfer(Case):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [part.to(device).clone() for part in batch]


class MemoryMapped(Case):
    class data(Data):
        def setup(self, stage: str) -> None:
            with tempfile.TemporaryFile() as file:
                self.mapped = np.memmap(file, np.float32, "w+", shape=(SIZE, 6))
            self.mapped[:] = self.inputs.numpy()

        def train_set(self) -> Any:
            return [(torch.tensor(self.mapped[n]), self.labels[n]) for n in range(SIZE)]


class TwoViews(Case):
    class data(Data):
        def train_set(self) -> Any:
            return [((x, x.flip(0)), y) for x, y in zip(self.inputs, self.labels, strict=True)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (one, other), _ = batch
        a, b = (nn.functional.normalize(self(view), dim=1) for view in (one, other))
        return cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))


class ReloadsEachEpoch(Case):
    flags: ClassVar[dict[str, Any]] = {"reload_dataloaders_every_n_epochs": 1}

    class data(Data):
        def train_dataloader(self) -> Any:
            kept = SIZE - 4 * (self.trainer.current_epoch > 0)  # type: ignore[union-attr]
            return DataLoader(Subset(self.train_set(), range(kept)), batch_size=BATCH)


class _Epochs(Sampler[int]):
    """Begins elsewhere in each epoch, by `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter([(n + 5 * self.epoch) % SIZE for n in range(SIZE)])


class SamplerOfEpochs(Case):
    class data(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set(), batch_size=BATCH, sampler=_Epochs())


class BatchSamplerOfTorch(Case):
    class data(Data):
        def train_dataloader(self) -> Any:
            data = self.train_set()
            return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), BATCH, False))


# ---- what draws -------------------------------------------------------------------------------------------


class _Draws(Case):
    draws = True


class Dropout(_Draws):
    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.AlphaDropout(0.2), nn.Linear(16, 3)
        )


class Mixup(_Draws):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(batch[0]))  # noqa: NPY002
        out = self(share * batch[0] + (1 - share) * batch[0][order])
        return share * cross_entropy(out, batch[1]) + (1 - share) * cross_entropy(out, batch[1][order])


class MixupOfTorch(_Draws):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = torch.distributions.Beta(0.4, 0.4).sample()
        out = self(share * batch[0] + (1 - share) * batch[0].flip(0))
        return share * cross_entropy(out, batch[1]) + (1 - share) * cross_entropy(out, batch[1].flip(0))


class NoiseOnInputs(_Draws):
    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self(batch[0] + 0.3 * torch.randn_like(batch[0])), batch[1])


class Reparametrised(_Draws):
    def build(self) -> None:
        self.spread = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Any:
        return torch.distributions.Normal(self.net(inputs), self.spread(inputs).exp()).rsample()


class Gumbel(_Draws):
    def forward(self, inputs: Tensor) -> Any:
        return nn.functional.gumbel_softmax(self.net(inputs), tau=0.7)


class DropsPaths(_Draws):
    def forward(self, inputs: Tensor) -> Any:
        hidden = self.net[1](self.net[0](inputs))
        keep = torch.rand(len(inputs), 1, device=inputs.device) < 0.7
        return self.net[2](hidden * keep / 0.7)


class TeacherForcing(_Draws):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        forced = random.random() < 0.5
        return self.loss(batch) if forced else self.loss((batch[0] * 0.5, batch[1]))


class GeneratorOfTheModule(_Draws):
    def build(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss((batch[0] + torch.randn(batch[0].shape, generator=self.generator), batch[1]))


class NumpyGeneratorOfTheModule(_Draws):
    def build(self) -> None:
        self.rng = np.random.default_rng(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.from_numpy(self.rng.normal(size=tuple(batch[0].shape))).float()
        return self.loss((batch[0] + noise, batch[1]))


class GeneratorOfAFunction(_Draws):
    def build(self) -> None:
        self.noise = functools.partial(
            _noise, np.random.RandomState(3), collections.deque([random.Random(1)])
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss((batch[0] + self.noise(batch[0].shape), batch[1]))


def _noise(rng: Any, others: Any, shape: Any) -> Tensor:
    return torch.from_numpy(rng.normal(size=tuple(shape))).float() * others[0].random()


class NegativeSamples(_Draws):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        wrong = torch.randint(0, 3, (len(batch[1]),))
        return self.loss(batch) - 0.1 * cross_entropy(self(batch[0]), wrong)


class _Jitters(Dataset[Any]):
    """Transforms with draws of three kinds."""

    def __init__(self, data: Data) -> None:
        self.data, self.rng = data, np.random.default_rng(0)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        x = self.data.inputs[index] * random.uniform(0.5, 1.5) + torch.rand(()) + float(self.rng.random())
        return x, self.data.labels[index]


class Augments(_Draws):
    class data(Data):
        def train_set(self) -> Any:
            return _Jitters(self)


class AugmentsInWorkers(_Draws):
    class data(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(_Jitters(self), batch_size=BATCH, num_workers=1)


def _shaken(rng: random.Random, samples: list[Any]) -> Any:
    xs, ys = zip(*samples, strict=True)
    return torch.stack(xs) * rng.random(), torch.stack(ys)


class CollatesWithDraws(_Draws):
    class data(Data):
        def train_dataloader(self) -> Any:
            collate = functools.partial(_shaken, random.Random(5))
            return DataLoader(self.train_set(), batch_size=BATCH, collate_fn=collate)


class Shuffles(_Draws):
    class data(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set(), BATCH, True, generator=torch.Generator().manual_seed(3))


class SamplesWithReplacement(_Draws):
    class data(Data):
        def train_dataloader(self) -> Any:
            data = self.train_set()
            return DataLoader(data, BATCH, sampler=RandomSampler(data, replacement=True, num_samples=16))
