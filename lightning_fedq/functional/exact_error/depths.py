"""Vectorised logarithms, cosines and exponentials for depths, identical on every machine.

A library's logarithm takes several times as long, and its last digit may differ between machines. The loops
here use only sums, products, quotients and square roots of float64. IEEE 754 defines these to the last bit,
and the compiler vectorises them. The polynomials are Chebyshev approximations of functions without their
first terms.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]

LEAST_DEPTH = 2.0**-60
"""Smallest depth. The mass below is less than 1e-26, and smaller depths are clamped."""
_ATANH = (
    0.3333333333333333,
    0.19999999999999762,
    0.1428571428580005,
    0.11111111099118386,
    0.09090909948981357,
    0.07692271982430275,
    0.06667589315724629,
    0.05867139530651599,
    0.05422589197440007,
    0.03746071897775383,
    0.07815288900461426,
)
"""(atanh(sqrt z) / sqrt z - 1) / z for z in [0, 1/9], to 2^-59."""
_COSINE = (
    -0.23370055013616983,
    0.019968957764878188,
    -0.0008945229984747746,
    2.4737276364651975e-05,
    -4.6476600840853195e-07,
    6.321469472887123e-09,
    -6.513360987666224e-11,
    5.26019553598555e-13,
    -3.418604865987095e-15,
    1.7873806538769212e-17,
)
"""(cos(pi sqrt z / 2) / (1 - z) - 1) / z for z in [0, 1]."""
_EXPONENTIAL = (
    0.5,
    -0.16666666666666666,
    0.04166666666666632,
    -0.008333333333323789,
    0.001388888888754174,
    -0.00019841269729525813,
    2.4801581433351544e-05,
    -2.755711628480224e-06,
    2.7552627691424324e-07,
    -2.4980133062535776e-08,
    2.016929472918688e-09,
    -1.1958968909842996e-10,
)
"""(1 - (1 - e^-r) / r) / r for r in [-0.001, 0.694], to 2^-66."""
_LN2 = 0.6931471805599453
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
"""ln 2 in two parts. The first part has 32 bits, so that small multiples are exact."""
_MANTISSA, _HALF = (1 << 52) - 1, 1022 << 52


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def minus_logs(tails: Floats, low: Flags, out: Floats) -> None:
    """Compute -ln(tail) where `low` is set, else -ln(1 - tail), with a relative error below 2^-50.6.

    Where `low` is set, a multiple of ln 2 is subtracted first. Both cases are then
    -ln(1 - t) = 2 atanh(t / (2 - t)) of an exact t up to 1/2.

    Args:
        tails: Tails in (0, 1/2], `(n,)`.
        low: Choice between the two logarithms, `(n,)`.
        out: Results, `(n,)`, overwritten. It must not be `tails`.
    """
    mantissas = np.empty(tails.size, np.int64)
    bits, parts = tails.view(np.int64), mantissas.view(np.float64)
    for j in range(tails.size):
        mantissas[j] = (bits[j] & _MANTISSA) | _HALF  # in [1/2, 1)
    for j in range(tails.size):
        t = 1.0 - parts[j] if low[j] else tails[j]  # exact, because the part is at least 1/2
        octaves = np.float64(1022 - (bits[j] >> 52)) if low[j] else 0.0  # tail = part 2^-octaves
        s = t / (2.0 - t)
        z = s * s
        p = _ATANH[10] * z + _ATANH[9]
        p = (((p * z + _ATANH[8]) * z + _ATANH[7]) * z + _ATANH[6]) * z + _ATANH[5]
        p = ((((p * z + _ATANH[4]) * z + _ATANH[3]) * z + _ATANH[2]) * z + _ATANH[1]) * z + _ATANH[0]
        out[j] = octaves * _LN2 + (2.0 * s) * (p * z + 1.0)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def draw_depths(words: Words, gaussian: bool, depths: Floats) -> None:
    """Turn the four words of each coordinate into its depth l. The top 53 bits of word 0 are not used.

    Args:
        words: `(4 n,)` uniform 64-bit words.
        gaussian: Gaussian law if true, else Laplace.
        depths: `(n,)`, overwritten.
    """
    size, low_bits = depths.size, np.uint64(2047)
    tails, low, second = np.empty(size), np.empty(size, np.bool_), np.empty(size)
    for j in range(size):
        word = words[4 * j + 1]
        fraction = (np.float64(words[4 * j] & low_bits) + 0.5) * 2.0**-11
        low[j] = word < ~word
        fraction = fraction if word < ~word else 1.0 - fraction
        tails[j] = (np.float64(min(word, ~word)) + fraction) * 2.0**-64
    minus_logs(tails, low, depths)
    for j in range(size):
        word = words[4 * j + 2]
        fraction = (np.float64((words[4 * j + 3] & low_bits) >> np.uint64(1)) + 0.5) * 2.0**-10
        low[j] = word < ~word
        fraction = fraction if word < ~word else 1.0 - fraction
        tails[j] = (np.float64(min(word, ~word)) + fraction) * 2.0**-64
    minus_logs(tails, low, second)
    for j in range(size):
        cosine = 1.0
        if gaussian:
            angle = words[4 * j + 3] >> np.uint64(11)
            x = (np.float64(angle) + 0.5) * 2.0**-53
            rest = (np.float64(np.uint64((1 << 53) - 1) - angle) + 0.5) * 2.0**-53  # 1 - x, also near 0
            z = x * x
            p = _COSINE[9] * z + _COSINE[8]
            p = ((((p * z + _COSINE[7]) * z + _COSINE[6]) * z + _COSINE[5]) * z + _COSINE[4]) * z + _COSINE[3]
            p = ((p * z + _COSINE[2]) * z + _COSINE[1]) * z + _COSINE[0]
            cosine = (rest * (1.0 + x)) * (p * z + 1.0)
        depths[j] = max(depths[j] + cosine * cosine * second[j], LEAST_DEPTH)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def complementary_depths(depths: Floats, out: Floats) -> None:
    """Compute -ln(1 - e^-l) for depths l.

    Args:
        depths: Depths in [2^-60, 200], `(n,)`.
        out: Results, `(n,)`, overwritten. It must not be `depths`.
    """
    size = depths.size
    tails, low, scales = np.empty(size), np.empty(size, np.bool_), np.empty(size, np.int64)
    powers = scales.view(np.float64)
    for j in range(size):
        scales[j] = (1023 - np.int64(depths[j] * (1.0 / _LN2))) << 52  # 2^-octaves, as bits
    for j in range(size):
        octaves = np.floor(depths[j] * (1.0 / _LN2))
        # the first product is exact, because octaves have 9 bits
        r = (depths[j] - octaves * _LN2_HIGH) - octaves * _LN2_LOW
        p = _EXPONENTIAL[11] * r + _EXPONENTIAL[10]
        p = (((p * r + _EXPONENTIAL[9]) * r + _EXPONENTIAL[8]) * r + _EXPONENTIAL[7]) * r + _EXPONENTIAL[6]
        p = (((p * r + _EXPONENTIAL[5]) * r + _EXPONENTIAL[4]) * r + _EXPONENTIAL[3]) * r + _EXPONENTIAL[2]
        p = (p * r + _EXPONENTIAL[1]) * r + _EXPONENTIAL[0]
        rise = r * (1.0 - r * p)  # 1 - e^-r
        low[j] = octaves == 0.0
        tails[j] = min(rise if octaves == 0.0 else (1.0 - rise) * powers[j], 0.5)
    minus_logs(tails, low, out)
