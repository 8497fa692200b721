"""Layered quantisers: dithering with a random step, which gives the error any unimodal law exactly.

A unimodal density is a mixture of uniform densities on intervals, one for every height under its graph. If a
height is drawn and the dither has the length of its interval, the error has this density. *Direct* layering
takes the whole level set {f >= v} at height v, so steps can be arbitrarily short. *Shifted* layering pairs
the right end at height v with the left end at height Z* - v, where Z* is the peak. Its steps are never
shorter than `minimal_step`, so bounded inputs need a fixed number of bits.

The code uses the depth l = -ln(v / Z*) of a height. For the Gaussian law, 2 l is chi-square with 3 degrees of
freedom. For the Laplace law, l is Gamma(2, 1). Every coordinate takes four 64-bit words. The top 53 bits of
word 0 are the dither, and the top 53 bits of word 3 are the angle. Words 1 and 2 are tails. The low bits of
words 0 and 3 refine them to 75 and 74 bits. Bit 0 of word 3 is the side.
`functional.exact_error.float_error` bounds the effect of floats and finitely many bits on the law.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024,
    definitions 4 and 5 (the direct and the shifted layered quantiser). The dither is centred here.
"""

from __future__ import annotations

import math
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.exact_error.depths import complementary_depths, draw_depths

Law = Literal["gaussian", "laplace"]
Layering = Literal["direct", "shifted"]

WORDS_PER_COORDINATE = 4


def minimal_step(law: Law, sigma: float) -> float:
    """Return the shortest step of the shifted layering: 2 s sqrt(ln 4) (Gaussian) or sqrt 2 ln 2 s (Laplace).

    It is the step at half the peak.

    Examples:
        >>> round(minimal_step("gaussian", 1.0), 3)
        2.355
    """
    return sigma * (2.0 * math.sqrt(math.log(4.0)) if law == "gaussian" else math.sqrt(2.0) * math.log(2.0))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _half_width(depth: float, gaussian: bool, sigma: float) -> float:
    return float(sigma * np.sqrt(2.0 * depth) if gaussian else sigma * depth * 0.7071067811865476)


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def layer_row(
    words: NDArray[np.uint64],
    sigma: float,
    gaussian: bool,
    shifted: bool,
    dither: NDArray[np.float64],
    step: NDArray[np.float64],
    offset: NDArray[np.float64],
) -> None:
    """Turn the four words of each coordinate into its dither, step and offset, in one pass.

    Args:
        words: `(4 n,)` uniform 64-bit words.
        sigma: Standard deviation of the error.
        gaussian: Gaussian law if true, else Laplace.
        shifted: Shifted layering if true, else direct.
        dither: `(n,)`, overwritten.
        step: `(n,)`, overwritten.
        offset: `(n,)`, overwritten.
    """
    shift, half_cells = np.uint64(11), np.int64(1 << 52)
    depths, others = np.empty(dither.size), np.empty(dither.size)
    for j in range(dither.size):
        dither[j] = (np.float64(np.int64(words[4 * j] >> shift) - half_cells) + 0.5) * 2.0**-53
    draw_depths(words, gaussian, depths)
    if not shifted:
        for j in range(dither.size):
            step[j] = 2.0 * _half_width(depths[j], gaussian, sigma)
            offset[j] = 0.0
        return
    complementary_depths(depths, others)
    for j in range(dither.size):
        half = _half_width(depths[j], gaussian, sigma)
        other = _half_width(others[j], gaussian, sigma)
        step[j] = half + other
        gap = 0.5 * (half - other)
        offset[j] = -gap if words[4 * j + 3] & np.uint64(1) else gap
