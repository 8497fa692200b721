"""A vector of each client's data in place of an update: statistics of all clients, before anybody trains.

A round of statistics is a round: cohort, streams, message, masks and charge are those of a training round,
and so is what it claims. Only what is encoded is another vector, and the server reads it off in place of a
step. The vector is repeated over all coordinates of the model, as large as the mechanism lets an update be,
so that a message tells it as well as it tells an update: a mechanism that clips whole updates gains nothing
by fewer numbers, one that clips coordinates averages the noise of all copies.
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
    """Which vectors float32 can hold, `(clients,)`."""
    return (vectors.abs() <= torch.finfo(torch.float32).max).all(1)


@dataclass(frozen=True)
class Statistics:
    """First rounds of a run, which release the mean of a vector of each client's data and train nobody.

    The module says what the vector is and what becomes of the mean:

        def client_statistics(self, batches):  # at each client, without gradients
            return torch.stack([x.mean() for x, _ in batches]).mean(0, keepdim=True)

        def on_statistics(self, mean):  # in the fit, after the last of these rounds, and at each client
            self.mean.copy_(mean)  # a buffer

    Args:
        size: Numbers of the vector, at most as many as travel in a round.
        bound: Largest l2 norm of a client's vector, > 0; a longer one is shortened. Noise grows with it, and
            no claim rests on it: the mechanism holds every message to its own bound.
        rounds: First rounds of the run, >= 1, of `max_epochs`; the mean is that of all of them.

    Raises:
        ValueError: If a value is out of its range.
        TypeError: If a value is of another kind.

    Example:
        >>> Statistics(size=6, bound=0.5)  # Federated(..., statistics=this)
        Statistics(size=6, bound=0.5, rounds=1)
    """

    size: int
    bound: float
    rounds: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(bound=self.bound)
        if self.size < 1 or self.rounds < 1:
            raise ValueError(f"size and rounds must be >= 1, got {self.size} and {self.rounds}")

    def check(self, mechanism: Mechanism, dim: int) -> None:
        """Refuse what can't carry the vector.

        Raises:
            ValueError: With the cure.
        """
        if self.size > dim:
            raise ValueError(
                f"statistics of {self.size} numbers travel in a round of {dim} coordinates; take fewer"
            )
        if not mechanism.unbiased:
            raise ValueError(
                f"{type(mechanism).__name__} is biased, so the mean of clients' statistics would be off by "
                "more than its noise; leave statistics out, or take RotatedCoins or CorBin"
            )

    def spread(
        self, vectors: Tensor, mechanism: Mechanism, context: RoundContext, weights: Tensor, target: Target
    ) -> Tensor:
        """Updates that carry the vectors of clients, `(clients, dim)`.

        Args:
            vectors: `(clients, size)`; one with what float32 can't hold, NaN too, counts as zeros.
            weights: `(dim,)` the model as clients were sent it.
            target: What is quantised.
        """
        unit = torch.where(is_finite_float32(vectors)[:, None], vectors.double() / self.bound, 0.0)
        unit = unit / torch.linalg.vector_norm(unit, dim=1, keepdim=True).clamp(min=1.0)
        reach, base = self._copy_indices(mechanism, context, weights.device)
        rows: Tensor = (base + reach * unit[:, None]).flatten(1)[:, : context.dim]
        return (rows if target == "updates" else rows - weights.double()).to(weights)

    def read(self, mean: Tensor, mechanism: Mechanism, context: RoundContext) -> Tensor:
        """The mean of the vectors, `(size,)` float64, of the decoded mean `(dim,)`.

        Least squares over the copies, which are alike but for their reach.
        """
        reach, base = self._copy_indices(mechanism, context, mean.device)
        copies = self._split_copies(mean.double())
        return self.bound * (reach * (copies - base)).sum(0) / reach.square().sum(0)

    def std(self, mechanism: Mechanism, context: RoundContext, variance: Tensor) -> float:
        """Standard deviation of one number of the mean, where coordinates err apart from each other.

        Args:
            variance: Bound on the variance of the mean of a round, one value a segment.
        """
        reach = self._copy_indices(mechanism, context, variance.device)[0].square()
        noise = (reach * self._split_copies(context.expand(variance).double())).sum(0) / reach.sum(0).square()
        return self.bound * math.sqrt(float(noise.max()))

    def _copy_indices(
        self, mechanism: Mechanism, context: RoundContext, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Where the copies lie, `(copies, size)` each: at `base + reach v`, reach 0 where there is none."""
        longest = mechanism.longest_update(context.dim)
        base, reach = map(context.expand, mechanism.clipping_range(context))
        if longest is not None:
            # an l1 norm is told for normal coordinates; the worst of these is sqrt(pi / 2) longer
            whole = longest if mechanism.clips_norm else longest * math.sqrt(2.0 / math.pi)
            reach = torch.full((context.dim,), whole / math.sqrt(-(-context.dim // self.size)))
        return self._split_copies(reach.to(device, torch.float64)), self._split_copies(
            base.to(device, torch.float64)
        )

    def _split_copies(self, values: Tensor) -> Tensor:
        """`(dim,)` as `(copies, size)`, with zeros behind the last."""
        rest = -len(values) % self.size
        return torch.cat([values, values.new_zeros(rest)]).view(-1, self.size)
