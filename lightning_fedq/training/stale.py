"""Hooks of a validation, of a checkpoint and of the end that use what training has left beside the model.

A callback that averages weights by batch, and puts the average in when the training ends, does the first in
the clients' copies and the second in the user's fit, where its average is still of the first weights. That
is tried before the first round: such hooks must do the same to the model of a client that has trained, and
to that model with all else as it was before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.forks import in_fork
from lightning_fedq.clients.hooks import knows_clients, looks_at_batches, overrides
from lightning_fedq.data.generator_turns import seed_for_transforms
from lightning_fedq.training.shown import Digests, digests

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
    (one, raised), (other, _) = in_fork(lambda: _after_hooks(trained)), in_fork(lambda: _after_hooks(before))
    return next((hook for hook in one if one[hook] != other[hook]), ""), raised


def untried(trainer: Any, why: str, raised: Sequence[str]) -> str:
    """Sentence of a run and its page about hooks that are not tried. "" where there are none.

    Args:
        trainer: The user's, in its fit.
        why: Why none is. "" if they were.
        raised: Those that raised where they were tried, and what.
    """
    module = trainer.lightning_module
    names = _called([one for one in trainer.callbacks if _is_user_s(one)], module) if why else list(raised)
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{', '.join(names[:3])}{more} were not tried ({why or 'they raised there'}): weights that such "
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
    return [one for one in own if _is_user_s(one)]


def _is_user_s(one: Any) -> bool:
    return not (isinstance(one, pl.callbacks.Checkpoint | pl.callbacks.ProgressBar) or knows_clients(one))


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
