"""Settings by short dotted names (`--set Federated.num_clients=7`), and the modules of classes they name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lightning_fedq.commands.configs import SUFFIXES
from lightning_fedq.commands.errors import nearest

_ARGUMENTS = {"PrivacyTarget": "Federated.privacy", "SecAgg": "Federated.secure_aggregation"}
"""Classes that a configuration writes as settings of an argument, without a name of their own."""


def check_rounds(rounds: int | None) -> None:
    """Refuse a run of no rounds.

    Raises:
        ValueError: If there are less than one; None is no word on them.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(f"--rounds must be >= 1, got {rounds}; nothing is sent in a run of none")


def parse_changes(arguments: Sequence[str]) -> dict[str, Any]:
    """`name=value` each. The value is YAML.

    Raises:
        ValueError: If one is not of that form.
    """
    changes = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"a setting is name=value such as LDPQ.epsilon=0.1, got {argument!r}")
        changes[name] = yaml.safe_load(value)
    return changes


def take_changes(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the arguments of a training command into those for Lightning and the changes after `--set`.

    Raises:
        ValueError: If a change is not `name=value`, or none follows.
    """
    rest: list[str] = []
    changes: list[str] = []
    waiting = list(arguments)
    while waiting:
        flag, equals, value = waiting.pop(0).partition("=")
        if flag != "--set":
            rest.append(flag + equals + value)
            continue
        given = [value] if equals else []
        while waiting and not waiting[0].startswith("-"):
            given.append(waiting.pop(0))
        if not given:
            raise ValueError("--set needs NAME=VALUE such as Federated.num_clients=7")
        changes += given
    return rest, parse_changes(changes)


def change_setting(config: dict[str, Any], name: str, value: Any) -> None:
    """Set `name` to `value` in place.

    Args:
        config: A resolved configuration, every default filled in.
        name: Dotted; it starts at a top-level key (`trainer.max_epochs`) or at the name of a class that
            occurs once (`Federated.server_lr`, `CorBin.epsilon`); `init_args` is left out. An item of a list
            is named by its place from 0 (`trainer.callbacks.1.server_lr`).
        value: The new value.

    Raises:
        ValueError: If there is no such setting, with the nearest one, or several.
    """
    first, *rest = name.split(".")
    if not rest:
        raise ValueError(f"a setting is a dotted name such as Federated.server_lr, got {name!r}")
    node = _start(config, first, name)
    for part in rest[:-1]:
        node = _inside(node[_key(node, part, name)])
        if not isinstance(node, dict | list):
            raise ValueError(f"{name!r}: {part!r} holds no settings")
    node[_key(node, rest[-1], name)] = value


def _start(config: dict[str, Any], first: str, name: str) -> Any:
    if first in config:
        return _inside(config[first])
    found = [node for label, node in classes(config) if label == first]
    if len(found) > 1:
        raise ValueError(
            f"{name!r}: {first} occurs {len(found)} times; name the setting from the top, with places from 0 "
            "in lists, as in trainer.callbacks.0.x"
        )
    if not found and first in _ARGUMENTS:
        rest = name.partition(".")[2]
        raise ValueError(
            f"{name!r}: {first} is no class in the configuration but an argument of Federated: "
            f"{_ARGUMENTS[first]}.{rest}"
        )
    if not found:
        choices = [*config, *(label for label, _ in classes(config))]
        raise ValueError(f"{name!r}: there is no {first} in the configuration.{nearest(first, choices)}")
    return _inside(found[0])


def classes(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and node of every class in a configuration, from the outside in."""
    if isinstance(node, dict):
        if "class_path" in node:
            yield str(node["class_path"]).rpartition(".")[2], node
        for child in node.values():
            yield from classes(child)
    elif isinstance(node, list):
        for child in node:
            yield from classes(child)


def _inside(node: Any) -> Any:
    return node.setdefault("init_args", {}) if isinstance(node, dict) and "class_path" in node else node


def _key(node: Any, part: str, name: str) -> Any:
    """The key of a part of a name, or its place in a list."""
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return int(part)
    choices = list(node) if isinstance(node, dict) else [str(place) for place in range(len(node or []))]
    if not isinstance(node, dict) or part not in node:
        raise ValueError(f"{name!r}: there is no setting {part!r}.{nearest(part, choices)} It has: {choices}")
    return part


# Which of Lightning's two packages a command works with: that of the classes which its YAML names.
#
# `lightning_fedq._lightning` takes the package that was imported first. In a program that is the program's
# own; in a command nothing was imported yet, so the modules of the named classes are.


_PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def import_named_classes(arguments: Sequence[str]) -> None:
    """Import the modules of classes that the arguments or their files name, until one imports Lightning.

    Models and data come before callbacks and loggers. What can't be imported is left to the parser, which
    says where it stands.
    """
    for module in _modules(arguments):
        if any(package in sys.modules for package in _PACKAGES):
            return
        with suppress(ImportError):
            import_module(module)


def _modules(arguments: Sequence[str]) -> Iterator[str]:
    configs = list(_configs(arguments))
    first = [config.get(key) for key in ("model", "data") for config in configs]
    paths = [*_flags(arguments), *(str(node["class_path"]) for _, node in classes([first, configs]))]
    for path in paths:
        module = path.rpartition(".")[0]
        if module and not module.startswith("lightning_fedq"):
            yield module


def _flags(arguments: Sequence[str]) -> Iterator[str]:
    """Classes given as `--model CLASS` or `--model=CLASS`, and of the data likewise."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    for flag, value in pairwise(words):
        if flag.removesuffix(".class_path") in ("--model", "--data"):
            yield value


def _configs(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    for argument in arguments:
        path = Path(argument.partition("=")[2] if argument.startswith("-") else argument)
        path = path / "config.yaml" if path.is_dir() else path
        if path.suffix in SUFFIXES and path.is_file():
            with suppress(yaml.YAMLError):
                config = yaml.safe_load(path.read_text())
                if isinstance(config, dict):
                    yield config
