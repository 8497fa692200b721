"""The `fedq` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_fedq import __version__
from lightning_fedq.commands.configs import EVALUATION, TRAINING, expand
from lightning_fedq.commands.errors import TRACE, complaint, nearest
from lightning_fedq.commands.options import import_named_classes, take_changes
from lightning_fedq.commands.shown import read_help, refuse_unknown
from lightning_fedq.commands.signature import run

OTHERS = {
    "configs": "list the shipped runs and fragments, or copy one to a file",
    "mechanisms": "list all mechanisms: bits, aggregatable or not, epsilon by adversary, paper",
    "compare": "compare mechanisms at equal epsilon, or finished runs, in a table and a picture",
    "report": "write an HTML page about finished runs: adversaries, epsilon and bits by round",
    "privacy": "print epsilon of a configuration, a checkpoint or a run, or of several runs together",
    "plan": "calibrate all mechanisms to a target epsilon, and rank them by error: bits, clients needed",
    "flower": "deploy over Flower: write an app, or run a site's client with installed code only",
    "audit": "try to refute the claims of mechanisms, also your own, by simulation",
}

ROOMS = {"audit": "audit.", "compare": "comparison."}
"""Where those of `OTHERS` stand that do not stand in `commands/` itself."""


def command_module(command: str) -> str:
    """Name of the module of one of `OTHERS`."""
    return f"lightning_fedq.{ROOMS.get(command, '')}commands.{command}"


def usage() -> str:
    """Return the overview of all commands."""
    begin = "Begin with fedq fit digits_private; fedq plan and fedq compare choose a mechanism."
    lines = ["usage: fedq COMMAND [options]", "", begin, "", f"  {'fit':<11} {TRAINING['fit']}"]
    lines += [f"  {'  '.join(EVALUATION)}  evaluate a checkpoint, or predict with it"]
    lines += [f"  {name:<11} {text}" for name, text in OTHERS.items()]
    lines += ["", "fedq COMMAND --help says more. Every option may stand in a YAML file given with --config."]
    lines += ["fit, validate, test and predict also take --with FRAGMENT and --set Federated.num_clients=7."]
    lines += [f"{TRACE}=1 in the environment shows the trace of an error that is told in a line."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if os.getcwd() not in sys.path:  # for classes named in a YAML, as with `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough, as in `fedq configs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
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
    if command in (*TRAINING, *OTHERS) and command != "configs":  # which only writes files
        import_named_classes(arguments[1:])
    if command in OTHERS:
        return run(import_module(command_module(command)).main, f"fedq {command}", arguments[1:])
    if command in TRAINING:
        try:
            arguments, changes = take_changes(expand(arguments))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        from lightning_fedq.commands.run import FedqCLI  # imports Lightning: seconds, and only needed here

        FedqCLI(arguments, changes=changes)
        return 0
    hint = nearest(command, [*TRAINING, *OTHERS])
    print(f"error: there is no command {command!r}.{hint}\n\n{usage()}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
