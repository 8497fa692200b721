"""Constraints on buffers that travel: a variance is not negative, a direction has length one.

Buffers travel as coordinates of an update, and a message with noise, or an average, knows nothing of what
they are for. Which constraint holds is read off the buffer, not off its name: from torch's own layers, and
from the values it begins with. A client whose own training breaks what was read off stops the run by name,
so that a constraint that is none is never kept in silence. Users declare theirs with
`Federated(constraints={...})`: a buffer that begins at zero shows nothing.

No client's data decide what holds, and repairs are a function of what was decoded and of the last global
model: they cost no privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import rank_zero_info

Constraint = str | Callable[[Tensor], Tensor]
"""One of the words of `WORDS`, or a function from what was decoded to what is valid, of the same shape."""
WORDS = ("nonnegative", "positive", "unit", "simplex", "psd", "any", "flag")
_SHRINK = 0.1
"""A positive value that was decoded as none is this much of the last one."""
_NEAR = 1e-3
_WIDEST = 1024
"""Matrices up to this size are looked at, and repaired, by their eigenvalues."""


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
        if callable(constraint) or str(constraint).partition(":")[0] in (*WORDS, "above"):
            continue
        raise ValueError(
            f"the constraint of {pattern!r} must be one of {', '.join(map(repr, WORDS))}, 'above:NAME' for "
            f"no less than another buffer, or a function of the decoded tensor, got {constraint!r}"
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
        if constraint == "flag":
            continue
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"constraints={pattern!r} matches no buffer that travels ({', '.join(names[:10])}); "
                "patterns match whole names, and Federated(shared=[...]) says what else travels"
            )
        found |= dict.fromkeys(matched, constraint)
    return found


def flags_of(constraints: Mapping[str, Constraint], module: nn.Module) -> list[str]:
    """Names of the buffers that are declared as flags: zero until the first round has ended, then one.

    Raises:
        ValueError: If a pattern matches no buffer, or one of floats.
    """
    found: list[str] = []
    buffers = dict(module.named_buffers())
    for pattern in (pattern for pattern, constraint in constraints.items() if constraint == "flag"):
        matched = [name for name in buffers if fnmatchcase(name, pattern)]
        if not matched or any(buffers[name].is_floating_point() for name in matched):
            raise ValueError(
                f"constraints={{{pattern!r}: 'flag'}} matches {matched or 'no buffer'}; a flag is a "
                "buffer of integers or truth values, such as 'norm.initialized'"
            )
        found += matched
    return list(dict.fromkeys(found))


def of_layers(module: nn.Module) -> dict[str, Constraint]:
    """Constraints of the buffers of torch's own layers, by their class."""
    found: dict[str, Constraint] = {}
    for name, layer in module.named_modules():
        dot = f"{name}." if name else ""
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            found[f"{dot}running_var"], found[f"{dot}running_mean"] = "positive", "any"
        elif type(layer).__module__.startswith("torch.ao.quantization"):  # observers and fake quantisation
            found |= {
                f"{dot}max_val": f"above:{dot}min_val",
                f"{dot}scale": "positive",
                f"{dot}min_val": "any",
            }
    return found


def of_values(start: Tensor) -> Constraint:
    """Constraint that the values of a buffer obey before any training, "any" if they show none."""
    value, shape = start.detach().double(), start.shape
    if not value.numel() or not bool(value.isfinite().all()) or not bool(value.any()):
        return "any"
    positive, square = bool((value > 0).all()), value.dim() > 1 and 1 < shape[-1] == shape[-2] <= _WIDEST
    if square and not positive and _is_psd(value):  # the identity, whose rows have length one, too
        return "psd"
    for dim in reversed(range(value.dim())):
        if shape[dim] > 1 and _is_unit(value, dim):
            return f"unit:{dim - value.dim()}"
    if bool((value < 0).any()):
        return "any"
    if value.dim() and shape[-1] > 1 and _is_simplex(value):
        return "simplex"
    return "positive" if positive else "nonnegative"


def _is_unit(value: Tensor, dim: int) -> bool:
    return bool(((value.norm(dim=dim) - 1.0).abs() < _NEAR).all())


