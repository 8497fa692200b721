"""Settings in the folder of a comparison: an interrupted comparison continues only with the same settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_fedq.reports.runs import write_atomically

SETTINGS = "comparison.yaml"
_NAMED = 5
"""Number of different settings that an error names."""


def check_folder(out: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a comparison into its folder, or compare them with those that are there.

    Args:
        out: Folder of the comparison.
        settings: All settings, with the configuration. Every comparison has the same keys.

    Raises:
        ValueError: If the folder holds another comparison, or settings that can't be read.
    """
    path = out / SETTINGS
    if path.exists() or (out / "runs").exists():
        try:
            there = dict(yaml.safe_load(path.read_text()))
            known = {key: there[key] for key in settings}
        except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
            raise ValueError(f"{path} is damaged. Name another folder with --out.") from None
        if names := list(_differences(known, settings)):
            more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ValueError(
                f"{out} holds another comparison ({', '.join(names[:_NAMED])}{more}). Name another folder "
                "with --out."
            )
    write_atomically(path, yaml.safe_dump(dict(settings), sort_keys=False))


def _differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[str]:
    """Yield each setting that differs, with both values."""
    old, new = dict(_flatten("", there)), dict(_flatten("", asked))
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield f"{name} {old.get(name)}, not {new.get(name)}"


def _flatten(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values. A class has its own name, as in `--set Federated.num_clients=7`."""
    if isinstance(node, Mapping) and "class_path" in node:
        kind = str(node["class_path"])
        yield name, kind
        yield from _flatten(kind.rpartition(".")[2], node.get("init_args") or {})
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flatten(f"{name}.{key}".removeprefix(".").removeprefix("configuration."), value)
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        for place, item in enumerate(node):
            yield from _flatten(f"{name}.{place}", item)
    else:
        yield name, node
