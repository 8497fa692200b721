"""Command line of a typed function: its parameters are the options, its docstring is the help.

jsonargparse, which reads configurations, could also derive parsers from functions. It would accept several
values only as `[a,b]` and a flag only as `--quick true`, report a wrong number in eight lines, and make
`fedq configs` three times slower.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from lightning_fedq.commands.errors import nearest

Command = Callable[..., int | None]


def run(command: Command | Mapping[str, Command], prog: str, argv: Sequence[str]) -> int:
    """Parse a command line, call the function with it, and return the exit status.

    Args:
        command: Function, or functions by the name of their subcommand. A function with `*words` gets the
            words of the command line unchanged.
        prog: Words before `argv`, for the help.
        argv: Words of the command line.

    Raises:
        ValueError: If the words don't match the parameters.
        SystemExit: If the words ask for help.
    """
    parser = _Parser(prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    if callable(command):
        if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(command).parameters.values()):
            return command(*argv) or 0
        _describe(parser, command)
    else:
        several = parser.add_subparsers(required=True, metavar="|".join(command))
        for name, function in command.items():
            first = str(inspect.getdoc(function)).partition("\n\n")[0].replace("%", "%%")
            formatter = parser.formatter_class
            added = several.add_parser(name, help=first, formatter_class=formatter, allow_abbrev=False)
            _describe(added, function)
    words = [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
    parser.refuse_unknown(words)
    options = vars(parser.parse_args(words))
    status: int | None = options.pop("command")(**options)
    return status or 0


class _Parser(argparse.ArgumentParser):
    """Parser that raises errors, so that `cli.main` prints them without the long usage."""

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError with the message, and with the nearest option to an unknown one."""
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        hint, options = "", self._options()
        if unknown:
            longer = [option for option in options if option.startswith(unknown[1])]
            hint = nearest(unknown[1], longer if len(longer) == 1 else options)
        raise ValueError(f"{message}.{hint} {self.prog} --help lists the options")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Raise the error about an unknown option, which argparse reports after a missing one.

        Raises:
            ValueError: If no command has the option.
        """
        known = [*self._options(), "--"]
        for word in words:
            option = word.partition("=")[0]
            if option.startswith("--") and " " not in option and option not in known:
                self.error(f"unrecognized arguments: {option}")

    def _options(self) -> list[str]:
        """Return the options of this parser and of its subcommands."""
        choices = [action.choices for action in self._actions if isinstance(action.choices, Mapping)]
        parsers = [self, *(parser for mapping in choices for parser in mapping.values())]
        return [option for parser in parsers for option in parser._option_string_actions]


def _describe(parser: argparse.ArgumentParser, command: Command) -> None:
    """Add the help and the parameters of a function to a parser."""
    text, _, examples = str(inspect.getdoc(command)).partition("\n\nExamples:\n")
    parser.description, _, arguments = text.partition("\n\nArgs:\n")
    parser.epilog = examples and f"examples:\n{examples}"
    lines = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", arguments, re.M))
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        default, text = parameter.default, " ".join(lines[name].split())
        settings = _kind(hints[name])
        if default is parameter.empty:
            settings |= {"nargs": "+"} if "nargs" in settings else {}
        elif "nargs" in settings and not default:
            settings |= {"action": "extend", "default": []}  # the option may be repeated, with several values
        else:
            settings["default"] = default
        if default not in (None, False, (), "", parameter.empty) and "default" not in text:
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            text = f"{text.rstrip('.')} (default: {shown})."
        settings["help"] = text.replace("%", "%%")
        if parameter.kind is parameter.KEYWORD_ONLY:
            settings |= {"dest": name, "required": default is parameter.empty}
            parser.add_argument(f"--{name.rstrip('_').replace('_', '-')}", **settings)
        else:
            if default is not parameter.empty:
                settings.setdefault("nargs", "?")
            parser.add_argument(name, **settings)
    parser.set_defaults(command=command)


def _kind(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a type. `Annotated[T, "WORD"]` sets the metavar."""
    settings: dict[str, Any] = {}
    if get_origin(hint) is Annotated:
        hint, settings["metavar"] = get_args(hint)
    if NoneType in get_args(hint):
        (hint,) = (option for option in get_args(hint) if option is not NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Sequence:
        (hint,), settings["nargs"] = get_args(hint), "*"
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), **settings}
    return {"type": hint, **settings}
