"""Measures of similarity of a reconstruction and the truth."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def mean_square_errors(found: Tensor, truth: Tensor) -> Tensor:
    """Return `(a, b)` mean squared errors of all pairs of rows of `(a, ...)` and `(b, ...)`."""
    rows, others = found.flatten(1).double(), truth.flatten(1).double()
    return (rows[:, None] - others[None]).square().mean(2)


def in_order(found: Tensor, truth: Tensor) -> Tensor:
    """Reorder the rows of a reconstruction so that the total squared error is least.

    A batch has no order.
    """
    _, columns = linear_sum_assignment(mean_square_errors(truth, found).cpu().numpy())
    return found[torch.as_tensor(columns, device=found.device)]


def psnr(found: Tensor, truth: Tensor, value_range: float) -> Tensor:
    """Return the peak signal-to-noise ratio of each row, `(n,)` in dB, at most 100.

    Args:
        found: `(n, ...)` reconstructions.
        truth: `(n, ...)` originals.
        value_range: Largest value minus smallest value of an input.
    """
    error = (found - truth).flatten(1).double().square().mean(1)
    return (10.0 * torch.log10(value_range**2 / error.clamp(min=1e-30))).clamp(max=100.0)
