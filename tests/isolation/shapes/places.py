"""Places where a training can keep a loss, one a row, and ways in which it can be shown, in turn.

A row says how a loss is kept and how it is read; what goes by a client's own objects is isolated.
"""

from __future__ import annotations

import collections
import contextvars
import csv
import ctypes
import decimal
import functools
import gc
import itertools
import queue
import random
import sys
import threading
import typing
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_fedq._lightning import pl
from tests.isolation.worlds import Shape

_FOUND = r"Data of client \d+ changed results"
_SHOWN = ("checkpoint", "validation", "callback")


class _Place(Shape):
    """Keeps losses, and shows their sum."""

    shown: ClassVar[str] = "checkpoint"
    keep: ClassVar[Callable[[Any, float], Any]]
    kept: ClassVar[Callable[[Any], Any]]
    reset: ClassVar[Callable[[], Any]]
    make: ClassVar[Callable[[Any], Any]]

    @classmethod
    def forget(cls):
        cls.reset()

    def begin(self):
        type(self).make(self)

    def scaled(self, loss):
        type(self).keep(self, loss.item())
        return loss

    def read(self):
        return float(type(self).kept(self))

    def on_save_checkpoint(self, checkpoint):
        if self.shown == "checkpoint":
            checkpoint["kept"] = self.read()

    def on_validation_epoch_end(self):
        if self.shown == "validation":
            self.log("kept", self.read())

    def callbacks(self):
        return [_Shows(self)] if self.shown == "callback" else []


class _Shows(pl.Callback):
    def __init__(self, module: _Place) -> None:
        self.module = weakref.ref(module)

    def state_dict(self):
        return {"kept": self.module().read()}


PLACES = []


def _row(name, keep, kept, reset=lambda: None, make=lambda self: None, isolated=False, shown=""):
    """One place. What is isolated is shown in a checkpoint, all others in turn."""
    way = shown or ("checkpoint" if isolated else _SHOWN[len(PLACES) % len(_SHOWN)])
    members = {"keep": keep, "kept": kept, "reset": reset, "make": make, "shown": way}
    told = "" if isolated else _FOUND
    PLACES.append(type(name, (_Place,), {**members, "refused": told, "__module__": __name__}))


# ---- of Python: classes, functions, modules ------------------------------------------------------------
TABLE = {}
COUNT = 0.0


def _add_global(loss):
    global COUNT
    COUNT += loss


def _clear_global():
    global COUNT
    COUNT = 0.0


class _Meta(type):
    total = 0.0


class _Descriptor:
    seen = 0.0

    def __get__(self, owner, kind=None):
        return type(self).seen

    def __set__(self, owner, value):
        type(self).seen = value


class _Described:
    value = _Descriptor()


class _Proxy:
    """Whatever it is asked for lies in one dictionary."""

    def __getattr__(self, name):
        return TABLE.get(name, 0.0)

    def __setattr__(self, name, value):
        TABLE[name] = value


class _Pickled:
    """Is found by its name when it is pickled."""

    def __init__(self) -> None:
        self.seen = 0.0

    def __reduce__(self):
        return _the_one, ()


_ONE = _Pickled()


def _the_one():
    return _ONE


@functools.cache
def _cell_of(name):
    return [0.0]


_LOCAL, _VARIABLE = threading.local(), contextvars.ContextVar("seen", default=0.0)
_QUEUE = queue.Queue()
_POINTER = ctypes.c_double(0.0)


def _add(holder, name, loss):
    setattr(holder, name, getattr(holder, name, 0.0) + loss)


def _of(holder, name="seen_by_places"):
    """Keep, read and reset by an attribute of some object."""
    return {
        "keep": lambda self, loss: _add(holder, name, loss),
        "kept": lambda self: getattr(holder, name, 0.0),
        "reset": lambda: setattr(holder, name, 0.0),
    }


def _running():
    """A coroutine that sums what it is sent."""
    total = 0.0
    while True:
        total += (yield total) or 0.0


_RUNNING = [_running()]


def _restart():
    _RUNNING[0] = _running()
    next(_RUNNING[0])


