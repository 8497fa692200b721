"""Mechanisms that a command is asked for: each name ends in a row with a setting, or in a sentence.

`fedq compare`, `fedq plan`, `fedq mechanisms` and `fedq audit` read names by this one rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_fedq.commands.errors import nearest
from lightning_fedq.commands.mechanism_row import example
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.registry import class_path, installed, mechanism_class


@dataclass(frozen=True)
class Resolved:
    """Mechanisms by the name of their row, and why a name has none.

    Args:
        rows: By name of the row: the class, or the class and what is set otherwise ("RotatedCoins, paired").
        left_out: By the name that was asked for, a sentence.
    """

    rows: Mapping[str, Mechanism]
    left_out: Mapping[str, str]

    @property
    def words(self) -> list[str]:
        """A line for every name that is left out."""
        return [f"{name} is left out: {why}" for name, why in self.left_out.items()]

    def some(self) -> Resolved:
        """Itself.

        Raises:
            ValueError: If no name has a row.
        """
        if not self.rows:
            raise ValueError("no mechanism is left. " + "; ".join(self.words))
        return self


def resolved(names: Sequence[str], params: int, *, target: bool = True) -> Resolved:
    """Resolve names.

    Args:
        names: Names of rows (`fedq plan` lists them) or classes, or class paths. A class of which no row has
            the name is all of its rows. Without any, all rows of all installed mechanisms.
        params: Parameters of the model; what clips in l1 gets the l1 norm of an evenly spread update.
        target: Are rows asked for that a target can set? Else a class is one row, at example settings.

    Example:
        >>> found = resolved(["CPA", "RotatedCoins, paired", "Nonsense", "FedAvg"], 100)
        >>> sorted(found.rows), sorted(found.left_out)
        (['CPA', 'RotatedCoins, paired'], ['FedAvg', 'Nonsense'])
    """
    rows: dict[str, Mechanism] = {}
    left_out: dict[str, str] = {}
    every: Mapping[str, Mechanism] | None = None
    for name in names or list(installed()):
        try:
            kind = mechanism_class(name)
            found = plan_settings(kind, params) if target else {find_name(kind): example(kind)}
        except (ValueError, TypeError) as error:
            every = candidates(params) if every is None else every
            if name in every:
                rows[name] = every[name]
            elif "," in name:
                left_out[name] = f"there is no row of this name.{nearest(name, every)} `fedq plan` lists them"
            else:
                left_out[name] = str(error)
            continue
        if not found and names:
            left_out[name] = _obstacle_text(kind)
        found = {name: found[name]} if names and name in found else found
        for row, mechanism in found.items():
            taken = row in rows and type(rows[row]) is not kind
            rows[row.replace(kind.__name__, class_path(kind)) if taken else row] = mechanism
    return Resolved(rows, left_out)


def candidates(params: int) -> dict[str, Mechanism]:
    """Settings of every installed mechanism that a target can set, for updates of l2 norm 1, by row.

    Args:
        params: Parameters of the model.
    """
    found: dict[str, Mechanism] = {}
    for kind in installed().values():
        found |= plan_settings(kind, params)
    return found


def plan_settings(kind: type[Mechanism], params: int) -> Mapping[str, Mechanism]:
    """Settings of a mechanism by row, none where no target can set it.

    Raises:
        ValueError: If a parameter has no usual value.
    """
    if (own := kind.plan_settings(params)) is not None:
        return own
    if kind.level is None and kind.with_level is Mechanism.with_level:
        return {}
    shown = example(kind)
    return {} if shown.joint else {kind.__name__: shown}


def find_name(kind: type[Mechanism]) -> str:
    """Name by which `mechanism_class` finds a mechanism: that of an installed one, else the class path."""
    return kind.__name__ if installed().get(kind.__name__) is kind else class_path(kind)


def _obstacle_text(kind: type[Mechanism]) -> str:
    if kind.level is None and kind.with_level is Mechanism.with_level:
        return "no target can set it: it says neither level nor at_level (docs/writing_a_mechanism.md)"
    return "its clients encode jointly, so that a target can't set it"
