"""Entry point of the `fedq` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_fedq import __version__
from lightning_fedq.commands.configs import EVALUATION, TRAINING, expand
from lightning_fedq.commands.errors import TRACE, complaint, nearest
from lightning_fedq.commands.options import import_named_classes, refuse_unknown_settings, take_changes
from lightning_fedq.commands.shown import read_help, refuse_unknown
from lightning_fedq.commands.signature import run

OTHERS = {
    "configs": "list the runs and fragments that ship with the package, or write one to a file",
    "mechanisms": "list all mechanisms: bits, homomorphic or not, epsilon by adversary, paper",
    "compare": "compare mechanisms and Opacus's noise at equal epsilon, or finished runs",
    "report": "write one HTML page about finished runs: privacy, accuracy and bits by round",
    "privacy": "report the guarantee of a configuration, checkpoint or run, or of several runs together",
    "plan": "rank all mechanisms, calibrated to a target epsilon, by error",
    "flower": "deploy over Flower: write an app, run a site's client with its own code only",
    "audit": "try to refute the claims of mechanisms, also of your own, by simulation",
}

ROOMS = {"audit": "audit.", "compare": "comparison."}
"""Packages of the commands in `OTHERS` that are outside `lightning_fedq.commands`."""


def command_module(command: str) -> str:
    """Return the name of the module of a command in `OTHERS`."""
    return f"lightning_fedq.{ROOMS.get(command, '')}commands.{command}"


def usage() -> str:
    """Return the overview of all commands."""
    begin = "Start with fedq fit digits_private. Choose a mechanism with fedq plan and fedq compare."
    lines = ["usage: fedq COMMAND [options]", "", begin, "", f"  {'fit':<11} {TRAINING['fit']}"]
    lines += [f"  {'  '.join(EVALUATION)}  evaluate a checkpoint, or predict with it"]
    lines += [f"  {name:<11} {text}" for name, text in OTHERS.items()]
    lines += ["", "fedq COMMAND --help shows its options. A YAML file given with --config may set them, too."]
    lines += ["fit, validate, test and predict also take --with FRAGMENT and --set Federated.num_clients=7."]
    lines += [f"{TRACE}=1 in the environment shows the trace of an error."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if os.getcwd() not in sys.path:  # a YAML may name classes in the current folder, as with `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `fedq configs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit succeeds
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if (words := complaint(error)) is None:
            raise
        print(words, file=sys.stderr)
        return 2
    return status


def _run(argv: Sequence[str] | None) -> int:
    """Run one command without handling its errors, and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"fedq {__version__}")
        return 0
    if arguments[-1] in ("-h", "--help") and (text := read_help(command, *arguments[1:-1])) is not None:
        print(text, end="")
        return 0
    if command == "fit":
        refuse_unknown(arguments[1:])
    if command in (*TRAINING, *OTHERS) and command != "configs":  # `configs` needs no class
        import_named_classes(arguments[1:])
    if command in OTHERS:
        return run(import_module(command_module(command)).main, f"fedq {command}", arguments[1:])
    if command in TRAINING:
        try:
            arguments, changes = take_changes(expand(arguments))
            refuse_unknown_settings(changes, arguments)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        from lightning_fedq.commands.run import FedqCLI  # imports Lightning, which takes seconds

        FedqCLI(arguments, changes=changes)
        return 0
    hint = nearest(command, [*TRAINING, *OTHERS])
    print(f"error: There is no command {command!r}.{hint}\n\n{usage()}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
