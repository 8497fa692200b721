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

CASES: list[type[Case]] = []
SIZE, BATCH = 24, 4


class Data(pl.LightningDataModule):
    """A classification of three kinds, in a fixed order."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SIZE, 6, generator=draws)
        self.labels = self.inputs[:, :3].argmax(1)
        self.begin()

    def begin(self) -> None:
        """Whatever else there is."""

    def train_set(self) -> Any:
        return TensorDataset(self.inputs, self.labels)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set(), batch_size=BATCH)

    def val_dataloader(self) -> Any:
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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__name__.startswith("_"):
            CASES.append(cls)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.build()

    def build(self) -> None:
        """Whatever else there is."""

    @classmethod
    def forget(cls) -> None:
        """Where a row resets what outlives a run."""

    def callbacks(self) -> list[pl.Callback]:
        return []

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


# ---- averages, teachers, adapters -----------------------------------------------------------------------


class EmaOfTorch(Case):
    said = "training changed ema.n_averaged, which no update carries"

    def build(self) -> None:
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.ema.requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        self.ema.update_parameters(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            wanted = self.ema(batch[0])
        return self.loss(batch) + nn.functional.mse_loss(self.net(batch[0]), wanted)


class EmaInDictionary(Case):
    """A shadow by name, which pulls."""

    def build(self) -> None:
        self.shadow = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pull = sum(((p - self.shadow[name]) ** 2).sum() for name, p in self.net.named_parameters())
        for name, p in self.net.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.3)
        return self.loss(batch) + 0.1 * pull


class LoraParametrization(Case):
    def build(self) -> None:
        self.net[0].weight.requires_grad_(False)
        parametrize.register_parametrization(self.net[0], "weight", _LowRank(5, 6))


class _LowRank(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.zeros(rows, 1)), nn.Parameter(torch.ones(1, columns))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


class LoraByForwardPatch(Case):
    """The layer's own `forward` becomes a bound function."""

    def build(self) -> None:
        layer: Any = self.net[0]
        layer.up = nn.Parameter(torch.zeros(5, 6))
        layer.plain = layer.forward
        layer.forward = types.MethodType(lambda self, x: self.plain(x) + x @ self.up.T, layer)


class Pruned(Case):
    def build(self) -> None:
        prune.l1_unstructured(self.net[0], "weight", amount=0.3)  # type: ignore[no-untyped-call]


class CachedParametrization(Case):
    def build(self) -> None:
        parametrizations.weight_norm(self.net[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with parametrize.cached():
            return self.loss(batch)


class SpectralOfOld(Case):
    def build(self) -> None:
        nn.utils.spectral_norm(self.net[0])


# ---- compiled, scripted, traced ---------------------------------------------------------------------------


class ScriptedPart(Case):
    def build(self) -> None:
        self.net = torch.jit.script(self.net)  # type: ignore[no-untyped-call]


class TracedPart(Case):
    def build(self) -> None:
        self.net[2] = torch.jit.trace(self.net[2], torch.zeros(1, 5))  # type: ignore[no-untyped-call]


class CompiledEager(Case):
    def build(self) -> None:
        self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]


class GraphModule(Case):
    def build(self) -> None:
        self.net = torch.fx.symbolic_trace(self.net)  # type: ignore[assignment]


class Functional(Case):
    """The module holds its own parameters by name and calls a template."""

    def build(self) -> None:
        self.template = [copy.deepcopy(self.net).to("meta")]
        self.named = dict(self.net.named_parameters())

    def forward(self, inputs: Tensor) -> Any:
        return torch.func.functional_call(self.template[0], self.named, (inputs,))


# ---- ties and views ---------------------------------------------------------------------------------------


class TiedByData(Case):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        self.net[2].weight.data = self.net[0].weight.data


class FlatParameters(Case):
    """All parameters are views of one flat tensor."""

    def build(self) -> None:
        parameters = list(self.net.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        start = 0
        for p in parameters:
            p.data = self.flat[start : start + p.numel()].view_as(p)
            start += p.numel()

    def on_before_zero_grad(self, *args: Any) -> None:
        self.flat.mul_(0.99)


class RowsOfABuffer(Case):
    def build(self) -> None:
        self.register_buffer("table", torch.zeros(3, 3))
        self.rows = [self.table[n] for n in range(3)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows[batch_idx % 3] += 0.1
        return nn.functional.cross_entropy(self.net(batch[0]) + self.table.clone()[0], batch[1])


class NumpyView(Case):
    def build(self) -> None:
        self.counts = torch.zeros(3)
        self.view = self.counts.numpy()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.view += np.bincount(batch[1].numpy(), minlength=3).astype(np.float32)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=1 / (1 + self.counts))


class ParametersOutsideOfModules(Case):
    """In a plain list, given to the optimiser by hand."""

    refused = "parameters in the optimiser are not the module's"

    def build(self) -> None:
        self.scales = [torch.ones(3, requires_grad=True)]

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs) * self.scales[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.scales], lr=0.1)