def _is_simplex(value: Tensor) -> bool:
    return bool(((value.sum(-1) - 1.0).abs() < _NEAR).all())


def _is_psd(value: Tensor) -> bool:
    """Is this symmetric, of no negative eigenvalue, and not zero, which is nothing yet?"""
    size = float(value.abs().max())
    if not size or not torch.allclose(value, value.mT, atol=_NEAR * size):
        return False
    return float(torch.linalg.eigvalsh(value).min()) > -_NEAR * size


def repaired(constraint: Constraint, value: Tensor, last: Tensor, other: Tensor | None = None) -> Tensor:
    """Return a valid value next to this one, itself where it is valid.

    Args:
        constraint: What holds.
        value: The decoded one, in the buffer's shape.
        last: In the last global model.
        other: The buffer that an "above:NAME" is about.

    Raises:
        ValueError: If a function of the user's returns another shape, or no numbers.
    """
    if not isinstance(constraint, str):
        found = constraint(value)
        if not isinstance(found, Tensor) or found.shape != value.shape or not bool(found.isfinite().all()):
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"a constraint must return finite values of shape {tuple(value.shape)}, got {got}; return "
                "the nearest valid tensor to the one it is given"
            )
        return found.to(value)
    kind, _, rest = constraint.partition(":")
    if kind == "any":
        return value
    value = torch.where(value.isfinite(), value, last)
    if kind == "above":
        return value if other is None else torch.maximum(value, other)
    if kind == "nonnegative":
        return value.clamp(min=0.0)
    if kind == "positive":
        return torch.where(
            value > 0, value, torch.where(last > 0, _SHRINK * last, torch.finfo(value.dtype).tiny)
        )
    if kind == "psd":
        return _repaired_psd(value, last)
    if kind == "simplex":
        value = value.clamp(min=0.0)
        whole = value.sum(-1, keepdim=True)
        found = torch.where(whole > 0, value / whole, last)
        return torch.where((whole - 1.0).abs() < 1e-5, value, found)
    dim = int(rest or -1)
    norm = value.norm(dim=dim, keepdim=True)
    return torch.where((norm - 1.0).abs() < 1e-5, value, torch.where(norm > 0, value / norm, last))


def _repaired_psd(value: Tensor, last: Tensor) -> Tensor:
    """Eigenvalues below zero are a tenth of the last model's smallest."""
    wide = value.double()
    wide = (wide + wide.mT) / 2
    eigenvalues, vectors = torch.linalg.eigh(wide)
    floor = _SHRINK * torch.linalg.eigvalsh(last.double()).clamp(min=0.0).min(-1, keepdim=True).values
    if bool((eigenvalues >= 0).all()):
        return wide.to(value) if not torch.equal(value, value.mT) else value
    raised = torch.where(eigenvalues < 0, floor.expand_as(eigenvalues), eigenvalues)
    found: Tensor = (vectors * raised[..., None, :]) @ vectors.mT
    return found.to(value)


def holds(constraint: Constraint, value: Tensor) -> bool:
    """Does a value obey a constraint, up to rounding? A function is not asked."""
    if not isinstance(constraint, str) or not bool(value.isfinite().all()):
        return True  # what is not finite is another matter
    kind, _, rest = constraint.partition(":")
    size = float(value.abs().max()) if value.numel() else 0.0
    if kind in ("nonnegative", "positive", "simplex") and bool((value < -1e-6 * size).any()):
        return False
    if kind == "unit":
        return _is_unit(value.double(), int(rest or -1))
    if kind == "simplex":
        return _is_simplex(value.double())
    return kind != "psd" or not size or _is_psd(value.double())


def say_what_is_kept(read_off: Mapping[str, Constraint]) -> None:
    """Say which constraints were read off the values of buffers.

    Args:
        read_off: By name.
    """
    if read_off:
        named = ", ".join(f"{name} ({constraint})" for name, constraint in list(read_off.items())[:10])
        more = f" and {len(read_off) - 10} more" if len(read_off) > 10 else ""
        rank_zero_info(
            f"buffers that travel are kept what their first values show them to be: {named}{more}; "
            "Federated(constraints={...}) says otherwise"
        )
