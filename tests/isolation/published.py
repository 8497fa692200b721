"""Habits of published trainings, one a class: what modules, callbacks, data and optimisers hold and do.

None leaks, so none may be refused, but where `refused` says by which words. Nothing is drawn while they
train, so that one client's round is an epoch of the plain training, bit for bit.
"""

from __future__ import annotations

import abc
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import logging
import operator
import queue
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

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
    said = "training changed ema.n_averaged, which no update carries"

    def build(self):
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.ema.requires_grad_(False)

    def on_train_batch_end(self, *args):
        self.ema.update_parameters(self.net)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            wanted = self.ema(batch[0])
        return self.loss(batch) + nn.functional.mse_loss(self.net(batch[0]), wanted)


class EmaInDictionary(Case):
    """A shadow by name, which pulls."""

    def build(self):
        self.shadow = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def training_step(self, batch, batch_idx):
        pull = sum(((p - self.shadow[name]) ** 2).sum() for name, p in self.net.named_parameters())
        for name, p in self.net.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.3)
        return self.loss(batch) + 0.1 * pull


class LoraParametrization(Case):
    def build(self):
        self.net[0].weight.requires_grad_(False)
        parametrize.register_parametrization(self.net[0], "weight", _LowRank(5, 6))


class _LowRank(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.zeros(rows, 1)), nn.Parameter(torch.ones(1, columns))

    def forward(self, weight):
        return weight + self.left @ self.right


class LoraByForwardPatch(Case):
    """The layer's own `forward` becomes a bound function."""

    def build(self):
        layer = self.net[0]
        layer.up = nn.Parameter(torch.zeros(5, 6))
        layer.plain = layer.forward
        layer.forward = types.MethodType(lambda self, x: self.plain(x) + x @ self.up.T, layer)


class Pruned(Case):
    def build(self):
        prune.l1_unstructured(self.net[0], "weight", amount=0.3)


class CachedParametrization(Case):
    def build(self):
        parametrizations.weight_norm(self.net[0])

    def training_step(self, batch, batch_idx):
        with parametrize.cached():
            return self.loss(batch)


class SpectralOfOld(Case):
    def build(self):
        nn.utils.spectral_norm(self.net[0])


# ---- compiled, scripted, traced ---------------------------------------------------------------------------
class ScriptedPart(Case):
    def build(self):
        self.net = torch.jit.script(self.net)


class TracedPart(Case):
    def build(self):
        self.net[2] = torch.jit.trace(self.net[2], torch.zeros(1, 5))


class CompiledEager(Case):
    def build(self):
        self.net = torch.compile(self.net, backend="eager")


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
class TiedByData(Case):
    def build(self):
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        self.net[2].weight.data = self.net[0].weight.data


class FlatParameters(Case):
    """All parameters are views of one flat tensor."""

    def build(self):
        parameters = list(self.net.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        start = 0
        for p in parameters:
            p.data = self.flat[start : start + p.numel()].view_as(p)
            start += p.numel()

    def on_before_zero_grad(self, *args):
        self.flat.mul_(0.99)


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
UNSET = object()


class Sentinel(Case):
    def build(self):
        self.last = UNSET

    def training_step(self, batch, batch_idx):
        scale = 1.0 if self.last is UNSET else 0.5
        self.last = batch_idx
        return scale * self.loss(batch)


class _Missing:
    def __repr__(self):
        return "MISSING"


MISSING = _Missing()


class SentinelOfAClass(Case):
    """An instance that is one by being at module level."""

    def build(self):
        self.last = MISSING

    def training_step(self, batch, batch_idx):
        scale = 1.0 if self.last is MISSING else 0.5
        self.last = batch_idx
        return scale * self.loss(batch)


class _Phase(enum.Enum):
    WARM = "warm"
    MAIN = "main"


class Enumeration(Case):
    def build(self):
        self.phase = _Phase.WARM
        self.rates = {_Phase.WARM: 0.1, _Phase.MAIN: 1.0}

    def training_step(self, batch, batch_idx):
        if batch_idx >= 2:
            self.phase = _Phase.MAIN
        return self.rates[self.phase] * self.loss(batch)


class ById(Case):
    """Scales by the `id` of a parameter, in a helper."""

    def build(self):
        self.helper = types.SimpleNamespace(scales={id(p): 0.1 * n for n, p in enumerate(self.parameters())})

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.mul_(self.helper.scales[id(p)])


class ByModuleWeakly(Case):
    def build(self):
        self.scales = weakref.WeakKeyDictionary({self.net[0]: 0.3, self.net[2]: 0.6})

    def on_after_backward(self):
        for layer, scale in self.scales.items():
            layer.weight.grad.mul_(scale)


class ByIdGlobally(Case):
    """A registry at module level, by `id`, which layers fill when they are made."""

    refused = "names _BY_ID, by id past it"

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


STATE = types.SimpleNamespace(step=0)


class GlobalStateHeld(Case):
    """Written by the attribute, read as a global."""

    crosses = True

    @classmethod
    def forget(cls):
        STATE.step = 0

    def build(self):
        self.state = STATE

    def training_step(self, batch, batch_idx):
        self.state.step += 1
        return self.loss(batch) / STATE.step


HISTORY = []


class GlobalListHeld(Case):
    crosses = True

    @classmethod
    def forget(cls):
        HISTORY.clear()

    def build(self):
        self.history = HISTORY

    def training_step(self, batch, batch_idx):
        self.history.append(batch_idx)
        return self.loss(batch) / len(HISTORY)


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


TEACHER = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).requires_grad_(False).eval()


