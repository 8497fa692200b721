"""Gradients of a model for an attacker: of a batch, of single samples, or as a function of the inputs.

Several local steps on one batch look like one step along the sum of their gradients, which is the client's
update divided by its learning rate. These functions compute this sum, also as a differentiable function of
the inputs.

No function here changes `.grad`, a buffer or a global random generator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function that returns the mean loss of scores `(batch, classes)` and labels `(batch,)`."""


def trainable(model: nn.Module) -> list[Tensor]:
    """Return the parameters that are part of a client's update, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Switch a model and its parts to a mode, and restore the modes that they had before."""
    others = [part for part in model.modules() if part.training != training]
    model.train(training)
    try:
        yield
    finally:
        for part in others:
            part.training = not training


@dataclass(frozen=True)
class LocalSteps:
    """Local training on one batch: steps of plain gradient descent on its mean loss.

    Args:
        learning_rate: Learning rate, > 0.
        count: Number of steps, >= 1, all on the same batch.

    Raises:
        ValueError: If a number is out of its range.
    """

    learning_rate: float
    count: int = 1

    def __post_init__(self) -> None:
        if not self.learning_rate > 0 or self.count < 1:
            raise ValueError(
                f"learning_rate must be > 0 and local_steps >= 1, got {self.learning_rate} and {self.count}"
            )


def batch_gradient(
    model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, steps: LocalSteps | None = None
) -> Tensor:
    """Return the sum of the gradients of a batch's local steps, `(dim,)`, detached.

    Args:
        model: Model at the start of the steps.
        loss: Mean loss of scores and labels.
        inputs: `(batch, ...)` inputs.
        labels: `(batch,)` labels.
        steps: Local steps. None is one step.
    """
    with torch.enable_grad():
        parts = _gradients(model, loss, inputs, labels, steps, differentiable=False)
    return torch.cat([part.detach().reshape(-1) for part in parts])


def sample_gradients(
    model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, steps: LocalSteps | None = None
) -> Tensor:
    """Return the sums of gradients of `batch_gradient` for each sample separately, `(batch, dim)`.

    It takes one backward pass per sample and step.
    """
    rows = zip(torch.split(inputs, 1), torch.split(labels, 1), strict=True)
    return torch.stack([batch_gradient(model, loss, sample, label, steps) for sample, label in rows])


def differentiable_gradient(
    model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, steps: LocalSteps | None = None
) -> list[Tensor]:
    """Return the sum of gradients of `batch_gradient` as a function of `inputs`, one tensor per parameter.

    It is also differentiable in soft labels.
    """
    return _gradients(model, loss, inputs, labels, steps, differentiable=True)


def _gradients(
    model: nn.Module,
    loss: Loss,
    inputs: Tensor,
    labels: Tensor,
    steps: LocalSteps | None,
    differentiable: bool,
) -> list[Tensor]:
    """Return the sum of the gradients of unrolled gradient descent, one tensor per parameter.

    The first step uses the model itself, and later steps use changed weights.
    """

    def compute_gradients(scores: Tensor, weights: list[Tensor]) -> list[Tensor]:
        value = loss(scores, labels)
        return list(
            torch.autograd.grad(
                value, weights, create_graph=differentiable, allow_unused=True, materialize_grads=True
            )
        )

    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    weights = trainable(model)
    total = slopes = compute_gradients(model(inputs), weights)
    for _ in range(1, steps.count if steps is not None else 1):
        assert steps is not None
        pairs = zip(weights, slopes, strict=True)
        weights = [weight - steps.learning_rate * slope for weight, slope in pairs]
        if not differentiable:
            # detach the weights, so that the graphs of earlier steps are freed
            weights = [weight.detach().requires_grad_() for weight in weights]
        named = dict(zip(names, weights, strict=True))
        slopes = compute_gradients(functional_call(model, named, (inputs,)), weights)
        total = [a + b for a, b in zip(total, slopes, strict=True)]
    return total
