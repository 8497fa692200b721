"""Randomised smoothing with compression as the perturbation.

f_s(x) = E f(x + s Z), Z standard normal, is smooth where f is only convex and Lipschitz: f <= f_s <= f + s L
sqrt d, and its gradient is (L / s)-Lipschitz. A server that broadcasts its point through a layered quantiser
with error N(0, s^2 I) gives clients a point perturbed by exactly the noise that smoothing wants; a
subgradient there is an unbiased gradient of f_s.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, appendix D.
    Duchi, Bartlett, Wainwright, Randomized smoothing for stochastic optimization, 2012.
    Scaman et al., Optimal algorithms for non-smooth distributed optimization in networks, NeurIPS 2018 (the
    accelerated form).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.exact_error.layered import WORDS_PER_COORDINATE, layer_row

Words = Callable[[int], NDArray[np.uint64]]


class Perturbed(NamedTuple):
    """A point as compressed copies.

    Args:
        points: float64 `(copies, dim)`, the point plus independent N(0, sigma^2) errors.
        symbols: int64 `(copies, dim)`, what is broadcast.
        dither: `(copies, dim)`, which both ends know.
        step: `(copies, dim)`, likewise.
    """

    points: Tensor
    symbols: NDArray[np.int64]
    dither: NDArray[np.float64]
    step: NDArray[np.float64]


def compressed_copies(point: Tensor, sigma: float, copies: int, words: Words) -> Perturbed:
    """Compress a point several times, direct layered quantiser. Each error is exactly N(0, sigma^2 I).

    Args:
        point: `(dim,)` floats.
        sigma: s > 0, in units of the point.
        copies: >= 1.
        words: Source of uniform 64-bit words that both ends know.

    Raises:
        ValueError: If sigma is not > 0 and finite, copies < 1, or the point is not finite.
    """
    check_positive(sigma=sigma)
    if copies < 1:
        raise ValueError(f"copies must be >= 1, got {copies}")
    if point.dim() != 1 or not bool(torch.isfinite(point).all()):
        raise ValueError("point must be a finite (dim,) tensor; lower the step size if it diverged")
    values = point.detach().cpu().double().numpy()
    dither, step, offset = (np.empty(copies * values.size) for _ in range(3))
    layer_row(words(WORDS_PER_COORDINATE * dither.size), sigma, True, False, dither, step, offset)
    shape = (copies, values.size)
    dithers, steps = dither.reshape(shape), step.reshape(shape)
    symbols = np.floor(values / steps + dithers + 0.5).astype(np.int64)
    return Perturbed(torch.from_numpy((symbols - dithers) * steps), symbols, dithers, steps)


def accelerated_smoothing(
    gradient: Callable[[Tensor, float], Tensor],
    start: Tensor,
    radius: float,
    lipschitz: float,
    copies: int,
    steps: int,
) -> Tensor:
    """Minimise a convex Lipschitz function by accelerated descent on ever less smoothed versions of it.

    Args:
        gradient: `gradient(y, s)`, an unbiased estimate of the gradient of f_s at y.
        start: `(dim,)` float64.
        radius: R, about the distance to the minimiser, > 0.
        lipschitz: L of the gradients' mean, > 0.
        copies: Perturbed copies that each estimate averages, >= 1.
        steps: Iterations, >= 1.

    Returns:
        The last iterate, `(dim,)`.

    Raises:
        ValueError: If radius, lipschitz, copies or steps is out of range.

    References:
        Scaman et al. 2018, algorithm 1; its constants are meant to be tuned.
    """
    if not (radius > 0 and lipschitz > 0 and copies >= 1 and steps >= 1):
        raise ValueError(
            "radius and lipschitz must be > 0, copies and steps >= 1, got "
            f"{radius}, {lipschitz}, {copies} and {steps}"
        )
    root, share = len(start) ** 0.25, 1.0
    x = start.clone()
    weighted, moved = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(steps):
        y = (1.0 - share) * x + share * (start + moved)
        weighted += gradient(y, radius / root * share) / share
        rate = radius * share / (2.0 * lipschitz * (root + math.sqrt((step + 1) / copies)))
        moved = -rate * weighted
        x = (1.0 - share) * x + share * (start + moved)
        share = 2.0 / (1.0 + math.sqrt(1.0 + 4.0 / share**2))
    return x
