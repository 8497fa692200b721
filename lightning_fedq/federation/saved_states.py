"""States that a checkpoint holds beside parameters and buffers: persistent metrics, `get_extra_state`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_fedq.federation.optimizer_memory import copy_of, same_setting


class SavedStates:
    """States of a module that checkpoints hold, that no noise covers, and that a training may have changed.

    Args:
        module: As it is now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, copy_of(_states(module))

    def check(self) -> None:
        """Refuse to go on where they have changed, and put them back.

        Raises:
            ValueError: Naming them.
        """
        now = _states(self._module)
        names = [*self._before, *(name for name in now if name not in self._before)]
        changed = [name for name in names if not _same(self._before.get(name), now.get(name))]
        if not changed:
            return
        for part in self._module.modules():
            if isinstance(part, Metric):
                part.reset()
        self._module.load_state_dict(copy_of(self._before), strict=False)
        raise ValueError(
            f"training changed {', '.join(changed[:10])}, which checkpoints hold beside parameters and "
            "buffers, exactly and without noise; leave persistent(True) of metrics and get_extra_state out, "
            "or update them in validation"
        )


def _states(module: nn.Module) -> dict[str, Any]:
    if not any(_saves_more(part) for part in module.modules()):
        return {}
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name not in own}


def _saves_more(part: nn.Module) -> bool:
    if isinstance(part, Metric):
        return any(part._persistent.values())
    return type(part).get_extra_state is not nn.Module.get_extra_state


def _same(one: Any, other: Any) -> bool:
    plain = all(isinstance(leaf, int | float | str | bytes) for leaf in tree_leaves([one, other]))
    return one == other if plain else same_setting(one, other)
