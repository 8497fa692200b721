"""Robust aggregation rules in place of the plain mean, and weights by the clients' noise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fedq.algorithms.byzantine import robust
from lightning_fedq.algorithms.byzantine.robust import Rule
from lightning_fedq.functional.checks import check_fields
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.rounds import RoundPlan

Weighting = Literal["uniform", "samples", "inverse_variance"]
"""Weight of each client: equal, by its number of samples, or by one over its noise variance."""


def inverse_variance_weights(mechanism: Mechanism, segments: Sequence[int], num_clients: int) -> Tensor:
    """Return weights `(num_clients,)` of sum one, for a mean over clients with different noise.

    A weight is one over the client's noise bound. It is proportional to tanh^2(epsilon / 2) if only the
    randomised response of a one-bit mechanism makes noise. The weighted mean estimates the mean of all
    clients' updates only if these agree, so the weights are a choice.

    Args:
        mechanism: Mechanism with the noise bound of each client.
        segments: Length of each segment of the model.
        num_clients: Number of clients, which are 0 to num_clients - 1.

    Raises:
        ValueError: If the mechanism has no noise bound, or no noise.
    """
    ones = torch.ones(len(segments), dtype=torch.float64)
    weights = torch.empty(num_clients, dtype=torch.float64)
    for client in range(num_clients):
        context = RoundContext(0, ((client,),), tuple(segments), 0.0 * ones, ones)
        variance = mechanism.noise_variance(context, (client,))
        if variance is None or not bool((variance > 0).all()):
            raise ValueError(
                f"{type(mechanism).__name__} has no noise bound > 0, which weights need. "
                "Use weighting='uniform'."
            )
        weights[client] = 1.0 / variance.mean()
    return weights / weights.sum()


@dataclass(frozen=True)
class RobustAggregation:
    """Byzantine-robust aggregation of the decoded messages, with or without bucketing.

    Take it if some clients may be Byzantine and the server sees every client's message. Behind secure
    aggregation the server sees the sum only, so filters per client are impossible. Use buckets for one-bit
    messages, because the median of single signs is a majority vote. Use `FixedRange` in place of
    `AdaptiveRange`, which would follow the noise of single messages.

    Args:
        rule: Rule of `byzantine.robust`.
        num_byzantine: Number of rows (or of buckets) that the rule has to tolerate, >= 0, for trimmed_mean,
            krum and multi_krum.
        bucket_size: Number of clients per bucket, >= 1. 1 is without buckets. The members are drawn every
            round.

    Examples:
        >>> RobustAggregation("trimmed_mean", num_byzantine=2)  # Federated(..., aggregator=this)
        RobustAggregation(rule='trimmed_mean', num_byzantine=2, bucket_size=1)
    """

    rule: Rule
    num_byzantine: int = 0
    bucket_size: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_byzantine < 0:
            raise ValueError(f"num_byzantine must be >= 0, got {self.num_byzantine}")
        if self.bucket_size < 1:
            raise ValueError(f"bucket_size must be >= 1, got {self.bucket_size}")

    @property
    def min_clients(self) -> int:
        """Fewest clients with which the rule works."""
        count = self.num_byzantine
        min_rows = {"trimmed_mean": 2 * count + 1, "krum": count + 3, "multi_krum": count + 3}
        return (min_rows.get(self.rule, 1) - 1) * self.bucket_size + 1

    def __call__(self, rows: Tensor, plan: RoundPlan) -> Tensor:
        """Aggregate `(n, dim)` rows to `(dim,)`. The plan's seed draws the buckets."""
        if self.bucket_size > 1:
            generator = torch.Generator().manual_seed(plan.stream_seed("buckets"))
            rows = robust.bucketing(rows, torch.randperm(len(rows), generator=generator), self.bucket_size)
        rule: Callable[..., Tensor] = getattr(robust, self.rule)
        takes_number = self.rule in ("trimmed_mean", "krum", "multi_krum")
        return rule(rows, self.num_byzantine) if takes_number else rule(rows)

    def warn_if_broken(self, num_clients: int, fraction: float) -> None:
        """Warn if the share of Byzantine clients exceeds the breakdown point. One client spoils a bucket."""
        buckets = -(-num_clients // self.bucket_size)
        spoilt = min(fraction * num_clients / buckets, 1.0 - 1e-9)
        robust.check_breakdown(self.rule, buckets, spoilt, self.num_byzantine)
