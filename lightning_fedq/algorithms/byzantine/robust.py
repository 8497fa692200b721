"""Robust means of several vectors, some of which are Byzantine: arbitrary, NaN and infinity included.

Every rule first replaces a row that is not finite by a row of zeros. Such a row never enters arithmetic, and
still counts as one of the `num_byzantine` rows that the rule has to tolerate. The number of Byzantine rows
that a rule tolerates is its breakdown point. `check_breakdown` warns if the Byzantine clients exceed it.

References:
    Yin et al., Byzantine-Robust Distributed Learning, ICML 2018 (median, trimmed mean).
    Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017 (Krum, multi-Krum).
    Pillutla et al., Robust Aggregation for Federated Learning, 2019 (geometric median, smoothed Weiszfeld).
    Karimireddy et al., Learning from History, ICML 2021 (centred clipping).
    Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022.
"""

import math
import warnings
from typing import Literal

import torch
from torch import Tensor

Rule = Literal[
    "mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "centered_clipping"
]


def finite_rows(rows: Tensor) -> Tensor:
    """Replace every row that holds a NaN or an infinity by zeros.

    Raises:
        ValueError: If `rows` is not `(n, dim)` with n >= 1.
    """
    if rows.dim() != 2 or not len(rows):
        raise ValueError(f"rows must be (n, dim) with n >= 1, got {tuple(rows.shape)}")
    finite = torch.isfinite(rows).all(1)
    return rows if bool(finite.all()) else torch.where(finite[:, None], rows, 0.0)


def mean(rows: Tensor) -> Tensor:
    """Return the plain mean of the rows after `finite_rows`. It tolerates no finite Byzantine row."""
    return finite_rows(rows).mean(0)


def median(rows: Tensor) -> Tensor:
    """Return the coordinate-wise median, the mean of the middle two for an even number of rows.

    Args:
        rows: `(n, dim)` floats.
    """
    ordered = finite_rows(rows).sort(0).values
    # torch.median would take the lower of the two
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


def trimmed_mean(rows: Tensor, num_byzantine: int) -> Tensor:
    """Return the coordinate-wise mean without the `num_byzantine` smallest and largest values.

    Args:
        rows: `(n, dim)` floats, n > 2 num_byzantine.
        num_byzantine: Number of rows to tolerate, >= 0.

    Raises:
        ValueError: If no value would be left.
    """
    _check_tolerated(rows, num_byzantine, 2 * num_byzantine < len(rows), "n > 2 num_byzantine")
    return finite_rows(rows).sort(0).values[num_byzantine : len(rows) - num_byzantine].mean(0)


def krum(rows: Tensor, num_byzantine: int) -> Tensor:
    """Return the row that is closest to its n - num_byzantine - 2 nearest neighbours. See `multi_krum`."""
    return multi_krum(rows, num_byzantine, 1)


def multi_krum(rows: Tensor, num_byzantine: int, count: int | None = None) -> Tensor:
    """Return the mean of the rows that are closest to their n - num_byzantine - 2 nearest neighbours.

    Args:
        rows: `(n, dim)` floats, n >= num_byzantine + 3 (robustness is proven for n >= 2 num_byzantine + 3).
        num_byzantine: Number of rows to tolerate, >= 0.
        count: Number of rows to average, 1 to n. None takes n - num_byzantine.

    Raises:
        ValueError: If n or count does not fit.
    """
    _check_tolerated(rows, num_byzantine, len(rows) >= num_byzantine + 3, "n >= num_byzantine + 3")
    size = len(rows)
    count = size - num_byzantine if count is None else count
    if not 1 <= count <= size:
        raise ValueError(f"count must be in [1, n = {size}], got {count}")
    finite = finite_rows(rows)
    # distances in float64 after scaling, so that huge rows can't overflow into infinities or NaN
    scaled = finite.double() / finite.abs().max().clamp(min=1e-300).double()
    # without matrix products, because distances of close rows would cancel
    distances = torch.cdist(scaled, scaled, compute_mode="donot_use_mm_for_euclid_dist").square()
    distances.fill_diagonal_(math.inf)  # a row is not its own neighbour
    scores = distances.sort(1).values[:, : size - num_byzantine - 2].sum(1)
    chosen: Tensor = finite[scores.argsort(stable=True)[:count]].mean(0)
    return chosen