# ---- identity ---------------------------------------------------------------------------------------------

UNSET = object()


class Sentinel(Case):
    def build(self) -> None:
        self.last: Any = UNSET

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = 1.0 if self.last is UNSET else 0.5
        self.last = batch_idx
        return scale * self.loss(batch)


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


class SentinelOfAClass(Case):
    """An instance that is one by being at module level."""

    def build(self) -> None:
        self.last: Any = MISSING

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = 1.0 if self.last is MISSING else 0.5
        self.last = batch_idx
        return scale * self.loss(batch)


class _Phase(enum.Enum):
    WARM = "warm"
    MAIN = "main"


class Enumeration(Case):
    def build(self) -> None:
        self.phase = _Phase.WARM
        self.rates = {_Phase.WARM: 0.1, _Phase.MAIN: 1.0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx >= 2:
            self.phase = _Phase.MAIN
        return self.rates[self.phase] * self.loss(batch)


class ById(Case):
    """Scales by the `id` of a parameter, in a helper."""

    def build(self) -> None:
        self.helper = types.SimpleNamespace(scales={id(p): 0.1 * n for n, p in enumerate(self.parameters())})

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.mul_(self.helper.scales[id(p)])  # type: ignore[union-attr]


class ByModuleWeakly(Case):
    def build(self) -> None:
        self.scales = weakref.WeakKeyDictionary({self.net[0]: 0.3, self.net[2]: 0.6})

    def on_after_backward(self) -> None:
        for layer, scale in self.scales.items():
            layer.weight.grad.mul_(scale)


class ByIdGlobally(Case):
    """A registry at module level, by `id`, which layers fill when they are made."""

    refused = "names _BY_ID, by id past it"

    def build(self) -> None:
        _BY_ID.clear()
        for n, p in enumerate(self.parameters()):
            _BY_ID[id(p)] = 0.2 * n

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.mul_(_BY_ID[id(p)])  # type: ignore[union-attr]


_BY_ID: dict[int, float] = {}


# ---- what is global and held, too -------------------------------------------------------------------------


class _Config:
    def __init__(self) -> None:
        self.smoothing, self.scale = 0.1, 0.5


CFG = _Config()


class GlobalConfigHeld(Case):
    """Only read, by both ways."""

    def build(self) -> None:
        self.cfg = CFG

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.cfg.scale == CFG.scale
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=CFG.smoothing)
        return self.cfg.scale * loss


STATE = types.SimpleNamespace(step=0)


class GlobalStateHeld(Case):
    """Written by the attribute, read as a global."""

    crosses = True

    @classmethod
    def forget(cls) -> None:
        STATE.step = 0

    def build(self) -> None:
        self.state = STATE

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.state.step += 1
        return self.loss(batch) / STATE.step


HISTORY: list[int] = []


class GlobalListHeld(Case):
    crosses = True

    @classmethod
    def forget(cls) -> None:
        HISTORY.clear()

    def build(self) -> None:
        self.history = HISTORY

    def training_step(self, batch: Any, batch_idx: int) -> Any:
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
    def forget(cls) -> None:
        COUNTS.step = 0

    def build(self) -> None:
        self.counts = COUNTS

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts.step += 1
        return self.loss(batch) / DEEP[0].inner["a"][0][0]("step")


class BehindManyInAGlobal(DeepInAGlobal):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts.step += 1
        return self.loss(batch) / MANY[-1].step  # type: ignore[attr-defined]


