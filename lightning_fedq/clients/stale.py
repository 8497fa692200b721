"""Hooks that use what training leaves beside the model, of which the user's own objects never hear.

A callback that averages weights by batch, and puts the average in when the training ends, does the first in
the clients' copies and the second in the user's fit, where its average is still of the first weights. So
hooks of a validation, of a checkpoint and of the end must do the same to the model of a client that has
trained, and to that model with all else as it was before.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.forks import run_in_fork
from lightning_fedq.clients.hooks import knows_clients, looks_at_batches, overrides
from lightning_fedq.data.generator_turns import seed_for_transforms
from lightning_fedq.data.sampling import in_short

_HOOKS = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
)
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}
_CHANGES |= {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "socket.connect", "shutil.rmtree"}


def stale_hooks(trained: Client, before: Client) -> tuple[str, list[str]]:
    """Which hook would use what the user's own objects never get ("" if none does), and which raise there.

    Only in a fork: hooks are called in forks of it in which nothing can be written.

    Args:
        before: One that has not. It is given the other's parameters and buffers.
    """
    if not _called(_callbacks(trained), trained.module):
        return "", []
    with torch.no_grad():
        theirs = dict(_tensors(trained.module))
        for name, tensor in _tensors(before.module):
            if name in theirs and tensor.shape == theirs[name].shape:
                tensor.data.copy_(theirs[name])
    (one, raised), (other, _) = (
        run_in_fork(lambda: _after_hooks(trained)),
        run_in_fork(lambda: _after_hooks(before)),
    )
    return next((hook for hook in one if one[hook] != other[hook]), ""), raised


def untried(trainer: Any, why: str, raised: Sequence[str]) -> str:
    """Sentence of a run and its page about hooks that are not tried. "" where there are none.

    Args:
        why: Why none is. "" if they were.
        raised: Those that raised where they were tried, and what.
    """
    module = trainer.lightning_module
    names = _called([one for one in trainer.callbacks if is_user_s(one)], module) if why else list(raised)
    if not names:
        return ""
    return (
        f"{in_short(names, 3)} were not tried ({why or 'they raised there'}): weights that such "
        "hooks put in, from what hooks of batches keep beside the model, an average say, are the first ones; "
        "EMAWeightAveraging averages the global model."
    )


def _called(callbacks: list[Any], module: Any) -> list[str]:
    """Hooks of a validation, a checkpoint or the end that somebody overrides, with whose they are."""
    hooks = ("on_save_checkpoint", *_HOOKS)
    found = [f"{type(one).__name__}.{hook}" for one in callbacks for hook in hooks if overrides(one, hook)]
    own = [hook for hook in hooks if is_overridden(hook, module, pl.LightningModule)]
    return found + [f"{type(module).__name__}.{hook}" for hook in own]


def _no_changes(event: str, args: Any) -> None:
    """Let Python change no file and reach nobody, as an audit hook of a fork."""
    if event == "open" and not isinstance(args[0], int):
        writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR) or any(sign in (args[1] or "") for sign in "wax+")
    else:
        writes = event in _CHANGES
    if writes:
        raise PermissionError("nothing can be written where hooks are tried")


def _after_hooks(client: Client) -> tuple[dict[str, Digests], list[str]]:
    """The model as checkpoints would hold it, and after each hook, and which hooks raise."""
    sys.addaudithook(_no_changes)
    seed_for_transforms(0)
    module, trainer, called = client.module, client.trainer, _callbacks(client)
    saved: dict[str, Any] = {"state_dict": dict(module.state_dict())}
    raised = list[str]()

    def call(one: Any, hook: str, *more: Any) -> None:
        try:
            getattr(one, hook)(*(more if one is module else (trainer, module, *more)))
        except Exception as error:
            if (one is module and is_overridden(hook, module)) or (
                one is not module and looks_at_batches(one)
            ):
                raised.append(f"{type(one).__name__}.{hook} ({type(error).__name__}: {error})"[:200])

    for one in (*called, module):
        call(one, "on_save_checkpoint", saved)
    state = saved["state_dict"] if isinstance(saved.get("state_dict"), Mapping) else {}
    weights = {name: state[name] for name, _ in _tensors(module) if name in state}  # no other kind of state
    found = {"on_save_checkpoint": digests(weights, "")}
    for hook in _HOOKS:
        for one in (*called, module):
            call(one, hook)
        found[hook] = digests(dict(_tensors(module)), "")
    return found, raised


def _callbacks(client: Client) -> list[Any]:
    """Its copies, and the user's own of which it has none."""
    copied = [type(one) for one in client.callbacks]
    own = [*client.callbacks, *(one for one in client.trainer.home.callbacks if type(one) not in copied)]
    return [one for one in own if is_user_s(one)]


def is_user_s(one: Any) -> bool:
    """Is a callback the user's own, or one of Lightning's that works on the training?"""
    return not (isinstance(one, pl.callbacks.Checkpoint | pl.callbacks.ProgressBar) or knows_clients(one))


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


Digests = dict[str, str]


_PER_RUN = {"seconds", "id"}
"""A record's time and a ledger's name."""


def digests(value: Any, path: str, plain: bool = False) -> Digests:
    """A digest of every leaf, by its place. An object that is met again is told by its first place.

    Args:
        plain: Leave out objects, and containers in a container.

    Example:
        >>> sorted(digests({"a": [1, 2.5]}, "checkpoint"))
        ['checkpoint/a/0', 'checkpoint/a/1', 'checkpoint/a/length', 'checkpoint/keys']
        >>> digests([knot := [], knot], "twice")["twice/1"]
        'as twice/0'
    """
    found: Digests = {}
    met: dict[int, tuple[str, Any]] = {}  # with the objects, whose `id` would be another's when they are gone

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, str | bytes | int | float | bool | type(None)):
            found[path] = repr(value)[:2000]
        elif isinstance(value, Tensor):
            raw = value.detach().cpu()
            raw = raw.contiguous().view(-1) if raw.layout == torch.strided else raw.to_dense().view(-1)
            head = f"{value.dtype}{tuple(value.shape)}".encode()
            found[path] = hashlib.sha256(head + raw.view(torch.uint8).numpy().tobytes()).hexdigest()
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            head = f"{value.dtype}{value.shape}".encode()
            found[path] = hashlib.sha256(head + value.tobytes()).hexdigest()
        elif met.setdefault(id(value), (path, value))[0] != path:
            found[path] = f"as {met[id(value)][0]}"
        elif depth > (0 if plain else 20):
            return
        elif isinstance(value, Mapping):
            found[path + "/keys"] = repr(sorted(map(str, value)))
            for key, one in value.items():
                if key not in _PER_RUN:
                    walk(one, f"{path}/{key}", depth + 1)
        elif isinstance(value, list | tuple | set | frozenset):
            found[path + "/length"] = str(len(value))
            for number, one in enumerate(value):
                walk(one, f"{path}/{number}", depth + 1)
        elif plain:
            return
        elif isinstance(value, pl.Trainer) or type(value).__module__.startswith("lightning_fedq."):
            found[path] = type(value).__qualname__  # which lead from hyperparameters to everything
        elif hasattr(value, "__dict__"):
            found[path] = type(value).__qualname__
            walk(vars(value), path, depth + 1)
        else:
            found[path] = type(value).__qualname__
            with suppress(Exception):
                found[path] = hashlib.sha256(pickle.dumps(value)).hexdigest()

    walk(value, path, 0)
    return found
