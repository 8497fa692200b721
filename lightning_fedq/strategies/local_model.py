"""The module and the optimiser of a federation, which every client uses in turn.

The module shows the global model between clients and, to whoever asks for its `state_dict()`, also while one
of them trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedq._lightning import pl
from lightning_fedq.functional.flatten import flatten, unflatten


class LocalModel:
    """The parameters that are trained, as one flat vector, and the optimiser as it was when a round began.

    Args:
        module: The user's own.
        optimizer: Of the trained parameters.

    Raises:
        ValueError: If there is no trained parameter, or several devices.
    """

    def __init__(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        optimised = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad and id(p) in optimised]
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self.optimizer = optimizer
        self.flat()

    def flat(self) -> Tensor:
        """`(dim,)` the present weights."""
        return flatten(self.parameters)

    def use(self, weights: Tensor) -> None:
        """Take `weights` for the global ones from now on; nothing moves before `show`."""
        self._views = unflatten(weights, [parameter.shape for parameter in self.parameters])

    def remember_optimizer(self) -> None:
        """Take the optimiser's present settings for those that every client of the round starts with."""
        self._groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]

    def renew_optimizer(self) -> None:
        """No momentum, and the settings that were remembered."""
        self.optimizer.state.clear()
        for group, values in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(values)

    def forget_client(self) -> None:
        """Global weights in the module, and nothing of a client in the optimiser."""
        self.show()
        self.optimizer.state.clear()

    def show(self) -> None:
        """Load the global weights into the module."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.copy_(view)

    def show_in_state_dict(self, training: Callable[[], bool]) -> Any:
        """A hook that puts the global weights into the module's `state_dict()` while a client trains."""

        def hook(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            if training():
                for name, view in zip(self.names, self._views, strict=True):
                    key = prefix + name
                    state_dict[key] = view.to(state_dict[key].dtype).clone()

        return hook
