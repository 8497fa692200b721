"""Layered quantisers: dithering with a random step, so that the error has any unimodal law exactly.

A unimodal density is a mixture of uniform densities on intervals, one for every height under its graph.
Draw a height, dither with that interval's length, and the error has the density. *Direct* takes the
level set {f >= v} whole; its steps can be arbitrarily short. *Shifted* pairs the right end at height v
with the left end at height Z* - v (Z* the peak); its steps are never shorter than `minimal_step`, so
that bounded inputs need a fixed number of bits.

A height enters through its depth l = -ln(v / Z*), which is chi-square with 3 degrees of freedom over 2
for the Gaussian and Gamma(2, 1) for the Laplace law. One coordinate takes four 64-bit words, always: the
top 53 bits of word 0 are the dither, those of word 3 the angle; words 1 and 2 are tails, which the low bits
of words 0 and 3 refine to 75 and 74 bits; bit 0 of word 3 is the side. What floats and finitely many bits do
to the law is bounded in `functional.exact_error.float_error`.

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
from lightning_fedq.functional.exact_error.depths import BLOCK, LEAST_DEPTH, complementary_depths, draw_depths

Law = Literal["gaussian", "laplace"]
Layering = Literal["direct", "shifted"]

WORDS_PER_COORDINATE = 4


def check_law(law: str, layering: str, sigma: float) -> None:
    """Refuse what no layered quantiser can do.

    Raises:
        ValueError: If the law or the layering is unknown, or sigma is not > 0 and finite.
    """
    if law not in ("gaussian", "laplace"):
        raise ValueError(f"law must be 'gaussian' or 'laplace', got {law!r}")
    if layering not in ("direct", "shifted"):
        raise ValueError(f"layering must be 'direct' or 'shifted', got {layering!r}")
    check_positive(sigma=sigma)


def half_width(depth: Tensor, law: Law, sigma: float) -> Tensor:
    """Half-width of the level set at depth l: s sqrt(2 l) (Gaussian) or s l / sqrt 2 (Laplace), std s."""
    return sigma * (2.0 * depth).sqrt() if law == "gaussian" else sigma / math.sqrt(2.0) * depth


def complementary_depth(depth: Tensor) -> Tensor:
    """-ln(1 - e^-l), without ever forming e^-l near 0 or 1.

    Example:
        >>> complementary_depth(torch.tensor([0.25]))
        tensor([1.5087])
    """
    near = -torch.log(-torch.expm1(-depth))
    far = -torch.log1p(-torch.exp(-depth))
    return torch.where(depth < math.log(2.0), near, far)  # either loses its digits on the other's side


def layer(depth: Tensor, side: Tensor, law: Law, layering: Layering, sigma: float) -> tuple[Tensor, Tensor]:
    """Return the step and the offset of the layer at a depth.

    Args:
        depth: float64, > 0.
        side: +1 or -1, independent of the depth; read by the shifted layering only.
        law: The error's law, mean 0.
        layering: Direct or shifted.
        sigma: Its standard deviation, > 0.

    Returns:
        `(step, offset)` of `depth`'s shape, in units of sigma's.

    Raises:
        ValueError: As `check_law`.
    """
    check_law(law, layering, sigma)
    half = half_width(depth.clamp(min=LEAST_DEPTH), law, sigma)
    if layering == "direct":
        return 2.0 * half, torch.zeros_like(half)
    other = half_width(complementary_depth(depth.clamp(min=LEAST_DEPTH)), law, sigma)
    return half + other, 0.5 * side * (half - other)


def minimal_step(law: Law, sigma: float) -> float:
    """Shortest step of the shifted layering, at half the peak: 2 s sqrt(ln 4) or sqrt 2 ln 2 s.

    Example:
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
    """Turn four words a coordinate into its dither, step and offset, in one pass.

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
    depths, others = np.empty(BLOCK), np.empty(BLOCK)
    for start in range(0, dither.size, BLOCK):
        drawn, size = words[4 * start :], min(BLOCK, dither.size - start)
        u, w, mid = dither[start : start + size], step[start : start + size], offset[start : start + size]
        for j in range(size):
            u[j] = (np.float64(np.int64(drawn[4 * j] >> shift) - half_cells) + 0.5) * 2.0**-53
        draw_depths(drawn, gaussian, depths[:size])
        if not shifted:
            for j in range(size):
                w[j] = 2.0 * _half_width(depths[j], gaussian, sigma)
                mid[j] = 0.0
            continue
        complementary_depths(depths[:size], others[:size])
        for j in range(size):
            half = _half_width(depths[j], gaussian, sigma)
            other = _half_width(others[j], gaussian, sigma)
            w[j] = half + other
            gap = 0.5 * (half - other)
            mid[j] = -gap if drawn[4 * j + 3] & np.uint64(1) else gap
