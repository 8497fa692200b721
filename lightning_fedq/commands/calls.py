"""Mechanisms by their text, as checkpoints, tables and plans hold them. Read without evaluating code."""

from __future__ import annotations

import ast
from typing import Any

from lightning_fedq import mechanisms
from lightning_fedq.core import Mechanism


def parse_mechanism(text: str) -> Mechanism:
    """Build a mechanism from its `repr`.

    Raises:
        ValueError: If it is not a mechanism of this package with plain numbers as parameters.
    """
    name, parameters = parse_call(text)
    if name not in mechanisms.__all__:
        raise ValueError(_unreadable(text))
    built: Mechanism = getattr(mechanisms, name)(**parameters)
    return built


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and keyword arguments of the `repr` of a dataclass of plain values."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError(_unreadable(text))
        return call.func.id, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(_unreadable(text)) from error


def _unreadable(text: str) -> str:
    return f"can't read the mechanism {text!r} from the checkpoint; give the configuration of its run instead"
