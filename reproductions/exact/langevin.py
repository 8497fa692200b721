"""Quantised Langevin dynamics with a fixed number of bits: the compressor's error is part of the noise.

A chain theta <- theta - g H + sqrt(2 g) N(0, I) samples exp(-U) for H = grad U. Here clients send their parts
of H through the shifted layered quantiser, whose error is exactly Gaussian with a variance that everybody
knows, and the server adds only the noise that is still missing. A vector is scaled by its largest coordinate,
which travels as one float beside the symbols, so b bits a coordinate always suffice.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, appendix C
    (algorithm 6). Vono et al., QLSD: Quantised Langevin stochastic dynamics for Bayesian federated learning,
    AISTATS 2022 (the unbiased rounding compared with).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.exact_error.layered import WORDS_PER_COORDINATE, layer_row

Words = NDArray[np.uint64]


def _check_bits(bits: int) -> None:
    if not 2 <= bits <= 24:
        raise ValueError(f"bits must be in [2, 24], got {bits}; one bit leaves no step")


def shifted_sigma(bits: int) -> float:
    """Error std for which the shifted layered quantiser fits [-1, 1] into b bits: 1 / ((2^b - 2) sqrt(ln 4)).

    Raises:
        ValueError: If bits is not in [2, 24].
    """
    _check_bits(bits)
    return 1.0 / ((2.0**bits - 2.0) * math.sqrt(math.log(4.0)))


def _scaled(vectors: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if vectors.dim() != 2 or not bool(torch.isfinite(vectors).all()):
        raise ValueError("vectors must be a finite (clients, dim) tensor; check the gradients")
    rows: NDArray[np.float64] = vectors.detach().cpu().double().numpy()
    norms: NDArray[np.float64] = np.abs(rows).max(1, keepdims=True)
    return rows / np.where(norms > 0.0, norms, 1.0), norms


def shifted_round_trip(vectors: Tensor, bits: int, words: Words) -> tuple[Tensor, Tensor]:
    """Quantise each row to b bits a coordinate and decode it. The error is exactly Gaussian.

    Args:
        vectors: `(clients, dim)` floats.
        bits: b in [2, 24].
        words: `(4 clients dim,)` uniform 64-bit words, shared by client and server.

    Returns:
        The decoded rows, float64 `(clients, dim)`, and the error's variance in each row, `(clients,)`: the
        square of `shifted_sigma` times the row's largest absolute coordinate; 0 for a row of zeros.

    Raises:
        ValueError: If a row is not finite, the number of words is wrong, or bits is out of range.
    """
    sigma = shifted_sigma(bits)
    rows, norms = _scaled(vectors)
    if words.shape != (WORDS_PER_COORDINATE * rows.size,):
        raise ValueError(f"{WORDS_PER_COORDINATE * rows.size} words are needed, got shape {words.shape}")
    dither, step, offset = (np.empty(rows.size) for _ in range(3))
    layer_row(words, sigma, True, True, dither, step, offset)
    flat = rows.reshape(-1)
    symbols = np.floor(flat / step + dither + 0.5)
    # the smallest symbol of inputs in [-1, 1], which the server knows too
    first = np.floor(-1.0 / step + dither + 0.5)
    if float((symbols - first).max()) >= 2.0**bits:
        raise ValueError(f"a symbol does not fit {bits} bits")
    decoded = ((symbols - dither) * step + offset).reshape(rows.shape) * norms
    return torch.from_numpy(decoded), torch.from_numpy((sigma * norms[:, 0]) ** 2)


def rounding_round_trip(vectors: Tensor, bits: int, words: Words) -> Tensor:
    """Unbiased stochastic rounding to 2^b levels on [-m, m], m a row's largest absolute coordinate.

    Args:
        vectors: `(clients, dim)` floats.
        bits: b in [2, 24].
        words: `(clients dim,)` uniform 64-bit words.

    Returns:
        float64 `(clients, dim)`; the error depends on the input.
    """
    _check_bits(bits)
    rows, norms = _scaled(vectors)
    cells = 2.0**bits - 1.0
    place = (rows + 1.0) * (0.5 * cells)
    floor = np.minimum(np.floor(place), cells - 1.0)
    uniforms = (words.reshape(rows.shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    level = floor + (uniforms < place - floor)
    return torch.from_numpy((level * (2.0 / cells) - 1.0) * norms)


def missing_variance(step_size: float, variance: Tensor) -> Tensor:
    """Variance that the server still has to add: max(0, 2 g - g^2 v), v the variance of the sum of gradients.

    Where g v > 2 the compressor alone has too much noise, and the chain is over-dispersed by g v / 2.

    Args:
        step_size: g > 0.
        variance: v, any shape.

    Raises:
        ValueError: If step_size is not > 0.
    """
    if not step_size > 0:
        raise ValueError(f"step_size must be > 0, got {step_size}")
    return (2.0 * step_size - step_size**2 * variance).clamp(min=0.0)
