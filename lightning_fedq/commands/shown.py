"""Help of each command, printed without importing the command.

The parsers' own words stand in `shown.json`, which `make tables` writes and a test compares with the
parsers; a parser's module imports torch, which takes seconds. Lightning's stand there for `fedq fit NAME`,
with the packages that they are from; with others, the parser is asked.
"""

from __future__ import annotations

import json
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_fedq.commands.configs import TRAINING, configs

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


def help_of(command: str, *names: str) -> str | None:
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
    shipped: dict[str, str] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    if names:
        return shipped[FLAGS] if shipped[WRITERS] == writers() else None
    return shipped.get(command)
