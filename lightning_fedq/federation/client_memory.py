"""Memory of module, data module and callbacks from batch to batch, which goes with the client.

A number that a training step keeps (a running mean of its losses), a batch that a callback mixes into the
next one, or statistics that a data module's batch hooks update would let one client's exact data into the
next client's update, past the mechanism. In a run that withholds clients' metrics every client begins with
what the round began with. Hooks at the end of an epoch see what the round's last client has left, and the
next round begins without it. Integers that count batches go on by those of the longest client, and metrics
that training updates begin empty.

Callbacks are looked at where a hook of theirs has changed a batch, a loss, a gradient or a weight in place.
Of all others what they keep can't come into an update. Datasets and their transforms are not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_fedq._lightning import is_overridden, pl, rank_zero_info
from lightning_fedq.federation.saved_states import same
from lightning_fedq.federation.undo import Undo

_BEFORE_A_STEP = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step"),
)
_OF_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_COPIED = 1 << 22
"""Elements up to which a tensor is copied; of larger ones, such as a data module's data, nothing is kept."""
_MOST = 10_000
"""Entries of a container that is looked at: a vocabulary is not, and nothing grows so long in a client."""
_NOT_LOOKED_AT = {"_forward_counter"}  # of Opacus, within one step


class ClientMemory:
    """Values in attributes that one client's training has changed, and the next client must not find.

    Args:
        trainer: Of the fit in progress.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        module, datamodule = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
        machinery = set(vars(pl.LightningModule()))
        parts = [
            part
            for part in module.modules()
            if not isinstance(part, Metric)
            and not type(part).__module__.startswith(("torchmetrics.", "torch."))
        ]
        self._of_module = [_Memory(part, machinery, numbers_only=True) for part in parts]
        own = set(vars(pl.LightningDataModule()))
        hooks = datamodule is not None and any(
            is_overridden(hook, datamodule, pl.LightningDataModule) for hook in _OF_BATCHES
        )
        self._of_data = [_Memory(datamodule, own)] if hooks else []
        self._of_callbacks = [
            _Memory(callback, set(_BEFORE_A_STEP))
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if not type(callback).__module__.startswith(
                ("lightning_fedq.", "pytorch_lightning.", "lightning.")
            )
        ]
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._counted: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._acting: list[_Memory] = []
        self._on, self._told = False, False

    def attach(self, undo: Undo) -> None:
        """Begin to look, until `undo`."""
        undo.replace(self, "_on", True)
        for memory in self._of_callbacks:
            for hook in _BEFORE_A_STEP:
                if is_overridden(hook, memory.owner, pl.Callback):
                    undo.replace(memory.owner, hook, self._watched(memory, getattr(memory.owner, hook)))

    def _watched(self, memory: _Memory, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A callback's hook, and whether it changes what the client trains on or with."""

        def watched(trainer: Any, module: Any, *args: Any) -> Any:
            memory.begin()
            before = _versions(module, args)
            result = hook(trainer, module, *args)
            if memory not in self._acting and before != _versions(module, args):
                self._acting.append(memory)
            return result

        return watched

    def open(self) -> None:
        """A round opens, before its first batch is asked for."""
        for memory in self._of_data if self._on else ():
            memory.begin()

    def begin(self) -> None:
        """At a round's first batch."""
        for memory in self._of_module if self._on else ():
            memory.begin()
        for place, count in self._left.items() if self._on else ():
            if self._metrics[place].update_count == count:  # nobody has reset it since
                self._metrics[place].reset()
        self._left, self._counted = {}, self._updates()

    def begin_client(self) -> None:
        """At the first batch of a client that is not the round's first."""
        self._put_back([*self._of_module, *self._acting])
        self._reset_metrics()

    def end_client(self, batches: int, last: bool) -> None:
        """After a client's last batch.

        Args:
            batches: How many it had.
            last: Of the round? What it leaves stays until the next one.
        """
        for memory in [*self._of_module, *self._acting] if self._on else ():
            memory.count(batches)
        self._put_back([*self._of_data, *(() if last else [*self._of_module, *self._acting])])
        if not last:
            self._reset_metrics()

    def end_round(self) -> None:
        """Before the hooks that may look at what the last client has left."""
        for memory in [*self._of_module, *self._of_data, *self._of_callbacks]:
            memory.end(memory in self._of_module or memory in self._acting)
        if self._counted:
            self._left, self._counted = self._updated(), {}

    def _updates(self) -> dict[int, int]:
        return {place: metric.update_count for place, metric in enumerate(self._metrics)}

    def _updated(self) -> dict[int, int]:
        """Metrics that training has updated since, by place, with their counts."""
        return {place: count for place, count in self._updates().items() if count != self._counted[place]}

    def _reset_metrics(self) -> None:
        for place in self._updated() if self._on else ():
            self._metrics[place].reset()
            self._counted[place] = self._metrics[place].update_count

    def _put_back(self, memories: list[_Memory]) -> None:
        if not self._on:
            return
        changed = [f"{type(m.owner).__name__}.{name}" for m in memories for name in m.put_back()]
        if changed and not self._told:
            self._told = True
            rank_zero_info(
                f"training changed {', '.join(changed[:10])}: because this run claims privacy, every client "
                "begins with what the round began with, and counts of batches go on by those of the longest "
                "client; a schedule can go by trainer.global_step, which is the client's own"
            )


