"""Places where a training can keep a loss, one a row, and ways in which it can be shown, in turn.

A row says how a loss is kept and how it is read. The first rows are refused, the last ones isolated.
"""

from __future__ import annotations

import csv
import threading
import typing
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

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


def _row(name, keep, kept, reset, make=lambda self: None):
    """One place, shown in one of three ways, in turn."""
    way = _SHOWN[len(PLACES) % len(_SHOWN)]
    members = {"keep": keep, "kept": kept, "reset": reset, "make": make, "shown": way}
    PLACES.append(type(name, (_Place,), {**members, "refused": _FOUND, "__module__": __name__}))


# ---- of Python -----------------------------------------------------------------------------------------
COUNT = 0.0


def _add_global(loss):
    global COUNT
    COUNT += loss


def _clear_global():
    global COUNT
    COUNT = 0.0


_LOCAL = threading.local()


def _add(holder, name, loss):
    setattr(holder, name, getattr(holder, name, 0.0) + loss)


def _of(holder, name="seen_by_places"):
    """Keep, read and reset by an attribute of some object."""
    return {
        "keep": lambda self, loss: _add(holder, name, loss),
        "kept": lambda self: getattr(holder, name, 0.0),
        "reset": lambda: setattr(holder, name, 0.0),
    }


_row("GlobalNumber", lambda s, x: _add_global(x), lambda s: COUNT, _clear_global)
_row("ThreadLocal", **_of(_LOCAL))
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


_row("HookOfAllModules", lambda s, x: None, lambda s: sum(_SEEN_BY_HOOKS), _unhook, _all_hooks)
_row(
    "OfAnAutogradFunction",
    lambda s, x: _Square.apply(torch.tensor([x], requires_grad=True)).sum().backward(),
    lambda s: sum(_Square.seen),
    _Square.seen.clear,
)
_row("OnTheTrainersClass", **_of(pl.Trainer))


# ---- what is a client's own: isolated ---------------------------------------------------------------------
class HyperparametersWritten(Shape):
    """Which checkpoints hold."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"largest": 0.0})

    def scaled(self, loss):
        self.hparams.largest = max(self.hparams.largest, loss.item())
        return loss


class WrittenIntoGroups(Shape):
    """Of the optimiser, and its defaults."""

    def scaled(self, loss):
        optimizer = self.optimizers().optimizer
        optimizer.defaults["seen"] = optimizer.defaults.get("seen", 0.0) + loss.item()
        optimizer.param_groups[0]["seen"] = optimizer.defaults["seen"]
        return loss