def geometric_median(rows: Tensor, iterations: int = 100, smoothing: float = 1e-6) -> Tensor:
    """Return the point with the smallest sum of distances to all rows (Weiszfeld's iteration).

    Args:
        rows: `(n, dim)` floats.
        iterations: Largest number of steps, >= 1.
        smoothing: Distances below this fraction of the median distance count as that fraction, > 0.
    """
    finite = finite_rows(rows)
    values = finite.double()
    point = median(values)
    for _ in range(iterations):
        distances = (values - point).norm(dim=1)
        floor = smoothing * float(distances.median())
        weights = 1.0 / distances.clamp(min=max(floor, 1e-300))  # the median may equal a row
        moved: Tensor = (weights / weights.sum()) @ values
        if bool((moved - point).norm() <= 1e-9 * distances.median().clamp(min=1e-300)):
            break
        point = moved
    return point.to(finite.dtype)


def centered_clipping(rows: Tensor, radius: float | None = None, iterations: int = 3) -> Tensor:
    """Start at the coordinate-wise median and move by the mean of the rows' clipped offsets.

    Args:
        rows: `(n, dim)` floats.
        radius: Largest norm of one row's offset in one step, > 0. None takes the median distance to the
            centre.
        iterations: Number of steps, >= 1.

    Raises:
        ValueError: If radius or iterations is out of range.
    """
    if radius is not None and not radius > 0:
        raise ValueError(f"radius must be > 0 or None, got {radius}")
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, got {iterations}")
    finite = finite_rows(rows)
    values = finite.double()
    center = median(values)
    for _ in range(iterations):
        offsets = values - center
        lengths = offsets.norm(dim=1).clamp(min=1e-300)
        longest = float(lengths.median()) if radius is None else radius
        center = center + (offsets * (longest / lengths).clamp(max=1.0)[:, None]).mean(0)
    return center.to(finite.dtype)


def bucketing(rows: Tensor, order: Tensor, size: int) -> Tensor:
    """Return means of buckets of `size` rows, as rows for any rule. A Byzantine client spoils one bucket.

    One-bit messages need buckets: single signs have no outliers, so a rule on them is a majority vote.

    Args:
        rows: `(n, dim)` floats.
        order: `(n,)` int64, a random permutation that the Byzantine clients could not predict.
        size: Number of rows per bucket, >= 1. The last bucket may have fewer.

    Returns:
        `(ceil(n / size), dim)`.

    Raises:
        ValueError: If size < 1 or order is not a permutation.
    """
    if size < 1:
        raise ValueError(f"size must be >= 1, got {size}")
    if sorted(order.tolist()) != list(range(len(rows))):
        raise ValueError(f"order must be a permutation of {len(rows)} rows")
    return torch.stack([part.mean(0) for part in torch.split(finite_rows(rows)[order], size)])


def breakdown_point(rule: Rule, num_rows: int, num_byzantine: int = 0) -> int:
    """Return the largest number of arbitrary rows that can't move the result beyond the honest rows.

    Args:
        rule: Rule of this module.
        num_rows: Number of rows n.
        num_byzantine: Number of rows that the rule was set to tolerate, for trimmed mean and Krum.
    """
    if rule in ("mean", "trimmed_mean"):
        return 0 if rule == "mean" else num_byzantine
    if rule in ("krum", "multi_krum"):
        return min(num_byzantine, max((num_rows - 3) // 2, 0))
    return (num_rows - 1) // 2


def check_breakdown(rule: Rule, num_rows: int, fraction: float, num_byzantine: int = 0) -> None:
    """Warn if the share of Byzantine clients exceeds the rule's breakdown point.

    Args:
        rule: Rule of this module.
        num_rows: Number of rows n that the rule will see.
        fraction: Share of Byzantine clients, in [0, 1).
        num_byzantine: Number of rows that the rule was set to tolerate.

    Raises:
        ValueError: If fraction is not in [0, 1).
    """
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"fraction must be in [0, 1), got {fraction}")
    # 1e-9, so that rounding of the product adds no client
    expected, limit = math.ceil(fraction * num_rows - 1e-9), breakdown_point(rule, num_rows, num_byzantine)
    if expected > limit:
        warnings.warn(
            f"{rule} of {num_rows} rows tolerates {limit} Byzantine clients, but {expected} are expected. "
            "Use a rule with a higher breakdown point, or more clients.",
            stacklevel=2,
        )


def _check_tolerated(rows: Tensor, num_byzantine: int, enough: bool, wanted: str) -> None:
    """Refuse a number of Byzantine rows that is negative, or for which there are not enough rows."""
    if num_byzantine < 0:
        raise ValueError(f"num_byzantine must be >= 0, got {num_byzantine}")
    if not enough:
        raise ValueError(f"the rule needs {wanted}, got n = {len(rows)} and num_byzantine = {num_byzantine}")