class FrozenTeacherNamed(Case):
    """Held and named, and never changed."""

    def build(self):
        self.teacher = TEACHER

    def training_step(self, batch, batch_idx):
        TEACHER.eval()
        return self.loss(batch) + nn.functional.mse_loss(self.net(batch[0]), TEACHER(batch[0]))


class TeacherNamedThatFollows(Case):
    refused = "names STUDENT past it: the original Linear, which training changes"

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
    refused = "names trainer past it"

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + trainer.global_step)  # noqa: F821


class _Registry(dict[str, Callable[..., Any]]):
    def register(self, function):
        self[function.__name__] = function
        return function


LOSSES = _Registry()


@LOSSES.register
def smooth(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, labels, label_smoothing=0.2)


class RegistryHeld(Case):
    def build(self):
        self.losses = LOSSES

    def loss(self, batch):
        assert self.losses["smooth"] is LOSSES["smooth"]
        return LOSSES["smooth"](self.net(batch[0]), batch[1])


HOLDER = types.SimpleNamespace(module=None)


class ModuleInAGlobal(Case):
    """The current module is found by a global."""

    def build(self):
        HOLDER.module = self

    def training_step(self, batch, batch_idx):
        return HOLDER.module.loss(batch)

    refused = "names HOLDER.module past it"


class _Stepper:
    one: ClassVar[Any] = None

    @classmethod
    def get(cls):
        if cls.one is None:
            cls.one = cls()
            cls.one.steps = 0
        return cls.one


class SingletonThatCounts(Case):
    """Counted by one way and read by the other."""

    crosses = True

    @classmethod
    def forget(cls):
        _Stepper.one = None

    def build(self):
        self.stepper = _Stepper.get()

    def training_step(self, batch, batch_idx):
        self.stepper.steps += 1
        return self.loss(batch) / _Stepper.get().steps


class _Borg:
    _all: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self._all


class Borg(Case):
    crosses = True

    @classmethod
    def forget(cls):
        _Borg._all.clear()

    def build(self):
        self.borg = _Borg()
        self.borg.steps = 0

    def training_step(self, batch, batch_idx):
        self.borg.steps += 1
        return self.loss(batch) / _Borg().steps


_STEP = contextvars.ContextVar("step", default=0)


class ContextVariable(Case):
    """Set and put back within a step."""

    def build(self):
        self.step_variable = _STEP

    def training_step(self, batch, batch_idx):
        token = self.step_variable.set(batch_idx)
        loss = self.loss(batch) / (1 + _STEP.get())
        self.step_variable.reset(token)
        return loss


# ---- functions and objects --------------------------------------------------------------------------------
class PartialOfMethod(Case):
    def build(self):
        self.weight = 0.7
        self.criterion = functools.partial(self._weighted, power=2)

    def _weighted(self, scores, labels, power):
        self.weight *= 0.9
        return nn.functional.cross_entropy(scores, labels) * self.weight**power

    def loss(self, batch):
        return self.criterion(self.net(batch[0]), batch[1])