class ImportedInside(DeepInAGlobal):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        from tests.isolation import published

        self.counts.step += 1
        return self.loss(batch) / published.COUNTS.step


TEACHER = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).requires_grad_(False).eval()


class FrozenTeacherNamed(Case):
    """Held and named, and never changed."""

    def build(self) -> None:
        self.teacher = TEACHER

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        TEACHER.eval()
        return self.loss(batch) + nn.functional.mse_loss(self.net(batch[0]), TEACHER(batch[0]))


class TeacherNamedThatFollows(Case):
    refused = "names STUDENT past it: the original Linear, which training changes"

    def build(self) -> None:
        self.teacher = STUDENT

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        STUDENT.weight.data.lerp_(self.net[2].weight.data, 0.1)
        return self.loss(batch) + nn.functional.mse_loss(self.net[:2](batch[0]), self.net[:2](batch[0]))


STUDENT = nn.Linear(5, 3).requires_grad_(False)


class TrainerNamed(Case):
    """Its settings are read by a global, its clock is not."""

    flags: ClassVar[dict[str, Any]] = {"log_every_n_steps": 2}

    def on_fit_start(self) -> None:
        globals()["trainer"] = self.trainer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) / trainer.max_epochs * trainer.log_every_n_steps  # type: ignore[name-defined] # noqa: F821


class ClockOfTheTrainerNamed(TrainerNamed):
    refused = "names trainer past it"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) / (1 + trainer.global_step)  # type: ignore[name-defined] # noqa: F821


class _Registry(dict[str, Callable[..., Any]]):
    def register(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self[function.__name__] = function
        return function


LOSSES = _Registry()


@LOSSES.register
def smooth(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, labels, label_smoothing=0.2)


class RegistryHeld(Case):
    def build(self) -> None:
        self.losses = LOSSES

    def loss(self, batch: Any) -> Tensor:
        assert self.losses["smooth"] is LOSSES["smooth"]
        return LOSSES["smooth"](self.net(batch[0]), batch[1])  # type: ignore[no-any-return]


HOLDER = types.SimpleNamespace(module=None)


class ModuleInAGlobal(Case):
    """The current module is found by a global."""

    def build(self) -> None:
        HOLDER.module = self

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return HOLDER.module.loss(batch)

    refused = "names HOLDER.module past it"


class _Stepper:
    one: ClassVar[Any] = None

    @classmethod
    def get(cls) -> Any:
        if cls.one is None:
            cls.one = cls()
            cls.one.steps = 0
        return cls.one


class SingletonThatCounts(Case):
    """Counted by one way and read by the other."""

    crosses = True

    @classmethod
    def forget(cls) -> None:
        _Stepper.one = None

    def build(self) -> None:
        self.stepper = _Stepper.get()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.stepper.steps += 1
        return self.loss(batch) / _Stepper.get().steps


class _Borg:
    _all: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self._all


class Borg(Case):
    crosses = True

    @classmethod
    def forget(cls) -> None:
        _Borg._all.clear()

    def build(self) -> None:
        self.borg: Any = _Borg()
        self.borg.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.borg.steps += 1
        return self.loss(batch) / _Borg().steps  # type: ignore[attr-defined]


_STEP: contextvars.ContextVar[int] = contextvars.ContextVar("step", default=0)


class ContextVariable(Case):
    """Set and put back within a step."""

    def build(self) -> None:
        self.step_variable = _STEP

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        token = self.step_variable.set(batch_idx)
        loss = self.loss(batch) / (1 + _STEP.get())
        self.step_variable.reset(token)
        return loss


# ---- functions and objects --------------------------------------------------------------------------------


class PartialOfMethod(Case):
    def build(self) -> None:
        self.weight = 0.7
        self.criterion = functools.partial(self._weighted, power=2)

    def _weighted(self, scores: Tensor, labels: Tensor, power: int) -> Tensor:
        self.weight *= 0.9
        return nn.functional.cross_entropy(scores, labels) * self.weight**power

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1])


class NonlocalCounter(Case):
    def build(self) -> None:
        count = 0

        def warm() -> float:
            nonlocal count
            count += 1
            return min(1.0, count / 4)

        self.warm = warm

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.warm()


