"""A dry round: clients train before the first round as they will in it, and nothing of it counts.

What training changes has to travel, and whoever decides by a metric that stays with clients has to hear of it
before anybody has trained. Nobody knows either without trying, because both are in the user's code. So one
client trains two steps by the worker of the rounds (`clients.worker`), with everybody's hooks of the start
before it: in a fork on the user's own objects, as Lightning will call them, and where a process can't be
forked on the copies. Each check is a function of what was seen.

Sizes of batches are known when the data are dealt out, also of clients that are drawn late. What needs two
samples, as BatchNorm, a contrastive loss or a standard deviation does, fails on a batch of one, and would
fail in the middle of some round, without the client's name: so the smallest one is tried, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.algorithms import Correction
from lightning_fedq.clients.clock import Clock
from lightning_fedq.clients.fit import Client, ClientFit
from lightning_fedq.clients.forks import run_in_fork
from lightning_fedq.clients.hooks import call_start_hooks, trains_with_clients
from lightning_fedq.clients.measurement import compute_statistics
from lightning_fedq.clients.snapshot import NotCopyableError
from lightning_fedq.clients.stale import is_user_s, stale_hooks
from lightning_fedq.clients.vector import ChangedTensors, Vector, find_changed
from lightning_fedq.clients.worker import ClientWorker
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import preserve_generators
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.per_client_loaders import PerClientRoundLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.functional.batch_stack import map_tensors
from lightning_fedq.training.client_metrics import ObservedResults

T = TypeVar("T")
Change = Callable[[Any], Any]
_ROUNDS = 100
"""Rounds in which somebody to try with is looked for."""


class DryWorker(ClientWorker):
    """Trains clients as in a round, beside the rounds: on copies, with all draws put back.

    What crosses clients is left out, what they log goes nowhere, and nothing of them counts.

    Args:
        no_forks: Why nothing is tried in forks. "" if it is.
        owner: Callback whose `on_fit_start` is running; None where all hooks of the start have run.
        skips_empty: Is an empty batch no step at all?
        term: The local algorithm's half at the clients; None is federated averaging.

    Attributes:
        names: Names of the metrics that clients have logged.
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
    ) -> None:
        super().__init__(trainer, vector, ClientFit(trainer), clock, None, loader, 1, skips_empty, term)
        self.no_forks, self._owner = no_forks, owner
        self.names: dict[str, None] = {}
        self._look: Callable[[Client], object] = lambda client: None

    def run_in_fork(self, work: Callable[[], T]) -> T:
        """Do something in a fork in which all hooks of the start have run, else here.

        Args:
            work: Returns what can be pickled.
        """
        if self.no_forks:
            return work()

        def begun() -> T:
            self._start()
            return work()

        return run_in_fork(begun)

    def _start(self) -> None:
        """Call the hooks of the start that are still to come on the user's own objects. In a fork."""
        home = self.trainer
        silence(home)
        if self._owner is None:
            return
        with suppress(Exception):
            home.fit_loop.setup_data()
        number = next(n for n, one in enumerate(home.callbacks) if one is self._owner)
        called = [one for one in home.callbacks if is_user_s(one)]
        behind = [one for one in home.callbacks[number:] if is_user_s(one)]
        self._owner = None
        call_start_hooks(home, called, behind)

    def start_client(self, seed: int, clients: Sequence[int] = ()) -> Client:
        """A client's copy that is about to train."""
        client = self.fit.copy(seed, clients, alone=True)
        if self._owner is not None:
            own = [one for one in self.trainer.callbacks if trains_with_clients(one) or one is self._owner]
            number = next(n for n, one in enumerate(own) if one is self._owner)
            call_start_hooks(client.trainer, client.callbacks, client.callbacks[number:])
        self.vector.freeze_statistics(client.module)
        return client

    def _copy(self, stack: Stack) -> Client:
        client = self.start_client(stack.training_seed, stack.clients)
        names = self.names
        # values refer to themselves, so that the Trainer's own way to reduce them would keep the client
        reduce = lambda value, *args, **kwargs: value  # noqa: E731
        results = ObservedResults(True, lambda name, value: names.setdefault(name), reduce)
        client.trainer.fit_loop.epoch_loop._results = results
        return client

    def _check_unsent_tensors(self, client: Client, before: Mapping[str, Tensor] | None) -> None:
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
            look: Called with the copy that has trained, before it is dropped.
            again: Begin anew with the client's batches where there are fewer.
            change: What becomes of a batch before it is trained on.
            loader: Loader to train from; None is that of all clients.
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

    def statistics(self, stack: Stack, most: int, size: int, change: Change | None = None) -> Tensor:
        """Vector of a client's first batches, `(size,)`, see `compute_statistics`.

        Args:
            size: Numbers that are expected.
            change: What becomes of a batch before it is looked at; None is itself.
        """
        with preserve_generators():
            batches: Any = islice(self._loader().stack_batches(stack), most)
            batches = batches if change is None else map(change, batches)
            return compute_statistics(self.fit, stack, batches, size)


