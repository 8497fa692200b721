"""Resolution of mechanism names on the command line: each name gives rows, or a reason why it has none.

`fedq compare`, `fedq plan`, `fedq mechanisms` and `fedq audit` all use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_fedq.commands.errors import nearest
from lightning_fedq.commands.mechanism_row import example
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.registry import class_path, installed, mechanism_class

_RANKED: dict[str, dict[str, dict[str, Any]]] = {
    "BandedGaussian": {"BandedGaussian, band 1": {}},
    "CPA": {"CPA": {}, "CPA, some blocks": {"epsilon_scope": "round"}},
    "MVU": {},
    "RotatedCoins": {
        "RotatedCoins": {},
        "RotatedCoins, paired": {"paired": True},
        "RotatedCoins, share 1/2": {"fraction": 0.5},
        "RotatedCoins, share 1/8": {"fraction": 0.125},
    },
}
"""Rows of a plan, by class: changes to the example by row. MVU has none, because a design takes seconds."""


@dataclass(frozen=True)
class Resolved:
    """Mechanisms by the name of their row, and reasons for names that have no row.

    Args:
        rows: Mechanisms by the name of their row. The name is the class, perhaps with a variant
            ("RotatedCoins, paired").
        left_out: Reasons by the name that was asked for.
    """

    rows: Mapping[str, Mechanism]
    left_out: Mapping[str, str]

    @property
    def words(self) -> list[str]:
        """Lines with the reason for every name that is left out."""
        return [f"{name} is left out: {why}" for name, why in self.left_out.items()]

    def some(self) -> Resolved:
        """Return this object after a check that it has a row.

        Raises:
            ValueError: If no name has a row.
        """
        if not self.rows:
            raise ValueError("No mechanism is left. " + "; ".join(self.words))
        return self


def resolved(names: Sequence[str], params: int, *, target: bool = True) -> Resolved:
    """Resolve names to rows of mechanisms.

    Args:
        names: Names of rows (`fedq plan` lists them) or classes, or class paths. A class whose name is not a
            row stands for all of its rows. Empty means all rows of all installed mechanisms.
        params: Number of parameters of the model. Mechanisms that clip in l1 get the l1 norm of an evenly
            spread update.
        target: Whether to return the rows that a privacy target can calibrate. If False, each class is one
            row with example settings.

    Examples:
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
                hint = nearest(name, every)
                left_out[name] = f"there is no row of this name.{hint} `fedq plan` lists rows."
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
    """Return all mechanisms that a privacy target can calibrate, for updates of l2 norm 1, by row.

    Args:
        params: Number of parameters of the model.
    """
    found: dict[str, Mechanism] = {}
    for kind in installed().values():
        found |= plan_settings(kind, params)
    return found


def plan_settings(kind: type[Mechanism], params: int) -> Mapping[str, Mechanism]:
    """Return the rows of a mechanism class, empty if a privacy target can't calibrate it.

    A plan is about updates of l2 norm 1 and cohorts of any kind. It ranks the example of a class, with a
    clipping norm that such an update just meets. It leaves out mechanisms with their own rule for the range,
    with noise that needs cohorts that take turns, and votes.

    Raises:
        ValueError: If a parameter has no usual value.
    """
    if kind.level is None and kind.with_level is Mechanism.with_level:
        return {}
    shown: Any = example(kind)
    longest = shown.longest_update(params)
    if longest is not None and longest != 1.0:
        shown = replace(shown, clip_norm=shown.clip_norm / longest)
    if installed().get(kind.__name__) is kind and kind.__name__ in _RANKED:
        return {row: replace(shown, **changes) for row, changes in _RANKED[kind.__name__].items()}
    takes_part_anytime = shown.separation == 1 and shown.range_rule is None and not shown.joint
    return {kind.__name__: shown} if takes_part_anytime else {}


def find_name(kind: type[Mechanism]) -> str:
    """Return the name that `mechanism_class` resolves to a class: its name if installed, or its path."""
    return kind.__name__ if installed().get(kind.__name__) is kind else class_path(kind)


def _obstacle_text(kind: type[Mechanism]) -> str:
    """Return the reason why a privacy target can't calibrate a mechanism class."""
    if kind.level is None and kind.with_level is Mechanism.with_level:
        return "no target can set it without level or with_level (docs/writing_a_mechanism.md)"
    return "no target can set it, because its clients encode jointly"