class NonlocalCounter(Case):
    def build(self):
        count = 0

        def warm():
            nonlocal count
            count += 1
            return min(1.0, count / 4)

        self.warm = warm

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.warm()


class RunningGenerator(Case):
    refused = "scales.*__next__"

    def build(self):
        self.scales = (1 / n for n in itertools.count(1))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * next(self.scales)


class CachedProperty(Case):
    @functools.cached_property
    def weights(self):
        return torch.arange(1.0, 4.0)

    def build(self):
        self.net[0].weight.data *= float(self.weights.mean())

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=self.weights)


class PropertyWithSetter(Case):
    _rate = 1.0

    @property
    def rate(self):
        return self._rate

    @rate.setter
    def rate(self, value):
        self._rate = value

    def training_step(self, batch, batch_idx):
        self.rate = self.rate * 0.8
        return self.rate * self.loss(batch)


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Settings:
    scale: float = 0.5
    weights: tuple[float, ...] = (1.0, 2.0, 3.0)


@dataclasses.dataclass
class _Running:
    settings: _Settings
    losses: list[float] = dataclasses.field(default_factory=list)
    make: dataclasses.InitVar[int] = 0

    def __post_init__(self, make):
        self.total = float(make)


class Dataclasses(Case):
    def build(self):
        self.running = _Running(_Settings())

    def training_step(self, batch, batch_idx):
        self.running.losses.append(1.0)
        return self.loss(batch) * self.running.settings.scale / len(self.running.losses)


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


class _OwnState:
    """Leaves out what it makes anew."""

    def __init__(self) -> None:
        self.scale, self.lock = 0.5, threading.Condition()

    def __getstate__(self):
        return {"scale": self.scale}

    def __setstate__(self, state):
        self.scale, self.lock = state["scale"], threading.Condition()


class OwnState(Case):
    def build(self):
        self.helper = _OwnState()

    def training_step(self, batch, batch_idx):
        with self.helper.lock:
            self.helper.scale *= 0.9
        return self.helper.scale * self.loss(batch)


class Threads(Case):
    """What synchronises, and a queue."""

    def build(self):
        self.lock, self.event, self.waiting = threading.RLock(), threading.Event(), queue.Queue()

    def training_step(self, batch, batch_idx):
        with self.lock:
            self.event.set()
            self.waiting.put(batch_idx)
        return self.loss(batch) / (1 + self.waiting.qsize())

    refused = "event|waiting"


class Logs(Case):
    def build(self):
        self.text = logging.getLogger(__name__)
        self.adapter = logging.LoggerAdapter(self.text, {"run": 1})

    def training_step(self, batch, batch_idx):
        self.adapter.debug("step %d", batch_idx)
        return self.loss(batch)


class LongChain(Case):
    """A linked list that is deeper than Python recurses."""

    refused = "maximum recursion depth"

    def build(self):
        self.chain = None
        for n in range(3000):
            self.chain = (n, self.chain)


class OwnContainers(Case):
    def build(self):
        self.counts = collections.Counter()
        self.order = collections.OrderedDict(a=1)
        self.order.note = "kept"
        self.chained = collections.ChainMap({"a": 0.5}, {"b": 0.25})
        self.getter = operator.itemgetter("a")

    def training_step(self, batch, batch_idx):
        self.counts.update(batch[1].tolist())
        self.order["b"] = self.order.pop("b", 0) + 1
        assert self.order.note == "kept"
        return self.loss(batch) * self.getter(self.chained) * self.order["b"] / self.counts.total()


class _Strategy(abc.ABC):
    @abc.abstractmethod
    def __call__(self, step): ...


class _Decay(_Strategy):
    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self, step):
        self.value *= 0.8
        return self.value


class StrategyObject(Case):
    def build(self):
        self.strategies = nn.ModuleDict(), [_Decay()]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.strategies[1][0](batch_idx)


