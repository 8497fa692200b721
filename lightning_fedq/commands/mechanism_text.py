"""Parser for the text (`repr`) of mechanisms in checkpoints, tables and plans. It evaluates no code."""

from __future__ import annotations

import ast
from typing import Any

from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.registry import installed


def parse_mechanism(text: str, kind: type[Mechanism] | None = None) -> Mechanism:
    """Build a mechanism from its `repr`.

    The text of a checkpoint can't cause imports. It may name installed mechanisms and the caller's `kind`.

    Args:
        text: The `repr` of the mechanism.
        kind: Class that no entry point installs.

    Raises:
        ValueError: If the mechanism is neither installed nor of class `kind`, or its parameters are not plain
            values.
    """
    name, parameters = parse_call(text)
    known = dict(installed())
    if kind is not None:
        known[kind.__name__] = kind
    if name not in known:
        raise ValueError(
            f"The checkpoint's mechanism {text!r} is not installed. Install its package, name its class "
            "with --mechanism PACKAGE.CLASS, or give the configuration of its run."
        )
    try:
        return known[name](**parameters)
    except TypeError as error:
        raise ValueError(f"{_unreadable(text)}: {error}") from error


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and keyword arguments of a dataclass's `repr` with plain values or mechanisms.

    Raises:
        ValueError: If the text is not such a call.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError(_unreadable(text))
        return call.func.id, {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(_unreadable(text)) from error


def _value(node: ast.expr) -> Any:
    """Return the value of an argument: a nested mechanism or a literal."""
    return parse_mechanism(ast.unparse(node)) if isinstance(node, ast.Call) else ast.literal_eval(node)


def _unreadable(text: str) -> str:
    return f"Can't read the mechanism {text!r} from the checkpoint. Give the configuration of its run."