_row("GlobalNumber", lambda s, x: _add_global(x), lambda s: COUNT, _clear_global)
_row(
    "ModuleLevelTable",
    lambda s, x: TABLE.update(sum=TABLE.get("sum", 0) + x),
    lambda s: TABLE.get("sum", 0),
    TABLE.clear,
)
_row("OnSys", **_of(sys))
_row("OfAMetaclass", **_of(_Meta, "total"))
_row(
    "ByADescriptor",
    lambda s, x: setattr(_Described(), "value", _Descriptor.seen + x),
    lambda s: _Described().value,
    lambda: setattr(_Descriptor, "seen", 0.0),
)
_row(
    "BehindAProxy",
    lambda s, x: setattr(_Proxy(), "seen", _Proxy().seen + x),
    lambda s: _Proxy().seen,
    TABLE.clear,
)
_row(
    "PickledByAFunction",
    lambda s, x: _add(s.one, "seen", x),
    lambda s: _ONE.seen,
    lambda: setattr(_ONE, "seen", 0.0),
    lambda s: setattr(s, "one", _ONE),
)
_row("CellOfACache", lambda s, x: _cell_of("a").append(x), lambda s: sum(_cell_of("a")), _cell_of.cache_clear)
_row("ThreadLocal", **_of(_LOCAL))
_row(
    "ContextVar",
    lambda s, x: _VARIABLE.set(_VARIABLE.get() + x),
    lambda s: _VARIABLE.get(),
    lambda: _VARIABLE.set(0.0),
)
_row("InAQueue", lambda s, x: _QUEUE.put(x), lambda s: sum(_QUEUE.queue), lambda: _QUEUE.queue.clear())
_row(
    "BehindAPointer",
    lambda s, x: setattr(_POINTER, "value", _POINTER.value + x),
    lambda s: _POINTER.value,
    lambda: setattr(_POINTER, "value", 0.0),
)
_row(
    "InACoroutine",
    lambda s, x: _RUNNING[0].send(x),
    lambda s: _RUNNING[0].send(0.0),
    _restart,
    shown="checkpoint",
)
_row(
    "InAPrecision",
    lambda s, x: setattr(decimal.getcontext(), "prec", 9 + int(9 * x) % 90),
    lambda s: decimal.getcontext().prec,
    lambda: setattr(decimal.getcontext(), "prec", 28),
    shown="checkpoint",
)
_row(
    "ByTheCollector",
    lambda s, x: gc.set_threshold(700 + int(99 * x)),
    lambda s: gc.get_threshold()[0],
    lambda: gc.set_threshold(700),
    shown="checkpoint",
)
_row(
    "InAFilterOfWarnings",
    lambda s, x: warnings.filterwarnings("ignore", str(x)),
    lambda s: sum(hash(str(f)) % 97 for f in warnings.filters),
    lambda: None,
    shown="validation",
)
_row("OfATyping", **_of(typing))
_row(
    "InAFieldSizeLimit",
    lambda s, x: csv.field_size_limit(1000 + int(99 * x)),
    lambda s: csv.field_size_limit(),
    lambda: csv.field_size_limit(131072),
)

# ---- of torch ------------------------------------------------------------
_HANDLES = []
_SEEN_BY_HOOKS = []


def _all_hooks(module):
    _HANDLES.append(nn.modules.module.register_module_forward_hook(_note_output))


def _note_output(module, inputs, output):
    if isinstance(module, nn.Linear) and module.training:
        _SEEN_BY_HOOKS.append(float(output.sum()))


def _unhook():
    _SEEN_BY_HOOKS.clear()
    while _HANDLES:
        _HANDLES.pop().remove()


class _Square(torch.autograd.Function):
    seen: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * 1.0

    @staticmethod
    def backward(ctx, gradient):
        _Square.seen.append(float(ctx.saved_tensors[0].sum()))
        return gradient


class _Scaled(nn.Module):
    seen: ClassVar[list[float]] = []

    def forward(self, weight):
        if self.training:
            self.seen.append(float(weight.detach().sum()))
        return weight


_METRIC, _GENERATOR = torchmetrics.MeanMetric(), torch.Generator()
_row("HookOfAllModules", lambda s, x: None, lambda s: sum(_SEEN_BY_HOOKS), _unhook, _all_hooks)
_row(
    "OfAnAutogradFunction",
    lambda s, x: _Square.apply(torch.tensor([x], requires_grad=True)).sum().backward(),
    lambda s: sum(_Square.seen),
    _Square.seen.clear,
)
_row(
    "OfAParametrization",
    lambda s, x: None,
    lambda s: sum(_Scaled.seen[-3:]) + len(_Scaled.seen),
    _Scaled.seen.clear,
    lambda s: parametrize.register_parametrization(s.net, "weight", _Scaled()),
)
_row("InAGlobalMetric", lambda s, x: _METRIC.update(x), lambda s: _METRIC.mean_value, _METRIC.reset)
_row(
    "SeedOfAGenerator",
    lambda s, x: _GENERATOR.manual_seed(int(1000 * x)),
    lambda s: _GENERATOR.initial_seed(),
    lambda: _GENERATOR.manual_seed(0),
    shown="checkpoint",
)
_row("OnTheTensorClass", **_of(Tensor))
_row("OnTheTrainersClass", **_of(pl.Trainer))
_row(
    "OnTheModulesClass",
    lambda s, x: _add(type(s), "total", x),
    lambda s: getattr(type(s), "total", 0.0),
    lambda: setattr(PLACES[-1], "total", 0.0),
)


