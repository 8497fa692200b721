"""Rehearsal before the first round: a client's first steps, and the validation and checkpoint after a round.

Two facts depend on the user's code and are needed before the first round. Tensors that training changes must
be sent, and callbacks may decide by metrics that clients log. So one client trains two steps. Then the
fit's validation and checkpoint run once, so that an error in them is raised before a round is charged.

At last, the smallest batch of all clients is tried. Code that needs two samples (BatchNorm, a contrastive
loss, a standard deviation) fails on a batch of one sample. The error would come in the middle of some round,
without the client's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.changed_tensors import ChangedTensors, find_changed
from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.forks import picklable_error, run_in_fork
from lightning_fedq.clients.hooks import is_shared_by_clients, knows_clients
from lightning_fedq.clients.snapshot import NotCopyableError
from lightning_fedq.clients.stale import is_user_s, stale_hooks
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import preserve_generators, seed_for_transforms
from lightning_fedq.data.per_client_loaders import PerClientRoundLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.functional.batch_stack import map_tensors
from lightning_fedq.training.client_metrics import metric_forks
from lightning_fedq.training.dry_round import DryWorker, in_a_line

if TYPE_CHECKING:
    from lightning_fedq.training.population import PartitionedData

Failure = tuple[str, Exception]
"""What fails at the end of a round, as a sentence, and the user's error."""


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
        end_obstacle: Why the end of a round was not rehearsed. "" if it was.
        validated: Names of the metrics after a validation. None if it was not rehearsed.
    """

    rehearsed: ChangedTensors
    failure: str = ""
    moved: bool = True
    stale: str = ""
    raised: Sequence[str] = ()
    names: Mapping[str, None] = {}
    end: Failure | None = None
    end_obstacle: str = ""
    validated: tuple[str, ...] | None = None

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
    kind, text = type(error), sentence.format(in_a_line(error))
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


def find_end_obstacle(worker: DryWorker, clients: Sequence[Stack]) -> str:
    """Return why the end of the first round can't be rehearsed. "" if it can.

    A trial lacks what a callback that crosses clients would leave, and what clients would log.

    Args:
        worker: Worker that has trained a client, if one is tried.
        clients: Stack of this client. Empty if none was tried.
    """
    if worker.no_forks:
        return worker.no_forks
    if worker.start_error is not None:
        return f"{worker.start_error[0]} fails"
    crossing = [one for one in worker.trainer.callbacks if is_shared_by_clients(one)]
    if names := [type(one).__name__ for one in crossing if not knows_clients(one)]:
        return f"{in_short(names)} crosses clients"
    if worker.shares and not clients:
        return "no client was tried, and validation may read what clients log"
    return ""


def report_unrehearsed_end(trainer: Any, obstacle: str) -> None:
    """Report, before the first round, that its end was not rehearsed.

    Args:
        obstacle: Why it was not rehearsed. "" if it was.
    """
    saves = any(isinstance(one, pl.callbacks.Checkpoint) for one in trainer.callbacks)
    names = ["validation"] * bool(trainer.enable_validation) + ["checkpoints"] * saves
    if obstacle and names:
        rank_zero_info(
            f"Not rehearsed before round 1: {' and '.join(names)} ({obstacle}). An error there would come "
            "after round 1 is charged, so try one round with a seed first"
        )


def rehearse_end(
    worker: DryWorker, clients: Sequence[Stack]
) -> tuple[Failure | None, tuple[str, ...] | None]:
    """Return what fails at the end of the first round, and the names of the metrics after a validation.

    Both are None if nothing fails, or no validation was tried.

    Validation and checkpoint run once, in a fork of a fork. Validation is tried on two batches, and if it
    fails on all batches.

    Args:
        worker: Worker that has trained a client, if one is tried.
        clients: Stack of this client. Empty if none was tried.
    """
    home = worker.trainer
    saving = [one for one in home.callbacks if isinstance(one, pl.callbacks.Checkpoint)]
    home.callbacks = [one for one in home.callbacks if is_user_s(one)]
    if worker.shares:
        for name, value in worker.values.items():
            home.callback_metrics.update(dict.fromkeys(metric_forks(name), value))

    def last_step(most: float) -> tuple[Failure | None, tuple[str, ...] | None]:
        validated = None
        if worker.num_statistics and clients:  # the first rounds release them, before any validation
            try:
                home.lightning_module.on_statistics(worker.statistics(clients[0], 2))
            except Exception:  # `check_statistics` will tell
                return None, None
        every, last = home.check_val_every_n_epoch or 1, home.max_epochs
        will_validate = last is None or last < 0 or last // every > home.current_epoch // every
        if home.enable_validation and will_validate:
            home.validating = True
            try:
                validate(home, most)
            except Exception as error:
                return (_VALIDATION, picklable_error(error)), None
            home.training = True
            validated = tuple(home.callback_metrics)
        for weights_only in {bool(getattr(one, "save_weights_only", False)) for one in saving}:
            try:
                home._checkpoint_connector.dump_checkpoint(weights_only)
            except Exception as error:
                return (_CHECKPOINT, picklable_error(error)), validated
        return None, validated

    failure, validated = run_in_fork(lambda: last_step(2))
    if failure is not None and failure[0] == _VALIDATION:
        failure, validated = run_in_fork(lambda: last_step(math.inf))
    return failure, validated


_VALIDATION = (
    "Validation fails after a round ({}), because clients' changes to modules, callbacks and metrics are "
    "dropped. Use them in on_train_epoch_end, or use Federated(client_metrics='shared') if it reads logged "
    "metrics"
)
_CHECKPOINT = (
    "A checkpoint fails after the first round ({}), because clients' steps change copies only. Let "
    "state_dict and on_save_checkpoint work before the first step"
)


def first_steps(worker: DryWorker, clients: Sequence[Stack]) -> TrialFindings:
    """Train one client for two steps, and return the findings.

    If these steps fail, then the first round will fail with the same error of the user's code. Until then the
    types of the layers tell which tensors change. If they can't tell, the error is raised at once. This needs
    a fork in which all hooks of the start have run.

    Args:
        clients: Stack of the client to try. Empty if no client trains.

    Raises:
        NotCopyableError: If an object of the fit can't be copied.
    """
    module = worker.trainer.lightning_module
    by_layers = ChangedTensors.from_layers(module)
    if not clients:
        nobody = "nobody trains in a hundred rounds"
        return TrialFindings(by_layers, nobody, end_obstacle=nobody)
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
        return TrialFindings(by_layers, in_a_line(error), end_obstacle="the first steps fail")
    return with_end(seen, worker, clients)


def with_end(seen: TrialFindings, worker: DryWorker, clients: Sequence[Stack]) -> TrialFindings:
    """Add to the findings what fails at the end of a round, see `rehearse_end`, or why it is not known."""
    if obstacle := find_end_obstacle(worker, clients):
        return seen._replace(end_obstacle=obstacle)
    end, validated = rehearse_end(worker, clients)
    return seen._replace(end=end, validated=validated)


def check_statistics(worker: DryWorker, stack: Stack) -> None:
    """Compute the statistics of one client before a round is charged, and drop them.

    Raises:
        ValueError: If the statistics have another shape, or a value is not finite. Errors of the user's hook
            are also raised.
    """
    vector = worker.run_in_fork(lambda: worker.statistics(stack, len(stack.batch_sizes)))
    if not bool(torch.isfinite(vector).all()):
        raise ValueError(
            f"client_statistics of client {stack.clients[0]} returned values that are not finite. Do not "
            "divide by a count that may be 0, or take the standard deviation of one sample"
        )


# ---- the smallest batch ------------------------------------------------------------------------------------


def _smallest_batch(loader: Any, steps: int) -> int | None:
    """Return the number of samples in the smallest batch of a client's own loader. None if not known."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    samples, size = len(loader.sampler), loader.batch_sampler.batch_size  # type: ignore[arg-type]
    rest = samples % size
    cut = steps < len(loader) or loader.drop_last or not rest
    return size if cut else rest


