"""Does what one client trains on reach what another trains, or anything that leaves? Tried before round one.

Clients train in worlds of their own (`clients.snapshot`). What lies outside of them stays: globals, class
attributes, caches, data sets with memory, files, memory that processes share. Nobody can list these. So two
trainings are compared, each in a fork in which nobody has trained: client A for two rounds, once beside
itself and once beside client B on other data. Whatever of A, or of what the user's Trainer then shows, is not
the same in both is refused by its name: A's updates, which buffers change (the length of a message),
counters, every leaf of a checkpoint, what validation logs, and what the code names by a global. What is
written to files or told to loggers by hand is not looked at.

Where a process can't be forked (a GPU, macOS, Windows, ranks), A, B and A again train here. Compared are A's
updates, buffers and counters; in a checkpoint of the user's Trainer nothing but whole numbers may change.
That does not see what leaves by validation, nor what the first to come has fixed for all.

Both are tests and no proofs: of two rounds and at most eight batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.forks import ForkFailedError, run_in_fork
from lightning_fedq.clients.hooks import crosses_clients, knows_clients
from lightning_fedq.clients.stale import Digests, digests
from lightning_fedq.clients.vector import ChangedTensors
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import seed_for_transforms
from lightning_fedq.functional.batch_stack import map_leaves, map_tensors
from lightning_fedq.rounds import Statistics
from lightning_fedq.training.dry_round import Change, DryWorker, silence

_NOT_SAVED, _NOT_VALIDATED = "not saved", "not validated"
"""Where the error stands for which a checkpoint or a validation, or a part of it, could not be looked at."""
_LARGE = 1 << 22


def digest_checkpoint(trainer: Any) -> Digests:
    """Of a checkpoint that is saved now.

    Where none can be, of all but the states of optimisers, which may have none before a first step, then of
    all but the callbacks, each of which then shows its own state; what is left out is told by
    `describe_undigested`.
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


def digest_outputs(trainer: Any, max_batches: float = math.inf) -> Digests:
    """A checkpoint, a validation and a checkpoint again. Only in a fork.

    Args:
        max_batches: Most batches of a loader.
    """
    found = digest_checkpoint(trainer)
    silence(trainer)
    no = pl.callbacks.Checkpoint | pl.callbacks.ProgressBar
    trainer.callbacks = [c for c in trainer.callbacks if not (isinstance(c, no) or knows_clients(c))]
    if trainer.enable_validation:
        trainer.validating = True
        try:
            _validate(trainer, max_batches)
        except Exception as error:  # of the user's code: the first round would raise it again
            found[_NOT_VALIDATED] = f"{type(error).__name__}: {error}"[:200]
        trainer.training = True
        metrics = {**trainer.callback_metrics, **trainer.logged_metrics}
        values = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float | Tensor)}
        found |= {f"logged {k}": repr(v) for k, v in values.items()}
        after = digest_checkpoint(trainer)
        found |= {f"after validation, {name}": value for name, value in after.items() if name != _NOT_SAVED}
        if _NOT_SAVED not in after:  # what lacked before is seen now
            found.pop(_NOT_SAVED, None)
    return found


def digest_external_state(state: Sequence[tuple[str, Any]]) -> Digests:
    """A digest of each value that code names past its own, and of large tensors their sum."""
    found: Digests = {}
    for way, value in state:
        if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) > _LARGE:
            found[f"{way}, which the code names"] = repr(float(value.sum()))
        else:
            found |= digests(value, f"{way}, which the code names", plain=True)
    return found


def describe_undigested(digests: Sequence[Digests]) -> str:
    """Parts of a Trainer's output that could not be looked at, with the errors. "" if all could.

    Args:
        digests: What it showed at several times; once is enough.
    """
    kinds = {"a checkpoint": _NOT_SAVED, "a validation": _NOT_VALIDATED}
    last = digests[-1] if digests else {}
    parts = [f"{kind} ({last[key]})" for kind, key in kinds.items() if key in last]
    return " or ".join(parts)