class _Silent:
    """Mixed into a logger's class: one that knows its folder and its name, and writes nothing."""

    experiment = property(lambda self: pl.loggers.logger.DummyExperiment())  # type: ignore[attr-defined]

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    log_metrics = log_hyperparams = log_graph = save = finalize = after_save_checkpoint = _nothing


def silence(trainer: Any) -> None:
    """Let a Trainer log nowhere. In a fork, whose loggers' files and threads are the parent's."""
    silent = []
    for logger in trainer.loggers:
        twin: Any = object.__new__(type("Silent", (_Silent, type(logger)), {}))
        vars(twin).update(vars(logger))
        silent.append(twin)
    trainer.loggers = silent


def first_clients(round_stacks: Callable[[int], Sequence[Stack]], number: int) -> list[Stack]:
    """The first clients to train, fewer where chance leaves that many out of the first hundred rounds."""
    found: dict[tuple[int, ...], Stack] = {}
    for round in range(_ROUNDS):
        for stack in round_stacks(round):
            if stack.clients and len(found) < number:
                found.setdefault(stack.clients, stack)
        if len(found) == number:
            break
    return list(found.values())


# ---- a client's first steps --------------------------------------------------------------------------------


class TrialFindings(NamedTuple):
    """Record of a client's first steps.

    Args:
        rehearsed: What training changes beside the parameters.
        failure: Why there were none. "" if there were.
        moved: Did any parameter move?
        stale: A hook that uses what training leaves beside the model, see `clients.stale`. "" is none.
        raised: Hooks of which that is not known, because they raise where they are tried.
        names: Names of the metrics that were logged.
    """

    rehearsed: ChangedTensors
    failure: str = ""
    moved: bool = True
    stale: str = ""
    raised: Sequence[str] = ()
    names: Mapping[str, None] = {}

    def check(self, module: pl.LightningModule) -> None:
        """Say what the user should know.

        Raises:
            ValueError: If a hook would put weights in that nobody has averaged.
        """
        if self.stale:
            raise ValueError(
                f"{self.stale} puts weights in that follow from what hooks of batches or steps have kept "
                "beside the model, an average say, and the fit's own would be of the first weights; keep the "
                "average in a submodule or buffer, which travels, or use EMAWeightAveraging"
            )
        if self.failure:
            rank_zero_info(
                f"a rehearsal of the first steps failed ({self.failure}); of buffers, those of "
                "normalisation layers travel"
            )
        if not self.moved:
            rank_zero_warn(
                f"nothing trains: the first steps of a client moved no parameter of "
                f"{type(module).__name__}; look at whether training_step returns a loss that follows from "
                "them, at requires_grad, and at the learning rate of the first steps"
            )


def first_steps(worker: DryWorker, clients: Sequence[Stack]) -> TrialFindings:
    """Let a client train two steps.

    Where that fails it will fail again in the first round, by the user's own error. Until then the layers
    say what changes; where they can't, the error is raised at once, as long as all hooks of the start have
    run.

    Args:
        clients: The one that tries. None leaves it to the layers.

    Raises:
        NotCopyableError: If something in the fit has no bytes.
    """
    module = worker.trainer.lightning_module
    by_layers = ChangedTensors.from_layers(module)
    if not clients:
        return TrialFindings(by_layers, "nobody trains in a hundred rounds")
    seen = TrialFindings(by_layers)

    def look(client: Client) -> None:
        nonlocal seen
        trained = [name for name, parameter in client.module.named_parameters() if parameter.requires_grad]
        moved = bool(find_changed(module, client.module, trained))
        seen = TrialFindings(ChangedTensors.compare(module, client.module), moved=moved, names=worker.names)
        if not worker.no_forks:  # hooks of the end can be tried
            with preserve_generators():
                before = worker.start_client(clients[0].training_seed, clients[0].clients)
            stale, raised = stale_hooks(client, before)
            seen = seen._replace(stale=stale, raised=raised)

    try:
        # two steps, of one batch twice if need be: what follows the weights does not change in the first
        worker.try_out(clients[0], 2 * int(module.trainer.accumulate_grad_batches), look, again=True)
    except NotCopyableError:
        raise
    except Exception as error:
        if worker.vector.uncarried and worker.vector.mode == "share" and not worker.no_forks:
            raise
        return TrialFindings(by_layers, _in_a_line(error))
    return seen


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def check_statistics(worker: DryWorker, stack: Stack, size: int) -> None:
    """Make the vector of one client before anybody is charged, and drop it.

    Raises:
        ValueError: If it is of another shape, or not finite. What the hook itself raises goes on.
    """
    vector = worker.run_in_fork(lambda: worker.statistics(stack, len(stack.batch_sizes), size))
    if not bool(torch.isfinite(vector).all()):
        raise ValueError(
            f"client_statistics of client {stack.clients[0]} returned numbers that are not finite; divide by "
            "no count that may be 0, and take a standard deviation of two samples or more"
        )