class _Cut:
    """Loader whose batches are cut to a number of samples."""

    def __init__(self, loader: PerClientRoundLoader, size: int) -> None:
        self._loader, self._size = loader, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def stack_batches(self, stack: Stack) -> Iterator[Any]:
        """Yield the first samples of each batch."""
        for batch in self._loader.stack_batches(stack):
            yield map_tensors(lambda t: t[: self._size] if t.dim() else t, batch)


def check_smallest(worker: DryWorker, holdings: PartitionedData, tried: Stack) -> None:
    """Refuse a partition in which a client has a last batch that is too small to train on.

    The smallest batch is tried, and if it fails, the largest one. If both fail, nothing is refused,
    because the size is not the cause.

    Args:
        tried: Stack of a client that has trained without an error.

    Raises:
        ValueError: If training fails on the smallest batch only. The message names the clients.
    """
    loader, sizes = holdings.loader, holdings.schedule.sizes
    if isinstance(loader, PerClientRoundLoader):
        passes = zip(loader.passes, sizes, strict=True)
        found = [_smallest_batch(one, len(steps)) for one, steps in passes]
        known = (one.batch_size or 0 for one in loader.passes if isinstance(one, DataLoader))
    else:
        found = [min(own, default=None) for own in sizes]
        known = (size for own in sizes for size in own)
    smallest, largest = min((size for size in found if size), default=0), max(known, default=0)
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
            drawn = (holdings.client_indices[owner][:size],)
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
            return in_a_line(error)
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
