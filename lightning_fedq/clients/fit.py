"""One client's training, or a stack's: a fit on a copy of everything that the user's fit holds.

The user's Trainer, its module, optimisers, schedules, loss scale, data module and callbacks are never written
to. Every client begins with a copy of them as they are when its round begins, and the copy is dropped when
the client has trained: whatever it leaves in objects, containers, closures, hooks or optimisers is dropped
with it. Globals, class attributes, what code names by them, and data sets are shared, as in any program;
`training.isolation` finds out whether they carry anything from one client to another.

Nothing here knows of mechanisms, rounds, servers or other clients.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchmetrics import Metric

from lightning_fedq._lightning import pl
from lightning_fedq.clients.client_trainer import become_client, make_twins, resume_counters, user_attributes
from lightning_fedq.clients.hooks import call_hooks, crosses_clients, knows_clients, trains_with_clients
from lightning_fedq.clients.reachability import find_named_state
from lightning_fedq.clients.snapshot import Snapshot
from lightning_fedq.clients.undo import Undo

_NOWHERE = pl.loggers.logger.DummyLogger()
_KEPT_BYTES = (32 << 20) - (1 << 16)
"""glibc maps larger blocks than 32 MiB one by one."""


@dataclass(frozen=True)
class Client:
    """A client's copy of the user's fit."""

    trainer: Any
    module: pl.LightningModule
    callbacks: list[Any]


class Batches:
    """The batches of one client or stack, as its Trainer's training loader.

    Args:
        loader: The loader of all clients, which knows the data set and the like.
    """

    def __init__(self, batches: Iterator[Any], length: int, loader: Any) -> None:
        self._batches, self._length, self._loader = batches, length, loader

    def __iter__(self) -> Iterator[Any]:
        """The batches, once."""
        return self._batches

    def __len__(self) -> int:
        """Number of the client's batches in this round."""
        return self._length

    def __getattr__(self, name: str) -> Any:
        """Whatever else a loader knows."""
        return getattr(self._loader, name)


