"""The server's step from one global model to the next: the mean update itself, or an optimiser's."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from lightning_fedq.functional.flatten import rearrange
from lightning_fedq.rounds.parts import OptimizerFactory


class ServerStep:
    """A server learning rate, and a torch optimiser where there is one.

    Args:
        weights: `(dim,)` initial global model.
        server_lr: Server learning rate lambda in (0, 1]; the model moves to (1 - lambda) w + lambda w_new.
        make: Makes the optimiser of the parameters; None applies the mean update itself.

    Raises:
        ValueError: If the learning rate is out of its range.
    """

    def __init__(self, weights: Tensor, server_lr: float, make: OptimizerFactory | None) -> None:
        if not 0.0 < server_lr <= 1.0:
            raise ValueError(f"server_lr must be in (0, 1], got {server_lr}")
        self._lr, self._parameter = server_lr, torch.nn.Parameter(weights.clone())
        self._optimizer = make([self._parameter]) if make else None

    def apply(self, weights: Tensor, step: Tensor) -> Tensor:
        """The next model, `(dim,)`.

        Args:
            weights: The present one.
            step: The mean update.
        """
        if self._optimizer is None:
            return weights + self._lr * step
        with torch.no_grad():
            self._parameter.copy_(weights)
        self._parameter.grad = -step  # optimisers descend
        self._optimizer.step()
        return torch.lerp(weights, self._parameter.detach(), self._lr)  # (1 - lambda) w + lambda w_new

    def rearrange(
        self, weights: Tensor, segments: Sequence[int], origins: Sequence[int | None], parts: Sequence[Tensor]
    ) -> None:
        """Change what the flat vector is made of. What stays keeps its state.

        Args:
            weights: The new model.
            segments: Lengths of the old segments.
            origins: For each new segment the old one's index, or None where it joins.
            parts: A vector for each new segment.
        """
        old, self._parameter = self._parameter, torch.nn.Parameter(weights.clone())
        if self._optimizer is None:
            return
        zeros = [torch.zeros_like(part) for part in parts]
        state = self._optimizer.state.pop(old, {})
        self._optimizer.param_groups[0]["params"] = [self._parameter]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == old.shape:  # one value a coordinate
                state[name] = rearrange(value, segments, origins, zeros)
        self._optimizer.state[self._parameter] = state

    def is_finite(self) -> bool:
        """Is the optimiser's state finite?"""
        state = {} if self._optimizer is None else self._optimizer.state.get(self._parameter, {})
        vectors = [value for value in state.values() if isinstance(value, Tensor)]
        return all(bool(torch.isfinite(value).all()) for value in vectors)

    def begin_anew(self) -> bool:
        """Forget the optimiser's state. False where there is no optimiser."""
        if self._optimizer is None:
            return False
        self._optimizer.state.clear()
        return True

    def state_dict(self) -> dict[str, Any]:
        """State of the optimiser, {} without one."""
        return deepcopy(self._optimizer.state_dict()) if self._optimizer else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, see `check`."""
        if self._optimizer is not None:
            self._optimizer.load_state_dict(deepcopy(state))

    def check(self, state: dict[str, Any]) -> None:
        """Refuse the state of a server of another kind.

        Raises:
            ValueError: If only one of the two has an optimiser.
        """
        if bool(state) != (self._optimizer is not None):
            raise ValueError(
                "the state and this federation must both have a server_optimizer, or neither; "
                "use the checkpoint's own setting"
            )
