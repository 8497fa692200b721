"""Undo list of temporary attribute patches on the user's objects, for the time of a fit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Undo(ExitStack):
    """Things to undo, the last one first: when it is closed, or at the end of a `with` statement."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute. Undone, the instance has its own again, or none."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)
