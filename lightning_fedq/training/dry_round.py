"""A dry round: clients train before the first round as they will train in it, and the results are dropped.

Two facts depend on the user's code and are needed before the first round. Tensors that training changes must
be sent, and callbacks may decide by metrics that clients log. So one client trains two steps with the worker
of the rounds (`clients.worker`), after all hooks of the start. It trains in a fork, on the user's own
objects, as Lightning will call them. If the process can't be forked, it trains on copies. Each check is a
function of the findings.

The sizes of all clients' batches are known before the first round. Code that needs two samples (BatchNorm, a
contrastive loss, a standard deviation) fails on a batch of one sample. The error would come in the middle of
some round, without the client's name. So the smallest batch is also tried.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.algorithms import Correction
from lightning_fedq.clients.changed_tensors import ChangedTensors, find_changed
from lightning_fedq.clients.clock import Clock
from lightning_fedq.clients.fit import Client, ClientFit
from lightning_fedq.clients.forks import picklable_error, run_in_fork
from lightning_fedq.clients.hooks import (
    call_start_hooks,
    is_shared_by_clients,
    knows_clients,
    trains_with_clients,
)
from lightning_fedq.clients.measurement import compute_statistics
from lightning_fedq.clients.snapshot import NotCopyableError
from lightning_fedq.clients.stale import is_user_s, stale_hooks
from lightning_fedq.clients.vector import Vector
from lightning_fedq.clients.worker import ClientWorker
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import preserve_generators, seed_for_transforms
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.per_client_loaders import PerClientRoundLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.functional.batch_stack import map_tensors
from lightning_fedq.training.client_metrics import ObservedResults, metric_forks

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
    ) -> None:
        super().__init__(trainer, vector, ClientFit(trainer), clock, None, loader, 1, skips_empty, term)
        self.no_forks, self._owner = no_forks, owner
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
            own = [
                callback
                for callback in self.trainer.callbacks
                if trains_with_clients(callback) or callback is self._owner
            ]
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

    def statistics(self, stack: Stack, most: int, size: int, change: Change | None = None) -> Tensor:
        """Return the statistics of a client's first batches, `(size,)`, see `compute_statistics`.

        Args:
            most: Largest number of batches.
            size: Expected number of values.
            change: Function that changes each batch first. None changes nothing.
        """
        with preserve_generators():
            batches: Any = islice(self._loader().stack_batches(stack), most)
            batches = batches if change is None else map(change, batches)
            return compute_statistics(self.fit, stack, batches, size)


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


# ---- a client's first steps --------------------------------------------------------------------------------


class TrialFindings(NamedTuple):
    """Findings of a client's first steps.

    Args:
        rehearsed: Tensors that training changes, except the parameters.
        failure: Error for which no step was trained. "" if there was none.
        moved: Did any parameter change?
        stale: Hook that uses state which training leaves outside of the model, see `clients.stale`. "" if
            none.
        raised: Hooks that raised when they were tried, so that it is not known if they are stale.
        names: Names of the metrics that were logged.
        end: What fails at the end of a round, as a sentence, and the user's error. None if nothing fails.
    """

    rehearsed: ChangedTensors
    failure: str = ""
    moved: bool = True
    stale: str = ""
    raised: Sequence[str] = ()
    names: Mapping[str, None] = {}
    end: tuple[str, Exception] | None = None

    def check(self, module: pl.LightningModule) -> None:
        """Report the findings to the user.

        Raises:
            ValueError: If a hook would load weights, such as an average, that no client's update contains.
                Also, as the user's own error, if a validation or a checkpoint fails at the end of a round.
        """
        if self.end is not None:
            raise _with_sentence(*self.end) from self.end[1]
        if self.stale:
            raise ValueError(
                f"{self.stale} loads weights (such as an average) that hooks of batches or steps keep "
                "outside the model, but clients' copies are dropped. Keep them in a submodule or buffer, or "
                "use EMAWeightAveraging"
            )
        if self.failure:
            rank_zero_info(
                f"The first steps could not be tried ({self.failure}). So only buffers of normalisation "
                "layers travel"
            )
        if not self.moved:
            rank_zero_warn(
                f"Nothing trains: the first steps of a client changed no parameter of "
                f"{type(module).__name__}. Look at the loss of training_step, requires_grad and the learning "
                "rate of the first steps"
            )


def _with_sentence(sentence: str, error: Exception) -> Exception:
    """Return an error of the class of `error` and of `ValueError`.

    Args:
        sentence: Text of the new error, with {} for the old one.
    """
    kind, text = type(error), sentence.format(_in_a_line(error))
    bases = (kind,) if issubclass(kind, ValueError) else (kind, ValueError)
    try:
        methods = {"__init__": lambda self: None, "__str__": lambda self: text}
        made: Exception = type(kind.__name__, bases, methods)()
    except TypeError:  # a class that can't be extended
        return ValueError(text)
    return made


def validate(trainer: Any, most: float = math.inf) -> None:
    """Run the validation of a fit as at the end of a round. In a fork only.

    Args:
        most: Largest number of batches of each validation loader.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    seed_for_transforms(0)
    loop.setup_data()
    for loader in loop._combined_loader.flattened if loop._combined_loader is not None else ():
        with suppress(AttributeError):  # worker processes of the parent do not serve its fork
            loader._iterator, loader.num_workers, loader.timeout = None, 0, 0
    loop._max_batches = [min(own, most) for own in loop._max_batches]
    loop.run()


