"""Habits of published trainings, one a class: what modules, callbacks, data and optimisers hold and do.

None leaks, so none may be refused, but where `refused` says by which words. Nothing is drawn while they
train, so that one client's round is an epoch of the plain training, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl

CASES = []
SIZE, BATCH = 24, 4


class Data(pl.LightningDataModule):
    """A classification of three kinds, in a fixed order."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SIZE, 6, generator=draws)
        self.labels = self.inputs[:, :3].argmax(1)
        self.begin()

    def begin(self):
        """Whatever else there is."""

    def train_set(self):
        return TensorDataset(self.inputs, self.labels)

    def train_dataloader(self):
        return DataLoader(self.train_set(), batch_size=BATCH)

    def val_dataloader(self):
        return DataLoader(TensorDataset(self.inputs[:8], self.labels[:8]), batch_size=8)


class Case(pl.LightningModule):
    """A small network; a row differs from it in one habit."""

    refused: ClassVar[str] = ""
    said: ClassVar[str] = ""
    """The warning where a number ends as it began."""
    crosses: ClassVar[bool] = False
    """Does it go on counting from client to client, so that several are refused and one is not?"""
    begins_late: ClassVar[bool] = False
    """Does its habit begin after the first epoch, so that it is compared over several only?"""
    rounds: ClassVar[int] = 1
    """Rounds after which weights, steps and rates are those of as many epochs; the first is bit for bit."""
    draws: ClassVar[bool] = False
    """Does it draw? A plain training has other seeds."""
    flags: ClassVar[dict[str, Any]] = {}
    data: ClassVar[type[Data]] = Data

    def __init_subclass__(cls):
        super().__init_subclass__()
        if not cls.__name__.startswith("_"):
            CASES.append(cls)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.build()

    def build(self):
        """Whatever else there is."""

    @classmethod
    def forget(cls):
        """Where a row resets what outlives a run."""

    def callbacks(self):
        return []

    def forward(self, inputs):
        return self.net(inputs)

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


# ---- averages, teachers, adapters -----------------------------------------------------------------------
class EmaOfTorch(Case):
    said = "Training changed ema.n_averaged, which clients don't send"

    def build(self):
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.ema.requires_grad_(False)

    def on_train_batch_end(self, *args):
        self.ema.update_parameters(self.net)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            wanted = self.ema(batch[0])
        return self.loss(batch) + nn.functional.mse_loss(self.net(batch[0]), wanted)


class LoraByForwardPatch(Case):
    """The layer's own `forward` becomes a bound function."""

    def build(self):
        layer = self.net[0]
        layer.up = nn.Parameter(torch.zeros(5, 6))
        layer.plain = layer.forward
        layer.forward = types.MethodType(lambda self, x: self.plain(x) + x @ self.up.T, layer)


# ---- compiled, scripted, traced ---------------------------------------------------------------------------
class ScriptedPart(Case):
    def build(self):
        self.net = torch.jit.script(self.net)


class GraphModule(Case):
    def build(self):
        self.net = torch.fx.symbolic_trace(self.net)


class Functional(Case):
    """The module holds its own parameters by name and calls a template."""

    def build(self):
        self.template = [copy.deepcopy(self.net).to("meta")]
        self.named = dict(self.net.named_parameters())

    def forward(self, inputs):
        return torch.func.functional_call(self.template[0], self.named, (inputs,))


# ---- ties and views ---------------------------------------------------------------------------------------
class RowsOfABuffer(Case):
    def build(self):
        self.register_buffer("table", torch.zeros(3, 3))
        self.rows = [self.table[n] for n in range(3)]

    def training_step(self, batch, batch_idx):
        self.rows[batch_idx % 3] += 0.1
        return nn.functional.cross_entropy(self.net(batch[0]) + self.table.clone()[0], batch[1])


class NumpyView(Case):
    def build(self):
        self.counts = torch.zeros(3)
        self.view = self.counts.numpy()

    def training_step(self, batch, batch_idx):
        self.view += np.bincount(batch[1].numpy(), minlength=3).astype(np.float32)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=1 / (1 + self.counts))


class ParametersOutsideOfModules(Case):
    """In a plain list, given to the optimiser by hand."""

    refused = "parameters in the optimiser are not the module's"

    def build(self):
        self.scales = [torch.ones(3, requires_grad=True)]

    def forward(self, inputs):
        return self.net(inputs) * self.scales[0]

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.scales], lr=0.1)


# ---- identity ---------------------------------------------------------------------------------------------


class ById(Case):
    """Scales by the `id` of a parameter, in a helper."""

    def build(self):
        self.helper = types.SimpleNamespace(scales={id(p): 0.1 * n for n, p in enumerate(self.parameters())})

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.mul_(self.helper.scales[id(p)])


