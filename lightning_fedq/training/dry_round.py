"""A dry worker: it trains clients before the first round as rounds will train them, and drops the results.

It is the worker of the rounds (`clients.worker`), after all hooks of the start. It works in forks, on the
user's own objects, as Lightning will call them. If the process can't be forked, it works on copies. The
trials of `rehearsal` and `isolation` use it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms import Correction
from lightning_fedq.clients.clock import Clock
from lightning_fedq.clients.fit import Client, ClientFit
from lightning_fedq.clients.forks import run_in_fork
from lightning_fedq.clients.hooks import call_start_hooks, trains_with_clients
from lightning_fedq.clients.measurement import compute_statistics
from lightning_fedq.clients.stale import is_user_s
from lightning_fedq.clients.vector import Vector
from lightning_fedq.clients.worker import ClientWorker
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import preserve_generators
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.training.client_metrics import ObservedResults

T = TypeVar("T")
Change = Callable[[Any], Any]
_ROUNDS = 100
"""Number of rounds that are searched for a client to try."""


class DryWorker(ClientWorker):
    """Worker that trains clients on copies, outside of the rounds, and restores all random generators.

    Callbacks that cross clients are left out, and logged metrics are not kept.

    Args:
        no_forks: Why the process can't be forked. "" if it can.
        owner: Callback whose `on_fit_start` is running. None if all hooks of the start have run.
        skips_empty: Does an empty batch count as no step?
        term: Client half of the local algorithm. None is federated averaging.
        shares: Do clients log for validation to see?
        num_statistics: Number of values of the clients' statistics. 0 if there are none.

    Attributes:
        names: Names of the metrics that clients have logged.
        values: Last value of each of them.
        start_error: First hook of the start that raised, with its error. None if none did.
    """

    def __init__(
        self,
        trainer: Any,
        vector: Vector,
        clock: Clock,
        loader: Callable[[], ClientLoader],
        no_forks: str,
        owner: Any = None,
        skips_empty: bool = False,
        term: Correction | None = None,
        shares: bool = False,
        num_statistics: int = 0,
    ) -> None:
        super().__init__(trainer, vector, ClientFit(trainer), clock, None, loader, 1, skips_empty, term)
        self.no_forks, self._owner = no_forks, owner
        self.shares, self.num_statistics = shares, num_statistics
        self.names: dict[str, None] = {}
        self.values: dict[str, Tensor] = {}
        self.start_error: tuple[str, Exception] | None = None
        self._look: Callable[[Client], object] = lambda client: None

    def run_in_fork(self, work: Callable[[], T]) -> T:
        """Run `work` in a fork in which all hooks of the start have run. Without forks, run it here.

        Args:
            work: Function whose result can be pickled.
        """
        if self.no_forks:
            return work()

        def begun() -> T:
            self._start()
            return work()

        return run_in_fork(begun)

    def _start(self) -> None:
        """Call the hooks of the start that have not run yet, on the user's own objects. In a fork only."""
        home = self.trainer
        silence(home)
        if hasattr(home.strategy, "is_single"):
            home.strategy.is_single = True  # a fork of a rank does not wait for the other ranks
        if self._owner is None:
            return
        with suppress(Exception):
            home.fit_loop.setup_data()
        number = next(n for n, callback in enumerate(home.callbacks) if callback is self._owner)
        called = [callback for callback in home.callbacks if is_user_s(callback)]
        behind = [callback for callback in home.callbacks[number:] if is_user_s(callback)]
        self._owner = None
        self.start_error = call_start_hooks(home, called, behind)

    def start_client(self, seed: int, clients: Sequence[int] = ()) -> Client:
        """Return a client's copy of the fit that is ready to train."""
        client = self.fit.copy(seed, clients, alone=True)
        if self._owner is not None:
            own = [c for c in self.trainer.callbacks if trains_with_clients(c) or c is self._owner]
            number = next(n for n, callback in enumerate(own) if callback is self._owner)
            behind = client.callbacks[number:]
            self.start_error = call_start_hooks(client.trainer, client.callbacks, behind)
        self.vector.freeze_statistics(client.module)
        return client

    def _copy(self, stack: Stack) -> Client:
        client = self.start_client(stack.training_seed, stack.clients)
        names, values = self.names, self.values
        # values refer to themselves, so that the Trainer's own way to reduce them would keep the client
        reduce = lambda value, *args, **kwargs: value  # noqa: E731

        def note(name: str, value: Any) -> None:
            names.setdefault(name)
            if isinstance(value, int | float | Tensor):
                values[name] = torch.as_tensor(value).detach().clone()

        results = ObservedResults(True, note, reduce)
        client.trainer.fit_loop.epoch_loop._results = results
        return client

    def _check_unsent_tensors(self, client: Client) -> None:
        self._look(client)

    def try_out(
        self,
        stack: Stack,
        most: int,
        look: Callable[[Client], object] = lambda client: None,
        again: bool = False,
        change: Change | None = None,
        loader: Any = None,
    ) -> Tensor:
        """Train a client on its first batches, and return its update, `(dim,)`.

        Args:
            most: Largest number of batches.
            look: Called with the trained copy, before it is dropped.
            again: Repeat the client's batches if it has fewer than `most`?
            change: Function that changes each batch before the training.
            loader: Loader to train from. None is the clients' own loader.
        """
        loader, there = self._loader() if loader is None else loader, len(stack.batch_sizes)
        passes = -(-most // there) if again and there else 1
        weights = self.vector.read()
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        self._look = look
        try:
            with preserve_generators():
                batches: Any = chain.from_iterable(loader.stack_batches(stack) for _ in range(passes))
                batches = batches if change is None else map(change, batches)
                short = replace(stack, batch_sizes=(passes * stack.batch_sizes)[:most])
                update = self.train(short, batches, weights).updates[0]
                self.fit.check_frozen()
        finally:
            for part in (self.vector, self.states, self.clock):
                part.begin_round()
        return update

    def statistics(self, stack: Stack, most: int, change: Change | None = None) -> Tensor:
        """Return the statistics of a client's first batches, `(num_statistics,)`, see `compute_statistics`.

        Args:
            most: Largest number of batches.
            change: Function that changes each batch first. None changes nothing.
        """
        with preserve_generators():
            batches: Any = islice(self._loader().stack_batches(stack), most)
            batches = batches if change is None else map(change, batches)
            return compute_statistics(self.fit, stack, batches, self.num_statistics)


_WRITERS = {
    "torch.utils.tensorboard.writer": "SummaryWriter",
    "tensorboardX.writer": "SummaryWriter",
    "wandb.sdk.wandb_run": "Run",
}
"""Classes to which loggers of the user's own code write, by module."""


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """Write nothing, in place of a logger's or a writer's method."""


_SILENT = {
    "__slots__": (),
    "experiment": property(lambda self: pl.loggers.logger.DummyExperiment()),  # type: ignore[attr-defined]
    **dict.fromkeys(
        ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint"),
        _write_nothing,
    ),
}
"""Attributes of the class of a silent logger, which keeps the logger's folder and name."""


def silence(trainer: Any) -> None:
    """Silence all loggers and their writers in this process, for a fork only.

    A fork shares files and connections with its parent. So this includes loggers that callbacks or modules
    hold, and writers that they use directly.
    """
    # by type, because a proxy of an object that is gone has no class
    found: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), pl.loggers.Logger)]
    for logger in {id(one): one for one in [*trainer.loggers, *found]}.values():
        with suppress(TypeError):  # a class that can't be extended
            logger.__class__ = type("Silent", (type(logger),), _SILENT)
    for module, name in _WRITERS.items():
        if (kind := getattr(sys.modules.get(module), name, None)) is not None:
            for method in (one for one, value in vars(kind).items() if isinstance(value, FunctionType)):
                if not method.startswith("_"):
                    setattr(kind, method, _write_nothing)
    if "wandb" in sys.modules:
        sys.modules["wandb"].log = _write_nothing  # type: ignore[attr-defined]


def first_clients(round_stacks: Callable[[int], Sequence[Stack]], number: int) -> list[Stack]:
    """Return the first `number` clients to train. Fewer if 100 rounds have fewer distinct clients."""
    found: dict[tuple[int, ...], Stack] = {}
    for round in range(_ROUNDS):
        for stack in round_stacks(round):
            if stack.clients and len(found) < number:
                found.setdefault(stack.clients, stack)
        if len(found) == number:
            break
    return list(found.values())


def in_a_line(error: Exception) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
