"""Which of Lightning's two packages a command works with: that of the classes which its YAML names.

`lightning_fedq._lightning` takes the package that was imported first. In a program that is the program's own;
in a command nothing was imported yet, so the modules of the named classes are.
"""

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
from lightning_fedq.commands.settings import classes

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
