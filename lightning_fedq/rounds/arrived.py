"""Share of the clipped updates that arrives in the decoded means of a run.

Unbiased noise averages out over rounds. A decoder that returns zeros or pure noise has a small error in each
round where updates are short, but nothing of the updates arrives. So the sums over the run are compared. They
contain exact updates, so they stay in memory and are in no checkpoint: a resumed run begins new sums.
"""

import math

import torch
from torch import Tensor

from lightning_fedq.mechanisms.interface import Mechanism, RoundContext


def clip_rows(mechanism: Mechanism, rows: Tensor, context: RoundContext) -> Tensor:
    """Return updates as a mechanism's clip leaves them, without its quantisation and noise.

    Mechanisms that clip neither the l2 norm nor coordinates get the updates as they are.

    Args:
        rows: `(n, dim)` updates, or weights if clients send weights.
        context: Public facts of the round.
    """
    if mechanism.clips_norm:
        center = context.expand(context.center).to(rows)
        norms = torch.linalg.vector_norm(rows - center, dim=1, keepdim=True)
        bound: float = mechanism.clip_norm
        clipped: Tensor = center + (rows - center) * (bound / norms.clamp(min=bound))
        return clipped
    if mechanism.longest_update(context.dim) is not None:
        return rows
    center, radius = (context.expand(part).to(rows) for part in mechanism.clipping_range(context))
    return torch.minimum(torch.maximum(rows, center - radius), center + radius)


class ArrivedShare:
    """Share of the updates that arrived, over the rounds of a run.

    With D the sum of decoded means and M that of exact means, the share is <D, M> / |M|^2: 1 for unbiased
    decoders, 0 for zeros. Noise changes it by about |D - M| / (|M| sqrt(dim)), and twice that is subtracted,
    so a decoder of pure noise does not get a share by chance. Where the vector changes its length, new sums
    begin, and the numbers of all parts are added.

    Examples:
        >>> arrived = ArrivedShare()
        >>> for _ in range(10):  # a decoder that returns half of each update
        ...     arrived.add(torch.ones(100), 2.0 * torch.ones(100))
        >>> round(arrived.share, 2)
        0.4
    """

    def __init__(self) -> None:
        self._earlier = torch.zeros(3, dtype=torch.float64)
        self._decoded: Tensor | None = None
        self._exact: Tensor | None = None

    def add(self, decoded: Tensor, exact: Tensor) -> None:
        """Add a round: the decoded mean `(dim,)`, and the exact mean of the clipped updates `(dim,)`."""
        if self._decoded is None or self._exact is None or self._decoded.shape != decoded.shape:
            self._earlier = self._numbers()
            self._decoded, self._exact = (torch.zeros_like(exact, dtype=torch.float64) for _ in range(2))
        self._decoded += decoded
        self._exact += exact

    def _numbers(self) -> Tensor:
        """Return <D, M>, |M|^2 and |D - M|^2 / dim, summed over the parts of the run."""
        if self._decoded is None or self._exact is None:
            return self._earlier
        decoded, exact = self._decoded, self._exact
        error = (decoded - exact).square().mean()
        return self._earlier + torch.stack([decoded @ exact, exact @ exact, error]).cpu()

    @property
    def share(self) -> float:
        """Share of the updates that arrived, less two standard deviations. NaN if all updates were zero."""
        overlap, signal, error = self._numbers().tolist()
        return (overlap - 2.0 * math.sqrt(error * signal)) / signal if signal > 0.0 else math.nan
