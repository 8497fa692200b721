"""Training of one client, or of a stack: a fit on a copy of the user's training state.

The user's Trainer, module, optimisers, schedules, loss scale, data module and callbacks are never changed.
Every client starts with a copy of them from the start of the round. The copy is dropped after the client has
trained, with everything that training stored in objects, containers, closures, hooks or optimisers.

Globals, class attributes, objects that code names by them, and data sets are shared by all clients.
`training.isolation` tests whether they carry information from one client to another.

This module depends on no mechanism, round, server or other client.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchmetrics import Metric

from lightning_fedq._lightning import pl
from lightning_fedq.clients.client_trainer import make_twins, resume_counters, user_attributes
from lightning_fedq.clients.hooks import call_hooks, is_shared_by_clients, knows_clients, trains_with_clients
from lightning_fedq.clients.reachability import find_named_state
from lightning_fedq.clients.snapshot import Snapshot

_NOWHERE = pl.loggers.logger.DummyLogger()
_COMBINED = vars(pl.utilities.CombinedLoader(None, "max_size_cycle"))
"""Attributes of Lightning's loader of one iterable, whose constructor is slow."""
_KEPT_BYTES = (32 << 20) - (1 << 16)
"""Largest block that glibc does not always map separately. The limit is 32 MiB."""


@dataclass(frozen=True)
class Client:
    """Client's copy of the user's fit: Trainer, module and callbacks."""

    trainer: Any
    module: pl.LightningModule
    callbacks: list[Any]


