"""A comparison on a configuration of one's own: its module, its data, its `Federated`, its keys.

A cell is the configuration with another mechanism, target and seed, and is trained as `fedq fit` would. Its
folder below `runs/` holds the configuration, so that `fedq fit` of it is the same run again. With secret keys
all cells compose for the same clients: what they cost together is written before the first begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lightning_fedq.comparison.bench.tasks import Task, tasks


def task_of(
    on: str,
    data: Path | None,
    rounds: int | None,
    delta: float,
    monitor: str | None,
    mode: Literal["max", "min"] | None,
) -> Task:
    """A task that comes along, or that of a configuration."""
    from dataclasses import replace

    known = tasks(data)
    if on in known:
        return replace(known[on], rounds=rounds or known[on].rounds, delta=delta)
    raise ValueError(f"there is no task or configuration {on}; those on images need --data FOLDER")