def _validate(trainer: Any, max_batches: float) -> None:
    loop = trainer.fit_loop.epoch_loop.val_loop
    seed_for_transforms(0)
    loop.setup_data()
    for loader in loop._combined_loader.flattened if loop._combined_loader is not None else ():
        with suppress(AttributeError):  # workers of the parent do not work for its fork
            loader._iterator, loader.num_workers, loader.timeout = None, 0, 0
    loop._max_batches = [min(own, max_batches) for own in loop._max_batches]
    loop.run()


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
    """Sentences of a run's page about the trial.

    Args:
        method: How it was tried. None: not at all.
        fork_obstacle: Why not in forks.
        is_data_unchanged: Did the other client train on its own data, because the training takes no changed
            ones?
        is_size_unchanged: Was no client of another size tried, because the training takes none?
        describe_undigested: What could not be looked at, and why.
    """
    if method is None:
        return (
            "Isolation of the clients was not tried: whether globals, class attributes, caches, files or "
            "data sets carry data from one client to others is not known."
        )
    begun = "Isolation of the clients was tried before the first round, in "
    data = "beside another client's own data" if is_data_unchanged else "with another client's data changed"
    not_seen = f" It could not look into {unseen}: what such ones hold is not known." if unseen else ""
    if method == "forks":
        size = ", and no client of another size" if is_size_unchanged else ""
        return (
            f"{begun}forks of the process: one client's updates, lengths and counters, and checkpoints and "
            f"validation, {data}{size}. A test over two rounds and a few batches, and no proof.{not_seen}"
        )
    return (
        f"{begun}one process, which can't be forked here ({fork_obstacle}): one client's updates, lengths "
        "and "
        f"counters, and checkpoints, {data}. What reaches validation, or is fixed by the first client to "
        f"train, is not seen so. A test over a few batches, and no proof.{not_seen}"
    )


_BATCHES = {100_000: 8, 1_000_000: 4}
"""Most batches of each training, by the number of parameters; of larger models two."""
_NOISE = 10.0
"""On a device whose sums are not the same twice: so many times the difference of equal trainings passes."""
_OUTLIVES = ("update", "counters", "which buffers")
"""Findings that are never put down to chance: what outlives a fork makes A differ from itself, too."""


class TrialOutcome(NamedTuple):
    """Outcome of some trainings in one fork.

    Args:
        updates: Client A's, `(dim,)` each: of both rounds.
        other_update: The update of who trained beside it first, `(dim,)`.
        buffers: Names of what the first training changed beside the parameters.
        counters: What it counted.
        digests: What the user's Trainer shows after the first client, and at the end.
    """

    updates: list[Tensor]
    other_update: Tensor
    buffers: tuple[str, ...]
    counters: dict[str, Any]
    digests: tuple[Digests, ...] = ()


