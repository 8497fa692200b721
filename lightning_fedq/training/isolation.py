"""Check before the first round that data of one client reach nothing but its own messages.

Every client trains in an isolated copy of the training state (`clients.snapshot`). State outside of this copy
is shared by all clients: globals, class attributes, caches, data sets with memory, files, shared memory. Such
state can't be listed, so the check compares two trainings, each in a fork in which no client has trained.
Client A trains two rounds, once next to itself and once next to client B on changed data. The run is refused
if A's results, or the outputs of the user's Trainer, differ between the two. Compared are:

- A's updates, and the names of the buffers that change, because they decide the length of a message,
- counters, every leaf of a checkpoint, and metrics that validation logs,
- globals that the code names.

Files and loggers that the user's code writes to by hand are not compared.

If a process can't be forked (a GPU, macOS, Windows), then A, B and A again train in this process. A's
updates, buffers and counters are compared, and a checkpoint of the user's Trainer may change in whole numbers
only. This misses leaks through validation, and state that the first client fixes for all.

Both ways are tests over at most eight batches a training (and two rounds in forks), not proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_fedq._lightning import rank_zero_info, rank_zero_warn
from lightning_fedq.clients.changed_tensors import ChangedTensors, largest_difference
from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.forks import ForkFailedError, run_in_fork
from lightning_fedq.clients.stale import Digests, digests, is_user_s
from lightning_fedq.data.batches import Stack
from lightning_fedq.functional.batch_stack import map_leaves, map_tensors
from lightning_fedq.training.dry_round import Change, DryWorker, silence
from lightning_fedq.training.rehearsal import validate

_NOT_SAVED, _NOT_VALIDATED = "not saved", "not validated"
"""Keys of the errors for which a checkpoint or a validation (or a part of it) could not be digested."""
_LARGE = 1 << 22


def digest_checkpoint(trainer: Any) -> Digests:
    """Digest a checkpoint that is saved now.

    An optimiser may have no state before its first step, so saving may fail. Then the checkpoint is saved
    again without the states of optimisers, and at last also without callbacks. In this case each callback's
    state is digested separately. The errors are in the digests, see `describe_undigested`.
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
            except Exception as error:  # raised by the user's code, or by an optimiser without a state
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


def digest_outputs(trainer: Any, max_batches: float = math.inf) -> Digests:
    """Digest a checkpoint, a validation and a second checkpoint. Run it in a fork only.

    Args:
        max_batches: Largest number of batches of each validation loader.
    """
    found = digest_checkpoint(trainer)
    silence(trainer)
    trainer.callbacks = [callback for callback in trainer.callbacks if is_user_s(callback)]
    if trainer.enable_validation:
        trainer.validating = True
        try:
            validate(trainer, max_batches)
        except Exception as error:  # the user's error, which the first round would raise again
            found[_NOT_VALIDATED] = f"{type(error).__name__}: {error}"[:200]
        trainer.training = True
        metrics = {**trainer.callback_metrics, **trainer.logged_metrics}
        values = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float | Tensor)}
        found |= {f"logged {k}": repr(v) for k, v in values.items()}
        after = digest_checkpoint(trainer)
        found |= {f"after validation, {name}": value for name, value in after.items() if name != _NOT_SAVED}
        if _NOT_SAVED not in after:  # the second checkpoint has the parts that the first one lacked
            found.pop(_NOT_SAVED, None)
    return found


def describe_undigested(digests: Digests) -> str:
    """Describe outputs of a Trainer that could not be digested, with the errors. "" if all could be."""
    kinds = {"a checkpoint": _NOT_SAVED, "a validation": _NOT_VALIDATED}
    return " or ".join(f"{kind} ({digests[key]})" for kind, key in kinds.items() if key in digests)


# ---- the trial ---------------------------------------------------------------------------------------------


T = TypeVar("T")
Way = Literal["forks", "one process"]