# ---- what is a client's own: isolated ---------------------------------------------------------------------
class _Itself:
    """Keeps a list in a slot."""

    __slots__ = ("__weakref__", "inner")

    def __init__(self) -> None:
        self.inner = [0.0]


def _own(name, make, keep, kept):
    def begin(self):
        self.own = make(self)

    _row(name, lambda s, x: keep(s.own, x), lambda s: kept(s.own), make=begin, isolated=True)


_own("OwnSlots", lambda s: _Itself(), lambda o, x: o.inner.append(x), lambda o: sum(o.inner))
_own(
    "OwnCycle",
    lambda s: itertools.cycle(range(101)),
    lambda o, x: [next(o) for _ in range(int(999 * x) % 97)],
    next,
)
_own("OwnCounter", lambda s: itertools.count(), lambda o, x: [next(o) for _ in range(int(9 * x) % 7)], next)
_own("OwnChainMap", lambda s: collections.ChainMap({}, {}), lambda o, x: o.update({x: x}), lambda o: sum(o))
_own("OwnMemory", lambda s: bytearray(8), lambda o, x: o.extend(str(x).encode()), lambda o: sum(o))
_own(
    "OwnMetric",
    lambda s: torchmetrics.MeanMetric(),
    lambda o, x: o.update(x),
    lambda o: float(o.mean_value) if o.mean_value.numel() else 0.0,
)
_own(
    "OwnTracker",
    lambda s: torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=True),
    lambda o, x: (o.increment(), o.update(x)),
    lambda o: sum(float(one.mean_value) for one in o),
)
_own(
    "OwnPythonRandom",
    lambda s: random.Random(0),
    lambda o, x: [o.random() for _ in range(int(9 * x) % 7)],
    lambda o: o.random(),
)
_own(
    "OwnGenerator",
    lambda s: np.random.default_rng(0),
    lambda o, x: o.random(int(9 * x) % 7),
    lambda o: o.random(),
)
_own(
    "OwnClosure", lambda s: functools.partial(list.append, [0.0]), lambda o, x: o(x), lambda o: sum(o.args[0])
)
_own(
    "OwnWeakSet",
    lambda s: (weakref.WeakSet([s.net]), [0.0]),
    lambda o, x: o[1].append(x * len(o[0])),
    lambda o: sum(o[1]),
)


class HyperparametersWritten(Shape):
    """Which checkpoints hold."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"largest": 0.0})

    def scaled(self, loss):
        self.hparams.largest = max(self.hparams.largest, loss.item())
        return loss


class RateByALambda(Shape):
    """A schedule whose function hears of losses."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        self.losses = [1.0]
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, seen=self.losses: 1 / sum(seen))
        return [optimizer], [{"scheduler": rate, "interval": "step"}]

    def scaled(self, loss):
        self.losses.append(loss.item())
        return loss


class WrittenIntoGroups(Shape):
    """Of the optimiser, and its defaults."""

    def scaled(self, loss):
        optimizer = self.optimizers().optimizer
        optimizer.defaults["seen"] = optimizer.defaults.get("seen", 0.0) + loss.item()
        optimizer.param_groups[0]["seen"] = optimizer.defaults["seen"]
        return loss


class IntoLoggedMetrics(Shape):
    def scaled(self, loss):
        for metrics in (self.trainer.logged_metrics, self.trainer.callback_metrics):
            metrics["seen"] = metrics.get("seen", torch.zeros(())) + loss.detach()
        return loss


class _Keeps(pl.Callback):
    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.seen.append(float(outputs["loss"]))

    def state_dict(self):
        return {"seen": list(self.seen)}

    def on_train_end(self, trainer, pl_module):
        trainer.logger.log_metrics({"seen": float(sum(self.seen))})


class StateOfACallbacksOwn(Shape):
    def callbacks(self):
        return [_Keeps()]
