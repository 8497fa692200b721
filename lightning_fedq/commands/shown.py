"""Help of each command, printed without importing the command.

The parsers' own words stand in `shown.json`, which `make tables` writes and a test compares with the
parsers; a parser's module imports torch, which takes seconds. Lightning's stand there for `fedq fit NAME`,
with the packages that they are from; with others, the parser is asked.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_fedq.commands.configs import TRAINING, configs
from lightning_fedq.commands.errors import suggest

SHIPPED = Path(__file__).with_suffix(".json")
CHOICES = (
    "NAME is a run that ships with the package (`fedq configs` lists them) or a YAML file, RUN the folder of "
    "a run. --with FRAGMENT adds a mechanism or a callback that ships (corbin, wandb), or a file. Several "
    "may be given, and stand in that order behind the callbacks of NAME. --set changes settings after all "
    "else, by the name of a class or from the top: --set Federated.num_clients=7 CorBin.epsilon=2.0 "
    "trainer.max_epochs=3."
)
"""What `expand` and `take_changes` add to LightningCLI."""


FLAGS, WRITERS = "fit NAME", "fit NAME is from"
"""Keys of the help of `fedq fit NAME`, and of the packages that it is from."""
_PACKAGES = ("pytorch-lightning", "jsonargparse", "docstring-parser", "torch")


def writers() -> str:
    """Packages that the help of `fedq fit NAME` hangs on, as installed. "" where one is not."""
    try:
        return ", ".join(
            [f"Python {sys.version_info[0]}.{sys.version_info[1]}"]
            + [f"{name} {version(name)}" for name in _PACKAGES]
        )
    except PackageNotFoundError:
        return ""


def described(subcommand: str) -> dict[str, str]:
    """Usage and description of a training command, of which LightningCLI knows a part."""
    first = "NAME" if subcommand == "fit" else "RUN"
    return {
        "usage": f"fedq {subcommand} {first} [--with FRAGMENT] [--set SETTING=VALUE ...] [--KEY VALUE ...]",
        "description": f"{TRAINING[subcommand][:1].upper()}{TRAINING[subcommand][1:]}. {CHOICES}",
    }


def read_help(command: str, *names: str) -> str | None:
    """Return what `fedq COMMAND --help` prints, or `fedq fit NAME --help`. None where the parser must say.

    Every key of a configuration is a flag of a training command, 500 lines that Lightning writes: they come
    with a NAME before `--help`.
    """
    if names and (command != "fit" or len(names) > 1 or names[0] not in configs()):
        return None
    if command in TRAINING and not names:
        words = described(command)
        keys = (
            "Every key of a configuration is a flag: --trainer.max_epochs 3. `fedq fit NAME --print_config` "
            f"shows those of a run, `fedq {command} NAME --help` lists all that Lightning knows."
        )
        texts = (f"usage: {words['usage']}", words["description"], keys)
        return "\n\n".join(textwrap.fill(text, 100) for text in texts) + "\n"
    shipped = _shipped()
    if names:
        return shipped[FLAGS] if shipped[WRITERS] == writers() else None
    return shipped.get(command)


def refuse_unknown(arguments: Sequence[str]) -> None:
    """Refuse an option that `fedq fit` does not have, before anything is imported.

    Settings below a class (`--model.lr`, `--trainer.callbacks.mechanism`) are left to the parser, and all of
    them with other packages than the help that ships is from. So is a name that is shortened.

    Raises:
        ValueError: If there is one, with the nearest one.
    """
    shipped = _shipped()
    if shipped[WRITERS] != writers():
        return
    keys = [key for key in re.findall(r"--([\w.]+)", shipped[FLAGS]) if not key.endswith(".help")]
    leaves = [f"{key}." for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    for argument in arguments:
        option = argument.removeprefix("--").partition("=")[0].rstrip("+")
        known = option.startswith(tuple(leaves)) or any(key.startswith(option) for key in keys)
        if argument.startswith("--") and not known:
            words = f"unrecognized arguments: --{option}"
            near = f".{hint}" if (hint := suggest(words, keys)) else ";"
            raise ValueError(f"{words}{near} fedq fit NAME --help lists the options")


def _shipped() -> dict[str, str]:
    shipped: dict[str, str] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return shipped
