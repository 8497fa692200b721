"""Objects of the training state that all clients share, because copies would be useless or impossible."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextvars
import enum
import functools
import io
import logging
import math
import sys
import threading
import types
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric

from lightning_fedq._lightning import pl
from lightning_fedq.clients.libraries import is_library_code
from lightning_fedq.data.generator_turns import GENERATORS

_OUTSIDE: tuple[type, ...] = (
    *(type, types.ModuleType, types.CodeType, property, contextvars.ContextVar, torch.fx.Graph),
    torch.jit.ScriptFunction,
    *(Dataset, DataLoader, Sampler, pl.loggers.Logger, logging.Logger, argparse.ArgumentParser),
    *(pl.Trainer, pl.strategies.Strategy, pl.accelerators.Accelerator),
    *(threading.Thread, concurrent.futures.Executor, np.memmap, enum.Enum),
)
"""Classes whose instances all clients share."""
_MACHINERY = ("jsonargparse", "torch._dynamo", "torch._inductor", "torch._functorch")
"""Packages of the command line and the compiler, whose objects all clients share."""
PLAIN = {type(None), bool, float, complex, str, bytes, frozenset}
"""Classes of immutable values, which copies and originals share without harm."""
FIXED = {*PLAIN, int, tuple, torch.dtype, torch.device, torch.Size, np.dtype}
"""Classes whose instances no training can change."""
_LARGE, _MANY = 1 << 18, 10_000
"""Tensor values and container entries above which an attribute of a data module counts as data."""


def is_shared(kind: type, value: Any) -> bool:
    """Return whether all clients share an object, by its class or its content."""
    if kind is types.FunctionType:
        return _is_stateless(value)
    if copies_itself(kind):
        return value.__deepcopy__({}) is value
    if isinstance(value, io.IOBase):  # share files that are only written to: readers would not be isolated
        return not value.closed and value.writable() and not value.readable()
    return _is_program_object(kind) or kind in GENERATORS


def is_large(value: Any) -> bool:
    """Return whether a data module's attribute is large enough to count as data, which clients share."""
    if isinstance(value, Tensor | np.ndarray):
        return math.prod(value.shape) > _LARGE
    return isinstance(value, list | tuple | dict | set) and len(value) > _MANY


@functools.cache
def copies_itself(kind: type) -> bool:
    """Return whether a class defines `__deepcopy__` in Python. False for tensors, modules and optimisers."""
    owner = next((base for base in kind.__mro__ if "__deepcopy__" in vars(base)), None)
    if owner is None or issubclass(kind, (Tensor, nn.Module, Optimizer)):
        return False
    return isinstance(vars(owner)["__deepcopy__"], types.FunctionType) and owner.__module__ != "weakref"


@functools.cache
def _is_program_object(kind: type) -> bool:
    """Return whether all clients share instances of this class, as the program's own machinery."""
    if issubclass(kind, (nn.Module, Tensor, Optimizer, pl.LightningDataModule)):
        return False
    return kind is object or issubclass(kind, _OUTSIDE) or str(kind.__module__).startswith(_MACHINERY)


def _is_stateless(function: types.FunctionType) -> bool:
    """Return whether a function has no closure, attributes or mutable defaults, or is of a library."""
    if (function.__module__ or "").startswith("jsonargparse"):
        return True
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    fixed = all(type(one) in FIXED or isinstance(one, type) or _is_module_function(one) for one in defaults)
    if function.__closure__ is None and not function.__dict__ and fixed:
        return True
    if not is_library_code(function):
        return False
    try:  # the module has it under its qualified name, as torch's wrapped `SGD.step`
        return attrgetter(function.__qualname__)(sys.modules[function.__module__]) is function
    except (KeyError, AttributeError):
        return False


def _is_module_function(value: Any) -> bool:
    """Return whether a value is a builtin function of a module, not a bound method."""
    owner = getattr(value, "__self__", None)
    return isinstance(value, types.BuiltinFunctionType) and isinstance(owner, types.ModuleType | type(None))


class FrozenObject(NamedTuple):
    """Frozen module or tensor that code names by a global, so that all clients share the original.

    Args:
        name: Global name that leads to the object.
        value: The object.
        sums: Sums of values and of their squares, per tensor, when the object was first shared.
        modes: Parts of the module, each with its training mode at that time.
    """

    name: str
    value: Any
    sums: list[str]
    modes: list[tuple[nn.Module, bool]]

    @classmethod
    def record(cls, name: str, value: Any) -> FrozenObject:
        """Record the present values and modes of an object."""
        parts = value.modules() if isinstance(value, nn.Module) else ()
        return cls(name, value, _checksums(value), [(part, part.training) for part in parts])

    def has_changed(self) -> bool:
        """Return whether a value differs from the record."""
        return _checksums(self.value) != self.sums


def is_trainable(value: Any) -> bool:
    """Return whether training may change a module or a tensor."""
    if isinstance(value, pl.LightningModule | Metric):
        return True
    return any(tensor.requires_grad for tensor in _get_tensors(value))


def _checksums(value: Any) -> list[str]:
    """Return sums of values and of their squares per tensor, to detect changes."""
    wide = [tensor.detach().double() for tensor in _get_tensors(value)]
    return [f"{float(tensor.sum())!r} {float(tensor.square().sum())!r}" for tensor in wide]


def _get_tensors(value: Any) -> list[Tensor]:
    """Return the parameters and buffers of a module, or the tensor itself."""
    return [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]