def rehearse_end(
    worker: DryWorker, clients: Sequence[Stack], shares: bool, statistics: int | None
) -> tuple[str, Exception] | None:
    """Return what fails at the end of the first round, and the user's error. None if nothing fails.

    Validation and checkpoint run once, in a fork of a fork. Validation is tried on two batches, and if it
    fails on all batches. Nothing is tried if a callback of the user's crosses clients, because a trial lacks
    what it would leave.

    Args:
        worker: Worker that has trained a client, if one is tried.
        clients: Stack of this client. Empty if none was tried.
        shares: Do clients log for validation to see?
        statistics: Number of values of the clients' statistics. None if there are none.
    """
    home = worker.trainer
    if worker.start_error is not None or any(
        is_shared_by_clients(one) and not knows_clients(one) for one in home.callbacks
    ):
        return None
    if shares and not clients:
        return None
    kinds = pl.callbacks.Checkpoint | pl.callbacks.ProgressBar
    saving = [one for one in home.callbacks if isinstance(one, pl.callbacks.Checkpoint)]
    home.callbacks = [one for one in home.callbacks if not (isinstance(one, kinds) or knows_clients(one))]
    if shares:
        for name, value in worker.values.items():
            home.callback_metrics.update(dict.fromkeys(metric_forks(name), value))

    def last_step(most: float) -> tuple[str, Exception] | None:
        if statistics is not None and clients:  # the first rounds release them, before any validation
            try:
                mean = worker.statistics(clients[0], 2, statistics)
                home.lightning_module.on_statistics(mean)
            except Exception:  # `check_statistics` will tell
                return None
        if home.enable_validation and home.fit_loop.epoch_loop._should_check_val_epoch():
            home.validating = True
            try:
                validate(home, most)
            except Exception as error:
                return (_VALIDATION, picklable_error(error))
            home.training = True
        for weights_only in {bool(getattr(one, "save_weights_only", False)) for one in saving}:
            try:
                home._checkpoint_connector.dump_checkpoint(weights_only)
            except Exception as error:
                return (_CHECKPOINT, picklable_error(error))
        return None

    found = run_in_fork(lambda: last_step(2))
    if found is not None and found[0] == _VALIDATION:
        found = run_in_fork(lambda: last_step(math.inf))
    return found


