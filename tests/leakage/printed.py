"""What the papers print of leakage and total variation, to compare the package with."""

import math

import torch

from lightning_fedq.leakage.total_variation import _check


def paper_tv_bounds(dim, ratio):
    """Lemma 6.7's lower and upper bound: 1/100 and 3/2 of min(1, ratio sqrt(dim)); true and loose.

    The lower one is at least 16 times too small; the upper one can exceed 1.
    """
    _check(dim, ratio)
    size = min(1.0, ratio * math.sqrt(dim))
    return size / 100.0, 1.5 * size


def paper_ratio(dim, gap):
    """Lemma 6.8's variance ratio for a leakage that is to fall by `gap`; UNSOUND as a calibration.

    It makes the distance at least `gap`, which the paper takes for enough (Lemma 6.6, false): with
    this noise an attack on a linear model still recovers every image.

    Args:
        dim: Number of coordinates, >= 1.
        gap: C1 - tau, in (0, 0.01), the only range for which the lemma says anything.

    Raises:
        ValueError: If an argument is out of its range.
    """
    _check(dim, 0.0)
    if not 0.0 < gap < 0.01:
        raise ValueError(f"Lemma 6.8 says nothing for a gap outside (0, 0.01), got {gap}")
    return 100.0 * gap / math.sqrt(dim)


def diagonal_tv(ratios, normals):
    """Distance of N(m, diag s^2) and N(m, diag (1 + ratio) s^2) by sampling.

    It is the mean of max(0, 1 - likelihood ratio) under the first law.

    Args:
        ratios: `(dim,)` variance ratios, >= 0.
        normals: `(draws, dim)` standard normals.

    Returns:
        The estimate and its standard error.
    """
    ratios, squares = ratios.double(), normals.double().square()
    log_ratio = -0.5 * torch.log1p(ratios).sum() + 0.5 * squares @ (ratios / (1.0 + ratios))
    parts = (-torch.expm1(log_ratio)).clamp(min=0.0)
    return parts.mean().item(), (parts.std() / math.sqrt(len(parts))).item()
