"""Cost of layered quantisation: exact conditional entropies and the paper's bounds.

All bits are per coordinate, for an input uniform on an interval of length t, given the shared randomness S.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section 3.
    The gap bound of its proposition 1 is 1 bit, not 2: its proof multiplies by two twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import integrate

from lightning_fedq.functional.exact_error.layered import Law, Layering, layer

_LOG2E = math.log2(math.e)


def cell_entropy(ratio: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Entropy of the symbol of an input uniform on `ratio` steps, averaged over the dither.

    G(r) = log r + log e / (2 r) for r >= 1 and (r / 2) log e below; log is base 2.
    """
    r = np.asarray(ratio, np.float64)
    large = np.maximum(r, 1.0)
    cost: NDArray[np.float64] = np.where(r >= 1.0, np.log2(large) + _LOG2E / (2.0 * large), r * _LOG2E / 2.0)
    return cost


def layer_mean(function: Callable[[float], float], law: Law, layering: Layering) -> float:
    """Mean of a function of the step over the layers, for sigma = 1.

    The height's density is the step itself, so the mean of g is the integral of peak w(p) g(w(p)) over p
    in (0, 1), p = v / peak.
    """
    side = torch.ones((), dtype=torch.float64)

    def integrand(p: float) -> float:
        depth = torch.tensor(-math.log(p), dtype=torch.float64)
        step = layer(depth, side, law, layering, 1.0)[0].item()
        return step * function(step)

    half = 0.5 if layering == "shifted" else 1.0
    total = 0.0
    for low, high in ((0.0, half / 16), (half / 16, half)):
        total += integrate.quad(integrand, low, high, epsabs=1e-11, epsrel=1e-11, limit=400)[0]
    return (1.0 / math.sqrt(2.0 * math.pi) if law == "gaussian" else math.sqrt(0.5)) * total / half


def conditional_entropy(interval: float, sigma: float, law: Law, layering: Layering) -> float:
    """Exact H(M | S) in bits for an input uniform on an interval of length t.

    Args:
        interval: t > 0.
        sigma: Standard deviation of the error, > 0.
        law: The error's law.
        layering: Direct or shifted.

    Raises:
        ValueError: If interval or sigma is not > 0.

    References:
        Section 3 of the paper; the expectation over the layer is done by quadrature.
    """
    if not (interval > 0 and sigma > 0):
        raise ValueError(f"interval and sigma must be > 0, got {interval} and {sigma}")
    return layer_mean(lambda step: float(cell_entropy(interval / sigma / step)), law, layering)


def lower_bound(interval: float, sigma: float, law: Law) -> float:
    """Equation 4: no code whose error has this law needs less than log t + h(D), D the direct layer."""
    return math.log2(interval / sigma) - layer_mean(math.log2, law, "direct")


def upper_bound(interval: float, sigma: float, law: Law, layering: Layering) -> float:
    """Equation 5, proposition 1: log t + h(layer) + (8 log e / t) sigma, any input on length t."""
    return (
        math.log2(interval / sigma) - layer_mean(math.log2, law, layering) + 8.0 * _LOG2E * sigma / interval
    )


def known_dither_delta(distance: float, sigma: float, law: Law, layering: Layering) -> float:
    """delta of one coordinate against whoever holds dither and layer: E min(1, |x - x'| / w), at any epsilon.

    Args:
        distance: |x - x'|, > 0.
        sigma: Standard deviation of the error.
        law: The error's law.
        layering: Direct or shifted.
    """
    if layering == "direct":
        # a maximal coupling: the total variation between the law and its shift
        ratio = distance / sigma / math.sqrt(2.0)
        return math.erf(ratio / 2.0) if law == "gaussian" else -math.expm1(-ratio)
    return min(layer_mean(lambda step: min(1.0, distance / sigma / step), law, layering), 1.0)
