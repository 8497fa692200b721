"""Command line of a typed function: its parameters are the options, its docstring is the help.

jsonargparse, which reads configurations, derives parsers, too. Here it would take several words only as
`[a,b]`, a flag only as `--quick true`, tell a wrong number in eight lines, and slow `fedq configs` threefold.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

Command = Callable[..., int | None]


def run(command: Command | Mapping[str, Command], prog: str, argv: Sequence[str]) -> int:
    """Parse a command line, call the function with it, and return the exit status.

    Args:
        command: The function, or functions by the first word. One of `*words` takes the words as they are.
        prog: Words before `argv`, for the help.
        argv: Words of the command line.

    Raises:
        ValueError: If the words don't fit.
        SystemExit: If they ask for help.
    """
    parser = _Parser(prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter)
    if callable(command):
        if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(command).parameters.values()):
            return command(*argv) or 0
        _describe(parser, command)
    else:
        several = parser.add_subparsers(required=True, metavar="|".join(command))
        for name, one in command.items():
            first = str(inspect.getdoc(one)).partition("\n\n")[0].replace("%", "%%")
            _describe(several.add_parser(name, help=first, formatter_class=parser.formatter_class), one)
    options = vars(parser.parse_args([re.sub(r"^--[^=]+", _with_dashes, word) for word in argv]))
    status: int | None = options.pop("command")(**options)
    return status or 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave the words to who prints errors, without the usage, which is many lines long."""
        raise ValueError(f"{message}; {self.prog} --help lists the options")


def _with_dashes(flag: re.Match[str]) -> str:
    return flag[0].replace("_", "-")


def _describe(parser: argparse.ArgumentParser, command: Command) -> None:
    """Give a parser the help and the parameters of a function."""
    text, _, examples = str(inspect.getdoc(command)).partition("\n\nExamples:\n")
    parser.description, _, arguments = text.partition("\n\nArgs:\n")
    parser.epilog = examples and f"examples:\n{examples}"
    lines = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", arguments, re.M))
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        default, told = parameter.default, " ".join(lines[name].split())
        settings = _kind(hints[name])
        if default is parameter.empty:
            settings |= {"nargs": "+"} if "nargs" in settings else {}
        elif "nargs" in settings and not default:
            settings |= {"action": "extend", "default": []}  # each word, and each time it is given
        else:
            settings["default"] = default
        if default not in (None, False, (), "", parameter.empty) and "default" not in told:
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            told = f"{told.rstrip('.')} (default: {shown})."
        settings["help"] = told.replace("%", "%%")
        if parameter.kind is parameter.KEYWORD_ONLY:
            settings |= {"dest": name, "required": default is parameter.empty}
            parser.add_argument(f"--{name.rstrip('_').replace('_', '-')}", **settings)
        else:
            if default is not parameter.empty:
                settings.setdefault("nargs", "?")
            parser.add_argument(name, **settings)
    parser.set_defaults(command=command)


def _kind(hint: Any) -> dict[str, Any]:
    """Settings of `add_argument` for a type. `Annotated[T, "WORD"]` names the value in the help."""
    found: dict[str, Any] = {}
    if get_origin(hint) is Annotated:
        hint, found["metavar"] = get_args(hint)
    if NoneType in get_args(hint):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Sequence:
        (hint,), found["nargs"] = get_args(hint), "*"
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), **found}
    return {"type": hint, **found}
