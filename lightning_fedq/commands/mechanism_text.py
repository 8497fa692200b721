"""Mechanisms by their text, as checkpoints, tables and plans hold them. Read without evaluating code."""

from __future__ import annotations

import ast
from typing import Any

from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.registry import installed


def parse_mechanism(text: str, kind: type[Mechanism] | None = None) -> Mechanism:
    """Build a mechanism from its `repr`.

    Nothing is imported because a checkpoint says so: only what is installed, or what the caller names.

    Args:
        text: The `repr`.
        kind: A class that is not installed by an entry point.

    Raises:
        ValueError: If it is not an installed mechanism, or of `kind`, with plain values as parameters.
    """
    name, parameters = parse_call(text)
    known = dict(installed())
    if kind is not None:
        known[kind.__name__] = kind
    if name not in known:
        raise ValueError(
            f"the checkpoint's mechanism {text!r} is not installed: install its package, name its class "
            "with --mechanism PACKAGE.CLASS, or give the configuration of its run instead"
        )
    try:
        return known[name](**parameters)
    except TypeError as error:
        raise ValueError(f"{_unreadable(text)}: {error}") from error


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and keyword arguments of the `repr` of a dataclass of plain values, and of mechanisms."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError(_unreadable(text))
        return call.func.id, {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(_unreadable(text)) from error


def _value(node: ast.expr) -> Any:
    return parse_mechanism(ast.unparse(node)) if isinstance(node, ast.Call) else ast.literal_eval(node)


def _unreadable(text: str) -> str:
    return f"can't read the mechanism {text!r} from the checkpoint; give the configuration of its run instead"