def describe_trial(
    method: Way | None,
    fork_obstacle: str = "",
    is_data_unchanged: bool = False,
    is_size_unchanged: bool = False,
    unseen: str = "",
) -> str:
    """Describe the isolation check for the privacy page of a run.

    Args:
        method: How the check ran. None if it did not run.
        fork_obstacle: Why the process can't be forked.
        is_data_unchanged: Did the other client train on unchanged data, because the training accepts no
            changed data?
        is_size_unchanged: Was no client of another size tried, because the training accepts none?
        unseen: Outputs that could not be digested, see `describe_undigested`.
    """
    if method is None:
        return (
            "Isolation of the clients was not tested. Globals, class attributes, caches, files or data sets "
            "may carry data from one client to others."
        )
    begun = "Isolation of the clients was tested before the first round, in "
    data = "next to another client's own data" if is_data_unchanged else "with another client's data changed"
    not_seen = f" Not tested, because of errors: {unseen}." if unseen else ""
    if method == "forks":
        size = ", and no client of another size" if is_size_unchanged else ""
        return (
            f"{begun}forks of the process: one client's updates, message lengths and counters, checkpoints "
            f"and validation, {data}{size}. It is a test over two rounds and a few batches, not a proof."
            f"{not_seen}"
        )
    return (
        f"{begun}one process, because it can't be forked here ({fork_obstacle}): one client's updates, "
        f"message lengths and counters, and checkpoints, {data}. It does not see leaks through validation, "
        "or state that the first client fixes for all. It is a test over a few batches, not a proof."
        f"{not_seen}"
    )


_BATCHES = {100_000: 8, 1_000_000: 4}
"""Largest number of batches of a training, by the number of parameters. Two for larger models."""
_NOISE = 10.0
"""Tolerance on a device with non-deterministic sums: multiple of the difference between equal trainings."""
_OUTLIVES = ("update", "counters", "which buffers")
"""Findings that count even if client A differs from itself: state that outlives a fork causes that, too."""


class Training(NamedTuple):
    """Result of the training of one client.

    Args:
        update: Update, `(dim,)`, behind the client's statistics if there are any.
        buffers: Names of the tensors that the training changed, except the parameters.
        counters: Values of the counters after the training.
    """

    update: Tensor
    buffers: tuple[str, ...]
    counters: dict[str, Any]


class TrialOutcome(NamedTuple):
    """Results of the trainings in one fork, of client A and of the client next to it.

    Args:
        updates: Client A's updates of both rounds, `(dim,)` each.
        neighbour: First training, of the client next to A.
        digests: Outputs of the user's Trainer after the first client, and at the end.
    """

    updates: list[Tensor]
    neighbour: Training
    digests: tuple[Digests, Digests]


