"""A check that many constructors make."""

from __future__ import annotations

import math


def check_positive(**values: float) -> None:
    """Refuse what is not a positive finite number.

    Raises:
        ValueError: If a value is not > 0 and finite; the message names it.
    """
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be > 0 and finite, got {value}")
