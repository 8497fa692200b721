"""Change one setting of a resolved configuration by a short dotted name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_fedq.commands.suggestions import nearest


def change_setting(config: dict[str, Any], name: str, value: Any) -> None:
    """Set `name` to `value` in place.

    Args:
        config: A resolved configuration, every default filled in.
        name: Dotted; it starts at a top-level key (`trainer.max_epochs`) or at the name of a class that
            occurs once (`Federated.smoothing`, `CorBin.epsilon`); `init_args` is left out.
        value: The new value.

    Raises:
        ValueError: If there is no such setting, with the nearest one, or several.
    """
    first, *rest = name.split(".")
    if not rest:
        raise ValueError(f"a setting is a dotted name such as Federated.smoothing, got {name!r}")
    node = _start(config, first, name)
    for part in rest[:-1]:
        node = _inside(_child(node, part, name))
        if not isinstance(node, dict):
            raise ValueError(f"{name!r}: {part!r} holds no settings")
    _child(node, rest[-1], name)
    node[rest[-1]] = value


def _start(config: dict[str, Any], first: str, name: str) -> Any:
    if first in config:
        return _inside(config[first])
    found = [node for label, node in _classes(config) if label == first]
    if len(found) > 1:
        raise ValueError(f"{name!r}: {first} occurs {len(found)} times; name the setting from the top")
    if not found:
        choices = [*config, *(label for label, _ in _classes(config))]
        raise ValueError(f"{name!r}: there is no {first} in the configuration.{nearest(first, choices)}")
    return _inside(found[0])


def _classes(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if "class_path" in node:
            yield str(node["class_path"]).rpartition(".")[2], node
        for child in node.values():
            yield from _classes(child)
    elif isinstance(node, list):
        for child in node:
            yield from _classes(child)


def _inside(node: Any) -> Any:
    return node.setdefault("init_args", {}) if isinstance(node, dict) and "class_path" in node else node


def _child(node: Any, part: str, name: str) -> Any:
    if not isinstance(node, dict) or part not in node:
        choices = list(node) if isinstance(node, dict) else []
        raise ValueError(f"{name!r}: there is no setting {part!r}.{nearest(part, choices)} It has: {choices}")
    return node[part]
