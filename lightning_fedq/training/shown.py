"""Output of a Trainer: checkpoints and a validation. As digests by name, to compare two."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.clients.hooks import knows_clients
from lightning_fedq.data.generator_turns import seed_for_transforms

Digests = dict[str, str]

_NOT_SAVED, _NOT_VALIDATED = "not saved", "not validated"
"""Where the error stands for which a checkpoint or a validation, or a part of it, could not be looked at."""
_LARGE = 1 << 22
_PER_RUN = {"seconds", "id"}
"""A record's time and a ledger's name."""


def checkpoint_of(trainer: Any) -> Digests:
    """Of a checkpoint that is saved now.

    Where none can be, of all but the states of optimisers, which may have none before a first step, then of
    all but the callbacks, each of which then shows its own state; what is left out is told by `unseen`.
    """
    strategy, callbacks = trainer.strategy, trainer.callbacks
    optimizers, schedules = strategy.optimizers, strategy.lr_scheduler_configs
    errors: dict[str, str] = {}
    try:
        for left_out in ("", "optimizers", "callbacks"):
            if left_out == "optimizers":
                strategy.optimizers, strategy.lr_scheduler_configs = [], []
            elif left_out:
                trainer.callbacks = []
            try:
                found = digests(trainer._checkpoint_connector.dump_checkpoint(False), "checkpoint")
            except Exception as error:  # of the user's code, or of an optimiser without a state
                errors.setdefault(f"{type(error).__name__}: {error}"[:200], left_out)
                continue
            break
        else:
            found = {}
        if trainer.callbacks is not callbacks:
            for number, callback in enumerate(callbacks):
                with suppress(Exception):
                    found |= digests(callback.state_dict(), f"checkpoint/callbacks/{number}")
    finally:
        trainer.callbacks = callbacks
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers, schedules
    return found | ({_NOT_SAVED: "; ".join(errors)} if errors else {})


def shown_by(trainer: Any, most: int) -> Digests:
    """A checkpoint, a validation and a checkpoint again. Only in a fork.

    Args:
        trainer: The user's, in its fit.
        most: Most batches of a loader.
    """
    found = checkpoint_of(trainer)
    trainer.loggers = [pl.loggers.logger.DummyLogger() for _ in trainer.loggers]  # services hear nothing
    no = pl.callbacks.Checkpoint | pl.callbacks.ProgressBar
    trainer.callbacks = [c for c in trainer.callbacks if not (isinstance(c, no) or knows_clients(c))]
    if trainer.enable_validation:
        trainer.validating = True
        try:
            _validate(trainer, most)
        except Exception as error:  # of the user's code: the rounds will raise it again
            found[_NOT_VALIDATED] = f"{type(error).__name__}: {error}"[:200]
        trainer.training = True
        metrics = {**trainer.callback_metrics, **trainer.logged_metrics}
        values = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float | Tensor)}
        found |= {f"logged {k}": repr(v) for k, v in values.items()}
        after = checkpoint_of(trainer)
        found |= {f"after validation, {name}": value for name, value in after.items() if name != _NOT_SAVED}
        if _NOT_SAVED not in after:  # what lacked before is seen now
            found.pop(_NOT_SAVED, None)
    return found


def outside(state: Sequence[tuple[str, Any]]) -> Digests:
    """A digest of each value that code names past its own, and of large tensors their sum.

    Args:
        state: Ways and values.
    """
    found: Digests = {}
    for way, value in state:
        if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) > _LARGE:
            found[f"{way}, which the code names"] = repr(float(value.sum()))
        else:
            found |= digests(value, f"{way}, which the code names", 4, plain=True)
    return found


def unseen(shown: Sequence[Digests]) -> str:
    """Parts of a Trainer's output that could not be looked at, with the errors. "" if all could.

    Args:
        shown: What it showed at several times; once is enough.
    """
    kinds = {"a checkpoint": _NOT_SAVED, "a validation": _NOT_VALIDATED}
    last = shown[-1] if shown else {}
    parts = [f"{kind} ({last[key]})" for kind, key in kinds.items() if key in last]
    return " or ".join(parts)


def _validate(trainer: Any, most: int) -> None:
    loop = trainer.fit_loop.epoch_loop.val_loop
    seed_for_transforms(0)
    loop.setup_data()
    for loader in loop._combined_loader.flattened if loop._combined_loader is not None else ():
        with suppress(AttributeError):  # workers of the parent do not work for its fork
            loader._iterator, loader.num_workers, loader.timeout = None, 0, 0
    loop._max_batches = [min(most, 2) for most in loop._max_batches]
    loop.run()


def digests(value: Any, path: str, depth: int = 0, plain: bool = False) -> Digests:
    """A digest of every leaf, by its place.

    Args:
        value: What holds it.
        path: Its place.
        depth: Steps from the top.
        plain: Leave out objects, at which containers end.

    Example:
        >>> sorted(digests({"a": [1, 2.5]}, "checkpoint"))
        ['checkpoint/a/0', 'checkpoint/a/1', 'checkpoint/a/length', 'checkpoint/keys']
    """
    if isinstance(value, Tensor):
        raw = value.detach().cpu()
        raw = raw.contiguous().view(-1) if raw.layout == torch.strided else raw.to_dense().view(-1)
        head = f"{value.dtype}{tuple(value.shape)}".encode()
        return {path: hashlib.sha256(head + raw.view(torch.uint8).numpy().tobytes()).hexdigest()}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {path: hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()}
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return {path: repr(value)[:2000]}
    if depth > (4 if plain else 20):
        return {}
    found: Digests = {}
    if isinstance(value, Mapping):
        found[path + "/keys"] = repr(sorted(map(str, value)))
        for key, one in value.items():
            if key not in _PER_RUN:
                found |= digests(one, f"{path}/{key}", depth + 1, plain)
        return found
    if isinstance(value, list | tuple | set | frozenset):
        found[path + "/length"] = str(len(value))
        for number, one in enumerate(value):
            found |= digests(one, f"{path}/{number}", depth + 1, plain)
        return found
    if plain:
        return {}
    if hasattr(value, "__dict__"):
        return {path: type(value).__qualname__} | digests(dict(vars(value)), path, depth + 1)
    try:
        return {path: hashlib.sha256(pickle.dumps(value)).hexdigest()}
    except Exception:
        return {path: type(value).__qualname__}