class ByIdGlobally(Case):
    """A registry at module level, by `id`, which layers fill when they are made."""

    refused = "names _BY_ID, by id directly"

    def build(self):
        _BY_ID.clear()
        for n, p in enumerate(self.parameters()):
            _BY_ID[id(p)] = 0.2 * n

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.mul_(_BY_ID[id(p)])


_BY_ID = {}


# ---- what is global and held, too -------------------------------------------------------------------------
class _Config:
    def __init__(self) -> None:
        self.smoothing, self.scale = 0.1, 0.5


CFG = _Config()


class GlobalConfigHeld(Case):
    """Only read, by both ways."""

    def build(self):
        self.cfg = CFG

    def training_step(self, batch, batch_idx):
        assert self.cfg.scale == CFG.scale
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=CFG.smoothing)
        return self.cfg.scale * loss


class _Slots:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


COUNTS = types.SimpleNamespace(step=0)
DEEP = [_Slots({"a": [[functools.partial(getattr, COUNTS)]]})]
MANY = [*([n] for n in range(3_000)), COUNTS]


class DeepInAGlobal(Case):
    """Behind slots and a partial function, and behind 3,000 others."""

    crosses = True

    @classmethod
    def forget(cls):
        COUNTS.step = 0

    def build(self):
        self.counts = COUNTS

    def training_step(self, batch, batch_idx):
        self.counts.step += 1
        return self.loss(batch) / DEEP[0].inner["a"][0][0]("step")


class BehindManyInAGlobal(DeepInAGlobal):
    def training_step(self, batch, batch_idx):
        self.counts.step += 1
        return self.loss(batch) / MANY[-1].step


class ImportedInside(DeepInAGlobal):
    def training_step(self, batch, batch_idx):
        from tests.isolation import published

        self.counts.step += 1
        return self.loss(batch) / published.COUNTS.step


class TeacherNamedThatFollows(Case):
    refused = "names STUDENT directly: the original Linear, which training changes"

    def build(self):
        self.teacher = STUDENT

    def training_step(self, batch, batch_idx):
        STUDENT.weight.data.lerp_(self.net[2].weight.data, 0.1)
        return self.loss(batch) + nn.functional.mse_loss(self.net[:2](batch[0]), self.net[:2](batch[0]))


STUDENT = nn.Linear(5, 3).requires_grad_(False)


class TrainerNamed(Case):
    """Its settings are read by a global, its clock is not."""

    flags: ClassVar[dict[str, Any]] = {"log_every_n_steps": 2}

    def on_fit_start(self):
        globals()["trainer"] = self.trainer

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / trainer.max_epochs * trainer.log_every_n_steps  # noqa: F821


class ClockOfTheTrainerNamed(TrainerNamed):
    refused = "names trainer directly"

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + trainer.global_step)  # noqa: F821


HOLDER = types.SimpleNamespace(module=None)


class ModuleInAGlobal(Case):
    """The current module is found by a global."""

    def build(self):
        HOLDER.module = self

    def training_step(self, batch, batch_idx):
        return HOLDER.module.loss(batch)

    refused = "names HOLDER.module directly"


class CachedMethod(Case):
    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def scale_of(self, step):
        return 1 / (1 + step)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.scale_of(batch_idx)


@functools.singledispatch
def scaled(value: Any) -> Any:
    return value * 0.5


@scaled.register
def _(value: int) -> float:
    return value * 0.25


class SingleDispatch(Case):
    def build(self):
        self.scaled = scaled

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.scaled(batch_idx + 1)


class _Slotted:
    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


class SlotsAndWeak(Case):
    def build(self):
        self.counter = _Slotted()
        self.weakly = weakref.proxy(self.counter)

    def training_step(self, batch, batch_idx):
        self.weakly.count += 1
        return self.loss(batch) / self.counter.count


class LongChain(Case):
    """A linked list that is deeper than Python recurses."""

    refused = "maximum recursion depth"

    def build(self):
        self.chain = None
        for n in range(3000):
            self.chain = (n, self.chain)


# ---- hooks ------------------------------------------------------------------------------------------------
class StepInBackward(Case):
    """Optimisers that step while gradients are accumulated."""

    def build(self):
        self.automatic_optimization = False
        self.inner = {p: torch.optim.SGD([p], lr=0.1) for p in self.net.parameters()}
        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(self._step)

    def _step(self, p):
        self.inner[p].step()
        self.inner[p].zero_grad()

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


# ---- precision, layers ------------------------------------------------------------------------------------
class Bfloat(Case):
    flags: ClassVar[dict[str, Any]] = {"precision": "bf16-mixed"}


class ReplacedLayer(Case):
    """A head that a hook of the start replaces."""

    def on_fit_start(self):
        torch.manual_seed(5)
        self.net[2] = nn.Linear(5, 3)
        self.trainer.strategy.setup_optimizers(self.trainer)
