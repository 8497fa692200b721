"""Classes of the numbers that an adversary sees: single values, or equally likely intervals."""

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.audit.views import Array

Integers = NDArray[np.int64]

_BINS = 32


def _joined(items: list[str], at_most: int = 4) -> str:
    """Return a list in words, with the number of items that are left out."""
    shown = items[:at_most]
    if len(items) > at_most:
        return f"{', '.join(shown)} or {len(items) - at_most} more"
    return " or ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


class Bins:
    """Classes of a real number: one class per value up to 32 values, otherwise 32 equally likely classes.

    If there are more values, each value with at least 1/32 of the sample has a class of its own.

    Args:
        values: Sample that chooses the edges of the classes.
    """

    def __init__(self, values: Array) -> None:
        levels, counts = np.unique(values, return_counts=True)
        self._levels: Array | None = levels
        self._whole = False
        if len(levels) > _BINS:
            self._levels = None
            frequent = levels[counts * _BINS >= len(values)]  # each has a class of its own
            self._whole = bool((levels == np.rint(levels)).all())
            after = frequent + 1.0 if self._whole else np.nextafter(frequent, np.inf)
            quantiles = np.quantile(values, np.arange(_BINS) / _BINS)
            levels = np.unique(np.concatenate([quantiles, frequent, after]))
        self.edges, self.size = levels[1:], len(levels)
        # pairs of outcomes would need size^2 bins, so they use at most 8 coarse classes each
        self._width = -(-self.size // 8)
        self.coarse_size = -(-self.size // self._width)

    def describe(self, event: NDArray[np.bool_]) -> str:
        """Return the outputs of an event in words.

        Args:
            event: `(size,)`, whether each class is part of the event.
        """
        inside, outside = self._items(event), self._items(~event)
        if outside and len(outside) < len(inside):
            return f"any output but {_joined(outside)}"
        return f"output {_joined(inside)}"

    def _items(self, event: NDArray[np.bool_]) -> list[str]:
        """Return the values of an event, and the intervals of neighbouring classes."""
        if self._levels is not None:
            return [f"{value:.6g}" for value in self._levels[event]]
        ends = np.concatenate([[-np.inf], self.edges, [np.inf]])
        changes = np.flatnonzero(np.diff(np.concatenate([[0], event.astype(np.int64), [0]])))
        return [self._interval(ends[start], ends[stop]) for start, stop in changes.reshape(-1, 2)]

    def _interval(self, low: float, high: float) -> str:
        """Return the numbers from `low` up to, but without, `high` in words."""
        last = high - 1.0 if self._whole else high
        if np.isinf(low) or np.isinf(high):
            return f"below {high:.6g}" if np.isinf(low) else f"{low:.6g} or more"
        single = last == low if self._whole else high == np.nextafter(low, np.inf)
        return f"{low:.6g}" if single else f"{low:.6g} to {last:.6g}"

    def fine(self, values: Array) -> Integers:
        """Return the class of each value, 0 to `size` - 1."""
        return np.asarray(np.searchsorted(self.edges, values, side="right"), np.int64)

    def coarse(self, classes: Integers) -> Integers:
        """Merge neighbouring classes into at most 8, numbered 0 to `coarse_size` - 1."""
        return np.asarray(classes // self._width)