class IsolationTrial:
    """Trains two clients and compares.

    Args:
        trainer: The user's, in its fit; in forks nobody has trained in it.
        round_stacks: Returns the stacks of a round, of one client each.
        worker: Trains clients.
        statistics: Whether clients make statistics before they train.
        shared: Does validation find in the metrics what clients have logged?
    """

    def __init__(
        self,
        trainer: Any,
        worker: DryWorker,
        round_stacks: Callable[[int], Sequence[Stack]],
        statistics: Statistics | None,
        shared: bool,
    ) -> None:
        self._home, self._worker, self._stacks_of, self._shared = trainer, worker, round_stacks, shared
        self._no_forks, self._statistics = worker.no_forks, statistics
        self._is_data_unchanged = self._is_size_unchanged = False
        self._unseen = ""

    def check(self, clients: Sequence[Stack]) -> str:
        """Refuse a training in which one client's data reach beyond its own message.

        Args:
            clients: At least two, one a stack; no more are looked at.

        Returns:
            What was tried, see `describe_trial`.

        Raises:
            ValueError: If they do, with the names of what differs.
        """
        if len(clients) < 2:
            rank_zero_info("isolation of the clients is not checked, because there is one client only")
            return describe_trial(None)
        one, other = clients[:2]
        size = sum(p.numel() for p in self._home.lightning_module.parameters())
        batches = next((number for limit, number in _BATCHES.items() if size <= limit), 2)
        most = min(batches, len(one.batch_sizes), len(other.batch_sizes))
        found = (self._in_process if self._no_forks else self._in_forks)(one, other, most)
        if found:
            names = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
            raise ValueError(
                f"clients are not isolated: with client {other.clients[0]} on other data beside it, not the "
                f"same for client {one.clients[0]}, or in what leaves, were: {names}. Something outlives a "
                "client: a global variable, a class attribute, a cache, a file, or a data set, a transform "
                "or a collate_fn with memory. Keep it in the module or in a callback, of which every client "
                "has its own, name it by self alone (what code also names by a global is one for all), and "
                "log and save only what validation computes; or, where it tells nothing of "
                "anybody's data, use Federated(check_isolation=False)"
            )
        way: Way = "one process" if self._no_forks else "forks"
        if self._unseen:
            rank_zero_warn(
                f"the trial of isolation could not look into {self._unseen}: whether such ones show one "
                "client's data is not known; let state_dict and hooks work before the first step, "
                "too"
            )
        return describe_trial(
            way, self._no_forks, self._is_data_unchanged, self._is_size_unchanged, self._unseen
        )

    # ---- in one process -----------------------------------------------------------------------------

    def _in_process(self, client: Stack, neighbour: Stack, max_batches: int) -> list[str]:
        alone = getattr(self._home.strategy, "num_ranks", 1) <= 1
        # the second shows what differs by itself
        saved = [digest_checkpoint(self._home) for _ in range(2 * alone)]
        first, buffers, counters = self._train(client, max_batches)
        noise = 0.0
        if first.device.type != "cpu":
            noise = _NOISE * _distance(first, self._train(client, max_batches)[0])
        _, of_other, counted = self._train_on_changed_data(
            lambda change: self._train(neighbour, max_batches, change)
        )
        again = self._train(client, max_batches)[0]
        found = ["update of a client that trains twice"] if _distance(first, again) > noise else []
        found += _lengths(buffers, of_other, counters, counted)
        if alone:
            before, same = saved
            after = digest_checkpoint(self._home)
            self._unseen = describe_undigested([after])
            by_chance = set(_differ(before, same))
            changed = [name for name in _differ(same, after) if name not in by_chance]
            found += [name for name in changed if not after.get(name, "0").lstrip("-").isdigit()]
        return found

    # ---- in forks -----------------------------------------------------------------------------------

    def _in_forks(self, client: Stack, neighbour: Stack, max_batches: int) -> list[str]:
        alone = self._rounds(client, client, max_batches, None)
        self._check_validation(alone.digests[0])
        beside = self._train_on_changed_data(
            lambda change: self._rounds(neighbour, client, max_batches, change)
        )
        found, self._unseen = self._compare(alone, beside), describe_undigested(alone.digests)
        if not found:  # another number of samples must not matter either
            try:
                fewer = run_in_fork(lambda: self._beside_fewer(neighbour, client, max_batches))
                if _distance(alone.updates[0], fewer.updates[0]):
                    found = ["update beside a client of another size"]
            except ForkFailedError:  # which says nothing of sizes
                raise
            except Exception:  # a size that the module does not take
                self._is_size_unchanged = True
                return []
        if not found:
            return []
        again = self._compare(alone, self._rounds(client, client, max_batches, None), same=True)
        return [name for name in found if name not in again or name.startswith(_OUTLIVES)]

    def _check_validation(self, shown: Digests) -> None:
        """Refuse a validation that fails after a round, on two batches and on all, if there is one.

        Raises:
            ValueError: If it does, and may find nothing there that a trial leaves out: what clients share.
        """
        home, error = self._home, shown.get(_NOT_VALIDATED)
        shared = self._shared or any(crosses_clients(c) and not knows_clients(c) for c in home.callbacks)
        if not error or shared or not home.fit_loop.epoch_loop._should_check_val_epoch():
            return
        if _NOT_VALIDATED in run_in_fork(lambda: digest_outputs(home)):
            raise ValueError(
                f"validation fails after a round ({error}): what a training leaves in modules, callbacks and "
                "metrics is dropped with the client. Use it in on_train_epoch_end, which is the client's, or "
                "let what is logged be heard by client_metrics='shared'"
            )

    def _train_on_changed_data(self, train: Callable[[Change | None], T]) -> T:
        """Train on data that are changed as much as the module takes without an error."""
        for change in (_scale_floats, _mirrored):
            try:
                return train(change)
            except ForkFailedError:
                raise
            except Exception:  # the user's code does not take them
                continue
        self._is_data_unchanged = True
        return train(None)

    def _compare(self, alone: TrialOutcome, beside: TrialOutcome, same: bool = False) -> list[str]:
        found = []
        if not same and _distance(alone.other_update, alone.updates[0]):
            found.append("update of a client that trains twice")
        pairs = zip(alone.updates, beside.updates, strict=True)
        found += [f"update of round {n + 1}" for n, (a, b) in enumerate(pairs) if _distance(a, b)]
        found += _lengths(alone.buffers, beside.buffers, alone.counters, beside.counters)
        for before, after in zip(alone.digests, beside.digests, strict=True):
            names = _differ(before, after)
            repeated = {f"after validation, {name}" for name in names}
            found += [name for name in names if name not in repeated]
        return list(dict.fromkeys(found))

    def _rounds(
        self, neighbour: Stack, client: Stack, max_batches: int, change: Change | None
    ) -> TrialOutcome:
        """In a fork: two rounds of `neighbour`, then `client`. A plays both first, so that numbers agree."""
        return run_in_fork(lambda: self._train_both(neighbour, client, max_batches, change))

    def _train_both(
        self, neighbour: Stack, client: Stack, max_batches: int, change: Change | None
    ) -> TrialOutcome:
        before, buffers, counters = self._train(neighbour, max_batches, change)
        first, updates = run_in_fork(lambda: self._digest_outputs(max_batches)), []  # disturbs nothing there
        for round in range(2):
            if round:
                self._next_round()
                self._train(self._stack_in_round(neighbour, 1), max_batches, change)
            updates.append(self._train(self._stack_in_round(client, round), max_batches)[0])
        return TrialOutcome(updates, before, buffers, counters, (first, self._digest_outputs(max_batches)))

    def _beside_fewer(self, neighbour: Stack, client: Stack, max_batches: int) -> TrialOutcome:
        """One round beside a client with a batch less, or with a smaller batch."""
        fewer, change = (max_batches - 1, None) if max_batches > 1 else (max_batches, _halved)
        before, buffers, counters = self._train(neighbour, fewer, change)
        return TrialOutcome([self._train(client, max_batches)[0]], before, buffers, counters)

    def _digest_outputs(self, max_batches: int) -> Digests:
        return digest_outputs(self._home, min(max_batches, 2)) | digest_external_state(
            self._worker.fit.external_state()
        )

    def _stack_in_round(self, client: Stack, round: int) -> Stack:
        return next((stack for stack in self._stacks_of(round) if stack.clients == client.clients), client)

    def _next_round(self) -> None:
        current = self._home.fit_loop.epoch_progress.current
        for count in ("ready", "started", "processed", "completed"):
            setattr(current, count, getattr(current, count) + 1)
        self._worker.fit.end_round()  # the next clients begin with the fit as it is then

    def _train(
        self, stack: Stack, max_batches: int, change: Change | None = None
    ) -> tuple[Tensor, tuple[str, ...], dict[str, Any]]:
        names, found = self._worker.vector.members.counters, []
        counters, changed = dict[str, Any](), list[str]()

        def look(client: Client) -> None:
            counters.update({name: client.module.get_buffer(name).tolist() for name in names})
            changed.extend(ChangedTensors.compare(self._home.lightning_module, client.module).changed)

        if self._statistics is not None:  # as in a run: first these, then the training
            found.append(self._worker.statistics(stack, max_batches, self._statistics.size, change))
        found.append(self._worker.try_out(stack, max_batches, look, change=change).detach())
        return torch.cat([part.to(found[-1]) for part in found]), tuple(changed), counters