class Batches:
    """Training loader of one client or stack in one round.

    Args:
        batches: Iterator over the batches, which is used once.
        length: Number of batches.
        loader: Loader of all clients, which provides all other attributes, such as the data set.
    """

    def __init__(self, batches: Iterator[Any], length: int, loader: Any) -> None:
        self._batches, self._length, self._loader = batches, length, loader

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator over the batches. It can be used once."""
        return self._batches

    def __len__(self) -> int:
        """Return the number of the client's batches in this round."""
        return self._length

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader of all clients."""
        return getattr(self._loader, name)


class ClientFit:
    """Factory of clients' copies of one user's fit, and their training, one at a time or in a stack.

    Args:
        trainer: User's Trainer during its fit.
        loggers: Loggers that clients may write to. Clients then update the metric objects of the user's
            module. None gives a logger that writes nothing, and copies of these objects.
        number: Number of the only client in this process. None takes the numbers from `copy`.
    """

    def __init__(self, trainer: Any, loggers: Sequence[Any] | None = None, number: int | None = None) -> None:
        # glibc returns free memory to the system above twice the largest block that was mapped and freed.
        # After this large block, memory of one step is kept and reused by the next step.
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
        self._home, self._number = trainer, number
        self._snapshots: dict[bool, Snapshot] = {}
        self._reached: dict[int, tuple[Any, str]] | None = None
        self._loggers = loggers
        self._callbacks = [c for c in trainer.callbacks if trains_with_clients(c)]
        self._shared = tuple(filter(knows_clients, trainer.callbacks))
        self._crossing = [c for c in trainer.callbacks if is_shared_by_clients(c)]
        self._fetcher: Any = None
        # `id` of the user's tensors, which a copy may share (metrics, frozen tensors) and must not free
        self._user_tensors: set[int] = set()

    def drop(self, client: Client) -> None:
        """Free a client's tensors and objects at once, without waiting for the garbage collector."""
        for optimizer in client.trainer.strategy.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            optimizer.state.clear()
        for tensor in _tensors(client.module):
            if id(tensor) not in self._user_tensors:
                tensor.grad = None
                tensor.data = _empty_tensor(tensor.dtype, tensor.device)
        vars(client.trainer).clear()

    def end_round(self) -> None:
        """Drop the snapshots of the round.

        Raises:
            NotCopyableError: If a client has changed a frozen module or tensor that all clients share.
        """
        self.check_frozen()
        self._snapshots = {}

    def external_state(self) -> list[tuple[str, Any]]:
        """Return the paths and values of the state that training code reaches by globals, as it is now."""
        code: dict[int, Any] = {
            id(type(one)): type(one) for one in self._home.callbacks if not knows_clients(one)
        }
        for snapshot in self._snapshots.values():
            code |= snapshot.code
        return find_named_state(code.values())

    def check_frozen(self) -> None:
        """Raise `NotCopyableError` (a `ValueError`) if a shared frozen part of the training has changed."""
        for snapshot in self._snapshots.values():
            snapshot.check_frozen()

    def copy(self, seed: int, clients: Sequence[int] = (0,), alone: bool = False) -> Client:
        """Load a copy of the round's training state for one client or a stack.

        The first call in a round takes the snapshot.

        Args:
            seed: Seed of the random generators in the copy.
            clients: Numbers of the clients that train in the copy. A trial without a real client uses client
                0.
            alone: Whether to leave out everything that clients share: callbacks that are not copied, shared
                metrics, and loggers.

        Raises:
            NotCopyableError: If an object of the user's fit can't be pickled.
        """
        if alone not in self._snapshots:
            self._snapshots[alone] = self._take_snapshot(alone)
        (trainer, *_), (module, *_) = self._snapshots[alone].load(seed)
        trainer.clients = tuple(clients) if self._number is None else (self._number,)
        return Client(trainer, module, trainer.callbacks)

    def _take_snapshot(self, alone: bool) -> Snapshot:
        """Take the snapshot of the round, with or without the objects that clients share."""
        home, shared = self._home, list(self._shared)
        self._user_tensors = {id(one) for one in _tensors(home.lightning_module)}
        own_loggers = None if alone else self._loggers
        if own_loggers is not None:
            shared += [part for part in home.lightning_module.modules() if isinstance(part, Metric)]
        copied = self._callbacks
        roots = (
            home.lightning_module,
            home.strategy.optimizers,
            home.strategy.lr_scheduler_configs,
            home.strategy.precision_plugin,
            copied,
            home.datamodule,
            {name: getattr(home, name) for name in user_attributes(home)},
        )
        loggers = [_NOWHERE] * bool(home.loggers) if own_loggers is None else own_loggers
        crossing = [] if alone else self._crossing
        callbacks = [one for one in home.callbacks if one in copied or one in crossing]
        snapshot = Snapshot(roots, shared, make_twins(home, loggers, callbacks, copied), self._reached)
        self._reached = snapshot.reachable
        return snapshot

    def train(self, client: Client, batches: Batches, steps: int, logged: int = 0) -> None:
        """Train a copy on the batches of a client or a stack, with Lightning's loop and hooks.

        Args:
            client: Copy of the user's fit.
            batches: Batches of the client or stack.
            steps: Optimiser steps of one client before this round.
            logged: Number of steps on the loggers' axis.
        """
        child, loops = client.trainer, client.trainer.fit_loop
        resume_counters(child, steps, logged)
        loops.max_batches = len(batches)
        loops._combined_loader = _combined(batches)
        if self._fetcher is None:  # cached, because Lightning inspects the signature of `training_step`
            self._fetcher = type(pl.loops.utilities._select_data_fetcher(child, child.state.stage))
        fetcher = loops._data_fetcher = self._fetcher()
        fetcher.setup(loops._combined_loader)
        if self._fetcher is pl.loops.fetchers._PrefetchDataFetcher:  # read each batch only when it is used
            fetcher.iterator = zip(batches, itertools.count(), itertools.repeat(0))
            fetcher.length, fetcher.done = len(batches), not len(batches)
        else:
            iter(fetcher)
        loops.epoch_loop.run(fetcher)
        child._logger_connector.epoch_end_reached()
        child._logger_connector._current_fx = "on_train_epoch_end"  # keeps values that others have logged
        loops.epoch_progress.increment_processed()
        call_hooks(child, client.callbacks, "on_train_epoch_end")
        loops.epoch_loop._in_hook("on_train_epoch_end", client.module.on_train_epoch_end)


@functools.cache
def _empty_tensor(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor, which replaces the data of a dropped client's tensors."""
    return torch.empty(0, dtype=dtype, device=device)


def _combined(batches: Batches) -> Any:
    """Make Lightning's loader of these batches without its slow constructor."""
    loader: Any = object.__new__(pl.utilities.CombinedLoader)
    vars(loader).update(_COMBINED, _iterables=batches, _flattened=[batches])
    return loader


def _tensors(module: pl.LightningModule) -> list[Any]:
    """Return all parameters and buffers of a module, tied ones once per use."""
    return [
        t
        for part in module.modules()
        for t in (*part._parameters.values(), *part._buffers.values())
        if t is not None
    ]
