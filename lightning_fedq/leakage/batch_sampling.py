"""Variance of an update under random batches, and the sampling probability that makes it large enough.

Theorems 6.10 and 6.11 of the near-optimal-utility paper, repaired: the learning rate is where the proof has
it, the variance is that of the update that is really applied (the mean over the real batch, no step if that
is empty: Algorithm 2), and feasibility is checked. What it gives is a heuristic: the batches' variance is
made as large as C6 times the distance that the noise causes. It cannot buy back utility: for independent
noise of variance e^2 in each of dim coordinates the expected loss is dim e^2 at every sampling probability
(tests show it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor


@dataclass(frozen=True)
class GradientMoments:
    """Moments of the gradients of one client's samples at the global model, before the learning rate.

    Args:
        num_samples: M, >= 1.
        sum_squares: Sum of the squared norms.
        scatter: Sum of the squared distances to the mean.
        mean_square: Squared norm of the mean.
    """

    num_samples: int
    sum_squares: float
    scatter: float
    mean_square: float

    @classmethod
    def from_gradients(cls, gradients: Tensor, num_samples: int) -> GradientMoments:
        """From the `(probe, dim)` gradients of some samples, scaled up to all `num_samples`.

        Raises:
            ValueError: If there is no gradient, or one is not finite.
        """
        if gradients.dim() != 2 or not len(gradients):
            raise ValueError(f"gradients must have shape (probe, dim), got {tuple(gradients.shape)}")
        squares = gradients.double().square().sum(1)
        if not bool(torch.isfinite(squares).all()):
            raise ValueError("the gradients of the probe must be finite; lower the learning rate")
        mean = gradients.double().mean(0).square().sum().item()
        scale = num_samples / len(gradients)
        total = squares.sum().item() * scale
        return cls(num_samples, total, max(total - num_samples * mean, 0.0), mean)


def update_variance(moments: GradientMoments, probability: float, learning_rate: float = 1.0) -> float:
    """Trace of the covariance of one client's update when each sample is in the batch by its own coin.

    Args:
        probability: Sampling probability of each sample, in [0, 1].
        learning_rate: > 0.
    """
    m, p = moments.num_samples, probability
    inverse, empty = _mean_inverse_size(m, p) - (1.0 - (1.0 - p) ** m) / m, (1.0 - p) ** m
    spread = moments.scatter / max(m - 1, 1) * max(inverse, 0.0)
    return learning_rate**2 * (spread + empty * (1.0 - empty) * moments.mean_square)


def _mean_inverse_size(num: int, p: float) -> float:
    """E of 1 / size over batches that are not empty, 0 for empty ones. Size is Binomial(num, p)."""
    if p in (0.0, 1.0):
        return p / num
    sizes = torch.arange(1, num + 1, dtype=torch.float64)
    coefficients = math.lgamma(num + 1) - torch.lgamma(sizes + 1) - torch.lgamma(num - sizes + 1)
    weights = (coefficients + sizes * math.log(p) + (num - sizes) * math.log1p(-p)).exp()
    return (weights / sizes).sum().item()


@dataclass(frozen=True)
class SamplingProbability:
    """Sampling probability that the controller chose.

    Args:
        value: Probability with which each sample joins a batch.
        needed: The wanted variance over the largest that any p gives, at most 1 if feasible.
        feasible: Does `value` reach the wanted variance?
        reason: Why it was chosen, or why none can reach it.
    """

    value: float
    needed: float
    feasible: bool
    reason: str


def solve_probability(
    moments: GradientMoments, wanted: float, learning_rate: float = 1.0, smallest: float | None = None
) -> SamplingProbability:
    """Choose the largest p at which `update_variance` is `wanted`: the largest batches, hence least noise.

    Args:
        wanted: C6 TV, in squared units of the update, >= 0.
        learning_rate: > 0.
        smallest: Lower limit of p; None is 1 / num_samples, an expected batch of one.

    Raises:
        ValueError: If wanted or the learning rate is out of its range.
    """
    if not (wanted >= 0.0 and math.isfinite(wanted)):
        raise ValueError(f"wanted must be >= 0 and finite, got {wanted}")
    if not learning_rate > 0.0:
        raise ValueError(f"learning_rate must be > 0, got {learning_rate}")
    least = min(1.0 / moments.num_samples, 0.5) if smallest is None else smallest
    if wanted == 0.0:
        return SamplingProbability(least, 0.0, True, "no distortion, hence no constraint")
    if moments.sum_squares <= 0.0:
        return SamplingProbability(0.5, math.inf, False, "all gradients are zero: no batch makes them vary")

    def variance(p: float) -> float:
        return update_variance(moments, p, learning_rate)

    best = float(minimize_scalar(lambda p: -variance(p), bounds=(least, 1.0), method="bounded").x)
    best = max(best, least, key=variance)
    needed = wanted / variance(best) if variance(best) > 0.0 else math.inf
    if needed > 1.0:
        return SamplingProbability(
            best,
            needed,
            False,
            f"the batches' variance would have to be {needed:.4g} times the largest that any p in "
            f"[{least:.4g}, 1] gives; lower the noise, clip to a smaller norm or allow more leakage",
        )
    value = float(brentq(lambda p: variance(p) - wanted, best, 1.0, xtol=1e-13)) if needed < 1.0 else best
    return SamplingProbability(value, needed, True, "largest p that reaches the variance")
