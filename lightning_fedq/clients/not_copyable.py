"""Error for an object that clients would share: it names the path to the object, and a cure."""

from __future__ import annotations

import functools
import io
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

_CURES: dict[Any, str] = {
    types.GeneratorType: "Write it as a class with __next__, or create it in training_step if it is None.",
    _BaseDataLoaderIter: "Keep the DataLoader, and call iter() on it in training_step.",
    io.IOBase: "Open it where it is used.",
}
_ROOTS = ("", "optimizers", "lr_scheduler_configs", "precision_plugin", "callbacks", "datamodule", "trainer")
"""Names of a snapshot's roots, in their order."""


class NotCopyableError(ValueError):
    """Error for an object of the training state that can't be pickled, so clients would share it.

    Args:
        reason: Error text of Python.
        path: Keys and attributes that lead to the object, the outermost first.
        cure: Advice for this kind of object. "" gives general advice.
    """

    def __init__(self, reason: str, path: Sequence[str], cure: str = "") -> None:
        super().__init__(reason, path, cure)
        self.reason, self.path, self.cure = reason, path, cure

    def __str__(self) -> str:
        """Return the path to the object, the reason, and the cure."""
        if not self.path:
            return f"Each client needs its own copy of the training state, but {self.reason}. {self.cure}"
        cure = self.cure or (
            "Give its class a __deepcopy__(self, memo) that returns a copy, or self to share it."
        )
        return (
            "Each client needs its own copy of the training state, but "
            f"{''.join(self.path).lstrip('.')} can't be pickled: {self.reason}. {cure}"
        )


def not_picklable_error(roots: Sequence[Any], culprit: Any, error: Exception) -> NotCopyableError:
    """Make the error for an object that pickle refuses.

    Args:
        roots: Roots of the snapshot (`_ROOTS`), which lead to the object.
        culprit: Object that pickle visited last.
        error: Error of pickle.
    """
    cure = next((text for kind, text in _CURES.items() if isinstance(culprit, kind)), "")
    reason = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
    return NotCopyableError(reason, _find_path(roots, culprit), cure)


def name_clash_error(name: str, value: Any, what: str = "") -> NotCopyableError:
    """Make the error for code that reaches an original object by a global, not the client's copy."""
    what = what or f"the original {type(value).__name__}, which no client trains"
    return NotCopyableError(
        f"the code names {name} directly: {what}",
        (),
        "Reach it by self (an attribute of the module, self.trainer), not by a global, class or closure.",
    )


def _find_path(roots: Sequence[Any], target: Any) -> list[str]:
    """Return the shortest path to an object, by attributes, keys and closures."""
    seen: set[int] = set()
    names = (f".{name}" if name else "" for name in _ROOTS)
    queue = deque((root, [name]) for root, name in zip(roots, names, strict=True))
    while queue:
        value, path = queue.popleft()
        if value is target:
            return path
        if id(value) not in seen and not isinstance(value, type | types.ModuleType | str | Tensor):
            seen.add(id(value))
            queue.extend((item, [*path, name]) for name, item in _contained_values(value))
    return [f" {type(target).__name__}"]


def _contained_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object holds directly, with their part of the path."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, list | tuple | set | deque):
        yield from ((f"[{number}]", held) for number, held in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):
                yield f" in the closure of {value.__qualname__}", cell.cell_contents
    for name, held in (getattr(value, "__dict__", None) or {}).items():
        if isinstance(value, nn.Module) and name in ("_modules", "_parameters", "_buffers"):
            yield from ((f".{key}", value) for key, value in held.items())
        else:
            yield f".{name}", held
