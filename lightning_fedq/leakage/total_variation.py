"""Total variation distance between isotropic Gaussians, exactly.

The near-optimal-utility paper (Zhang, Chen, Yang, 2022/23) bounds the distance between N(m, s^2 I) and N(m,
(s^2 + e^2) I) within a factor of 150 (Lemma 6.7). Radial symmetry gives it exactly, with two chi-square
distribution functions. The noise for a wanted distance then follows from a root search, without the paper's
restriction to distances below 0.01.

A distance measures how different two distributions of an update are. A large distance does NOT certify that
an attacker learns little (`functional.trade_off`). With a finite data set, the unprotected update has a
discrete distribution, so any continuous noise is at distance 1. All values here are those of the Gaussian
model.
"""

import math

import scipy  # submodules are imported when they are used, because `stats` takes half a second

from lightning_fedq.functional.checks import check_at_least


def _check(dim: int, ratio: float) -> None:
    check_at_least(1, dim=dim)
    if not (ratio >= 0.0 and math.isfinite(ratio)):
        raise ValueError(f"ratio must be >= 0 and finite, got {ratio}")


def isotropic_tv(dim: int, ratio: float) -> float:
    """Return the total variation distance of N(m, s^2 I) and N(m, (1 + ratio) s^2 I), exactly.

    The densities are equal on one sphere. With x its squared radius over the variance, the distance is
    F(x_small) - F(x_large), where x_small uses the smaller variance, and F is the chi-square distribution
    function with `dim` degrees of freedom.

    Args:
        dim: Number of coordinates, >= 1.
        ratio: Variance of the added noise over the variance of the update, >= 0.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> round(isotropic_tv(7850, 0.005), 9)
        0.124149015
    """
    _check(dim, ratio)
    if ratio == 0.0:
        return 0.0
    crossing = dim * math.log1p(ratio) / ratio
    return float(scipy.stats.chi2.cdf(crossing * (1.0 + ratio), dim) - scipy.stats.chi2.cdf(crossing, dim))
