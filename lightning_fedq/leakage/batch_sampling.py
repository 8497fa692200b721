"""Variance of an update under random batches, and the sampling probability that makes it large enough.

These are theorems 6.10 and 6.11 of the near-optimal-utility paper with three repairs. The learning rate is
where the proof has it. The variance is that of the update that is really applied (Algorithm 2: the mean over
the real batch, no step if the batch is empty). Feasibility is checked. The result is a heuristic: it makes
the variance of the batches as large as C6 times the distance that the noise causes. It can't restore utility.
For independent noise of variance e^2 in each of dim coordinates, the expected loss is dim e^2 at every
sampling probability (tests show it).
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
        num_samples: Number of samples M, >= 1.
        sum_squares: Sum of the squared norms of the gradients.
        scatter: Sum of the squared distances of the gradients to their mean.
        mean_square: Squared norm of the mean gradient.
    """

    num_samples: int
    sum_squares: float
    scatter: float
    mean_square: float

    @classmethod
    def from_gradients(cls, gradients: Tensor, num_samples: int) -> GradientMoments:
        """Return the moments of some samples' gradients, `(probe, dim)`, scaled up to all `num_samples`.

        Raises:
            ValueError: If there is no gradient, or one is not finite.
        """
        if gradients.dim() != 2 or not len(gradients):
            raise ValueError(f"gradients must have shape (probe, dim), got {tuple(gradients.shape)}")
        squares = gradients.double().square().sum(1)
        if not bool(torch.isfinite(squares).all()):
            raise ValueError("the gradients of the probe must be finite. Lower the learning rate.")
        mean = gradients.double().mean(0).square().sum().item()
        scale = num_samples / len(gradients)
        total = squares.sum().item() * scale
        return cls(num_samples, total, max(total - num_samples * mean, 0.0), mean)


def update_variance(moments: GradientMoments, probability: float, learning_rate: float = 1.0) -> float:
    """Return the trace of the covariance of one client's update under Poisson sampling of its batch.

    Each sample joins the batch independently. An empty batch is no step.

    Args:
        moments: Moments of the gradients of the client's samples.
        probability: Probability with which each sample joins the batch, in [0, 1].
        learning_rate: Learning rate, > 0.
    """
    m, p = moments.num_samples, probability
    inverse, empty = _mean_inverse_size(m, p) - (1.0 - (1.0 - p) ** m) / m, (1.0 - p) ** m
    spread = moments.scatter / max(m - 1, 1) * max(inverse, 0.0)
    return learning_rate**2 * (spread + empty * (1.0 - empty) * moments.mean_square)


def _mean_inverse_size(num: int, p: float) -> float:
    """Return the mean of 1 / size over batches, 0 for empty ones. The size is Binomial(num, p)."""
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
        needed: Wanted variance over the largest variance that any probability gives. At most 1 if feasible.
        feasible: Whether `value` reaches the wanted variance.
        reason: Reason for the choice, or reason why no probability reaches the variance.
    """

    value: float
    needed: float
    feasible: bool
    reason: str


def solve_probability(
    moments: GradientMoments, wanted: float, learning_rate: float = 1.0
) -> SamplingProbability:
    """Return the largest p at which `update_variance` is `wanted`, and which gives at least one sample.

    It gives the largest batches, and so the least noise.

    Args:
        moments: Moments of the gradients of the client's samples.
        wanted: Wanted variance C6 TV, in squared units of the update, >= 0.
        learning_rate: Learning rate, > 0.

    Raises:
        ValueError: If `wanted` or the learning rate is out of its range.
    """
    if not (wanted >= 0.0 and math.isfinite(wanted)):
        raise ValueError(f"wanted must be >= 0 and finite, got {wanted}")
    if not learning_rate > 0.0:
        raise ValueError(f"learning_rate must be > 0, got {learning_rate}")
    least = min(1.0 / moments.num_samples, 0.5)  # an expected batch of one sample
    if wanted == 0.0:
        return SamplingProbability(least, 0.0, True, "no distortion, so there is no constraint")
    if moments.sum_squares <= 0.0:
        return SamplingProbability(0.5, math.inf, False, "all gradients are zero, so batches do not vary")

    def variance(p: float) -> float:
        return update_variance(moments, p, learning_rate)

    best = float(minimize_scalar(lambda p: -variance(p), bounds=(least, 1.0), method="bounded").x)
    best = max(best, least, key=variance)
    needed = wanted / variance(best) if variance(best) > 0.0 else math.inf
    if needed > 1.0:
        reason = (
            f"the batches need {needed:.4g} times the largest variance that any p in [{least:.4g}, 1] gives. "
            "Lower the noise, clip to a smaller norm or allow more leakage."
        )
        return SamplingProbability(best, needed, False, reason)
    value = float(brentq(lambda p: variance(p) - wanted, best, 1.0, xtol=1e-13)) if needed < 1.0 else best
    return SamplingProbability(value, needed, True, "largest p that reaches the variance")
