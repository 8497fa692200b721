"""Statistics rounds: before training, clients send statistics of their data in place of an update.

A statistics round has the cohort, streams, messages, masks, charge and claims of a training round. The
difference is the encoded vector, and that the server reads its mean in place of a model step.

The vector of statistics is repeated over all coordinates of the model and scaled to the largest update that
the mechanism does not clip. So the statistics are sent as precisely as an update. With a mechanism that clips
whole updates, fewer statistics do not reduce the noise. With a mechanism that clips coordinates, the noise of
all copies is averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_fields, check_positive
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.rounds.client import Target


def is_finite_float32(vectors: Tensor) -> Tensor:
    """Return, per row, whether all values are in the range of float32, as `(clients,)` bool."""
    return (vectors.abs() <= torch.finfo(torch.float32).max).all(1)


@dataclass(frozen=True)
class Statistics:
    """Settings of the first rounds of a run, which release the mean of clients' statistics without training.

    The Lightning module computes the vector of one client and uses the mean:

        def client_statistics(self, batches):  # at each client, without gradients
            return torch.stack([x.mean() for x, _ in batches]).mean(0, keepdim=True)

        def on_statistics(self, mean):  # in the fit, after the last of these rounds, and at each client
            self.mean.copy_(mean)  # a buffer

    Args:
        size: Length of the vector of statistics, at most the number of model coordinates.
        clip_norm: Largest l2 norm of a client's vector, > 0. A longer vector is scaled down. The noise of the
            mean grows with the bound. No privacy claim depends on it, because the mechanism clips every
            message.
        rounds: Number of statistics rounds at the start of the run, >= 1. They count towards `max_epochs`,
            and the result is the mean over all of them.

    Raises:
        ValueError: If a value is out of its range.
        TypeError: If a value has a wrong type.

    Examples:
        >>> Statistics(size=6, clip_norm=0.5)  # Federated(..., statistics=this)
        Statistics(size=6, clip_norm=0.5, rounds=1)
    """

    size: int
    clip_norm: float
    rounds: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(clip_norm=self.clip_norm)
        if self.size < 1 or self.rounds < 1:
            raise ValueError(f"size and rounds must be >= 1, got {self.size} and {self.rounds}")

    def check(self, mechanism: Mechanism, dim: int) -> None:
        """Check that a round with this mechanism and model size can carry the vector.

        The mean over a biased mechanism would have an error beyond the noise that is reported.

        Args:
            mechanism: Mechanism that encodes the vectors.
            dim: Number of model coordinates.

        Raises:
            ValueError: If the vector is longer than the model, or the mechanism is biased.
        """
        if self.size > dim:
            raise ValueError(
                f"Statistics have {self.size} numbers, but a round has {dim} coordinates. Use fewer numbers."
            )
        if not mechanism.unbiased:
            raise ValueError(
                f"{type(mechanism).__name__} is biased, but statistics need an unbiased mechanism. "
                "Leave statistics out, or use RotatedCoins or CorBin."
            )

    def spread(
        self, vectors: Tensor, mechanism: Mechanism, context: RoundContext, weights: Tensor, target: Target
    ) -> Tensor:
        """Return updates `(clients, dim)` that contain scaled copies of the clients' vectors.

        Args:
            vectors: `(clients, size)` statistics. A vector that is not finite in float32 counts as zeros.
            mechanism: Mechanism that will encode the updates.
            context: Public facts of the round.
            weights: `(dim,)` model that clients received.
            target: Quantised vector, "updates" or "weights".
        """
        unit = torch.where(is_finite_float32(vectors)[:, None], vectors.double() / self.clip_norm, 0.0)
        unit = unit / torch.linalg.vector_norm(unit, dim=1, keepdim=True).clamp(min=1.0)
        reach, base = self._copy_indices(mechanism, context, weights.device)
        rows: Tensor = (base + reach * unit[:, None]).flatten(1)[:, : context.dim]
        return (rows if target == "updates" else rows - weights.double()).to(weights)

    def read(self, mean: Tensor, mechanism: Mechanism, context: RoundContext) -> Tensor:
        """Estimate the mean `(size,)` float64 of the vectors from the decoded mean `(dim,)`.

        The estimate is least squares over the copies, which differ only in their scale.
        """
        reach, base = self._copy_indices(mechanism, context, mean.device)
        copies = self._split_copies(mean.double())
        return self.clip_norm * (reach * (copies - base)).sum(0) / reach.square().sum(0)

    def std(self, mechanism: Mechanism, context: RoundContext, variance: Tensor) -> float:
        """Return the largest standard deviation of an entry of `read`'s estimate.

        The errors of coordinates are assumed to be uncorrelated.

        Args:
            mechanism: Mechanism of the round.
            context: Public facts of the round.
            variance: `(segments,)` bound on the noise variance of the decoded mean.
        """
        reach = self._copy_indices(mechanism, context, variance.device)[0].square()
        noise = (reach * self._split_copies(context.expand(variance).double())).sum(0) / reach.sum(0).square()
        return self.clip_norm * math.sqrt(float(noise.max()))

    def _copy_indices(
        self, mechanism: Mechanism, context: RoundContext, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return scale (`reach`) and offset (`base`) of the copies, `(copies, size)` each.

        A copy of the unit vector v is sent as `base + reach * v`. The padding after the last copy has reach
        0.
        """
        longest = mechanism.longest_update(context.dim)
        base, reach = map(context.expand, mechanism.clipping_range(context))
        if longest is not None:
            # `longest_update` converts an l1 bound for normal coordinates. Equal magnitudes have the largest
            # l1 norm, sqrt(pi / 2) times as large, so the scale is divided by this factor.
            whole = longest if mechanism.clips_norm else longest * math.sqrt(2.0 / math.pi)
            reach = torch.full((context.dim,), whole / math.sqrt(-(-context.dim // self.size)))
        reach, base = (part.to(device, torch.float64) for part in (reach, base))
        return self._split_copies(reach), self._split_copies(base)

    def _split_copies(self, values: Tensor) -> Tensor:
        """Reshape `(dim,)` to `(copies, size)`, padded with zeros."""
        rest = -len(values) % self.size
        return torch.cat([values, values.new_zeros(rest)]).view(-1, self.size)
