"""Every tensor that can be reached from some objects and files, and where two runs differ in them."""

import functools
import re
import types
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import pl
from lightning_fedq.data.loader import ClientLoader

LISTED = {
    "callback_metrics": "metrics of clients that the module logs",
    "logged_metrics": "the same",
    "_progress_bar_metrics": "the same",
    "_callback_metrics": "the same",
    "_logged_metrics": "the same",
    "_results": "the same",
    "_exact": "the exact mean, which only a simulation knows",
    "_arrived": "sums of exact means, which only a simulation knows",
    "committed": "what clients keep to themselves, in the simulation's memory",
    "pending": "the same, of an open round",
    "_reached": "what the program's own globals hold (on a device of `tests.elsewhere`, all of its tensors)",
    "client_evaluations": "what models score on clients' held-out samples, in the simulation's memory",
}
"""Attributes that the privacy page lists: what leaves without noise, or never leaves."""
_WITH_A_SEED = {"own": "what clients keep, in checkpoints of runs with a seed, where nothing is private"}
"""Keys of checkpoints; that those without a seed lack them: `training/test_personalisation.py`."""

_DATA = (Dataset, DataLoader, ClientLoader, pl.LightningDataModule)
_NO_DATA = {"_data_fetcher", "_combined_loader", "_data_source", "_batch", "_user_loader"}
"""Where Lightning keeps batches: the data themselves, of which nobody claims that they can't be seen."""


_LEDGER = re.compile("[0-9a-f]{16}")
"""Random name of a ledger."""


def _inside(value):
    if isinstance(value, Mapping):  # other keys than names differ from run to run, as names of ledgers do
        named = enumerate(value.items())
        return [
            (repr(key) if isinstance(key, str) and not _LEDGER.fullmatch(key) else str(number), part)
            for number, (key, part) in named
            if key not in _WITH_A_SEED
        ]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [(str(number), part) for number, part in enumerate(value)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, functools.partial):
        return [("args", value.args), ("keywords", value.keywords), ("function", value.func)]
    if isinstance(value, types.FunctionType):
        cells = [(str(n), _content(cell)) for n, cell in enumerate(value.__closure__ or ())]
        return [*cells, ("defaults", value.__defaults__)]
    if isinstance(value, type | types.ModuleType):
        return []
    kinds = type(value).__mro__
    slots = [name for kind in kinds for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    named = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
    return [(name, part) for name, part in named.items() if name not in LISTED and name not in _NO_DATA]


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def tensors(**roots):
    """All tensors that can be reached, gradients included, by the first way that leads to them."""
    found = {}
    seen = set()
    keep, todo = [], deque(roots.items())
    while todo:
        path, value = todo.popleft()
        if id(value) in seen or isinstance(value, (*_DATA, str, bytes, int, float, type(None))):
            continue
        seen.add(id(value))
        keep.append(value)  # so that no two objects share an id
        if isinstance(value, Tensor):
            found[path] = value.detach().clone()
            todo.append((f"{path}.grad", value.grad if value.is_leaf else None))
            continue
        todo.extend((f"{path}.{name}", part) for name, part in _inside(value))
    return found


def files(folder):
    """All tensors of all checkpoints in a folder."""
    found = {}
    for path in sorted(folder.rglob("*.ckpt")):
        state = torch.load(path, map_location="cpu", weights_only=True)
        found.update({f"{path.relative_to(folder)}: {name}": t for name, t in tensors(file=state).items()})
    return found


def differences(one, other):
    """Where two runs differ: other tensors, or other values."""
    return sorted(
        path
        for path in one.keys() | other.keys()
        if path not in one or path not in other or not _equal(one[path], other[path])
    )


def _equal(one, other):
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (
        torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
        if one.is_floating_point()
        else torch.equal(one, other)
    )
