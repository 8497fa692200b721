"""Can the gradient of a model be differentiated again, with respect to its inputs? Which layer can't?"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedq.leakage.gradients import Loss, differentiable_gradient


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