class IsolationTrial:
    """Test of isolation: trains client A alone and next to client B, and compares the results.

    Args:
        trainer: The user's Trainer in its fit. In forks, no client has trained in it.
        round_stacks: Returns the stacks of a round, of one client each.
        worker: Trains clients outside the rounds.
        reads_statistics: Do clients compute statistics before they train?
    """

    def __init__(
        self,
        trainer: Any,
        worker: DryWorker,
        round_stacks: Callable[[int], Sequence[Stack]],
        reads_statistics: bool,
    ) -> None:
        self._home, self._worker, self._stacks_of = trainer, worker, round_stacks
        self._no_forks, self._reads_statistics = worker.no_forks, reads_statistics
        self._is_data_unchanged = self._is_size_unchanged = False
        self._unseen = ""

    def check(self, clients: Sequence[Stack]) -> str:
        """Refuse a training in which one client's data reach more than its own messages.

        Args:
            clients: Stacks of one client each. The first two are tried.

        Returns:
            Description of the test, see `describe_trial`.

        Raises:
            ValueError: If they do. The message names what differs.
        """
        if len(clients) < 2:
            rank_zero_info("Isolation of the clients is not tested, because there is only one client")
            return describe_trial(None)
        client, neighbour = clients[:2]
        size = sum(p.numel() for p in self._home.lightning_module.parameters())
        batches = next((number for limit, number in _BATCHES.items() if size <= limit), 2)
        max_batches = min(batches, len(client.batch_sizes), len(neighbour.batch_sizes))
        findings = (self._in_process if self._no_forks else self._in_forks)(client, neighbour, max_batches)
        if findings:
            names = "; ".join(findings[:3]) + (f"; and {len(findings) - 3} more" if len(findings) > 3 else "")
            raise ValueError(
                f"Data of client {neighbour.clients[0]} changed results of client {client.clients[0]}, or "
                f"outputs of the run: {names}. Move state outside of the module and callbacks (globals, "
                "class attributes, caches, files, data sets) into them, or use "
                "Federated(check_isolation=False)"
            )
        way: Way = "one process" if self._no_forks else "forks"
        if self._unseen:
            rank_zero_warn(
                f"The isolation test could not look into {self._unseen}. Let state_dict and hooks work "
                "before the first step, too"
            )
        unchanged = self._is_data_unchanged, self._is_size_unchanged
        return describe_trial(way, self._no_forks, *unchanged, self._unseen)

    # ---- in one process -----------------------------------------------------------------------------

    def _in_process(self, client: Stack, neighbour: Stack, max_batches: int) -> list[str]:
        """Train A, then B, then A again in this process, and return what differs."""
        has_ranks = getattr(self._home.strategy, "num_ranks", 1) > 1  # checkpoints are those of all ranks
        # two checkpoints: leaves that differ between them change without any training
        saved = [] if has_ranks else [digest_checkpoint(self._home), digest_checkpoint(self._home)]
        first = self._train(client, max_batches)
        tolerance = 0.0
        if first.update.device.type != "cpu":
            tolerance = _NOISE * largest_difference(first.update, self._train(client, max_batches).update)
        other = self._train_on_changed_data(lambda change: self._train(neighbour, max_batches, change))
        again = self._train(client, max_batches)
        is_changed = largest_difference(first.update, again.update) > tolerance
        found = ["update of a client that trains twice"] if is_changed else []
        found += _compare_lengths(first, other)
        if has_ranks:
            return found
        after, by_chance = digest_checkpoint(self._home), set(_differ(*saved))
        self._unseen = describe_undigested(after)
        changed = [name for name in _differ(saved[1], after) if name not in by_chance]
        # whole numbers may change
        return found + [name for name in changed if not after.get(name, "0").lstrip("-").isdigit()]

    # ---- in forks -----------------------------------------------------------------------------------

    def _in_forks(self, client: Stack, neighbour: Stack, max_batches: int) -> list[str]:
        """Train A next to itself, then next to B, and return what differs for A, if not by chance."""
        alone = self._rounds(client, client, max_batches, None)
        beside = self._train_on_changed_data(
            lambda change: self._rounds(neighbour, client, max_batches, change)
        )
        self._unseen = describe_undigested(alone.digests[-1])
        found = self._compare(alone, beside)
        if not found and self._depends_on_size(alone.updates[0], neighbour, client, max_batches):
            found = ["update beside a client of another size"]
        if not found:
            return []
        again = self._compare(alone, self._rounds(client, client, max_batches, None), same=True)
        return [name for name in found if name not in again or name.startswith(_OUTLIVES)]

    def _depends_on_size(self, alone: Tensor, neighbour: Stack, client: Stack, max_batches: int) -> bool:
        """Return whether A's update depends on the number of B's samples. False if B can't have fewer.

        Args:
            alone: A's update next to itself.
        """
        try:
            fewer = self._worker.run_in_fork(lambda: self._beside_fewer(neighbour, client, max_batches))
            return largest_difference(alone, fewer) > 0.0
        except ForkFailedError:  # the fork failed, whatever the size
            raise
        except Exception:  # the module accepts no other size
            self._is_size_unchanged = True
            return False

    def _train_on_changed_data(self, train: Callable[[Change | None], T]) -> T:
        """Train on data that are changed as much as the module accepts, else on unchanged data."""
        for scales_floats in (True, False):
            try:
                return train(partial(map_leaves, partial(_change_numbers, scales_floats)))
            except ForkFailedError:
                raise
            except Exception:  # the user's code fails on such data
                continue
        self._is_data_unchanged = True
        return train(None)

    def _compare(self, alone: TrialOutcome, beside: TrialOutcome, same: bool = False) -> list[str]:
        found = []
        if not same and largest_difference(alone.neighbour.update, alone.updates[0]):
            found.append("update of a client that trains twice")
        pairs = zip(alone.updates, beside.updates, strict=True)
        found += [f"update of round {n + 1}" for n, (a, b) in enumerate(pairs) if largest_difference(a, b)]
        found += _compare_lengths(alone.neighbour, beside.neighbour)
        for before, after in zip(alone.digests, beside.digests, strict=True):
            names = _differ(before, after)
            repeated = {f"after validation, {name}" for name in names}
            found += [name for name in names if name not in repeated]
        return list(dict.fromkeys(found))

    def _rounds(
        self, neighbour: Stack, client: Stack, max_batches: int, change: Change | None
    ) -> TrialOutcome:
        """Train `neighbour`, then `client`, in each of two rounds, in a fork.

        For the reference, client A takes both places, so that the numbers of trainings are equal.
        """

        def train_both() -> TrialOutcome:
            first = self._train(neighbour, max_batches, change)
            # a fork of its own, so that validation changes nothing for the second round
            outputs, updates = run_in_fork(lambda: self._digest_outputs(max_batches)), []
            for round in range(2):
                if round:
                    self._next_round()
                    self._train(self._stack_in_round(neighbour, 1), max_batches, change)
                updates.append(self._train(self._stack_in_round(client, round), max_batches).update)
            return TrialOutcome(updates, first, (outputs, self._digest_outputs(max_batches)))

        return self._worker.run_in_fork(train_both)

    def _beside_fewer(self, neighbour: Stack, client: Stack, max_batches: int) -> Tensor:
        """Train B on one batch less, or on half of its only batch, and return A's update after it."""
        fewer, change = (max_batches - 1, None) if max_batches > 1 else (max_batches, _halved)
        self._train(neighbour, fewer, change)
        return self._train(client, max_batches).update

    def _digest_outputs(self, max_batches: int) -> Digests:
        found = digest_outputs(self._home, min(max_batches, 2))
        # values outside the client state that code names. Of large tensors, the sum
        for way, value in self._worker.fit.external_state():
            if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) > _LARGE:
                found[f"{way}, which the code names"] = repr(float(value.sum()))
            else:
                found |= digests(value, f"{way}, which the code names", plain=True)
        return found

    def _stack_in_round(self, client: Stack, round: int) -> Stack:
        return next((stack for stack in self._stacks_of(round) if stack.clients == client.clients), client)

    def _next_round(self) -> None:
        current = self._home.fit_loop.epoch_progress.current
        for count in ("ready", "started", "processed", "completed"):
            setattr(current, count, getattr(current, count) + 1)
        self._worker.fit.end_round()  # the next clients are copied from the fit in its present state

    def _train(self, stack: Stack, max_batches: int, change: Change | None = None) -> Training:
        names, found = self._worker.vector.members.counters, []
        counters, changed = dict[str, Any](), list[str]()

        def look(client: Client) -> None:
            counters.update({name: client.module.get_buffer(name).tolist() for name in names})
            changed.extend(ChangedTensors.compare(self._home.lightning_module, client.module).changed)

        if self._reads_statistics:  # in a run, too, statistics come before the training
            found.append(self._worker.statistics(stack, max_batches, change))
        found.append(self._worker.try_out(stack, max_batches, look, change=change).detach())
        return Training(torch.cat([part.to(found[-1]) for part in found]), tuple(changed), counters)