_VALIDATION = (
    "Validation fails after a round ({}), because clients' changes to modules, callbacks and metrics are "
    "dropped. Use them in on_train_epoch_end, or use Federated(client_metrics='shared') if it reads logged "
    "metrics"
)
_CHECKPOINT = (
    "A checkpoint fails after the first round ({}), because clients' steps change copies only. Let "
    "state_dict and on_save_checkpoint work before the first step"
)


def first_steps(
    worker: DryWorker, clients: Sequence[Stack], shares: bool = False, statistics: int | None = None
) -> TrialFindings:
    """Train one client for two steps, and return the findings.

    If these steps fail, then the first round will fail with the same error of the user's code. Until then the
    types of the layers tell which tensors change. If they can't tell, the error is raised at once. This needs
    a fork in which all hooks of the start have run.

    Args:
        clients: Stack of the client to try. Empty if no client trains.
        shares: Do clients log for validation to see?
        statistics: Number of values of the clients' statistics. None if there are none.

    Raises:
        NotCopyableError: If an object of the fit can't be copied.
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
        if not worker.no_forks:  # hooks of the end can be tried in forks only
            with preserve_generators():
                before = worker.start_client(clients[0].training_seed, clients[0].clients)
            stale, raised = stale_hooks(client, before)
            seen = seen._replace(stale=stale, raised=raised)

    try:
        # two steps, on one batch if need be: state that follows the weights changes in the second step only
        worker.try_out(clients[0], 2 * int(module.trainer.accumulate_grad_batches), look, again=True)
    except NotCopyableError:
        raise
    except Exception as error:
        # a hook of the start that failed is the cause of what fails after it
        where, cause = worker.start_error or ("", error)
        if worker.vector.uncarried and worker.vector.mode != "frozen":
            sentence = f"The first steps of a client fail{f' in {where}' if where else ''} ({{}})"
            return TrialFindings(by_layers, end=(sentence, picklable_error(cause)))
        return TrialFindings(by_layers, _in_a_line(error))
    if not worker.no_forks:
        seen = seen._replace(end=rehearse_end(worker, clients, shares, statistics))
    return seen


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def check_statistics(worker: DryWorker, stack: Stack, size: int) -> None:
    """Compute the statistics of one client before a round is charged, and drop them.

    Args:
        size: Expected number of values.

    Raises:
        ValueError: If the statistics have another shape, or a value is not finite. Errors of the user's hook
            are also raised.
    """
    vector = worker.run_in_fork(lambda: worker.statistics(stack, len(stack.batch_sizes), size))
    if not bool(torch.isfinite(vector).all()):
        raise ValueError(
            f"client_statistics of client {stack.clients[0]} returned values that are not finite. Do not "
            "divide by a count that may be 0, or take the standard deviation of one sample"
        )


# ---- the smallest batch ------------------------------------------------------------------------------------


def smallest_batches(loader: ClientLoader, sizes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Return the number of samples in each client's smallest batch. None where it is not known.

    Args:
        sizes: Batch sizes of each client in a round, if clients share one loader.
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
    """Loader whose batches are cut to a number of samples."""

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
    """Refuse a partition in which a client has a last batch that is too small to train on.

    The smallest batch is tried, and if it fails, the largest one. If both fail, nothing is refused,
    because the size is not the cause.

    Args:
        client_indices: Sample indices of each client, `(num_samples,)` each.
        sizes: Batch sizes of each client in a round.
        tried: Stack of a client that has trained without an error.

    Raises:
        ValueError: If training fails on the smallest batch only. The message names the clients.
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
        """Return the first line of the error on a batch of `size` samples. "" if there is none."""
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
            f"The last batch of clients {in_short(clients)} has {smallest} of {largest} samples, and "
            f"training on it fails ({first}). Use drop_last=True in the DataLoader, another batch_size, or "
            "another number of clients"
        )
