"""Total variation between Gaussians: the exact value, and the bounds of the paper beside it.

The near-optimal-utility paper (Zhang, Chen, Yang, 2022/23) bounds the distance between N(m, s^2 I) and
N(m, (s^2 + e^2) I) within a factor of 150 (Lemma 6.7). Radial symmetry gives it exactly, with two chi-square
distribution functions, and then the noise for a wanted distance by a root search without the paper's
restriction to distances below 0.01.

A distance says how far apart two laws of an update are. A large one does NOT certify that an attacker learns
little (`leakage.trade_off`), and with a finite data set the law of the unprotected update is
discrete, so that any continuous noise is at distance 1: all values here are those of the Gaussian model.
"""

import math

import scipy  # its parts are imported when used: `stats` takes half a second


def _check(dim: int, ratio: float) -> None:
    if dim < 1:
        raise ValueError(f"dim must be >= 1, got {dim}")
    if not (ratio >= 0.0 and math.isfinite(ratio)):
        raise ValueError(f"ratio must be >= 0 and finite, got {ratio}")


def isotropic_tv(dim: int, ratio: float) -> float:
    """Distance of N(m, s^2 I) and N(m, (1 + ratio) s^2 I), exactly.

    The densities cross on one sphere; with x its squared radius over either variance, the distance is
    F(x_small) - F(x_large), F the chi-square distribution function with `dim` degrees of freedom.

    Args:
        dim: Number of coordinates, >= 1.
        ratio: Variance of the added noise over that of the update, >= 0.

    Raises:
        ValueError: If an argument is out of its range.

    >>> round(isotropic_tv(7850, 0.005), 9)
    0.124149015
    """
    _check(dim, ratio)
    if ratio == 0.0:
        return 0.0
    crossing = dim * math.log1p(ratio) / ratio
    return float(scipy.stats.chi2.cdf(crossing * (1.0 + ratio), dim) - scipy.stats.chi2.cdf(crossing, dim))
