"""Private quantisers with few levels: draws from a probability matrix, dithered Laplace noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def draw_outputs(
    units: Floats, up: NDArray[np.uint32], words: NDArray[np.uint32], edges: NDArray[np.uint32]
) -> NDArray[np.uint8]:
    """Round each value at random to a knot, and draw an output from the knot's law.

    Knots are evenly spaced on [-1, 1]. A value is rounded up with P(up) = ceil(fraction 2^32) / 2^32, where
    fraction is its relative position between two knots. This rounding gives no privacy, the draw of the
    output does.

    Args:
        units: Values in [-1, 1], `(n,)`.
        up: Uniform 32-bit words for the rounding, `(n,)`.
        words: Uniform 32-bit words for the outputs, `(n,)`.
        edges: Cumulative probabilities of the outputs of each knot, times 2^32, `(knots, outputs - 1)`.

    Returns:
        Numbers of the outputs, `(n,)`.
    """
    place = (units + 1.0) * (0.5 * (len(edges) - 1))
    cell = np.minimum(np.floor(place), len(edges) - 2)  # the upper end is in the last cell
    knots = (cell + (up < np.ceil((place - cell) * 2.0**32))).astype(np.int64)
    outputs: NDArray[np.uint8] = (words[:, None] >= edges[knots]).sum(1).astype(np.uint8)
    return outputs


def noisy_levels(
    units: Floats, private: Floats, shared: Floats, scale: float, step: float, levels: int
) -> NDArray[np.int32]:
    """Add Laplace noise, then quantise with a subtractive dither.

    The level is floor((x + noise) / step + dither + levels / 2), clamped to [0, levels - 1].

    Args:
        units: Values in [-1, 1], `(n,)`.
        private: Uniforms on (0, 1) for the noise, `(n,)`.
        shared: Uniforms on (0, 1) for the dither, which is 1/2 less, `(n,)`.
        scale: Scale of the noise.
        step: Distance of two levels.
        levels: Number of levels.

    Returns:
        Levels, `(n,)`.
    """
    centered = private - 0.5
    size = scale * np.log1p(-2.0 * np.abs(centered))  # ln(2 tail) <= 0, finite as |centered| < 1/2
    noise = np.where(centered > 0.0, -size, size)
    places = (units + noise) / step + shared - 0.5 + levels / 2.0
    return np.clip(np.floor(places), 0.0, levels - 1.0).astype(np.int32)
