"""Constraints on sent tensors: variances stay positive, padding rows stay fixed, users declare others.

Noise and averaging can make the decoded value of a tensor invalid, for example a negative variance. The
constraints of torch's normalisation layers, padding rows and pruned weights are known from the layer. Users
declare others with `Federated(constraints={...})`.

Repairs depend only on the decoded tensor and the last global model, not on any client's data. They are
post-processing and do not change the privacy guarantee. The same repairs follow each step of `DPSGD`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

Word = Literal["positive", "fixed", "unit"]
Constraint = Word | Callable[[Tensor], Tensor]
"""A word, or a function from a decoded tensor to a valid one of the same shape. "fixed" keeps the last value,
and "unit" scales rows (along the last axis) to length 1."""
_SHRINK = 0.1
"""Factor on the last value that replaces a "positive" value which was decoded as zero or negative."""


def check_constraints(constraints: object) -> dict[str, Constraint]:
    """Check declared constraints and return them as a dictionary.

    Args:
        constraints: Constraints by name patterns. None is an empty dictionary.

    Raises:
        TypeError: If `constraints` is not a mapping with string keys.
        ValueError: If a constraint is neither a known word nor a function.
    """
    if constraints is None:
        return {}
    if not isinstance(constraints, Mapping) or not all(isinstance(name, str) for name in constraints):
        raise TypeError(
            "constraints must map name patterns to constraints, such as {'norm.var': 'positive'}, got "
            f"{constraints!r}"
        )
    for pattern, constraint in constraints.items():
        if constraint not in get_args(Word) and not callable(constraint):
            raise ValueError(
                f"The constraint of {pattern!r} must be 'positive', 'fixed', 'unit', or a function of the "
                f"decoded tensor, got {constraint!r}"
            )
    return dict(constraints)


def format_constraints(constraints: Mapping[str, Constraint]) -> str:
    """Format constraints as text that is equal in every process."""
    named = {
        key: c if isinstance(c, str) else getattr(c, "__qualname__", "?") for key, c in constraints.items()
    }
    return repr(named)


def match_constraints(
    constraints: Mapping[str, Constraint], names: Sequence[str], frozen: Sequence[str] = ()
) -> dict[str, Constraint]:
    """Return the constraint of each tensor that a pattern matches. The last matching pattern counts.

    Args:
        constraints: Constraints by name patterns.
        names: Names of tensors that clients send.
        frozen: Names of frozen parameters, which a pattern may match without effect.

    Raises:
        ValueError: If a pattern matches no name.
    """
    found: dict[str, Constraint] = {}
    for pattern, constraint in constraints.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched and not any(fnmatchcase(name, pattern) for name in frozen):
            raise ValueError(
                f"constraints={pattern!r} matches no sent tensor ({', '.join(names[:10])}). "
                "Patterns match whole names, and Federated(extra_buffers=[...]) adds sent tensors."
            )
        found |= dict.fromkeys(matched, constraint)
    return found


def layer_constraints(module: nn.Module) -> dict[str, Constraint]:
    """Return the constraints of the buffers of torch's normalisation layers, by name."""
    return {
        f"{name}.running_var".lstrip("."): "positive"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
    }


class ConstantElements(NamedTuple):
    """Constant elements of a parameter: a padding row, or weights that torch's `prune` masks.

    Args:
        layers: All layers that have the parameter, and its name in each. An element that one layer trains is
            not constant.
    """

    layers: tuple[tuple[nn.Module, str], ...]

    def mask(self, tensor: Tensor) -> Tensor:
        """Return a bool mask of the elements that are constant now, in the parameter's shape."""
        masks = (_constant_mask(layer, leaf, tensor) for layer, leaf in self.layers)
        return reduce(torch.logical_and, (mask for mask in masks if mask is not None))


def _constant_mask(layer: nn.Module, leaf: str, tensor: Tensor) -> Tensor | None:
    """Return the mask of elements of one layer's parameter that have no gradient. None if there are none."""
    is_table = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and leaf in ("weight", "weight_orig")
    row: Any = layer.padding_idx if is_table else None
    prune_mask = getattr(layer, f"{leaf[: -len('_orig')]}_mask", None) if leaf.endswith("_orig") else None
    if row is None and prune_mask is None:
        return None
    mask = torch.zeros_like(tensor, dtype=torch.bool)
    if prune_mask is not None:
        mask = (prune_mask == 0).to(tensor.device)
    if row is not None:
        mask[row] = True
    return mask


def find_constant_elements(module: nn.Module) -> dict[str, ConstantElements]:
    """Find the parameters with constant elements, by name."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for layer in module.modules():
        for leaf, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append((layer, leaf))
    return {
        name: ConstantElements(tuple(users[id(parameter)]))
        for name, parameter in module.named_parameters()
        if all(_constant_mask(*pair, parameter) is not None for pair in users[id(parameter)])
    }


def apply_constraints(
    tensors: Mapping[str, tuple[Tensor, Tensor]],
    constraints: Mapping[str, Constraint],
    constant_elements: Mapping[str, ConstantElements],
    exact: bool = False,
) -> None:
    """Repair new values in place, so that they satisfy the constraints.

    Args:
        tensors: Pair of new and last value, by name.
        constraints: Constraints of whole tensors, by name.
        constant_elements: Elements that layers keep constant, by name.
        exact: Whether the new values have no noise. Constant elements then keep their trained values.
    """
    for name in {**constraints, **constant_elements}:
        value, last = tensors[name]
        valid = nearest_valid(constraints[name], value, last) if name in constraints else value
        if name in constant_elements:
            valid = torch.where(constant_elements[name].mask(value), value if exact else last, valid)
        value.copy_(valid)


def constrain_steps(
    optimizer: torch.optim.Optimizer, module: nn.Module, constraints: Mapping[str, Constraint]
) -> list[Any]:
    """Repair parameters after every step of an optimiser whose gradients have noise.

    Args:
        optimizer: Optimiser of the parameters.
        module: Module with the parameters.
        constraints: Declared constraints, by name. Constant elements are found in the layers.

    Returns:
        Handles that remove the hooks.
    """
    parameters, constant = dict(module.named_parameters()), find_constant_elements(module)
    declared = {name: rule for name, rule in constraints.items() if name in parameters}
    last: dict[str, Tensor] = {}

    def before(*step: Any) -> None:
        last.update({name: parameters[name].detach().clone() for name in {**declared, **constant}})

    def after(*step: Any) -> None:
        with torch.no_grad():
            apply_constraints({n: (parameters[n], old) for n, old in last.items()}, declared, constant)

    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


def nearest_valid(constraint: Constraint, value: Tensor, previous: Tensor) -> Tensor:
    """Return the valid value that is nearest to a decoded one.

    Args:
        constraint: Constraint of the tensor.
        value: Decoded value.
        previous: Value in the last global model, of the same shape.

    Raises:
        ValueError: If a user's function returns another shape, or a value that is not finite.
    """
    if constraint == "positive":
        floor = torch.where(previous > 0, _SHRINK * previous, torch.finfo(value.dtype).tiny)
        return torch.where(value.isfinite(), torch.where(value > 0, value, floor), previous)
    if constraint == "fixed":
        return previous
    if constraint == "unit":
        length = value.norm(dim=-1, keepdim=True)
        return torch.where(length.isfinite() & (length > 0), value / length, previous)
    found = constraint(value)
    if not isinstance(found, Tensor) or found.shape != value.shape or not bool(found.isfinite().all()):
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"A constraint must return finite values of shape {tuple(value.shape)}, got {got}. "
            "Return the valid tensor that is nearest to the given one."
        )
    return found.to(value)
