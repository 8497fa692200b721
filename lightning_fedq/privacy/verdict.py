"""Epsilon in words and in print: one scale for clients and for samples."""

import math

VACUOUS_EPSILON = 20.0
NO_GUARANTEE = "no guarantee"
NOT_RUN = "not run"
"""In place of an epsilon towards the server behind masks that there were none of."""
VACUOUS = "vacuous"
_SCALE = ((1.0, "strong"), (4.0, "good"), (8.0, "moderate"), (VACUOUS_EPSILON, "weak"))


def scale() -> str:
    """The scale in words, for whoever reads a verdict first."""
    words = ", ".join(f"{word} up to {limit:g}" for limit, word in _SCALE)
    return f"epsilon, the smaller the more private: {words}, above it {VACUOUS}, which is as good as nothing"


def verdict(epsilon: float) -> str:
    """One word for an epsilon, in nats.

    Example:
        >>> verdict(0.5)
        'strong'
        >>> verdict(8.0)
        'moderate'
    """
    return next((word for limit, word in _SCALE if epsilon <= limit), VACUOUS)


def format_epsilon(value: float | None) -> str:
    """Three digits, rounded up so that a claim never shrinks in print. An infinite one is "∞".

    Example:
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
"""Classes of the colours of verdicts."""