class ClientFit:
    """Trains clients of one user's fit, one at a time or a stack of them.

    Args:
        loggers: Loggers that clients may write to; none is a logger that writes nothing.
        number: Number of the only client that there is; None takes those that are copied for.
        itself: Let that client train what the user's fit holds, which nobody needs afterwards.

    Attributes:
        shares_metrics: Do clients update the metric objects of the user's module, not copies?
    """

    def __init__(
        self,
        trainer: Any,
        loggers: Sequence[Any] | None = None,
        number: int | None = None,
        itself: bool = False,
    ) -> None:
        # glibc gives memory back to the system above twice the largest block that it has mapped and freed:
        # with a large one, what a step allocates stays, and the next step's pages are there already
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
        self._home, self._number = trainer, number
        self.itself, self._undo = itself, Undo()
        self._snapshots: dict[bool, Snapshot] = {}
        self._reached: dict[int, tuple[Any, str]] | None = None
        self._loggers = loggers
        self.shares_metrics = loggers is not None
        self._callbacks = [c for c in trainer.callbacks if trains_with_clients(c)]
        self._shared = tuple(filter(knows_clients, trainer.callbacks))
        self._crossing = [c for c in trainer.callbacks if crosses_clients(c)]
        self._fetcher: Any = None
        self._user_s: set[int] = set()  # tensors, by `id`: metrics and what is frozen may be shared

    def drop(self, client: Client) -> None:
        """Free a client's tensors at once, and its objects, which refer to each other through the Trainer."""
        if client.trainer is self._home:
            self.restore_trainer()
            return
        for optimizer in client.trainer.strategy.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            optimizer.state.clear()
        for tensor in _tensors(client.module):
            if id(tensor) not in self._user_s:
                tensor.grad = None
                tensor.data = _zero_loss(tensor.dtype, tensor.device)
        vars(client.trainer).clear()

    def restore_trainer(self) -> None:
        """Let the user's Trainer be its own again, where a client had it."""
        self._undo.close()

    def end_round(self) -> None:
        """Forget the world of the round, and all that a client has trained.

        Raises:
            NotCopyableError: If a client has changed what code names by a global, and was frozen.
        """
        self.restore_trainer()
        self.check_frozen()
        self._snapshots = {}

    def external_state(self) -> list[tuple[str, Any]]:
        """Ways and values of what the training's code names past its own, as it is now."""
        code: dict[int, Any] = {
            id(type(one)): type(one) for one in self._home.callbacks if not knows_clients(one)
        }
        for world in self._snapshots.values():
            code |= world.code
        return find_named_state(code.values())

    def check_frozen(self) -> None:
        """Raise `ValueError` where a frozen part of the training has changed."""
        for world in self._snapshots.values():
            world.check_frozen()

    @property
    def client_loggers(self) -> list[Any]:
        """Loggers of the clients' Trainers."""
        if self._loggers is not None:
            return list(self._loggers)
        return [_NOWHERE] if self._home.loggers else []

    def copy(self, seed: int, clients: Sequence[int] = (0,), alone: bool = False) -> Client:
        """Load the round's world for one client, or a stack. The first one of a round makes it.

        Args:
            seed: Seed of the random generators that the world holds.
            clients: Numbers of those that train in it; a trial of anybody is one of client 0.
            alone: Leave out what crosses clients: callbacks that are not copied, shared metrics, loggers.

        Raises:
            NotCopyableError: If something in the user's fit has no bytes.
        """
        if self.itself and not alone:
            become_client(self._home, self.client_loggers, [*self._select_callbacks(alone)], self._undo)
            self._home.clients = (self._number,)
            return Client(self._home, self._home.lightning_module, self._home.callbacks)
        if alone not in self._snapshots:
            self._snapshots[alone] = self._take_snapshot(alone)
        (trainer, *_), (module, *_) = self._snapshots[alone].load(seed)
        trainer.clients = tuple(clients) if self._number is None else (self._number,)
        return Client(trainer, module, trainer.callbacks)

    def _take_snapshot(self, alone: bool) -> Snapshot:
        home, shared = self._home, list(self._shared)
        self._user_s = {id(one) for one in _tensors(home.lightning_module)}
        if self.shares_metrics and not alone:
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
        loggers = self.client_loggers if not alone else [_NOWHERE] * bool(home.loggers)
        twins = make_twins(home, loggers, self._select_callbacks(alone), copied)
        world = Snapshot(roots, shared, twins, self._reached)
        self._reached = world.reachable
        return world

    def _select_callbacks(self, alone: bool) -> list[Any]:
        """A client's callbacks, and what crosses clients unless it is left out."""
        crossing = [] if alone else self._crossing
        return [one for one in self._home.callbacks if one in self._callbacks or one in crossing]

    @property
    def snapshot(self) -> Snapshot:
        """World of the open round, of which clients are copies."""
        return self._snapshots[False]

    def train(self, client: Client, batches: Batches, steps: int, logged: int = 0) -> None:
        """Train a copy on a client's batches, or a stack's.

        Args:
            steps: Optimiser steps of one client before this round.
            logged: Steps that loggers have seen.
        """
        child, loops = client.trainer, client.trainer.fit_loop
        resume_counters(child, steps, logged)
        loops.max_batches = len(batches)
        loops._combined_loader = _combined(batches)
        if self._fetcher is None:  # found by the signature of `training_step`, which takes a while
            self._fetcher = type(pl.loops.utilities._select_data_fetcher(child, child.state.stage))
        fetcher = loops._data_fetcher = self._fetcher()
        fetcher.setup(loops._combined_loader)
        if self._fetcher is pl.loops.fetchers._PrefetchDataFetcher:  # nothing is fetched ahead of its turn
            fetcher.iterator = zip(batches, itertools.count(), itertools.repeat(0))
            fetcher.length, fetcher.done = len(batches), not len(batches)
        else:
            iter(fetcher)
        loops.epoch_loop.run(fetcher)
        child._logger_connector.epoch_end_reached()
        child._logger_connector._current_fx = "on_train_epoch_end"  # forgets nothing that others have logged
        loops.epoch_progress.increment_processed()
        call_hooks(child, client.callbacks, "on_train_epoch_end")
        said = vars(client.module)  # which hook it is in
        before, said["_current_fx_name"] = said["_current_fx_name"], "on_train_epoch_end"
        own: Callable[[], object] = client.module.on_train_epoch_end
        own()
        said["_current_fx_name"] = before


@functools.cache
def _zero_loss(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


@functools.cache
def _combined_loader_attributes() -> dict[str, Any]:
    """Attributes of Lightning's loader of one iterable, which it takes a while to find."""
    return vars(pl.utilities.CombinedLoader(None, "max_size_cycle"))


def _combined(batches: Batches) -> Any:
    made: Any = object.__new__(pl.utilities.CombinedLoader)
    vars(made).update(_combined_loader_attributes(), _iterables=batches, _flattened=[batches])
    return made


def _tensors(module: pl.LightningModule) -> list[Any]:
    return [
        t
        for part in module.modules()
        for t in (*part._parameters.values(), *part._buffers.values())
        if t is not None
    ]
