"""States that a checkpoint holds beside parameters and buffers.

Of the module those of persistent metrics, what `get_extra_state` gives and its hyperparameters; of the data
module the same and its `state_dict()`; of callbacks their `state_dict()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torchmetrics import Metric

from lightning_fedq._lightning import pl


def copy_of(value: Any) -> Any:
    """A copy of containers and tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


class SavedStates:
    """States that checkpoints hold, that no noise covers, and that a training may have changed.

    Args:
        module: Module in its present state.
        datamodule: The same, where there is one.
        data: Its state when the round began, before the first batch came through its hooks. None is as now.
        callbacks: Callbacks whose states a checkpoint holds as they are; files and times do not count.
    """

    def __init__(
        self,
        module: nn.Module,
        datamodule: Any = None,
        data: dict[str, Any] | None = None,
        callbacks: Sequence[pl.Callback] = (),
    ) -> None:
        kinds = (pl.callbacks.Checkpoint, pl.callbacks.Timer)
        self._callbacks = [one for one in callbacks if not isinstance(one, kinds)]
        self._module = module
        self._owners: list[Any] = [one for one in (module, datamodule) if one is not None]
        self._datamodule, self._checking = datamodule, False
        self._before = copy_of(_states(module))
        self._settings = [dict(_hparams(owner)) for owner in self._owners]
        self._others = self._states_of_others()
        if data is not None:
            self._others[_DATA] = type(datamodule).__name__, data

    def check(self, batches: int | None = None) -> None:
        """Refuse to go on where they have changed, and put them back.

        Args:
            batches: After a client's last batch: how many it had, by which an integer may have advanced.
                Callbacks are looked at only then: of an open round a checkpoint holds what it began with.

        Raises:
            ValueError: Naming them.
        """
        if self._checking:  # by a hook of the `state_dict()` that is looked at
            return
        self._checking = True
        try:
            changed = self._changed(batches)
        finally:
            self._checking = False
        if not changed:
            return
        for part in self._module.modules():
            if isinstance(part, Metric):
                part.reset()
        self._module.load_state_dict(copy_of(self._before), strict=False)
        for owner, before in zip(self._owners, self._settings, strict=True):
            for name in [name for name in _hparams(owner) if name not in before]:
                del owner.hparams[name]
            owner.hparams.update(before)
        raise ValueError(
            f"training changed {', '.join(changed[:10])}, which checkpoints hold beside parameters and "
            "buffers, exactly and without noise; leave persistent(True) of metrics and get_extra_state out, "
            "and what follows from batches out of hyperparameters, or update them in validation"
        )

    def _changed(self, batches: int | None) -> list[str]:
        before, now = {**self._before}, {**_states(self._module)}
        for owner, settings in zip(self._owners, self._settings, strict=True):
            before |= {f"hparams.{name}": value for name, value in settings.items()}
            now |= {f"hparams.{name}": value for name, value in _hparams(owner).items()}
        changed = [name for name in {**before, **now} if not same(before.get(name), now.get(name))]
        others = self._states_of_others()
        for who, (name, state) in others.items():
            if who != _DATA and batches is None:
                continue
            _, old = self._others[who]
            changed += [
                f"{name}.{key}"
                for key in {**old, **state}
                if not same(old.get(key), state.get(key))
                and not _has_counted(old.get(key), state.get(key), batches)
            ]
        if batches is not None and not changed:
            self._others = others
        return changed

    def _states_of_others(self) -> dict[int, tuple[str, dict[str, Any]]]:
        """Names and states, by the place of the callback."""
        states = {
            n: (type(one).__name__, deepcopy(one.state_dict())) for n, one in enumerate(self._callbacks)
        }
        if self._datamodule is not None:
            states[_DATA] = type(self._datamodule).__name__, deepcopy(self._datamodule.state_dict())
        return states


_DATA = -1
"""The place of the data module."""


def _states(module: nn.Module) -> dict[str, Any]:
    if not any(_saves_more(part) for part in module.modules()):
        return {}
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name not in own}


def _hparams(owner: Any) -> dict[str, Any]:
    """Numbers and tensors among the hyperparameters."""
    named = dict(getattr(owner, "hparams", {}))
    return {name: copy_of(value) for name, value in named.items() if isinstance(value, int | float | Tensor)}


def _saves_more(part: nn.Module) -> bool:
    if isinstance(part, Metric):
        return any(part._persistent.values())
    return type(part).get_extra_state is not nn.Module.get_extra_state


def same(one: Any, other: Any) -> bool:
    """Do two states agree in every number, word and tensor, and in the keys of their dictionaries?"""
    (leaves, spec), (other_leaves, other_spec) = tree_flatten(one), tree_flatten(other)
    return bool(spec == other_spec) and all(map(_alike, leaves, other_leaves))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    of_a_copy: Any = type(one).__eq__
    if of_a_copy is object.__eq__:  # by identity, which no copy has
        return True
    return bool(one == other) or bool(one != one and other != other)  # NaN


def _has_counted(before: Any, now: Any, batches: int | None) -> bool:
    """Is this an integer that has counted a client's batches? In its middle, any integer.

    The last batch may not be counted yet.
    """
    if type(before) is not int or type(now) is not int:
        return False
    return batches is None or now - before in (batches - 1, batches)
