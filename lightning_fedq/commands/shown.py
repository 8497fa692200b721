"""Help texts of all commands, printed without importing the command.

A command's module imports torch, which takes seconds. The help texts are therefore stored in `shown.json`,
which `make tables` writes and a test compares with the parsers. The file also has Lightning's help of
`fedq fit NAME`, with the versions of the packages that produced it. With other versions, the parser prints
its own help.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_fedq.commands.configs import TRAINING, configs
from lightning_fedq.commands.errors import suggest

SHIPPED = Path(__file__).with_suffix(".json")
CHOICES = (
    "NAME is a run that ships with the package (`fedq configs` lists them) or a YAML file. RUN is the folder "
    "of a run. --with FRAGMENT adds a mechanism or a callback that ships with the package (corbin, wandb), "
    "or a file. Several fragments are added in their order after the callbacks of NAME. --set changes "
    "settings last, by the name of a class or from the top: --set Federated.num_clients=7 "
    "CorBin.epsilon_per_coordinate=2.0 trainer.max_epochs=3."
)
"""Help on the options that `expand` and `take_changes` add to LightningCLI."""


FLAGS, WRITERS, SETTINGS = "fit NAME", "fit NAME is from", "settings"
"""Keys in `shown.json`: help of `fedq fit NAME`, package versions that produced it, arguments by class."""
_PACKAGES = ("pytorch-lightning", "jsonargparse", "docstring-parser", "torch")


def writers() -> str:
    """Return the installed versions that the help of `fedq fit NAME` depends on, or "" if one is missing."""
    try:
        python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
        return ", ".join([python, *(f"{name} {version(name)}" for name in _PACKAGES)])
    except PackageNotFoundError:
        return ""


def described(subcommand: str) -> dict[str, str]:
    """Return usage and description of a training command, with the options that this package adds."""
    first = "NAME" if subcommand == "fit" else "RUN"
    return {
        "usage": f"fedq {subcommand} {first} [--with FRAGMENT] [--set SETTING=VALUE ...] [--KEY VALUE ...]",
        "description": f"{TRAINING[subcommand][:1].upper()}{TRAINING[subcommand][1:]}. {CHOICES}",
    }


def read_help(command: str, *names: str) -> str | None:
    """Return the help of `fedq COMMAND` or `fedq fit NAME`, or None if the parser must print it.

    Every key of a configuration is a flag of a training command. Lightning's help on all of them has 500
    lines, so it is only printed with a NAME before `--help`.
    """
    if names and (command != "fit" or len(names) > 1 or names[0] not in configs()):
        return None
    if command in TRAINING and not names:
        words = described(command)
        keys = (
            "Every key of a configuration is a flag: --trainer.max_epochs 3. `fedq fit NAME --print_config` "
            f"prints the keys of a run, and `fedq {command} NAME --help` lists all keys of Lightning."
        )
        texts = (f"usage: {words['usage']}", words["description"], keys)
        return "\n\n".join(textwrap.fill(text, 100) for text in texts) + "\n"
    shipped = _shipped()
    if names:
        return shipped[FLAGS] if shipped[WRITERS] == writers() else None
    return shipped.get(command)


def refuse_unknown(arguments: Sequence[str]) -> None:
    """Refuse an option that `fedq fit` does not have, before the slow imports.

    The parser checks settings below a class (`--model.lr`, `--trainer.callbacks.mechanism`). It checks all
    options if the stored help is from other package versions.

    Raises:
        ValueError: If an option is unknown. The message has the nearest option.
    """
    shipped = _shipped()
    if shipped[WRITERS] != writers():
        return
    keys = [key for key in re.findall(r"--([\w.]+)", shipped[FLAGS]) if not key.endswith(".help")]
    leaves = [f"{key}." for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    for argument in arguments:
        option = argument.removeprefix("--").partition("=")[0].rstrip("+")
        known = option in keys or option.startswith(tuple(leaves))
        if argument.startswith("--") and not known:
            words = f"unrecognized arguments: --{option}"
            near = f".{hint}" if (hint := suggest(words, keys)) else "."
            raise ValueError(f"{words}{near} fedq fit NAME --help lists the options")


def read_settings() -> dict[str, list[str]]:
    """Return the arguments of each public class, by its name, without importing the class."""
    return {name: arguments.split() for name, arguments in _shipped()[SETTINGS].items()}


def _shipped() -> dict[str, Any]:
    """Return the contents of `shown.json`."""
    shipped: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return shipped
