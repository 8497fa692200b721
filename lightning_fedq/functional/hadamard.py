"""Walsh-Hadamard transform of a vector in O(D log D), which is orthonormal after division by sqrt(D).

Orders D are powers of two and, from 1,280 on, also 12, 20 and 28 times a power of two. So padding adds at
most a quarter, while powers of two alone may double the vector. The matrix is the Kronecker product of a
Walsh-Hadamard matrix H and a symmetric matrix K of order 1, 12, 20 or 28 (Paley's second construction). The
transform is its own inverse. Bounds and privacy claims use only that entries are +-1 and rows are orthogonal.

References:
    Paley, On orthogonal matrices, Journal of Mathematics and Physics, 1933
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.checks import check_at_least

Floats = NDArray[Any]
"""Contiguous array of float32 or float64."""

NEAR = 1 << 16
"""Number of coordinates that fit a second-level cache for their first 16 stages."""


_MIXED = 1 << 10
"""Size up to which all orders are powers of two."""


def padded_size(dim: int) -> int:
    """Return the smallest order of a transform >= dim.

    Raises:
        ValueError: If dim < 1.

    Examples:
        >>> padded_size(1000), padded_size(1025), padded_size(11_200_000)
        (1024, 1280, 12582912)
    """
    check_at_least(1, dim=dim)
    power = 1 << (dim - 1).bit_length()  # exact at any size, which a float's log2 is not
    # 5, 6 and 7 eighths of a power of two are 20, 12 and 28 times another
    return next((power // 8 * odd for odd in (5, 6, 7) if dim > _MIXED and power // 8 * odd >= dim), power)


def _paley(prime: int, degree: int) -> Floats:
    """Symmetric Hadamard matrix of order 2 (q + 1), q = prime^degree being 5, 9 or 13."""
    # 9 elements are a + b i mod 3, a field because -1 is no square there
    field = [complex(a, b) for a in range(prime) for b in range(prime if degree == 2 else 1)]

    def reduced(x: complex) -> complex:
        return complex(x.real % prime, x.imag % prime)

    squares = {reduced(x * x) for x in field} - {0}
    conference = np.ones((len(field) + 1, len(field) + 1))
    # symmetric: -1 is a square, as q = 1 mod 4
    conference[1:, 1:] = [[1 if reduced(x - y) in squares else -1 for y in field] for x in field]
    np.fill_diagonal(conference, 0)
    matrix = np.kron(conference, [[1, 1], [1, -1]]) + np.kron(np.eye(len(field) + 1), [[1, -1], [-1, -1]])
    return np.ascontiguousarray(matrix)


_K12, _K20, _K28 = _paley(5, 1), _paley(3, 2), _paley(13, 1)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def kernel_order(size: int) -> int:
    """Order of K of a transform of `size` coordinates, 1, 12, 20 or 28, or 0 if there is none."""
    odd = size // (size & -size) if size > 0 else 0  # without the largest power of two in it
    if odd == 1:
        return 1
    return 4 * odd if odd in (3, 5, 7) and size % 4 == 0 else 0


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def near_size(size: int) -> int:
    """Coordinates whose transform is done in one go while they are in a second-level cache."""
    step: int = kernel_order(size)
    while 2 * step <= min(size, NEAR):
        step *= 2
    return step


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _two_stages(x: Floats, half: int) -> None:
    """Two stages at distances half and 2 half, in one pass."""
    for s in range(0, x.size, 4 * half):
        x0, x1 = x[s : s + half], x[s + half : s + 2 * half]
        x2, x3 = x[s + 2 * half : s + 3 * half], x[s + 3 * half : s + 4 * half]
        for k in range(half):
            a, b, c, d = x0[k], x1[k], x2[k], x3[k]
            a, b, c, d = a + b, a - b, c + d, c - d
            x0[k], x1[k], x2[k], x3[k] = a + c, b + d, a - c, b - d


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _stage(x: Floats, half: int) -> None:
    for s in range(0, x.size, 2 * half):
        p, q = x[s : s + half], x[s + half : s + 2 * half]
        for k in range(half):
            a, b = p[k], q[k]
            p[k], q[k] = a + b, a - b


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def stages(x: Floats, done: int) -> None:
    """Apply all stages at distances of `done` and more, two in one pass.

    Pass constants as np.int64(...), because numba would compile the function again for a literal.
    """
    while done < x.size:
        if x.size // done >= 4:
            _two_stages(x, done)
            done *= 4
        else:
            _stage(x, done)
            done *= 2


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _kernels(x: Floats, matrix: Floats) -> None:
    """Multiply every group of as many values as the symmetric matrix has rows."""
    order = len(matrix)
    sums = np.empty(order, x.dtype)
    for start in range(0, x.size, order):
        group = x[start : start + order]
        sums[:] = 0.0
        for k in range(order):
            row, value = matrix[k], group[k]
            for j in range(order):
                sums[j] += row[j] * value
        group[:] = sums


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def near_stages(x: Floats) -> None:
    """The transform of up to `NEAR` values."""
    kernel = kernel_order(x.size)
    if kernel > 1:
        _kernels(x, (_K12 if kernel == 12 else _K20 if kernel == 20 else _K28).astype(x.dtype))
    stages(x, kernel)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def transform(x: Floats) -> None:
    """Transform of an order of values, in place, not normalised."""
    step = near_size(x.size)
    for start in range(0, x.size, step):
        near_stages(x[start : start + step])
    stages(x, step)
