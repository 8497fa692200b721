"""Means over the layers of layered quantisation, and the delta against an adversary who knows the dither.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import integrate

from lightning_fedq.functional.exact_error.layered import Law, Layering


def layer_mean(function: Callable[[float], float], law: Law, layering: Layering) -> float:
    """Return the mean of a function of the step over the layers, for sigma = 1.

    The density of the height v is the step w itself. So the mean of g is the integral of peak w(p) g(w(p))
    over p = v / peak in (0, 1).
    """

    def half_width(depth: float) -> float:
        return math.sqrt(2.0 * depth) if law == "gaussian" else depth / math.sqrt(2.0)

    def integrand(p: float) -> float:
        depth = -math.log(p)
        step = half_width(depth) + half_width(-math.log1p(-p) if layering == "shifted" else depth)
        return step * function(step)

    half = 0.5 if layering == "shifted" else 1.0
    total = 0.0
    for low, high in ((0.0, half / 16), (half / 16, half)):
        total += integrate.quad(integrand, low, high, epsabs=1e-11, epsrel=1e-11, limit=400)[0]
    # the peak of a density of std 1
    return (1.0 / math.sqrt(2.0 * math.pi) if law == "gaussian" else math.sqrt(0.5)) * total / half


def known_dither_delta(distance: float, sigma: float, law: Law, layering: Layering) -> float:
    """Return the delta of one coordinate, at any epsilon, against an adversary who knows dither and layer.

    It is E min(1, |x - x'| / w) over the steps w.

    Args:
        distance: Distance |x - x'| > 0 of the two inputs.
        sigma: Standard deviation of the error.
        law: Law of the error.
        layering: Direct or shifted.
    """
    if layering == "direct":
        # the mean equals the total variation between the law and its shift (maximal coupling)
        ratio = distance / sigma / math.sqrt(2.0)
        # 2 Phi(d / (2 sigma)) - 1, and 1 - e^(-d / (2 b)) with b = sigma / sqrt 2
        return math.erf(ratio / 2.0) if law == "gaussian" else -math.expm1(-ratio)
    return min(layer_mean(lambda step: min(1.0, distance / sigma / step), law, layering), 1.0)