class RunningGenerator(Case):
    refused = "scales.*__next__"

    def build(self) -> None:
        self.scales = (1 / n for n in itertools.count(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * next(self.scales)


class CachedProperty(Case):
    @functools.cached_property
    def weights(self) -> Tensor:
        return torch.arange(1.0, 4.0)

    def build(self) -> None:
        self.net[0].weight.data *= float(self.weights.mean())

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=self.weights)


class PropertyWithSetter(Case):
    _rate = 1.0

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, value: float) -> None:
        self._rate = value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rate = self.rate * 0.8
        return self.rate * self.loss(batch)


class CachedMethod(Case):
    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def scale_of(self, step: int) -> float:
        return 1 / (1 + step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.scale_of(batch_idx)


@functools.singledispatch
def scaled(value: Any) -> Any:
    return value * 0.5


@scaled.register
def _(value: int) -> float:
    return value * 0.25


class SingleDispatch(Case):
    def build(self) -> None:
        self.scaled = scaled

    def training_step(self, batch: Any, batch_idx: int) -> Any:
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

    def __post_init__(self, make: int) -> None:
        self.total = float(make)


class Dataclasses(Case):
    def build(self) -> None:
        self.running = _Running(_Settings())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.running.losses.append(1.0)
        return self.loss(batch) * self.running.settings.scale / len(self.running.losses)


class _Slotted:
    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


class SlotsAndWeak(Case):
    def build(self) -> None:
        self.counter = _Slotted()
        self.weakly = weakref.proxy(self.counter)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.weakly.count += 1
        return self.loss(batch) / self.counter.count


class _OwnState:
    """Leaves out what it makes anew."""

    def __init__(self) -> None:
        self.scale, self.lock = 0.5, threading.Condition()

    def __getstate__(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.scale, self.lock = state["scale"], threading.Condition()


class OwnState(Case):
    def build(self) -> None:
        self.helper = _OwnState()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.helper.lock:
            self.helper.scale *= 0.9
        return self.helper.scale * self.loss(batch)


class Threads(Case):
    """What synchronises, and a queue."""

    def build(self) -> None:
        self.lock, self.event, self.waiting = threading.RLock(), threading.Event(), queue.Queue()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.lock:
            self.event.set()
            self.waiting.put(batch_idx)
        return self.loss(batch) / (1 + self.waiting.qsize())

    refused = "event|waiting"


class Logs(Case):
    def build(self) -> None:
        self.text = logging.getLogger(__name__)
        self.adapter = logging.LoggerAdapter(self.text, {"run": 1})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.adapter.debug("step %d", batch_idx)
        return self.loss(batch)


class LongChain(Case):
    """A linked list that is deeper than Python recurses."""

    refused = "maximum recursion depth"

    def build(self) -> None:
        self.chain: Any = None
        for n in range(3000):
            self.chain = (n, self.chain)


class OwnContainers(Case):
    def build(self) -> None:
        self.counts: Any = collections.Counter()
        self.order: Any = collections.OrderedDict(a=1)
        self.order.note = "kept"
        self.chained = collections.ChainMap({"a": 0.5}, {"b": 0.25})
        self.getter = operator.itemgetter("a")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts.update(batch[1].tolist())
        self.order["b"] = self.order.pop("b", 0) + 1
        assert self.order.note == "kept"
        return self.loss(batch) * self.getter(self.chained) * self.order["b"] / self.counts.total()


class _Strategy(abc.ABC):
    @abc.abstractmethod
    def __call__(self, step: int) -> float: ...


class _Decay(_Strategy):
    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self, step: int) -> float:
        self.value *= 0.8
        return self.value


class StrategyObject(Case):
    def build(self) -> None:
        self.strategies = nn.ModuleDict(), [_Decay()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.strategies[1][0](batch_idx)


class _Counts(nn.Module):
    """Says itself how it is copied: what it holds beside tensors is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.notes = nn.Parameter(torch.ones(3)), [1]

    def __deepcopy__(self, memo: Any) -> Any:
        made = type(self)()
        memo[id(self)] = made
        made.load_state_dict(self.state_dict())
        made.notes = self.notes
        return made


class ModuleThatCopiesItself(Case):
    def build(self) -> None:
        self.scales = _Counts()

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs) * self.scales.scale


class Hyperparameters(Case):
    """Saved with an object, and changed while it trains."""

    def build(self) -> None:
        self.save_hyperparameters({"scale": 1.0, "settings": _Settings()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hparams["scale"] *= 0.9
        return self.loss(batch) * self.hparams["scale"] * self.hparams.settings.scale  # type: ignore[attr-defined]


# ---- hooks ------------------------------------------------------------------------------------------------


class Activations(Case):
    """Forward hooks over `self` fill a dictionary, with handles in a list."""

    def build(self) -> None:
        self.seen: dict[str, Tensor] = {}
        self.handles = [
            layer.register_forward_hook(functools.partial(self._keep, name))
            for name, layer in self.net.named_children()
        ]

    def _keep(self, name: str, module: nn.Module, args: Any, out: Tensor) -> None:
        self.seen[name] = out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.1 * self.seen["1"].square().mean()


class HookOnce(Case):
    """A hook that removes itself after the first call."""

    def build(self) -> None:
        def first(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            self.handle.remove()
            return out * 2

        self.handle = self.net.register_forward_hook(first)


class StepInBackward(Case):
    """Optimisers that step while gradients are accumulated."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.inner = {p: torch.optim.SGD([p], lr=0.1) for p in self.net.parameters()}
        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(self._step)

    def _step(self, p: Tensor) -> None:
        self.inner[p].step()  # type: ignore[index]
        self.inner[p].zero_grad()  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class _Reverse(torch.autograd.Function):
    scale: ClassVar[float] = 0.5

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -_Reverse.scale * grad


class OwnAutograd(Case):
    def forward(self, inputs: Tensor) -> Any:
        hidden = self.net[:2](inputs)
        return self.net[2](hidden) + 0.1 * self.net[2](_Reverse.apply(hidden))  # type: ignore[no-untyped-call]


class Checkpointed(Case):
    def forward(self, inputs: Tensor) -> Any:
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

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class WrappedOptimizer(Case):
    def configure_optimizers(self) -> Any:
        return _Outer(torch.optim.Adam(self.parameters(), lr=0.05))


class OptimizerHooks(Case):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.calls = 0

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.calls += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / self.calls

        optimizer.register_step_pre_hook(before)
        return optimizer


class ScheduleByMethod(Case):
    """A schedule of the module's own method, stepped by hand."""

    def build(self) -> None:
        self.factor = 1.0

    def rate(self, step: int) -> float:
        return self.factor / (1 + step)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedule = lr_scheduler.LambdaLR(optimizer, self.rate)
        return optimizer

    def on_train_batch_end(self, *args: Any) -> None:
        self.factor *= 0.95
        self.schedule.step()


class Sequential(Case):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        parts: list[Any] = [
            lr_scheduler.LinearLR(optimizer, 0.3, total_iters=2),
            lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
        ]
        schedule = lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TwoByToggle(Case):
    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        self.toggle_optimizer(one)
        one.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(one, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        one.step()
        self.untoggle_optimizer(one)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


# ---- metrics ----------------------------------------------------------------------------------------------


class MetricSteers(Case):
    """A metric in a plain list whose value weighs the loss."""

    def build(self) -> None:
        self.seen = [torchmetrics.MeanMetric()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen[0].update(float(batch_idx + 1))
        return self.loss(batch) / self.seen[0].compute()


# ---- callbacks --------------------------------------------------------------------------------------------


class _EmaOfAll(pl.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.shadow = copy.deepcopy(pl_module.net).requires_grad_(False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for slow, fast in zip(self.shadow.parameters(), pl_module.net.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.5)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.load_state_dict(self.shadow.state_dict())


class EmaCallback(Case):
    """Ends every epoch with the average."""

    def callbacks(self) -> list[pl.Callback]:
        return [_EmaOfAll()]


class _Attaches(pl.Callback):
    """Attaches a hook in `setup`, and looks for another callback."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.scale = 1.0
        pl_module.net.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> Any:
        return out * self.scale if module.training else None

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        assert any(c is self for c in trainer.callbacks)
        self.scale *= 0.9


class CallbackWithHook(Case):
    def callbacks(self) -> list[pl.Callback]:
        return [_Attaches()]


class Accumulation(Case):
    def callbacks(self) -> list[pl.Callback]:
        return [pl.callbacks.GradientAccumulationScheduler({0: 2})]


# ---- data -------------------------------------------------------------------------------------------------


class _Caches(Dataset[Any]):
    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels, self.cache, self.reads = inputs, labels, dict[int, Any](), 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if index not in self.cache:
            self.cache[index] = self.inputs[index] * 2, self.labels[index]
        return self.cache[index]


class CachingData(Case):
    class data(Data):
        def train_set(self) -> Any:
            return _Caches(self.inputs, self.labels)


class _Lazily(Dataset[Any]):
    """Opens what it reads when it is first asked, as for HDF5."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.rows, self.opened = list(zip(inputs, labels, strict=True)), None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.opened is None:
            self.opened = iter, self.rows  # type: ignore[assignment]
        return self.rows[index]


class LazyData(Case):
    class data(Data):
        def train_set(self) -> Any:
            rows = _Lazily(self.inputs, self.labels)
            return ConcatDataset([Subset(rows, range(12)), Subset(rows, range(12, SIZE))])


class _Sorted(TensorDataset):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[n] for n in indices]


class ManyAtOnce(Case):
    class data(Data):
        def train_set(self) -> Any:
            return _Sorted(self.inputs, self.labels)


class OwnBatches(Case):
    """A class of batches that says how it moves."""

    class data(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set(), batch_size=BATCH, collate_fn=_Rows)

        def transfer_batch_to_device(self, batch: Any, device: Any, index: int) -> Any:
            return (
                batch if isinstance(batch, _Rows) else super().transfer_batch_to_device(batch, device, index)
            )

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch.inputs, batch.labels) if isinstance(batch, _Rows) else batch)


class _Rows:
    def __init__(self, rows: Any) -> None:
        self.inputs, self.labels = torch.utils.data.default_collate(rows)

    def __len__(self) -> int:
        return len(self.labels)


class SetUpData(Case):
    """Transforms of a data module that `setup` makes, which the module asks for by the Trainer."""

    class data(Data):
        def setup(self, stage: str) -> None:
            self.mean, self.steps = self.inputs.mean(0), 0

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.steps += 1
            return [batch[0] - self.mean, batch[1]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) / (1 + self.trainer.datamodule.mean.abs().sum())  # type: ignore[attr-defined]


class Augmented(Case):
    """Augmentation without draws, in the module, as kornia's."""

    def build(self) -> None:
        self.augment = nn.Sequential(_Turns())

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [self.augment(batch[0]), batch[1]] if self.trainer.training else batch


class _Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.turn += 1
        return inputs.roll(self.turn, 1)


# ---- precision, layers ------------------------------------------------------------------------------------


class Bfloat(Case):
    flags: ClassVar[dict[str, Any]] = {"precision": "bf16-mixed"}


class Lstm(Case):
    def build(self) -> None:
        self.cells, self.head = nn.LSTM(2, 4, batch_first=True, num_layers=2), nn.Linear(4, 3)
        del self.net
        self.hidden: Any = None

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.cells(inputs.view(-1, 3, 2))[0][:, -1])


class BatchNormOfNone(Case):
    def build(self) -> None:
        self.net.insert(1, nn.BatchNorm1d(5, momentum=0.5))


class Gates(Case):
    """Parameters in containers, a complex one, and one that gets no gradient."""

    def build(self) -> None:
        self.gates = nn.ParameterDict({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.zeros(3))})
        self.more = nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs) * self.gates["a"] + self.gates["b"]


class ReplacedLayer(Case):
    """A head that a hook of the start replaces."""

    def on_fit_start(self) -> None:
        torch.manual_seed(5)
        self.net[2] = nn.Linear(5, 3)
        self.trainer.strategy.setup_optimizers(self.trainer)


class StateDictHooks(Case):
    def build(self) -> None:
        self._register_state_dict_hook(_renamed)
        self.register_load_state_dict_pre_hook(_named_back)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["version"] = 2


def _renamed(module: Any, state: dict[str, Any], prefix: str, local: Any) -> None:
    for name in [name for name in state if name.startswith(prefix + "net.")]:
        state["renamed." + name] = state.pop(name)


def _named_back(module: Any, state: dict[str, Any], *args: Any) -> None:
    for name in [name for name in state if name.startswith("renamed.")]:
        state[name.removeprefix("renamed.")] = state.pop(name)
