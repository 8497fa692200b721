"""Changes of settings by dotted names (`--set Federated.num_clients=7`), and imports of named classes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lightning_fedq.commands.configs import SUFFIXES
from lightning_fedq.commands.errors import nearest
from lightning_fedq.commands.shown import read_settings

_ARGUMENTS = {"PrivacyTarget": "Federated.privacy", "SecAgg": "Federated.secure_aggregation"}
"""Classes that a configuration writes as an argument of `Federated`, without their class path."""


def check_rounds(rounds: int | None) -> None:
    """Check the number of rounds.

    Raises:
        ValueError: If `rounds` is given and below 1.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(f"--rounds must be >= 1, got {rounds}")


def parse_changes(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse arguments of the form `name=value`, where the value is YAML.

    Raises:
        ValueError: If an argument does not have that form.
    """
    changes = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(
                f"A setting is name=value such as LDPQ.epsilon_per_coordinate=0.1, got {argument!r}"
            )
        changes[name] = yaml.safe_load(value)
    return changes


def take_changes(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the arguments of a training command into those for Lightning and the changes after `--set`.

    Raises:
        ValueError: If a change is not `name=value`, or no change follows `--set`.
    """
    rest: list[str] = []
    changes: list[str] = []
    waiting = list(arguments)
    while waiting:
        flag, equals, value = waiting.pop(0).partition("=")
        if flag != "--set":
            rest.append(flag + equals + value)
            continue
        settings = [value] if equals else []
        while waiting and not waiting[0].startswith("-"):
            settings.append(waiting.pop(0))
        if not settings:
            raise ValueError("--set needs NAME=VALUE such as Federated.num_clients=7")
        changes += settings
    return rest, parse_changes(changes)


def refuse_unknown_settings(names: Iterable[str], arguments: Sequence[str]) -> None:
    """Refuse a setting that its class does not have, before the slow imports.

    `change_setting` checks all other names, and classes of another package with the name of a public class.

    Args:
        names: Dotted names of `--set`.
        arguments: Arguments of the command line, which may name classes and configurations.

    Raises:
        ValueError: If a public class has no such argument. The message has the nearest argument.
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    paths = [str(node["class_path"]) for config in _configs(arguments) for _, node in classes(config)]
    others = {path.rpartition(".")[2] for path in [*words, *paths] if not path.startswith("lightning_fedq.")}
    settings = read_settings()
    for name in names:
        kind, _, rest = name.partition(".")
        setting = rest.partition(".")[0]
        if kind in settings and kind not in others and setting not in settings[kind]:
            raise _unknown_setting(name, setting, settings[kind])


def _unknown_setting(name: str, setting: str, choices: Sequence[str]) -> ValueError:
    """Return the error about a part of a dotted name, with the nearest setting or all settings."""
    hint = nearest(setting, choices) or f" It has: {', '.join(choices)}."
    return ValueError(f"{name!r}: There is no setting {setting!r}.{hint}")


def change_setting(config: dict[str, Any], name: str, value: Any) -> None:
    """Set the setting `name` of a configuration to `value`, in place.

    Args:
        config: Resolved configuration with all defaults.
        name: Dotted name. It starts at a top-level key (`trainer.max_epochs`) or at the name of a class that
            occurs once (`Federated.server_lr`, `CorBin.epsilon_per_coordinate`), without `init_args`. An item
            of a list is named by its place, counted from 0 (`trainer.callbacks.1.server_lr`).
        value: New value.

    Raises:
        ValueError: If there is no such setting, or its class occurs several times. The message has the
            nearest name.
    """
    first, *rest = name.split(".")
    if not rest:
        raise ValueError(f"A setting is a dotted name such as Federated.server_lr, got {name!r}")
    node = _start(config, first, name)
    for part in rest[:-1]:
        node = _inside(node[_key(node, part, name)])
        if not isinstance(node, dict | list):
            raise ValueError(f"{name!r}: {part!r} holds no settings")
    node[_key(node, rest[-1], name)] = value


def _start(config: dict[str, Any], first: str, name: str) -> Any:
    """Return the node at which a dotted name starts: a top-level key, or a class that occurs once.

    Raises:
        ValueError: If there is no such key or class, or the class occurs several times.
    """
    if first in config:
        return _inside(config[first])
    nodes = [node for label, node in classes(config) if label == first]
    if len(nodes) > 1:
        raise ValueError(
            f"{name!r}: {first} occurs {len(nodes)} times. Write the whole name with places in lists, "
            "such as trainer.callbacks.0.x."
        )
    if not nodes and first in _ARGUMENTS:
        rest = name.partition(".")[2]
        raise ValueError(
            f"{name!r}: {first} is not a class in the configuration but an argument of Federated: "
            f"{_ARGUMENTS[first]}.{rest}"
        )
    if not nodes:
        choices = [*config, *(label for label, _ in classes(config))]
        raise ValueError(f"{name!r}: There is no {first} in the configuration.{nearest(first, choices)}")
    return _inside(nodes[0])


def classes(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and node of every class in a configuration, outer classes first."""
    if isinstance(node, dict):
        if "class_path" in node:
            yield str(node["class_path"]).rpartition(".")[2], node
        for child in node.values():
            yield from classes(child)
    elif isinstance(node, list):
        for child in node:
            yield from classes(child)


def _inside(node: Any) -> Any:
    """Return the `init_args` of a class node, or the node itself if it is not a class."""
    return node.setdefault("init_args", {}) if isinstance(node, dict) and "class_path" in node else node


def _key(node: Any, part: str, name: str) -> Any:
    """Return the key of a part of a dotted name, or its index in a list.

    Raises:
        ValueError: If the node has no such key.
    """
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return int(part)
    choices = list(node) if isinstance(node, dict) else [str(place) for place in range(len(node or []))]
    if not isinstance(node, dict) or part not in node:
        raise _unknown_setting(name, part, choices)
    return part


# Choice between Lightning's two packages: a command uses the package of the classes in its YAML.
#
# `lightning_fedq._lightning` uses the package that was imported first. In a command, nothing has been
# imported yet. The functions below therefore import the modules of the named classes first.


_PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def import_named_classes(arguments: Sequence[str]) -> None:
    """Import the modules of classes that the arguments or their files name, until one imports Lightning.

    Models and data come before callbacks and loggers. The parser reports modules that can't be imported,
    with their place in the configuration.
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    flags = ("--model", "--data", "--model.class_path", "--data.class_path")
    paths = [value for flag, value in pairwise(words) if flag in flags]
    configs = list(_configs(arguments))
    first = [config.get(key) for key in ("model", "data") for config in configs]
    paths += [str(node["class_path"]) for _, node in classes([first, configs])]
    for path in paths:
        module = path.rpartition(".")[0]
        if any(package in sys.modules for package in _PACKAGES):
            return
        if module and not module.startswith("lightning_fedq"):
            with suppress(ImportError):
                import_module(module)


def _configs(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the contents of all configuration files among the arguments."""
    for argument in arguments:
        path = Path(argument.partition("=")[2] if argument.startswith("-") else argument)
        path = path / "config.yaml" if path.is_dir() else path
        if path.suffix in SUFFIXES and path.is_file():
            with suppress(yaml.YAMLError):
                config = yaml.safe_load(path.read_text())
                if isinstance(config, dict):
                    yield config
