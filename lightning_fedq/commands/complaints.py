"""Errors that are meant for the reader of a terminal: one line in place of a stack trace."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from lightning_fedq.commands.suggestions import mechanism_misplaced

TRACE = "FEDQ_TRACE"
"""Environment variable that brings every trace back."""
_SPEAKERS = ("lightning_fedq", "pytorch_lightning", "lightning", "lightning_fabric")
_KINDS = (ValueError, TypeError, RuntimeError, OSError, ImportError)


def complaint(error: Exception) -> str | None:
    """Lines to print of an error in place of its trace, or None if the trace is needed.

    It is needed unless a `raise` of this package or of Lightning made the error, or the operating system did
    (no such file, no space left), and no code of the user's was running, neither then nor in what caused it.
    """
    whole, error = error, _refusal(error)
    known = isinstance(error, _KINDS) or type(error).__name__ == "MisconfigurationException"
    if os.environ.get(TRACE) or not known or not str(error):
        return None
    *_, last = _places(error)
    raised = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    system = isinstance(error, OSError) and error.errno is not None
    told = system or (raised and _package(last) in _SPEAKERS)
    if not told or any(map(_is_of_the_user, _all_places(whole))):
        return None
    return f"error: {error}{mechanism_misplaced(str(error))}\n{TRACE}=1 in the environment shows the trace."


def _refusal(error: Exception) -> Exception:
    """The error that a class has raised, below jsonargparse's list of what a setting could have been."""
    found: BaseException | None = error
    while found is not None and str(found).startswith("Does not validate against any of the Union subtypes"):
        found = found.__cause__
    return found if isinstance(found, Exception) else error


def _places(error: BaseException) -> Iterator[TracebackType]:
    place = error.__traceback__
    while place is not None:
        yield place
        place = place.tb_next


def _all_places(error: BaseException | None) -> Iterator[TracebackType]:
    """Those of the errors before it, too."""
    while error is not None:
        yield from _places(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _package(place: TracebackType) -> str:
    return str(place.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_of_the_user(place: TracebackType) -> bool:
    """Neither this package nor the standard library nor anything installed."""
    installed = {"site-packages", "dist-packages"} & set(Path(place.tb_frame.f_code.co_filename).parts)
    return not installed and _package(place) not in {*_SPEAKERS, *sys.stdlib_module_names}
