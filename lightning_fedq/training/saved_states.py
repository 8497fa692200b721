"""States of a module that a checkpoint holds beside parameters and buffers.

Those of persistent metrics, what `get_extra_state` gives, and hyperparameters. Not looked at are the states
of callbacks and of the data module.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torchmetrics import Metric


def copy_of(value: Any) -> Any:
    """A copy of containers and tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


class SavedStates:
    """States that checkpoints hold, that no noise covers, and that a training may have changed.

    Args:
        module: Module in its present state.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before, self._settings = copy_of(_states(module)), dict(_hparams(module))

    def check(self) -> None:
        """Refuse to go on where they have changed, and put them back.

        Raises:
            ValueError: Naming them.
        """
        changed = self._changed()
        if not changed:
            return
        for part in self._module.modules():
            if isinstance(part, Metric):
                part.reset()
        self._module.load_state_dict(copy_of(self._before), strict=False)
        owner: Any = self._module
        for name in [name for name in _hparams(owner) if name not in self._settings]:
            del owner.hparams[name]
        if self._settings:
            owner.hparams.update(self._settings)
        raise ValueError(
            f"training changed {', '.join(changed[:10])}, which checkpoints hold beside parameters and "
            "buffers, exactly and without noise; leave persistent(True) of metrics and get_extra_state out, "
            "and what follows from batches out of hyperparameters, or update them in validation"
        )

    def _changed(self) -> list[str]:
        before, now = {**self._before}, {**_states(self._module)}
        before |= {f"hparams.{name}": value for name, value in self._settings.items()}
        now |= {f"hparams.{name}": value for name, value in _hparams(self._module).items()}
        return [name for name in {**before, **now} if not same(before.get(name), now.get(name))]


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
