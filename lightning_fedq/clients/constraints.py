"""Constraints on buffers that travel: a variance is positive, a buffer of one's own what its function says.

Buffers travel as coordinates of an update, and a message with noise, or an average, knows nothing of what
they are for. Variances of torch's own normalisation layers are known by the class of the layer; users declare
theirs with `Federated(constraints={...})`.

No client's data decide what holds, and repairs are a function of what was decoded and of the last global
model: they cost no privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

Constraint = Literal["positive"] | Callable[[Tensor], Tensor]
"""A word, or a function from what was decoded to what is valid, of the same shape."""
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
        if constraint != "positive" and not callable(constraint):
            raise ValueError(
                f"the constraint of {pattern!r} must be 'positive', or a function of the decoded tensor that "
                f"returns the nearest valid one, got {constraint!r}"
            )
    return dict(constraints)


def shown(constraints: Mapping[str, Constraint]) -> str:
    """In words that are the same in another process."""
    named = {
        key: c if isinstance(c, str) else getattr(c, "__qualname__", "?") for key, c in constraints.items()
    }
    return repr(named)


def declared(constraints: Mapping[str, Constraint], names: tuple[str, ...]) -> dict[str, Constraint]:
    """Constraint of each of these buffers that a pattern matches, the last pattern's.

    Raises:
        ValueError: If a pattern matches none of them.
    """
    found: dict[str, Constraint] = {}
    for pattern, constraint in constraints.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"constraints={pattern!r} matches no buffer that travels ({', '.join(names[:10])}); "
                "patterns match whole names, and Federated(shared=[...]) says what else travels"
            )
        found |= dict.fromkeys(matched, constraint)
    return found


def of_layers(module: nn.Module) -> dict[str, Constraint]:
    """Constraints of the buffers of torch's own layers, by their class."""
    return {
        f"{name}.running_var".lstrip("."): "positive"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
    }


def repaired(constraint: Constraint, value: Tensor, last: Tensor) -> Tensor:
    """Return a valid value next to this one, itself where it is valid.

    Args:
        constraint: What holds.
        value: The decoded one, in the buffer's shape.
        last: In the last global model.

    Raises:
        ValueError: If a function of the user's returns another shape, or no numbers.
    """
    if constraint == "positive":
        floor = torch.where(last > 0, _SHRINK * last, torch.finfo(value.dtype).tiny)
        return torch.where(value.isfinite(), torch.where(value > 0, value, floor), last)
    found = constraint(value)
    if not isinstance(found, Tensor) or found.shape != value.shape or not bool(found.isfinite().all()):
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"a constraint must return finite values of shape {tuple(value.shape)}, got {got}; return "
            "the nearest valid tensor to the one it is given"
        )
    return found.to(value)
