"""CorBin-FL and AugCorBin-FL: pairs of clients share bits, so that their quantisation errors cancel.

Source: Salehi, Mia, Pradhan, Amini, Shirani, CorBin-FL, algorithms 2 and 3. Departures from the paper: the
shared bits come from the pair's X25519 key and are never sent (the paper sends d bits a parameter every
round). The roles need no coin flip, because the joint distribution is symmetric. Thresholds are integers, so
the level is exact. Exact numerical accounting replaces the central-privacy theorems of the paper (see
`claims`).

The second client's word has the complement of the first client's shared bits, and each client fills up its
word with private bits. A client whose partner dropped out is an LDPQ client: its message stays valid and
unbiased.
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

    Take it to reproduce the paper. `PairedCoins` also pairs clients, and has a finite epsilon against a
    server that sees both bits. An odd client is unpaired.

    Args:
        epsilon_per_coordinate: Local budget per coordinate and round, > 0, in nats.
        shared_bits: Number of random bits per coordinate that a pair shares, 0 to 32. None shares all 32, and
            0 is LDP-FL.

    The claim is `epsilon_per_coordinate` per coordinate and round against an eavesdropper. A server that sees
    both messages of a pair has an infinite pure epsilon, because some outcomes exclude an input. Against
    outsiders, curious clients and the server behind secure aggregation, only the bits of unpaired clients
    hide a pair's sum.

    A message has one bit per coordinate.

    References:
        Salehi, Mia, Pradhan, Amini, Shirani, CorBin-FL, algorithms 2 and 3

    Examples:
        >>> round(CorBin(epsilon_per_coordinate=1.0).coin.high / 2**32, 3)  # probability of the likelier bit
        0.731
    """

    shared_bits: int | None = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_bits is not None and not 0 <= self.shared_bits <= WORD_BITS:
            raise ValueError(f"shared_bits must be in [0, {WORD_BITS}] or None, got {self.shared_bits}")

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Return pairs, and one unpaired client if their number is odd."""
        return (2,) * (num_clients // 2) + (1,) * (num_clients % 2)

    def coupling(self, group: tuple[int, ...], rand: ClientRandomness) -> ComplementaryBits | None:
        """Return the pair's shared high bits, complemented for the second member. Low bits are private."""
        bits = WORD_BITS if self.shared_bits is None else self.shared_bits
        return ComplementaryBits(rand.peer(group, COINS), bits) if len(group) == 2 and bits else None

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Bound the variance by radius^2 (pairs M + others alpha^2) / n^2, M the worst error of a pair."""
        answered = set(clients)
        pairs = sum(len(group) == 2 and answered.issuperset(group) for group in context.groups)
        worst = pairs * worst_pair_mse(self.coin.scale, self.shared_bits)
        worst += (len(answered) - 2 * pairs) * self.coin.scale**2
        return context.radius**2 * worst / len(answered) ** 2

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return the claims of pairs with shared bits, see `claims.paired_claims`."""
        return paired_claims(self.coin, self.shared_bits, context)

    def advice(self, claim: PrivacyClaim) -> str:
        # the shared bits cause the infinite losses
        share = "share no bits (shared_bits=0, or LDPQ)"
        if claim.adversary in (Adversary.EAVESDROPPER, Adversary.SERVER, Adversary.SERVER_AND_PARTNER):
            repaired = "PairedCoins keeps the pairs and has a finite epsilon here"
            return f"{repaired}, or {share}, or add secure aggregation and unpaired clients"
        return f"{share}, or take more unpaired clients (AugCorBin)"


@dataclass(frozen=True)
class AugCorBin(CorBin):
    """CorBin with a share of unpaired clients, whose bits hide the sum of the others.

    Take it to reproduce the paper. A fresh public permutation of the cohort is drawn every round, and all
    parties know the unpaired clients.

    Args:
        epsilon_per_coordinate: Local budget per coordinate and round, > 0, in nats.
        shared_bits: Number of random bits per coordinate that a pair shares, as for `CorBin`.
        unpaired_fraction: Fraction gamma in [0, 1]. n - 2 floor((1 - gamma) n / 2) clients are unpaired.

    The claims are those of `CorBin`. The unpaired clients' bits give finite epsilons against adversaries that
    see sums only.

    A message has one bit per coordinate.

    References:
        Salehi, Mia, Pradhan, Amini, Shirani, CorBin-FL, algorithms 2 and 3

    Examples:
        >>> coin = AugCorBin(epsilon_per_coordinate=1.0).coin
        >>> round(coin.high / 2**32, 3)  # probability of the likelier bit
        0.731
    """

    unpaired_fraction: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.unpaired_fraction <= 1.0:
            raise ValueError(f"unpaired_fraction must be in [0, 1], got {self.unpaired_fraction}")

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Return pairs for (1 - gamma) of the clients. All other clients are unpaired."""
        pairs = int((1.0 - self.unpaired_fraction) * num_clients / 2.0 + 1e-9)
        return (2,) * pairs + (1,) * (num_clients - 2 * pairs)
