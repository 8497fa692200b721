"""The module and the optimiser of a federation, which every client uses in turn.

The module shows the global model between clients and, to whoever asks for its `state_dict()`, also while one
of them trains. What of it travels may change from round to round: a parameter that is frozen leaves, one that
is trained joins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedq._lightning import pl
from lightning_fedq.functional.flatten import flatten, unflatten


class Members(NamedTuple):
    """Names of what the flat vector is made of, one segment each, in its order.

    Args:
        parameters: Those that are trained and in the optimiser.
    """

    parameters: tuple[str, ...]

    def plain(self) -> dict[str, list[str]]:
        """In the types that a checkpoint may hold."""
        return {kind: list(names) for kind, names in self._asdict().items()}

    @classmethod
    def of(cls, plain: dict[str, list[str]]) -> Members:
        """What `plain` wrote."""
        return cls(**{kind: tuple(names) for kind, names in plain.items()})

    def origins(self, others: Members) -> list[int | None]:
        """For each segment the index of the segment that it was in `others`, None if it was none."""
        index = {name: number for number, name in enumerate(others.parameters)}
        return [index.get(name) for name in self.parameters]


class LocalModel:
    """What is trained, as one flat vector, and its optimiser.

    Args:
        module: The user's own.
        optimizer: Of the trained parameters.
        members: What the vector is made of, as a checkpoint has it; None looks at the module.

    Attributes:
        members: What the vector is made of.

    Raises:
        ValueError: If there is no trained parameter, or several devices.
    """

    def __init__(self, module: pl.LightningModule, optimizer: Optimizer, members: Members | None) -> None:
        self.module, self.optimizer = module, optimizer
        if members is not None:
            self._train_only(members)
        self.take(self.found() if members is None else members)
        self.flat()

    def _train_only(self, members: Members) -> None:
        """As in the run that a checkpoint is of: what was frozen there is frozen again, the rest trained."""
        optimised = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.module.named_parameters():
            if name in members.parameters or id(parameter) in optimised:
                parameter.requires_grad_(name in members.parameters)

    def found(self) -> Members:
        """What the module and the optimiser would train now."""
        optimised = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = self.module.named_parameters()
        return Members(tuple(name for name, p in named if p.requires_grad and id(p) in optimised))

    def take(self, members: Members) -> None:
        """Let the flat vector be made of these.

        Raises:
            ValueError: If there is no such parameter.
        """
        named = dict(self.module.named_parameters())
        missing = [name for name in members.parameters if name not in named]
        if missing:
            raise ValueError(
                f"the model has no parameters {', '.join(missing)}; use the checkpoint's own model"
            )
        self.members, self.parameters = members, [named[name] for name in members.parameters]
        self._shapes = [parameter.shape for parameter in self.parameters]

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters, in the order of the flat vector."""
        return list(self.members.parameters)

    @property
    def segments(self) -> list[int]:
        """Coordinates of each segment of the flat vector."""
        return [shape.numel() for shape in self._shapes]

    def flat(self) -> Tensor:
        """`(dim,)` the present weights."""
        return flatten(self.parameters)

    def parts(self) -> list[Tensor]:
        """The present weights of each segment."""
        return [parameter.detach().reshape(-1) for parameter in self.parameters]

    def use(self, weights: Tensor) -> None:
        """Take `weights` for the global ones from now on; nothing moves before `show`."""
        self._views = unflatten(weights, self._shapes)

    def renew_optimizer(self) -> None:
        """No momentum; settings and schedules are the clock's."""
        self.optimizer.state.clear()

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