class _Counts(nn.Module):
    """Says itself how it is copied: what it holds beside tensors is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.notes = nn.Parameter(torch.ones(3)), [1]

    def __deepcopy__(self, memo):
        made = type(self)()
        memo[id(self)] = made
        made.load_state_dict(self.state_dict())
        made.notes = self.notes
        return made


class ModuleThatCopiesItself(Case):
    def build(self):
        self.scales = _Counts()

    def forward(self, inputs):
        return self.net(inputs) * self.scales.scale


class Hyperparameters(Case):
    """Saved with an object, and changed while it trains."""

    def build(self):
        self.save_hyperparameters({"scale": 1.0, "settings": _Settings()})

    def training_step(self, batch, batch_idx):
        self.hparams["scale"] *= 0.9
        return self.loss(batch) * self.hparams["scale"] * self.hparams.settings.scale


# ---- hooks ------------------------------------------------------------------------------------------------
class Activations(Case):
    """Forward hooks over `self` fill a dictionary, with handles in a list."""

    def build(self):
        self.seen = {}
        self.handles = [
            layer.register_forward_hook(functools.partial(self._keep, name))
            for name, layer in self.net.named_children()
        ]

    def _keep(self, name, module, args, out):
        self.seen[name] = out

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 0.1 * self.seen["1"].square().mean()


class HookOnce(Case):
    """A hook that removes itself after the first call."""

    def build(self):
        def first(module, args, out):
            self.handle.remove()
            return out * 2

        self.handle = self.net.register_forward_hook(first)


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


class _Reverse(torch.autograd.Function):
    scale: ClassVar[float] = 0.5

    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, grad):
        return -_Reverse.scale * grad


class OwnAutograd(Case):
    def forward(self, inputs):
        hidden = self.net[:2](inputs)
        return self.net[2](hidden) + 0.1 * self.net[2](_Reverse.apply(hidden))


class Checkpointed(Case):
    def forward(self, inputs):
        return torch.utils.checkpoint.checkpoint(self.net, inputs, use_reentrant=False)


# ---- optimisers and schedules -----------------------------------------------------------------------------
class _Outer(torch.optim.Optimizer):
    """Holds another one and its groups, as timm's and pytorch_optimizer's do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = inner.state
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.count = 0

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class WrappedOptimizer(Case):
    def configure_optimizers(self):
        return _Outer(torch.optim.Adam(self.parameters(), lr=0.05))


class OptimizerHooks(Case):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.calls = 0

        def before(optimizer, args, kwargs):
            self.calls += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / self.calls

        optimizer.register_step_pre_hook(before)
        return optimizer


class ScheduleByMethod(Case):
    """A schedule of the module's own method, stepped by hand."""

    def build(self):
        self.factor = 1.0

    def rate(self, step):
        return self.factor / (1 + step)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedule = lr_scheduler.LambdaLR(optimizer, self.rate)
        return optimizer

    def on_train_batch_end(self, *args):
        self.factor *= 0.95
        self.schedule.step()


