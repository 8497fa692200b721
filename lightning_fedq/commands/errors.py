"""Errors for the reader of a terminal: one line in place of a stack trace, and "did you mean"."""

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
from types import TracebackType

from lightning_fedq import mechanisms


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest choice, or "" if nothing is close."""
    found = get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {found[0]!r}?" if found else ""


def suggest(message: str, keys: Iterable[str]) -> str:
    """Return what the reader of a parser's error probably meant, or "".

    Args:
        message: jsonargparse's message.
        keys: Dotted keys that the parser knows.
    """
    keys = list(keys)
    if re.search(r"arguments are required: .*\bmodel\b", message):
        return (
            " Nothing says what to train: give a run that ships with the package (fedq fit digits_corbin; "
            "`fedq configs` lists them), or a YAML file with model: {class_path: MODULE.CLASS}"
        )
    if misplaced := mechanism_misplaced(message):
        return misplaced
    wrong = re.findall(r'Parser key "(\w+)":\n(?: .*\n)*? *Expected (?:an? )?(.*)\. Got value: (.*)', message)
    if wrong and "class_path" in message:
        key, kind, value = wrong[-1]
        return f" {key} must be {_named(kind)}, got {value}"
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
            return _class_wanted("data" if owners[-1].endswith("DataModule") else "model")
        if owners:
            module, _, name = owners[-1].rpartition(".")
            parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            return nearest(refused[1], parameters) or f" It accepts: {', '.join(parameters)}."
    return ""


_MISPLACED = r"(?:Given value: |invalid strategy name: `strategy=')lightning_fedq\.(?:mechanisms\.)?(\w+)"


def mechanism_misplaced(message: str) -> str:
    """Return the flags that work, where a mechanism was given as a callback or as a strategy. Else ""."""
    given = {name.lower() for name in re.findall(_MISPLACED, message, re.I)}
    for name in mechanisms.__all__:
        if name.lower() in given:
            return (
                f" {name} is a mechanism, which Federated takes: "
                "--trainer.callbacks+=lightning_fedq.Federated "
                f"--trainer.callbacks.mechanism=lightning_fedq.{name} --trainer.callbacks.num_clients=100"
            )
    return ""


def _named(kind: str) -> str:
    """A type as it is written: `<class 'int'>` is an int."""
    return re.sub(r"<class '([\w.]+)'>", r"\1", kind)


def concise(message: str) -> str:
    """The first line of a parser's error and the one that names what was refused, without the dump."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = re.compile(
        "is not accepted|does not correspond|does not accept|has no attribute|Problem with given class_path"
    )
    refused = [line for line in lines[1:] if told.search(line)]
    return "\n".join(lines if len(lines) < 4 or not refused else [lines[0], *refused[-1:]])


def _class_wanted(key: str) -> str:
    """For the configuration of a script that names its classes in Python."""
    return (
        f" `{key}` names no class. Here it needs one, "
        f"{key}: {{class_path: MODULE.CLASS, init_args: {{...}}}}, "
        "or leave it to the script that calls LightningCLI: python train.py fit --config YOURS.yaml "
        "--config FRAGMENT.yaml (`fedq configs NAME --out FRAGMENT.yaml` writes a fragment out)"
    )


def _wrong_package_hint(path: str) -> str:
    """For a class of the Lightning package that this run is not of."""
    from lightning_fedq._lightning import pl  # decided by now

    (other,) = {"pytorch_lightning", "lightning.pytorch"} - {pl.__name__}
    module, _, name = path.rpartition(".")
    bases = getattr(getattr(importlib.import_module(module), name), "__mro__", ())
    if not any(f"{base.__module__}.".startswith(f"{other}.") for base in bases):
        return ""
    return (
        f" {path} is a class of {other}, and this run is one of {pl.__name__}, which was imported first; "
        "all classes of a run must come from the same of the two"
    )


def _nearest_start(option: str, keys: list[str]) -> str:
    """The nearest first part of a dotted key."""
    return nearest(option.partition(".")[0], {key.partition(".")[0] for key in keys})


# Errors that are meant for the reader of a terminal: one line in place of a stack trace.


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
    (where,) = traceback.extract_tb(last)
    raised = str(where.line).startswith("raise ")
    system = isinstance(error, OSError) and error.errno is not None
    told = system or (raised and _package(last) in _SPEAKERS)
    if not told or any(map(_is_of_the_user, _all_places(whole))):
        return None
    words = f"error: {error}{mechanism_misplaced(str(error))}"
    if words.endswith("--help lists the options"):  # nothing has run
        return words
    return f"{words}\n{TRACE}=1 in the environment shows the trace."


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
