"""Undo list of temporary attribute patches on the user's objects, for the time of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Undo:
    """A list of things to undo, the last one first."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def later(self, step: Callable[[], object]) -> None:
        """Remember one thing to undo."""
        self._steps.append(step)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute. Undone, the instance has its own again, or none."""
        if name in vars(owner):
            previous = vars(owner)[name]
            self.later(lambda: setattr(owner, name, previous))
        else:
            self.later(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def all(self) -> None:
        """Undo everything, once."""
        while self._steps:
            self._steps.pop()()