def _differ(left: Digests, right: Digests) -> list[str]:
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]


def _compare_lengths(left: Training, right: Training) -> list[str]:
    """Return the differences in the length of a message, and in counters, which travel without noise."""
    found = []
    if names := sorted(set(left.buffers) ^ set(right.buffers)):
        found.append(f"which buffers change ({', '.join(names)})")
    if names := [name for name in left.counters if left.counters[name] != right.counters.get(name)]:
        found.append(f"counters ({', '.join(names)})")
    return found


# ---- another client's data ------------------------------------------------------------------------------


def _halved(batch: Any) -> Any:
    """Keep half of the samples, at least two."""
    return map_tensors(lambda leaf: leaf[: max(2, len(leaf) // 2)] if leaf.dim() else leaf, batch)


def _change_numbers(scales_floats: bool, value: Any) -> Any:
    """Map floats x to 5 x + 1, if wanted. Mirror other numbers (such as labels) within the batch's range."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        return _change_numbers(scales_floats, torch.from_numpy(value)).numpy()
    if not isinstance(value, Tensor) or not value.numel() or value.is_complex() or value.dtype == torch.bool:
        return value
    if value.is_floating_point() and scales_floats:
        return 5 * value + 1
    return (value.min() + value.max() - value).to(value.dtype)
