"""Undo list for temporary attribute patches on the user's objects during a fit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Undo(ExitStack):
    """Stack of undo actions. They run in reverse order on `close` or at the end of a `with` statement."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance. Undo restores its old value, or deletes it if there was none."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)
