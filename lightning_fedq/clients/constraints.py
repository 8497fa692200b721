"""Constraints on what travels: a variance is positive, padding stays, a tensor of one's own is what is said.

A message with noise, or an average, knows nothing of what its coordinates are for. Variances of torch's own
normalisation layers, rows of padding and pruned weights are known by the layer; users declare the rest with
`Federated(constraints={...})`.

No client's data decide what holds, and repairs are a function of what was decoded and of the last global
model: they cost no privacy. The same repairs follow a step of `DPSGD`.
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
"""A word, or a function from what was decoded to what is valid, of the same shape. "fixed" is the value of
before, "unit" rows (along the last axis) of length 1."""
_SHRINK = 0.1
"""A positive value that was decoded as none is this much of the last one."""


def check_constraints(constraints: object) -> dict[str, Constraint]:
    """Return declared constraints as a dictionary.

    Args:
        constraints: Constraints by patterns of names; None is none.

    Raises:
        TypeError: If it is no such mapping.
        ValueError: If a constraint is another word.
    """
    if constraints is None:
        return {}
    if not isinstance(constraints, Mapping) or not all(isinstance(name, str) for name in constraints):
        raise TypeError(
            "constraints must map patterns of names to constraints, such as {'norm.var': 'positive'}, got "
            f"{constraints!r}"
        )
    for pattern, constraint in constraints.items():
        if constraint not in get_args(Word) and not callable(constraint):
            raise ValueError(
                f"the constraint of {pattern!r} must be 'positive', 'fixed', 'unit', or a function of the "
                f"decoded tensor that returns the nearest valid one, got {constraint!r}"
            )
    return dict(constraints)


def format_constraints(constraints: Mapping[str, Constraint]) -> str:
    """In words that are the same in another process."""
    named = {
        key: c if isinstance(c, str) else getattr(c, "__qualname__", "?") for key, c in constraints.items()
    }
    return repr(named)


def match_constraints(
    constraints: Mapping[str, Constraint], names: Sequence[str], frozen: Sequence[str] = ()
) -> dict[str, Constraint]:
    """Constraint of each of these tensors that a pattern matches, the last pattern's.

    Args:
        frozen: Names of parameters that do not travel now, which a pattern may mean, too.

    Raises:
        ValueError: If a pattern matches none of them.
    """
    found: dict[str, Constraint] = {}
    for pattern, constraint in constraints.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched and not any(fnmatchcase(name, pattern) for name in frozen):
            raise ValueError(
                f"constraints={pattern!r} matches nothing that travels ({', '.join(names[:10])}); "
                "patterns match whole names, and Federated(shared=[...]) says what else travels"
            )
        found |= dict.fromkeys(matched, constraint)
    return found


def layer_constraints(module: nn.Module) -> dict[str, Constraint]:
    """Constraints of the buffers of torch's own layers, by their class."""
    return {
        f"{name}.running_var".lstrip("."): "positive"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
    }


class ConstantElements(NamedTuple):
    """Part of a parameter that layers hold constant: a row of padding, weights that torch's `prune` masks.

    Args:
        layers: All layers that have the parameter, and its name in each. What one of them trains is trained.
    """

    layers: tuple[tuple[nn.Module, str], ...]

    def mask(self, tensor: Tensor) -> Tensor:
        """Elements that no batch gives a gradient, now, as masks change: `bool`, of the parameter's shape."""
        found = (_constant_mask(layer, leaf, tensor) for layer, leaf in self.layers)
        return reduce(torch.logical_and, (mask for mask in found if mask is not None))


def _constant_mask(layer: nn.Module, leaf: str, tensor: Tensor) -> Tensor | None:
    """Elements of one layer's parameter without a gradient. None if there are none."""
    is_table = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and leaf in ("weight", "weight_orig")
    row: Any = layer.padding_idx if is_table else None
    kept = getattr(layer, f"{leaf[: -len('_orig')]}_mask", None) if leaf.endswith("_orig") else None
    if row is None and kept is None:
        return None
    mask = torch.zeros_like(tensor, dtype=torch.bool) if kept is None else (kept == 0).to(tensor.device)
    if row is not None:
        mask[row] = True
    return mask


def find_constant_elements(module: nn.Module) -> dict[str, ConstantElements]:
    """Parameters of which their layers hold a part constant, by name."""
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
    """Let values be what they are to be, in place.

    Args:
        tensors: By name the new value, and the last one.
        constraints: What holds of whole tensors, of some of these names.
        constant_elements: What layers hold constant, of some of them.
        exact: Are the new values without an error? What layers hold constant is as trained then.
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
    """Repair parameters behind every step of an optimiser whose gradients have noise.

    Args:
        module: The parameters' own.
        constraints: What is declared, by name; what layers hold constant is known.

    Returns:
        Handles that take it off again.
    """
    parameters, held = dict(module.named_parameters()), find_constant_elements(module)
    said = {name: one for name, one in constraints.items() if name in parameters}
    last: dict[str, Tensor] = {}

    def before(*step: Any) -> None:
        last.update({name: parameters[name].detach().clone() for name in {**said, **held}})

    def after(*step: Any) -> None:
        with torch.no_grad():
            apply_constraints({name: (parameters[name], kept) for name, kept in last.items()}, said, held)

    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


def nearest_valid(constraint: Constraint, value: Tensor, previous: Tensor) -> Tensor:
    """Return a valid value next to this one, itself where it is valid.

    Args:
        constraint: What holds.
        value: The decoded one, in the tensor's shape.
        previous: In the last global model.

    Raises:
        ValueError: If a function of the user's returns another shape, or no numbers.
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
            f"a constraint must return finite values of shape {tuple(value.shape)}, got {got}; return "
            "the nearest valid tensor to the one it is given"
        )
    return found.to(value)
