"""Checks of arguments and fields that many constructors use."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_SMALLEST, _LARGEST = 1e-100, 1e100
"""Range in which squares, inverses and products of three are float64 numbers. Smaller squares become 0."""


def check_positive(**values: float) -> None:
    """Check that values are positive finite numbers with squares in float64.

    Raises:
        ValueError: If a value is not > 0 and finite, or not in [1e-100, 1e100]. The message names the value.
    """
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be > 0 and finite, got {value}")
        if not _SMALLEST <= value <= _LARGEST:
            raise ValueError(
                f"{name} must be in [{_SMALLEST:g}, {_LARGEST:g}], where floats have squares, got {value}. "
                "Take another unit."
            )


def check_at_least(least: int, **values: int) -> None:
    """Check that whole numbers are not below a smallest value.

    Raises:
        ValueError: If a number is smaller. The message names it.
    """
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}")


_WORDS = {float: "a number", int: "an integer", bool: "True or False", str: "a text", type(None): "None"}


@cache
def _hints(kind: type) -> dict[str, tuple[tuple[Any, ...], str | None]]:
    """Return the alternative types of every field's annotation, and its words if it is `Annotated`.

    Annotations of classes that can't be resolved at run time are left out.
    """
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        try:
            found |= get_type_hints(base, include_extras=True)
        except NameError:  # a name that only a type checker knows
            continue
    split = {}
    for field in fields(kind):
        if (hint := found.get(field.name)) is not None:
            hint, *words = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            union = get_origin(hint) in (Union, types.UnionType)
            split[field.name] = (get_args(hint) if union else (hint,), words[0] if words else None)
    return split


def check_fields(instance: Any, *, named: bool = True) -> None:
    """Check the fields of a frozen dataclass against their annotations. NumPy numbers become Python numbers.

    The function checks numbers, integers, bools, strings, choices (`Literal`) and tuples of them. It checks
    other classes only if the annotation describes them in words (`Annotated[kind, words]`).

    Args:
        instance: The dataclass.
        named: Whether errors name the class.

    Raises:
        TypeError: If a value has another type. The message has the expected type, the value and a cure.
        ValueError: If a value is not among the choices.
    """
    kind: type = type(instance)
    of = f" of {kind.__name__}" if named else ""
    for name, (alternatives, words) in _hints(kind).items():
        value = getattr(instance, name)
        if any(_fits(value, one, classes=words is not None) for one in alternatives):
            object.__setattr__(instance, name, _plain(value))
            continue
        if words is not None:
            got = f"the class {value.__name__} itself" if isinstance(value, type) else repr(value)
            raise TypeError(f"{name}{of} must be {words}, got {got}")
        words = " or ".join(_words(one) for one in alternatives)
        choices = any(get_origin(one) is Literal for one in alternatives)
        if choices and (isinstance(value, str) or len(alternatives) == 1):
            raise ValueError(f"{name}{of} must be {words}, got {value!r}")
        got = "None" if value is None else f"{value!r} ({type(value).__name__})"
        raise TypeError(f"{name}{of} must be {words}, got {got}{_cure(value, alternatives)}")


def _fits(value: Any, wanted: Any, classes: bool = False) -> bool:
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(one, parts[0]) for one in value)
    if wanted in (float, int):
        return isinstance(value, Real if wanted is float else Integral) and not isinstance(value, bool)
    if origin is Callable and classes:
        return callable(value)
    looked_at = wanted in _WORDS or (classes and isinstance(wanted, type))
    return not looked_at or isinstance(value, wanted)


def _plain(value: Any) -> Any:
    """Convert NumPy numbers to Python numbers, whose `repr` can be read back."""
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    if isinstance(value, Real) and type(value).__module__ != "builtins":
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _words(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        options = get_args(wanted)
        return repr(options[0]) if len(options) == 1 else f"one of {', '.join(map(str, options))}"
    if get_origin(wanted) is tuple:
        return f"a tuple of {_words(get_args(wanted)[0]).split(maxsplit=1)[1]}s"
    return _WORDS.get(wanted, str(wanted))


def _cure(value: Any, alternatives: tuple[Any, ...]) -> str:
    """Return a hint how to write the value instead, or an empty string."""
    if isinstance(value, list) and any(get_origin(one) is tuple for one in alternatives):
        return "; a tuple can be compared and hashed, a list can't"
    if isinstance(value, float) and value.is_integer() and int in alternatives:
        return f"; {int(value)} will do"
    if isinstance(value, str) and {int, float}.intersection(alternatives):
        return "; write it without quotes"
    return "; its .item() is a number" if hasattr(value, "item") else ""


def from_plain(kind: Any, value: Any, place: str = "it") -> Any:
    """Convert a value from JSON to a type, and check it. The JSON may come from an untrusted source.

    Args:
        kind: Type of the result. It is a frozen dataclass, a tuple, a dictionary with string keys, a
            `Literal`, an optional type, float ("inf" is allowed), int, bool, or a printable string. All
            fields of a dataclass must be in the JSON. Other entries are ignored.
        value: Result of `json.loads`.
        place: Name of the value, for errors.

    Raises:
        ValueError: If the value does not fit the type. The message has its name and the value.

    Examples:
        >>> from_plain(tuple[tuple[int, float], ...], [[1, 2], [3, "inf"]])
        ((1, 2.0), (3, inf))
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        hints, names = get_type_hints(kind), [field.name for field in fields(kind)]
        if missing := [name for name in names if name not in value]:
            raise ValueError(f"{place} has no {', '.join(missing)}")
        build: Any = kind
        return build(**{name: from_plain(hints[name], value[name], name) for name in names})
    if origin in (Union, types.UnionType):
        return None if value is None else from_plain(inner[0], value, place)
    if origin is tuple and isinstance(value, list):
        of = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
        if len(of) == len(value):
            return tuple(from_plain(one, item, place) for one, item in zip(of, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {from_plain(str, key, place): from_plain(inner[1], one, place) for key, one in value.items()}
    if origin is Literal and isinstance(value, str) and value in inner:
        return value
    if kind is float and (value == "inf" or (type(value) in (int, float) and value == value)):
        return float(value)
    if kind in (int, bool, str) and type(value) is kind and (kind is not str or value.isprintable()):
        return value
    raise ValueError(f"{place} can't be {value!r:.60}")
