"""CorBin-FL and AugCorBin-FL: pairs of clients share bits, so that their quantisation errors cancel.

Source: Salehi, Mia, Pradhan, Amini, Shirani, CorBin-FL, algorithms 2 and 3. Departures, each for a
reason: the shared bits come from the pair's X25519 key and are never sent (the paper sends d bits a
parameter every round); the roles need no coin flip, because the joint law is symmetric; thresholds
are integers, so the level is exact; the central-privacy theorems of the paper are replaced by exact
numerical accounting (see `claims`).

Client 2's word has client 1's shared bits complemented, and each fills up with private bits. A
survivor whose partner dropped out is just an LDPQ client: nobody re-quantises and nothing is biased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_fedq.functional.one_bit.threshold_coin import WORD_BITS, worst_pair_mse
from lightning_fedq.keys.randomness import ClientRandomness
from lightning_fedq.mechanisms.bases.claims import paired_claims
from lightning_fedq.mechanisms.bases.one_bit import COINS, ComplementaryBits, OneBitMechanism
from lightning_fedq.mechanisms.interface import Adversary, PrivacyClaim, RoundContext


@dataclass(frozen=True)
class CorBin(OneBitMechanism):
    """Correlated one-bit LDP quantiser: the errors of a pair of clients cancel.

    An odd client out works alone.

    Args:
        epsilon: Local budget per coordinate and round, > 0, in nats.
        shared_bits: How many random bits a coordinate a pair shares, 0 to 32; None is unlimited (all 32).
            0 is LDP-FL.

    Example:
        >>> round(CorBin(epsilon=1.0).coin.high / 2**32, 3)  # chance of the likelier bit
        0.731
    """

    shared_bits: int | None = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_bits is not None and not 0 <= self.shared_bits <= WORD_BITS:
            raise ValueError(f"shared_bits must be in [0, {WORD_BITS}] or None, got {self.shared_bits}")

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Pairs, and one client alone if their number is odd."""
        return (2,) * (num_clients // 2) + (1,) * (num_clients % 2)

    def coupling(self, group: tuple[int, ...], rand: ClientRandomness) -> ComplementaryBits | None:
        """Shared high bits, complemented for the second of the pair. Private low bits."""
        bits = WORD_BITS if self.shared_bits is None else self.shared_bits
        return ComplementaryBits(rand.peer(group, COINS), bits) if len(group) == 2 and bits else None

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """At most radius^2 (pairs M + others alpha^2) / n^2, M the worst error of a pair."""
        answered = set(clients)
        pairs = sum(len(group) == 2 and answered.issuperset(group) for group in context.groups)
        worst = pairs * worst_pair_mse(self.coin.scale, self.shared_bits)
        worst += (len(answered) - 2 * pairs) * self.coin.scale**2
        return context.radius**2 * worst / len(answered) ** 2

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Pairs with shared bits: see `claims.paired_claims`."""
        return paired_claims(self.coin, self.shared_bits, context)

    def advice(self, claim: PrivacyClaim) -> str:
        # shared bits are what the infinite losses come from
        share = "share no bits (shared_bits=0, or LDPQ)"
        if claim.adversary in (Adversary.EAVESDROPPER, Adversary.SERVER, Adversary.SERVER_AND_PARTNER):
            repaired = "PairedCoins keeps the pairs and has a finite epsilon here"
            return f"{repaired}; or {share}, or add secure aggregation and clients that work alone"
        return f"{share}, or more clients that work alone (AugCorBin)"


@dataclass(frozen=True)
class AugCorBin(CorBin):
    """CorBin with a share of unpaired clients, whose random bits hide the sum of the others.

    A fresh public permutation of the cohort is drawn every round; its unpaired clients are known to all.

    Args:
        epsilon: Local budget per coordinate and round, > 0, in nats.
        shared_bits: Bits of a coin that a pair shares, as for `CorBin`.
        unpaired_fraction: gamma in [0, 1]; n - 2 floor((1 - gamma) n / 2) clients work alone.

    Example:
        >>> round(AugCorBin(epsilon=1.0).coin.high / 2**32, 3)  # chance of the likelier bit
        0.731
    """

    unpaired_fraction: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.unpaired_fraction <= 1.0:
            raise ValueError(f"unpaired_fraction must be in [0, 1], got {self.unpaired_fraction}")

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Pairs for (1 - gamma) of the clients, the rest alone."""
        pairs = int((1.0 - self.unpaired_fraction) * num_clients / 2.0 + 1e-9)
        return (2,) * pairs + (1,) * (num_clients - 2 * pairs)
