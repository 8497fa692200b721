"""Layers with momentum=None, whose running statistics depend on the number of batches in all earlier rounds.

A client computes the counts of earlier rounds from the settings, so these layers must count every batch once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_fedq.flower.refusals import RefusedError

if TYPE_CHECKING:
    from lightning_fedq.clients.vector import Vector
    from lightning_fedq.training.settings import Local

_CURE = "use momentum=0.1, or buffers='local' or 'frozen'"


def check_counted(module: nn.Module, local: Local) -> list[str]:
    """Return layers whose running statistics depend on the number of batches in all earlier rounds.

    Returns:
        Names of these layers. Empty where buffers stay with each client or are frozen.

    Raises:
        RefusedError: If there is such a layer and `local_steps` is not set. The client with the most batches
            then determines the number, and no side knows that client over a network.
    """
    if local.buffers != "share":
        return []
    layers = [
        (n, m) for n, m in module.named_modules() if getattr(m, "num_batches_tracked", None) is not None
    ]
    names = [name for name, layer in layers if getattr(layer, "momentum", 0) is None]
    if names and local.local_steps is None:
        raise RefusedError(
            f"{names[0]} has momentum=None, but its number of batches is unknown over a network. Set "
            f"local_steps=..., or {_CURE}"
        )
    return names


class BatchCounters:
    """Counters of the layers that `check_counted` names.

    Args:
        vector: Flat vector of the client's module.
        layers: Names of the layers.
    """

    def __init__(self, vector: Vector, layers: Sequence[str]) -> None:
        self._vector = vector
        self._names = {f"{layer}.num_batches_tracked" for layer in layers}

    def advance(self, batches: int) -> None:
        """Count the batches of earlier rounds."""
        for name in self._names:
            counter = attrgetter(name)(self._vector.module)
            counter += batches

    def check(self, batches: int) -> None:
        """Refuse layers that have not counted each batch of this round exactly once.

        Args:
            batches: Number of batches that the client has trained on.

        Raises:
            RefusedError: If a layer has counted another number.
        """
        names = self._vector.members.counters
        sizes = [attrgetter(name)(self._vector.module).numel() for name in names]
        for name, counted in zip(names, torch.split(self._vector.max_counted, sizes), strict=True):
            if name in self._names and int(counted) != batches:
                raise RefusedError(
                    f"A layer with momentum=None counted {int(counted)} batches, but this client trained on "
                    f"{batches}: {_CURE}"
                )
