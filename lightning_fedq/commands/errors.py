"""Errors on a terminal: one line in place of a stack trace, with a suggestion for misspelt names."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import FrameType

from lightning_fedq import mechanisms


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest choice, or "" if nothing is close."""
    found = get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {found[0]!r}?" if found else ""


def suggest(message: str, keys: Iterable[str]) -> str:
    """Return a hint for a parser's error, which begins with a space, or "".

    Args:
        message: Error message of jsonargparse.
        keys: Dotted keys that the parser knows.
    """
    keys = list(keys)
    if re.search(r"arguments are required: .*\bmodel\b", message):
        return (
            " No model is given. Name a run that ships with the package (fedq fit digits_corbin, `fedq "
            "configs` lists them), or a YAML file with model: {class_path: MODULE.CLASS}."
        )
    if misplaced := mechanism_misplaced(message):
        return misplaced
    wrong = re.findall(r'Parser key "(\w+)":\n(?: .*\n)*? *Expected (?:an? )?(.*)\. Got value: (.*)', message)
    if wrong and "class_path" in message:
        key, kind, value = wrong[-1]
        plain = re.sub(r"<class '([\w.]+)'>", r"\1", kind)  # "int" for `<class 'int'>`
        return f" {key} must be {plain}, got {value}"
    unknown = re.search(r"[uU]nrecognized arguments?: --([^\s=]+)", message)
    if unknown:
        return nearest(unknown[1].rstrip("+"), keys) or _nearest_start(unknown[1], keys)
    option = re.search(r"does not accept option '([^']+)'", message)
    if option:
        return nearest(option[1], keys) or _nearest_start(option[1], keys)
    missing = re.search(r"[mM]odule '([\w.]+)' has no attribute '(\w+)'", message)
    if missing:
        return nearest(missing[2], vars(importlib.import_module(missing[1])))
    other = re.search(r"Import path ([\w.]+) does not correspond to a subclass", message)
    if other:
        return _wrong_package_hint(other[1])
    refused = re.search(r"Option '([\w.]+)' is not accepted", message)
    if refused:
        owners = re.findall(r"class_path '([\w.]+)'", message[: refused.start()])
        if owners and owners[-1].endswith((".LightningModule", ".LightningDataModule")):
            # the configuration is of a script that names its classes in Python
            key = "data" if owners[-1].endswith("DataModule") else "model"
            return (
                f" `{key}` names no class. Write {key}: {{class_path: MODULE.CLASS, init_args: {{...}}}}, "
                "or run the script that calls LightningCLI: python train.py fit --config YOURS.yaml "
                "--config FRAGMENT.yaml (`fedq configs NAME --out FRAGMENT.yaml` writes a fragment)."
            )
        if owners:
            module, _, name = owners[-1].rpartition(".")
            parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            return nearest(refused[1], parameters) or f" It accepts: {', '.join(parameters)}."
    return ""


_MISPLACED = r"(?:Given value: |invalid strategy name: `strategy=')lightning_fedq\.(?:mechanisms\.)?(\w+)"


def mechanism_misplaced(message: str) -> str:
    """Return correct flags if a mechanism was given as a callback or strategy, otherwise ""."""
    misplaced = {name.lower() for name in re.findall(_MISPLACED, message, re.I)}
    for name in mechanisms.__all__:
        if name.lower() in misplaced:
            return (
                f" {name} is a mechanism, which is an argument of Federated: "
                "--trainer.callbacks+=lightning_fedq.Federated "
                f"--trainer.callbacks.mechanism=lightning_fedq.{name} --trainer.callbacks.num_clients=100"
            )
    return ""


def concise(message: str) -> str:
    """Return the first line of a parser's error and the line with the cause, without the long dump."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    causes = re.compile(
        "is not accepted|does not correspond|does not accept|has no attribute|Problem with given class_path"
    )
    refused = [line for line in lines[1:] if causes.search(line)]
    return "\n".join(lines if len(lines) < 4 or not refused else [lines[0], *refused[-1:]])


def _wrong_package_hint(path: str) -> str:
    """Return a hint if a class belongs to the other of Lightning's two packages, otherwise ""."""
    from lightning_fedq._lightning import pl  # imported here because the package has been chosen by now

    (other,) = {"pytorch_lightning", "lightning.pytorch"} - {pl.__name__}
    module, _, name = path.rpartition(".")
    bases = getattr(getattr(importlib.import_module(module), name), "__mro__", ())
    if not any(f"{base.__module__}.".startswith(f"{other}.") for base in bases):
        return ""
    return (
        f" {path} is a class of {other}, but this run uses {pl.__name__}, which was imported first. "
        "Take all classes of a run from the same package."
    )


def _nearest_start(option: str, keys: list[str]) -> str:
    """Return a suggestion for the first part of a dotted key, or ""."""
    return nearest(option.partition(".")[0], {key.partition(".")[0] for key in keys})


# The functions below decide whether an error is printed as one line or with its stack trace.


TRACE = "FEDQ_TRACE"
"""Environment variable that makes every error print its stack trace."""
_SPEAKERS = ("lightning_fedq", "pytorch_lightning", "lightning", "lightning_fabric")
_KINDS = (ValueError, TypeError, RuntimeError, OSError, ImportError)


def complaint(error: Exception) -> str | None:
    """Return the lines to print for an error in place of its trace, or None if the trace is needed.

    The trace is not needed if two conditions hold. The error comes from a `raise` of this package or of
    Lightning, or from the operating system (no such file, no space left). No user code is in the trace of
    the error or of its causes.
    """
    refusal = _refusal(error)
    is_known = isinstance(refusal, _KINDS) or type(refusal).__name__ == "MisconfigurationException"
    if os.environ.get(TRACE) or not is_known or not str(refusal) or not _is_explained(refusal):
        return None
    if any(map(_is_of_the_user, _all_frames(error))):
        return None
    words = f"error: {refusal}{mechanism_misplaced(str(refusal))}"
    if words.endswith("--help lists the options"):  # the command line was wrong, so there is no useful trace
        return words
    return f"{words}\n{TRACE}=1 in the environment shows the trace."


def _is_explained(error: Exception) -> bool:
    """Return whether this package, Lightning or the operating system raised an error on purpose."""
    if isinstance(error, OSError) and error.errno is not None:
        return True
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    line = traceback.extract_tb(error.__traceback__)[-1].line
    return str(line).startswith("raise ") and _package(last) in _SPEAKERS


def _refusal(error: Exception) -> Exception:
    """Return the error that a class raised, in place of jsonargparse's list of possible types."""
    cause: BaseException | None = error
    while cause is not None and str(cause).startswith("Does not validate against any of the Union subtypes"):
        cause = cause.__cause__
    return cause if isinstance(cause, Exception) else error


def _all_frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yield the frames in the traceback of an error and of the errors that caused it."""
    while error is not None:
        yield from (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _package(frame: FrameType) -> str:
    """Return the top-level package of a frame's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_of_the_user(frame: FrameType) -> bool:
    """Return whether a frame runs user code: not installed, standard library or this package."""
    installed = {"site-packages", "dist-packages"} & set(Path(frame.f_code.co_filename).parts)
    return not installed and _package(frame) not in {*_SPEAKERS, *sys.stdlib_module_names}
