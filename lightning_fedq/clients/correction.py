"""Gradient term of a local algorithm (FedProx, SCAFFOLD, FedDyn) for one client or a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms.local_algorithm import Correction


class GradientCorrector(pl.Callback):
    """Callback that adds offset + pull (w - x) to the gradients before clipping and the optimiser step.

    It is the first callback of a client's Trainer. Here w are the weights and x their start values.

    Args:
        term: Local algorithm, with its pull and its offsets per client.
        clients: Numbers of the clients.
        weights: Function that returns the trained parameters: `shape` each, or `(clients, *shape)` of a
            stack.
        start: Weights at the start of the round, `shape` each.
    """

    knows_clients = True

    def __init__(
        self,
        term: Correction,
        clients: Sequence[int],
        weights: Callable[[], Sequence[Tensor]],
        start: Sequence[Tensor],
    ) -> None:
        self._pull, self._weights, self._start = term.pull, weights, start
        offsets = term.offsets(clients)
        self._offsets: Sequence[Tensor | None] = [None] * len(start)
        if offsets is not None:
            parts = torch.split(offsets, [one.numel() for one in start], dim=1)
            shapes = [weight.shape for weight in weights()]
            self._offsets = [p.to(w).reshape(s) for p, s, w in zip(parts, shapes, start, strict=True)]

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Add the term to the gradients of the optimiser's parameters."""
        optimised = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        if all(weight.grad is None for group in optimizer.param_groups for weight in group["params"]):
            return  # no gradients: the step is skipped
        for weight, start, offset in zip(self._weights(), self._start, self._offsets, strict=True):
            if id(weight) not in optimised:
                continue
            term = 0.0 if offset is None else offset
            if self._pull:
                term = term + self._pull * (weight - start)
            if not isinstance(term, float):  # not in place, because two weights may share a gradient
                weight.grad = term.to(weight) if weight.grad is None else weight.grad + term