class Sequential(Case):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        parts = [
            lr_scheduler.LinearLR(optimizer, 0.3, total_iters=2),
            lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
        ]
        schedule = lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TwoByToggle(Case):
    def build(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        one = self.optimizers()[batch_idx % 2]
        self.toggle_optimizer(one)
        one.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(one, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        one.step()
        self.untoggle_optimizer(one)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


# ---- metrics ----------------------------------------------------------------------------------------------
class MetricSteers(Case):
    """A metric in a plain list whose value weighs the loss."""

    def build(self):
        self.seen = [torchmetrics.MeanMetric()]

    def training_step(self, batch, batch_idx):
        self.seen[0].update(float(batch_idx + 1))
        return self.loss(batch) / self.seen[0].compute()


# ---- callbacks --------------------------------------------------------------------------------------------
class _EmaOfAll(pl.Callback):
    def setup(self, trainer, pl_module, stage):
        self.shadow = copy.deepcopy(pl_module.net).requires_grad_(False)

    def on_train_batch_end(self, trainer, pl_module, *args):
        for slow, fast in zip(self.shadow.parameters(), pl_module.net.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.5)

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.net.load_state_dict(self.shadow.state_dict())


class EmaCallback(Case):
    """Ends every epoch with the average."""

    def callbacks(self):
        return [_EmaOfAll()]


class _Attaches(pl.Callback):
    """Attaches a hook in `setup`, and looks for another callback."""

    def setup(self, trainer, pl_module, stage):
        self.scale = 1.0
        pl_module.net.register_forward_hook(self.hook)

    def hook(self, module, args, out):
        return out * self.scale if module.training else None

    def on_train_batch_start(self, trainer, *args):
        assert any(c is self for c in trainer.callbacks)
        self.scale *= 0.9


class CallbackWithHook(Case):
    def callbacks(self):
        return [_Attaches()]


class Accumulation(Case):
    def callbacks(self):
        return [pl.callbacks.GradientAccumulationScheduler({0: 2})]


# ---- data -------------------------------------------------------------------------------------------------
class _Caches(Dataset[Any]):
    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels, self.cache, self.reads = inputs, labels, dict[int, Any](), 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.reads += 1
        if index not in self.cache:
            self.cache[index] = self.inputs[index] * 2, self.labels[index]
        return self.cache[index]


class CachingData(Case):
    class data(Data):
        def train_set(self):
            return _Caches(self.inputs, self.labels)


class _Lazily(Dataset[Any]):
    """Opens what it reads when it is first asked, as for HDF5."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.rows, self.opened = list(zip(inputs, labels, strict=True)), None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.opened is None:
            self.opened = iter, self.rows
        return self.rows[index]


class LazyData(Case):
    class data(Data):
        def train_set(self):
            rows = _Lazily(self.inputs, self.labels)
            return ConcatDataset([Subset(rows, range(12)), Subset(rows, range(12, SIZE))])


class _Sorted(TensorDataset):
    def __getitems__(self, indices):
        return [self[n] for n in indices]


class ManyAtOnce(Case):
    class data(Data):
        def train_set(self):
            return _Sorted(self.inputs, self.labels)


class OwnBatches(Case):
    """A class of batches that says how it moves."""

    class data(Data):
        def train_dataloader(self):
            return DataLoader(self.train_set(), batch_size=BATCH, collate_fn=_Rows)

        def transfer_batch_to_device(self, batch, device, index):
            return (
                batch if isinstance(batch, _Rows) else super().transfer_batch_to_device(batch, device, index)
            )

    def loss(self, batch):
        return super().loss((batch.inputs, batch.labels) if isinstance(batch, _Rows) else batch)


class _Rows:
    def __init__(self, rows: Any) -> None:
        self.inputs, self.labels = torch.utils.data.default_collate(rows)

    def __len__(self):
        return len(self.labels)


class SetUpData(Case):
    """Transforms of a data module that `setup` makes, which the module asks for by the Trainer."""

    class data(Data):
        def setup(self, stage):
            self.mean, self.steps = self.inputs.mean(0), 0

        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.steps += 1
            return [batch[0] - self.mean, batch[1]]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + self.trainer.datamodule.mean.abs().sum())


class Augmented(Case):
    """Augmentation without draws, in the module, as kornia's."""

    def build(self):
        self.augment = nn.Sequential(_Turns())

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [self.augment(batch[0]), batch[1]] if self.trainer.training else batch


class _Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def forward(self, inputs):
        self.turn += 1
        return inputs.roll(self.turn, 1)


# ---- precision, layers ------------------------------------------------------------------------------------
class Bfloat(Case):
    flags: ClassVar[dict[str, Any]] = {"precision": "bf16-mixed"}


class Lstm(Case):
    def build(self):
        self.cells, self.head = nn.LSTM(2, 4, batch_first=True, num_layers=2), nn.Linear(4, 3)
        del self.net
        self.hidden = None

    def forward(self, inputs):
        return self.head(self.cells(inputs.view(-1, 3, 2))[0][:, -1])


class BatchNormOfNone(Case):
    def build(self):
        self.net.insert(1, nn.BatchNorm1d(5, momentum=0.5))


class Gates(Case):
    """Parameters in containers, a complex one, and one that gets no gradient."""

    def build(self):
        self.gates = nn.ParameterDict({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.zeros(3))})
        self.more = nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, inputs):
        return self.net(inputs) * self.gates["a"] + self.gates["b"]


class ReplacedLayer(Case):
    """A head that a hook of the start replaces."""

    def on_fit_start(self):
        torch.manual_seed(5)
        self.net[2] = nn.Linear(5, 3)
        self.trainer.strategy.setup_optimizers(self.trainer)


class StateDictHooks(Case):
    def build(self):
        self._register_state_dict_hook(_renamed)
        self.register_load_state_dict_pre_hook(_named_back)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["version"] = 2


def _renamed(module, state, prefix, local):
    for name in [name for name in state if name.startswith(prefix + "net.")]:
        state["renamed." + name] = state.pop(name)


def _named_back(module, state, *args):
    for name in [name for name in state if name.startswith("renamed.")]:
        state[name.removeprefix("renamed.")] = state.pop(name)
