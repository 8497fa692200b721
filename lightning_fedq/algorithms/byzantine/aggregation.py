"""Robust aggregation rules in place of the plain mean, and weights by the clients' noise."""

from collections.abc import Sequence
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
"""How much each client counts: alike, by its data, or by one over its noise."""


def inverse_variance_weights(mechanism: Mechanism, segments: Sequence[int], num_clients: int) -> Tensor:
    """Weights of a mean over clients whose messages are differently noisy, `(num_clients,)`. They sum to one.

    One over each client's noise bound: proportional to tanh^2(epsilon / 2) where only the coins of a one-bit
    mechanism make noise. The mean is then one of clients that count differently, which is a choice: it is no
    longer the mean of all clients' updates unless these agree.

    Args:
        mechanism: Says how noisy each client is.
        segments: Length of each segment of the model.
        num_clients: Clients 0 to num_clients - 1.

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
                f"{type(mechanism).__name__} has no noise bound > 0, so there is nothing to weight by; "
                "use weighting='uniform'"
            )
        weights[client] = 1.0 / variance.mean()
    return weights / weights.sum()


@dataclass(frozen=True)
class RobustAggregation:
    """Byzantine-robust aggregation of the decoded messages, with or without bucketing.

    It needs to see every client's message: behind secure aggregation the server sees the sum only, and
    per-client filters are impossible. On one-bit messages use buckets: the median of single signs is a
    majority vote. A range rule that follows the decoded size (`AdaptiveRange`) then feeds on the noise of
    single rows; take `FixedRange`.

    Args:
        rule: A rule of `byzantine.robust`.
        num_byzantine: How many rows (buckets, if there are any) the rule has to withstand, >= 0; for
            trimmed_mean, krum and multi_krum.
        bucket_size: Clients per bucket, >= 1; 1 is without buckets. Who shares one is drawn every round.

    Example:
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
        """Fewest clients that the rule can work with."""
        most = self.num_byzantine
        told = {"trimmed_mean": 2 * most + 1, "krum": most + 3, "multi_krum": most + 3}
        return (told.get(self.rule, 1) - 1) * self.bucket_size + 1

    def __call__(self, rows: Tensor, plan: RoundPlan) -> Tensor:
        """Aggregate `(n, dim)` rows to `(dim,)`. The plan's seed draws the buckets."""
        if self.bucket_size > 1:
            generator = torch.Generator().manual_seed(plan.stream_seed("buckets"))
            rows = robust.bucketing(rows, torch.randperm(len(rows), generator=generator), self.bucket_size)
        if self.rule in ("trimmed_mean", "krum", "multi_krum"):
            told = {"trimmed_mean": robust.trimmed_mean, "krum": robust.krum, "multi_krum": robust.multi_krum}
            return told[self.rule](rows, self.num_byzantine)
        plain = {
            "mean": robust.mean,
            "median": robust.median,
            "geometric_median": robust.geometric_median,
            "centered_clipping": robust.centered_clipping,
        }
        return plain[self.rule](rows)

    def warn_if_broken(self, num_clients: int, fraction: float) -> None:
        """Warn if that share of Byzantine clients exceeds the breakdown point. One spoils a whole bucket."""
        buckets = -(-num_clients // self.bucket_size)
        spoilt = min(fraction * num_clients / buckets, 1.0 - 1e-9)
        robust.check_breakdown(self.rule, buckets, spoilt, self.num_byzantine)