def _distance(left: Tensor, right: Tensor) -> float:
    if torch.equal(left.nan_to_num(), right.nan_to_num()):
        return 0.0
    return float((left - right).abs().nan_to_num(torch.inf).max())


def _differ(left: Digests, right: Digests) -> list[str]:
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]


def _lengths(
    left: Sequence[str], right: Sequence[str], counters: dict[str, Any], counted: dict[str, Any]
) -> list[str]:
    """Differences in a message's length, or in what is counted without noise."""
    found = []
    if names := sorted(set(left) ^ set(right)):
        found.append(f"which buffers change ({', '.join(names)})")
    if names := [name for name in counters if counters[name] != counted.get(name)]:
        found.append(f"counters ({', '.join(names)})")
    return found


# ---- another client's data ------------------------------------------------------------------------------


def _scale_floats(batch: Any) -> Any:
    """Floats five times as large, and one more. Integers, labels say, within the batch's range."""
    return map_leaves(lambda leaf: _changed(leaf, True), batch)


def _mirrored(batch: Any) -> Any:
    """All numbers mirrored within the batch's range."""
    return map_leaves(lambda leaf: _changed(leaf, False), batch)


def _halved(batch: Any) -> Any:
    """Half of the samples, two at least."""
    return map_tensors(lambda leaf: leaf[: max(2, len(leaf) // 2)] if leaf.dim() else leaf, batch)


def _changed(value: Any, scales: bool) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        return _changed(torch.from_numpy(value), scales).numpy()
    if not isinstance(value, Tensor) or not value.numel() or value.is_complex() or value.dtype == torch.bool:
        return value
    if value.is_floating_point() and scales:
        return 5 * value + 1
    return (value.min() + value.max() - value).to(value.dtype)