class _Memory:
    """Attributes of one object, as a round begins with them.

    Args:
        owner: Whose.
        skipped: Names that are not looked at.
        numbers_only: Tensors of more than one element are looked at elsewhere.
    """

    def __init__(self, owner: Any, skipped: set[str], numbers_only: bool = False) -> None:
        self.owner, self._skipped, self._numbers_only = owner, skipped | _NOT_LOOKED_AT, numbers_only
        self._start: dict[str, Any] | None = None
        self._left: dict[str, tuple[Any, Any]] = {}
        self._counts: dict[str, int | None] = {}

    def _values(self) -> Iterator[tuple[str, Any]]:
        for name, value in list(vars(self.owner).items()):
            if name not in self._skipped and _is_plain(value, self._numbers_only):
                yield name, value

    def begin(self) -> None:
        """Remember the start of a round, once in it, without what the last one left behind."""
        if self._start is not None:
            return
        for name, (left, start) in self._left.items():
            now = vars(self.owner).get(name, _NONE)
            if now is not _NONE and same(left, now):
                self._set(name, start)
            elif isinstance(now, list) and isinstance(left, list) and same(left, now[: len(left)]):
                self._set(name, [*(start if isinstance(start, list) else ()), *now[len(left) :]])
        self._left, self._counts = {}, {}
        self._start = {name: _copy(value) for name, value in self._values()}

    def _changed(self) -> dict[str, Any]:
        """Former values of the attributes that have changed since, `_NONE` where there was none."""
        if self._start is None:
            return {}
        return {
            name: self._start.get(name, _NONE)
            for name, now in self._values()
            if not same(self._start.get(name, _NONE), now)
        }

    def count(self, batches: int) -> None:
        """Note which integers count batches. The last one may not be counted yet."""
        for name, before in self._changed().items():
            now = vars(self.owner)[name]
            counts = type(before) is int and type(now) is int and now - before in (batches - 1, batches)
            most = self._counts.get(name, 0)
            self._counts[name] = max(most, batches) if counts and most is not None else None

    def put_back(self) -> list[str]:
        """Give the attributes what the round began with. Names of those that had changed."""
        changed = self._changed()
        for name, value in changed.items():
            self._set(name, value)
        return list(changed)

    def end(self, keep: bool) -> None:
        """The round is over. Keep in mind what its last client has left, if anything was put back before."""
        if self._start is None:
            return
        for name, before in self._changed().items() if keep else ():
            start = before + (self._counts.get(name) or 0) if type(before) is int else before
            self._left[name] = _copy(vars(self.owner)[name]), start
        self._start = None

    def _set(self, name: str, value: Any) -> None:
        now = vars(self.owner).get(name)
        if value is _NONE:
            vars(self.owner).pop(name, None)
        elif type(now) is type(value) and isinstance(now, list | deque | dict | set):
            now.clear()
            (now.update if isinstance(now, dict | set) else now.extend)(_copy(value))  # type: ignore[operator]
        else:
            vars(self.owner)[name] = _copy(value)


_NONE = object()
"""No such attribute."""


def _is_plain(value: Any, numbers_only: bool) -> bool:
    """Numbers, words and small tensors, or containers of them?"""
    kinds = (int, float, complex, str, list, deque, dict, set, type(None))
    if not isinstance(value, kinds if numbers_only else (*kinds, tuple, Tensor, np.ndarray)):
        return False
    if isinstance(value, list | deque | dict | set | tuple) and len(value) > _MOST:
        return False
    leaves = [*value] if isinstance(value, set) else tree_leaves(value)
    size = 0
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter) or (isinstance(leaf, np.ndarray) and leaf.dtype.hasobject):
            return False
        if isinstance(leaf, Tensor | np.ndarray):
            size = max(size, int(np.prod(leaf.shape)))
        elif not isinstance(leaf, int | float | complex | str | None):
            return False
    return size <= (1 if numbers_only else _COPIED)


def _copy(value: Any) -> Any:
    if isinstance(value, set):
        return set(value)
    return tree_map(
        lambda leaf: (
            leaf.detach().clone()
            if isinstance(leaf, Tensor)
            else leaf.copy()
            if isinstance(leaf, np.ndarray)
            else leaf
        ),
        value,
    )


def _versions(module: nn.Module, args: tuple[Any, ...]) -> list[tuple[int, int]]:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return [(id(tensor), tensor._version) for tensor in (*tensors, *gradients, *module.parameters())]
