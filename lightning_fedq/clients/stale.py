"""Detection of hooks that use stale state: state that training changes only in the clients' copies.

Example: a callback averages weights after each batch, and writes the average into the model when training
ends. The batch hook runs in the clients' copies, and the end hook in the user's fit, where the average is
still the initial one.

The test compares two copies: a client that has trained, and a fresh copy with the same weights. Hooks for
validation, checkpoints and the end of training must have the same effect on both models.
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
    """Find a hook that uses state of a client's training, and the hooks that raise.

    Call this in a fork only. The hooks run in further forks, in which files can't be written.

    Args:
        trained: Client that has trained.
        before: Client that has not trained. It receives the parameters and buffers of `trained`.

    Returns:
        Name of the first hook with a different effect on the two clients ("" if there is none), and the hooks
        that raised, with their errors.
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
    """Return a sentence for the report about hooks that were not tried. "" if there are none.

    Args:
        trainer: User's Trainer.
        why: Reason why no hook was tried. "" if they were tried.
        raised: Hooks that raised in the trial, with their errors.
    """
    module = trainer.lightning_module
    names = _called([one for one in trainer.callbacks if is_user_s(one)], module) if why else list(raised)
    if not names:
        return ""
    return (
        f"{in_short(names, 3)} were not tried ({why or 'they raised'}), so weights that they set "
        "from batch hooks, such as averages, may be initial ones. "
        "Use EMAWeightAveraging to average the global model."
    )


def _called(callbacks: list[Any], module: Any) -> list[str]:
    """Return the overridden hooks for validation, checkpoints and the end, as "Class.hook"."""
    hooks = ("on_save_checkpoint", *_HOOKS)
    found = [f"{type(one).__name__}.{hook}" for one in callbacks for hook in hooks if overrides(one, hook)]
    own = [hook for hook in hooks if is_overridden(hook, module, pl.LightningModule)]
    return found + [f"{type(module).__name__}.{hook}" for hook in own]


def _no_changes(event: str, args: Any) -> None:
    """Block file changes, subprocesses and network connections, as an audit hook of a fork."""
    if event == "open" and not isinstance(args[0], int):
        writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR) or any(sign in (args[1] or "") for sign in "wax+")
    else:
        writes = event in _CHANGES
    if writes:
        raise PermissionError("Hooks can't write files or open connections in the trial")


def _after_hooks(client: Client) -> tuple[dict[str, Digests], list[str]]:
    """Return digests of the model in a checkpoint and after each hook, and the hooks that raised."""
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
    weights = {name: state[name] for name, _ in _tensors(module) if name in state}  # parameters and buffers
    found = {"on_save_checkpoint": digests(weights, "")}
    for hook in _HOOKS:
        for one in (*called, module):
            call(one, hook)
        found[hook] = digests(dict(_tensors(module)), "")
    return found, raised


def _callbacks(client: Client) -> list[Any]:
    """Return the user callbacks of a client: its copies, and originals of which it has no copy."""
    copied = [type(one) for one in client.callbacks]
    callbacks = [*client.callbacks, *(c for c in client.trainer.home.callbacks if type(c) not in copied)]
    return [callback for callback in callbacks if is_user_s(callback)]


def is_user_s(one: Any) -> bool:
    """Return whether a callback may change the model: no checkpoint, progress bar or callback of rounds."""
    return not (isinstance(one, pl.callbacks.Checkpoint | pl.callbacks.ProgressBar) or knows_clients(one))


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


Digests = dict[str, str]


_PER_RUN = {"seconds", "id"}
"""Keys whose values differ between equal runs: the time in a record, and the name of a ledger."""


def digests(value: Any, path: str, plain: bool = False) -> Digests:
    """Return a digest of every leaf of a nested value, by its path.

    An object that occurs again is represented by the path of its first occurrence.

    Args:
        value: Nested value.
        path: Path of the value, a prefix of all paths.
        plain: Whether to leave out objects, and containers in containers.

    Examples:
        >>> sorted(digests({"a": [1, 2.5]}, "checkpoint"))
        ['checkpoint/a/0', 'checkpoint/a/1', 'checkpoint/a/length', 'checkpoint/keys']
        >>> digests([knot := [], knot], "twice")["twice/1"]
        'as twice/0'
    """
    found: Digests = {}
    met: dict[int, tuple[str, Any]] = {}  # keeps the objects alive, so that each `id` stays unique

    def walk(value: Any, path: str, depth: int) -> None:
        """Add the digests of a value at `depth` levels below the first one."""
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
            found[path] = type(value).__qualname__  # not followed, because these refer to the whole program
        elif hasattr(value, "__dict__"):
            found[path] = type(value).__qualname__
            walk(vars(value), path, depth + 1)
        else:
            found[path] = type(value).__qualname__
            with suppress(Exception):
                found[path] = hashlib.sha256(pickle.dumps(value)).hexdigest()

    walk(value, path, 0)
    return found
