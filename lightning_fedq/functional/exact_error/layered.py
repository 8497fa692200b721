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
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.exact_error.depths import LEAST_DEPTH, complementary_depths, draw_depths

Law = Literal["gaussian", "laplace"]
Layering = Literal["direct", "shifted"]

WORDS_PER_COORDINATE = 4


def check_law(law: str, layering: str, sigma: float) -> None:
    """Check the settings of a layered quantiser.

    Raises:
        ValueError: If the law or the layering is unknown, or sigma is not > 0 and finite.
    """
    if law not in ("gaussian", "laplace"):
        raise ValueError(f"law must be 'gaussian' or 'laplace', got {law!r}")
    if layering not in ("direct", "shifted"):
        raise ValueError(f"layering must be 'direct' or 'shifted', got {layering!r}")
    check_positive(sigma=sigma)


def half_width(depth: Tensor, law: Law, sigma: float) -> Tensor:
    """Return half the width of the level set at depth l: s sqrt(2 l) (Gaussian) or s l / sqrt 2 (Laplace)."""
    return sigma * (2.0 * depth).sqrt() if law == "gaussian" else sigma / math.sqrt(2.0) * depth


def complementary_depth(depth: Tensor) -> Tensor:
    """Return -ln(1 - e^-l), computed without e^-l near 0 or 1.

    Examples:
        >>> complementary_depth(torch.tensor([0.25]))
        tensor([1.5087])
    """
    near = -torch.log(-torch.expm1(-depth))
    far = -torch.log1p(-torch.exp(-depth))
    return torch.where(depth < math.log(2.0), near, far)  # each form loses digits on the other side


def layer(depth: Tensor, side: Tensor, law: Law, layering: Layering, sigma: float) -> tuple[Tensor, Tensor]:
    """Return the step and the offset of the layer at a depth.

    Args:
        depth: Depths > 0, float64.
        side: +1 or -1, independent of the depth. Only the shifted layering uses it.
        law: Law of the error, with mean 0.
        layering: Direct or shifted.
        sigma: Standard deviation of the error, > 0.

    Returns:
        `(step, offset)`, each of `depth`'s shape, in the units of sigma.

    Raises:
        ValueError: If the law or the layering is unknown, or sigma is not > 0 and finite.
    """
    check_law(law, layering, sigma)
    half = half_width(depth.clamp(min=LEAST_DEPTH), law, sigma)
    if layering == "direct":
        return 2.0 * half, torch.zeros_like(half)
    other = half_width(complementary_depth(depth.clamp(min=LEAST_DEPTH)), law, sigma)
    return half + other, 0.5 * side * (half - other)


def minimal_step(law: Law, sigma: float) -> float:
    """Return the shortest step of the shifted layering: 2 s sqrt(ln 4) (Gaussian) or sqrt 2 ln 2 s (Laplace).

    It is the step at half the peak.

    Examples:
        >>> round(minimal_step("gaussian", 1.0), 3)
        2.355
    """
    check_law(law, "shifted", sigma)
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
