"""CorBin in groups of any size: the clients of a group share one random offset per coordinate, nothing else.

CorBin-FL couples pairs; this is its extension to groups of g clients (not in the paper). Each
coordinate's uniform variable falls into g strata of length 1/g; client i draws from stratum
pi_i = (rank_i + offset) mod g, offset uniform and shared by the group, and jitters inside the stratum with
private coins. Every word alone is exactly uniform, so every message alone is the LDP-FL coin.

The exact variance (`functional.one_bit.threshold_coin.group_variance`) is that of a random permutation of the
strata. An offset alone rotates the group's order instead, which has the same law of every pair of strata once
the order itself is random: the round's plan draws it afresh every round, so the formula holds on average over
orders, not for one given order. Two clients are `CorBin(shared_bits=1)` in law.

References:
    an extension of CorBin-FL by stratified sampling; not in the paper
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_fedq.functional.one_bit.threshold_coin import worst_group_variance
from lightning_fedq.keys.randomness import ClientRandomness
from lightning_fedq.mechanisms.bases.claims import grouped_claims
from lightning_fedq.mechanisms.bases.one_bit import COINS, OneBitMechanism, RotatedStrata
from lightning_fedq.mechanisms.interface import AuditCase, PrivacyClaim, RoundContext


@dataclass(frozen=True)
class StratifiedCorBin(OneBitMechanism):
    """Correlated one-bit LDP quantiser in groups, one stratum a member.

    The remaining clients form one smaller group.

    Args:
        epsilon: Local budget per coordinate and round, > 0, in nats.
        group_size: g >= 2.

    Example:
        >>> round(StratifiedCorBin(epsilon=1.0).coin.high / 2**32, 3)  # chance of the likelier bit
        0.731
    """

    group_size: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be >= 2, got {self.group_size}; for independent clients use LDPQ"
            )

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Groups of `group_size`, and one smaller group of what remains."""
        groups, rest = divmod(num_clients, self.group_size)
        return (self.group_size,) * groups + (rest,) * (rest > 0)

    def coupling(self, group: tuple[int, ...], rand: ClientRandomness) -> RotatedStrata | None:
        """Strata rotated by the group's offsets. A client alone has its private words."""
        return RotatedStrata(rand.peer(group, COINS), len(group)) if len(group) > 1 else None

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """At most (2 radius alpha / n)^2 times the ones' variance. 1/4 per client of broken groups."""
        low, high = self.coin.probabilities
        ones, answered = 0.0, set(clients)
        for group in context.groups:
            left = len(answered.intersection(group))
            ones += worst_group_variance(left, high - low) if left == len(group) else left / 4
        return (2.0 * context.radius * self.coin.scale / len(answered)) ** 2 * ones

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Claims that hold for every coupling: see `claims.grouped_claims`."""
        return grouped_claims(self.coin, context)

    def counted_group(self) -> StratifiedCorBin:
        return replace(self, group_size=min(self.group_size, 4))

    def advice(self, claim: PrivacyClaim) -> str:
        # what a group shares counts as shown
        return "clients that share nothing (LDPQ)"

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # in pairs the stated variance is exact: a wrong stratum shows
        small = replace(self, group_size=min(self.group_size, 4))
        pairs = replace(self, group_size=2)
        return AuditCase(small, enumerable=True), AuditCase(pairs, title="pairs")
