"""Verdicts on an epsilon and its printed form, the same for clients and for samples."""

import math

VACUOUS_EPSILON = 20.0
NO_GUARANTEE = "no guarantee"
NOT_RUN = "not run"
"""Printed in place of an epsilon against the server behind secure aggregation where no masks ran."""
VACUOUS = "vacuous"
_SCALE = ((1.0, "strong"), (4.0, "good"), (8.0, "moderate"), (VACUOUS_EPSILON, "weak"))


def scale() -> str:
    """Return the scale of verdicts in words, for readers of a verdict."""
    words = ", ".join(f"{word} up to {limit:g}" for limit, word in _SCALE)
    return f"a smaller epsilon is more private: {words}, above it {VACUOUS}, which promises nothing useful"


def verdict(epsilon: float) -> str:
    """Return one word for an epsilon, in nats.

    Examples:
        >>> verdict(0.5)
        'strong'
        >>> verdict(8.0)
        'moderate'
    """
    return next((word for limit, word in _SCALE if epsilon <= limit), VACUOUS)


def format_epsilon(value: float | None) -> str:
    """Return epsilon with three digits, rounded up so that a printed claim is never smaller. Infinity is "∞".

    Examples:
        >>> format_epsilon(8.0), format_epsilon(None)
        ('8', '-')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "∞"
    if value == 0.0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-9) * unit:.3g}"


COLOURS = {"strong": "good", "good": "good", "moderate": "fair", "weak": "fair", VACUOUS: "bad"}
COLOURS |= {NO_GUARANTEE: "bad", NOT_RUN: "bad", "NOT met": "bad"}
"""Colour class of each verdict."""
