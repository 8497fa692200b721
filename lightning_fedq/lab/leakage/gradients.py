"""Gradients of a model for an attacker: of a batch, of single samples, and whether they can be matched.

Several local steps on one batch look like one step along the sum of their gradients, which is what a client's
update says over its learning rate; here it is a function of the inputs as any gradient is.

No function here touches `.grad`, a buffer or a global random generator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fedq.functional.flatten import unflatten

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of scores `(batch, classes)` and labels `(batch,)`."""


def trainable(model: nn.Module) -> list[Tensor]:
    """The parameters that a client's update is about, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class LocalSteps:
    """Local training on one batch: some steps of plain gradient descent on its mean loss.

    Args:
        learning_rate: > 0.
        count: Steps, >= 1; all on the same batch.

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
    """Sum of the gradients of a batch's steps, flat `(dim,)`, detached. None is one step."""
    with torch.enable_grad():
        parts = _gradients(model, loss, inputs, labels, steps, differentiable=False)
    return torch.cat([part.detach().reshape(-1) for part in parts])


def sample_gradients(
    model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, steps: LocalSteps | None = None
) -> Tensor:
    """The same for each sample on its own, `(batch, dim)`: one backward pass a sample and step."""
    rows = zip(torch.split(inputs, 1), torch.split(labels, 1), strict=True)
    return torch.stack([batch_gradient(model, loss, one, label, steps) for one, label in rows])


def differentiable_gradient(
    model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, steps: LocalSteps | None = None
) -> list[Tensor]:
    """The same of one batch as a function of `inputs` (and of soft labels), one tensor a parameter."""
    return _gradients(model, loss, inputs, labels, steps, differentiable=True)


def _gradients(
    model: nn.Module,
    loss: Loss,
    inputs: Tensor,
    labels: Tensor,
    steps: LocalSteps | None,
    differentiable: bool,
) -> list[Tensor]:
    """Unrolled gradient descent. Its first step is taken by the model itself."""

    def slopes_of(scores: Tensor, weights: list[Tensor]) -> list[Tensor]:
        value = loss(scores, labels)
        return list(
            torch.autograd.grad(
                value, weights, create_graph=differentiable, allow_unused=True, materialize_grads=True
            )
        )

    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    weights = trainable(model)
    total = slopes = slopes_of(model(inputs), weights)
    for _ in range(1, steps.count if steps is not None else 1):
        assert steps is not None
        pairs = zip(weights, slopes, strict=True)
        weights = [weight - steps.learning_rate * slope for weight, slope in pairs]
        if not differentiable:
            # earlier steps' graphs are freed
            weights = [weight.detach().requires_grad_() for weight in weights]
        slopes = slopes_of(functional_call(model, dict(zip(names, weights, strict=True)), (inputs,)), weights)
        total = [a + b for a, b in zip(total, slopes, strict=True)]
    return total


def split_like(model: nn.Module, gradient: Tensor) -> list[Tensor]:
    """Cut a flat gradient `(dim,)` into the shapes of the model's parameters."""
    return unflatten(gradient, [parameter.shape for parameter in trainable(model)])


def check_twice_differentiable(model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor) -> None:
    """Refuse a model whose gradient can't be differentiated with respect to its inputs.

    Raises:
        ValueError: With the name of the first layer that fails on its own.
    """
    with torch.enable_grad():
        dummy = inputs.detach().clone().requires_grad_()
        try:
            parts = differentiable_gradient(model, loss, dummy, labels)
            _differentiate_again(parts, dummy)
        except RuntimeError as error:
            raise ValueError(
                f"gradient inversion differentiates the model twice, and {_culprit(model, inputs)} can't be: "
                f"{str(error).splitlines()[0]}; replace the layer, or use the attack Matching, which needs "
                "first gradients only"
            ) from error


def _differentiate_again(parts: list[Tensor], inputs: Tensor) -> None:
    """Take the gradient of the parts' squares. Raise RuntimeError where that fails, even silently.

    `once_differentiable` leaves a node that raises, and autograd skips it where it only looks for `inputs`.
    """
    torch.autograd.grad(torch.stack([part.square().sum() for part in parts]).sum(), inputs, retain_graph=True)
    seen: set[Any] = set()
    waiting = [part.grad_fn for part in parts]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name().endswith("Error"):
            raise RuntimeError("its backward is marked once_differentiable")
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]


def _culprit(model: nn.Module, inputs: Tensor) -> str:
    seen: dict[str, tuple[nn.Module, Tensor]] = {}
    hooks = []
    for name, layer in model.named_modules():
        if not list(layer.children()):

            def keep(layer: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                seen.setdefault(name, (layer, args[0].detach().clone()))

            hooks.append(layer.register_forward_pre_hook(keep))
    try:
        model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for name, (layer, given) in seen.items():
        if given.is_floating_point() and not _layer_works(layer, given):
            return f"layer {name!r} ({type(layer).__name__})"
    return "no layer fails on its own, but the whole"


def _layer_works(layer: nn.Module, given: Tensor) -> bool:
    given.requires_grad_()
    try:
        # squared, so that a linear layer has a second derivative as well
        first = torch.autograd.grad(layer(given).square().sum(), given, create_graph=True)
        _differentiate_again(list(first), given)
    except RuntimeError:
        return False
    return True