# ---- the smallest batch ------------------------------------------------------------------------------------


def smallest_batches(loader: ClientLoader, sizes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Samples of each client's smallest batch, None where nobody knows.

    Args:
        sizes: Batch sizes of each client in a round, by its share of one loader.
    """
    if not isinstance(loader, PerClientRoundLoader):
        return [min(own, default=None) for own in sizes]
    return [_smallest_loader_batch(own, len(steps)) for own, steps in zip(loader.passes, sizes, strict=True)]


def _smallest_loader_batch(loader: Any, steps: int) -> int | None:
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    samples, size = len(loader.sampler), loader.batch_sampler.batch_size  # type: ignore[arg-type]
    rest = samples % size
    cut = steps < len(loader) or loader.drop_last or not rest
    return size if cut else rest


class _Cut:
    """A loader whose batches have so many samples."""

    def __init__(self, loader: ClientLoader, size: int) -> None:
        self._loader, self._size = loader, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def stack_batches(self, stack: Stack) -> Iterator[Any]:
        """Yield the first samples of each batch."""
        for batch in self._loader.stack_batches(stack):
            yield map_tensors(lambda t: t[: self._size] if t.dim() else t, batch)


def check_smallest(
    worker: DryWorker,
    loader: ClientLoader,
    client_indices: Sequence[Tensor],
    sizes: Sequence[tuple[int, ...]],
    tried: Stack,
) -> None:
    """Refuse a split that leaves a client a batch on which the training fails, if a whole one does not.

    Args:
        tried: A client that has been tried.

    Raises:
        ValueError: Naming the clients, with the cure.
    """
    found = smallest_batches(loader, sizes)
    smallest = min((size for size in found if size), default=0)
    if isinstance(loader, PerClientRoundLoader):
        largest = max(
            (one.batch_size or 0 for one in loader.passes if isinstance(one, DataLoader)), default=0
        )
    else:
        largest = max((size for own in sizes for size in own), default=0)
    if smallest >= largest:
        return
    clients = [client for client, size in enumerate(found) if size == smallest]

    def failure(size: int) -> str:
        """First line of what goes wrong on a batch of so many samples. Empty if nothing does."""
        source: Any = loader
        if isinstance(loader, PerClientRoundLoader):
            stack, source = Stack(tried.clients, (1,), tried.training_seed, ()), _Cut(loader, size)
        else:
            owner = next(c for c, own in enumerate(sizes) if size in own)
            drawn = (client_indices[owner][:size],)
            stack = Stack((owner,), (size,), tried.training_seed, (), drawn)
        broken = list[str]()

        def look(client: Client) -> None:
            state = client.module.state_dict().items()
            broken.extend(name for name, tensor in state if not bool(torch.isfinite(tensor).all()))

        try:
            worker.try_out(stack, 1, look, loader=source)
        except NotCopyableError:
            raise
        except Exception as error:
            return _in_a_line(error)
        return f"{', '.join(broken[:4])} is NaN or infinite" if broken else ""

    def only_smallest() -> str:
        first = failure(smallest)
        return "" if not first or failure(largest) else first

    if first := worker.run_in_fork(only_smallest):
        raise ValueError(
            f"the last batch of clients {in_short(clients)} has {smallest} of {largest} samples, and "
            f"training on it fails ({first}); use drop_last=True in the DataLoader, which leaves these out, "
            "another batch_size, or another number of clients"
        )
