"""PairedCoins: CorBin repaired, so that a server which sees both bits of a pair still has a finite epsilon.

A CorBin pair shares the random words of its bits. Some outcomes of both bits then exclude an input, so
epsilon is infinite against a server that sees both. The cause is not the correlation but a coupling without
separate noise. Here a pair shares the randomness of rounding, and each client keeps the randomness of its
response private (`functional.one_bit.coupled_coins`). The pair shares one secret bit a coordinate, from its
key agreement, so the bit is not sent. Messages and decoder are those of LDP-FL. The error of a pair is 2 / (1
+ e^epsilon) of LDP-FL's error if updates are small.

Privacy by the adversary's view, for a bit of level epsilon with t = tanh(epsilon / 2):

* One bit, or both bits of a pair: pure epsilon. Given the partner's bit, for any input of the partner, the
  probability of a one is in [lo, hi] for every input.
* The server with the partner, or with the leaked secret: pure ln((1 + t) / (1 - sqrt t)). The secret is a
  fair bit. An end of the range differs from the centre by much for one value of the secret and by little for
  the other, so at delta > 0 many coordinates cost less than that level (`_known_laws`).
* A sum: the adversary may know the secrets of all other pairs, so their members count as independent
  randomised bits with probabilities in [nu, 1 - nu]. It may also know the partner's bit, which does not
  count.

References:
    Derived for this project, after Salehi et al., CorBin-FL, whose pairs it repairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.functional.divergences import Pmf, randomized_response_pair
from lightning_fedq.functional.one_bit.coupled_coins import coupled_quantize, flip_threshold, inner_coin
from lightning_fedq.functional.one_bit.privacy import coin_splits, coin_sum_pmf
from lightning_fedq.functional.one_bit.threshold_coin import (
    CoinThresholds,
    coin_thresholds,
    one_bit_quantize_rows,
)
from lightning_fedq.functional.segments import normalise_segments, segment_lines
from lightning_fedq.keys.randomness import ClientRandomness
from lightning_fedq.mechanisms.bases.claims import coin_claims, independent_claims
from lightning_fedq.mechanisms.bases.one_bit import COINS, OneBitMechanism, stack_by_group
from lightning_fedq.mechanisms.interface import PrivacyClaim, RoundContext
from lightning_fedq.mechanisms.ldpq import LDPQ
from lightning_fedq.privacy.losses import CoinSum, HiddenPair, Law, PmfPairs

_CHUNK = 1 << 14
"""Coordinates that are encoded at once, a multiple of 8, so that buffers stay in the cache."""


@dataclass(frozen=True)
class _SecretKnown(HiddenPair):
    """Hidden bit with a known secret: the pmfs are (0, 1) for each value of the secret in turn."""

    def laws(self, low: float, high: float) -> Iterator[Law]:
        # the noise is added to the bit, separately for each value of the secret
        parts = [np.array(law).reshape(-1, 2) for law in (self.p, self.q)]
        for num_coins, num_high in coin_splits(self.num_coins):
            noise = coin_sum_pmf(num_coins, num_high, low, high)
            p, q = (np.concatenate([np.convolve(noise, row) for row in part]) for part in parts)
            yield p, q, self.weight
            yield q, p, self.weight


class _EveryoneHides(CoinSum):
    """Sum in which each other client already counts as one randomised bit, so a broken pair adds none."""

    def after_dropouts(
        self, group_sizes: Sequence[int], probability: float, failure: float, num_colluding: int = 0
    ) -> CoinSum:
        # each client that answers is one randomised bit, even if its partner does not answer
        return super().after_dropouts((1,) * sum(group_sizes), probability, failure, num_colluding)


@dataclass(frozen=True)
class PairedCoins(OneBitMechanism):
    """One-bit LDP quantiser in pairs that share the rounding, not the noise: every epsilon is finite.

    Take it in place of LDPQ for a smaller error at the same bits and epsilon, if clients can be paired. An
    odd client is unpaired.

    Args:
        epsilon_per_coordinate: Local budget per coordinate and round, > 0 and finite, in nats. It holds for
            both bits of a pair.

    The claim is `epsilon_per_coordinate` per coordinate and round against an eavesdropper and a server that
    sees every message. Against the server with a client's partner it is `partner_epsilon`. Against outsiders,
    curious clients and the server behind secure aggregation, the other clients' bits also hide the bit.

    A message has one bit per coordinate.

    References:
        Derived for this project, after Salehi et al., CorBin-FL, whose pairs it repairs.

    Examples:
        >>> round(PairedCoins(epsilon_per_coordinate=1.0).partner_epsilon, 4)
        1.5187
    """

    def __post_init__(self) -> None:
        if not math.isfinite(self.epsilon_per_coordinate):
            raise ValueError(
                f"epsilon must be finite, got {self.epsilon_per_coordinate}. Use CorrelatedQuantization() "
                "without privacy."
            )
        inner_coin(coin_thresholds(self.epsilon_per_coordinate))

    @property
    def coin(self) -> CoinThresholds:
        """Thresholds of the drawn bit. The claimed epsilon is slightly larger and covers their rounding."""
        return inner_coin(coin_thresholds(self.epsilon_per_coordinate))

    @property
    def partner_epsilon(self) -> float:
        """Pure epsilon of one bit against a server that also knows the pair's secret."""
        low, high = coin_thresholds(self.epsilon_per_coordinate).probabilities
        nu = self._nu
        return math.log(max(high / nu, (1.0 - nu) / low))

    @property
    def _nu(self) -> float:
        """Smallest probability of either bit, given the secret, less one unit of rounding."""
        return (flip_threshold(self.coin) - 1) / 2.0**self.coin.word_bits

    def _known_laws(self) -> tuple[tuple[Pmf, Pmf], ...]:
        """Return worst pairs of distributions of (secret, bit), as (0, 1) for secret 1 and then for secret 0.

        Given the secret s, the probability of a one is affine in the value x on [0, 1] and on [-1, 0], up to
        the rounding of thresholds. It is C_s at the centre, high at the upper and low at the lower end. A
        divergence is jointly convex in both distributions, so the worst inputs are ends or the centre. The
        pairs are an end and the centre (the other end gives the mirror image), and both ends.

        Rounding moves a threshold by half a unit at most. The interpolation weights of end and centre
        therefore differ between the two secrets by at most 1 / g, with g the units from C_1 to high (C_0 is
        farther). So a distribution is a mixture: with equal weights, except for a part 2 / g for both inputs.
        In that part a bit is revealed with its secret and at most `partner_epsilon` is lost, in one order or
        the other.
        """
        coin, flip = self.coin, flip_threshold(self.coin)
        whole = 1 << coin.word_bits
        upper, lower, centre = coin.high / whole, coin.low / whole, flip / whole
        # probabilities of a one, given secret 1 and given secret 0
        at_upper, at_lower, at_centre = (upper, upper), (lower, lower), (1.0 - centre, centre)
        # the part of 2 / g that rounding may lose, with one unit more, in which a bit is revealed
        rounded = min(3.0 / max(whole - flip - coin.high, 1), 1.0)
        low, high = coin_thresholds(self.epsilon_per_coordinate).probabilities
        revealed = (low, high), (1.0 - self._nu, self._nu)

        def law(ones: tuple[float, float], lost: Pmf) -> Pmf:
            """Return probabilities of (secret 1: 0, 1), (secret 0: 0, 1) and of the two revealed bits."""
            interpolated = [0.5 * (1.0 - rounded) * p for one in ones for p in (1.0 - one, one)]
            return (*interpolated, *(rounded * p for p in lost))

        return tuple(
            (law(at_upper, first), law(other, second))
            for other in (at_centre, at_lower)
            for first, second in (revealed, revealed[::-1])
        )

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Return pairs, and one unpaired client if their number is odd."""
        return (2,) * (num_clients // 2) + (1,) * (num_clients % 2)

    def _bits(self, rows: Tensor, context: RoundContext, rand: ClientRandomness) -> tuple[Tensor, int]:
        values, coin, clipped = rows.contiguous().numpy(), self.coin, 0
        bits = np.empty(values.shape, np.uint8)
        ranges = segment_lines(context.segments, context.center, 1.0 / context.radius)
        for group, members in stack_by_group(context, rand.clients).items():
            for row, rank in members:
                own = rand.private(group[rank], COINS)
                shared = rand.peer(group, COINS) if len(group) == 2 else None
                for first in range(0, context.dim, _CHUNK):
                    size = min(_CHUNK, context.dim - first)
                    words = own.words(size)  # the private words of randomised response
                    if shared is None:
                        clipped += one_bit_quantize_rows(
                            values, np.array([row]), first, words[None], ranges, coin.low, coin.high, bits
                        )
                        continue
                    shared.fill(told := np.empty(-(-size // 8), np.uint8))
                    # the shared rounding bits are inverted for the second member, so errors cancel
                    secret = np.unpackbits(told, count=size) ^ np.uint8(rank)
                    clipped += normalise_segments(values[row], first, ranges, False, units := np.empty(size))
                    bits[row, first : first + size] = coupled_quantize(units, words, secret, coin)
        return torch.from_numpy(bits), clipped

    def without_noise(self, context: RoundContext) -> OneBitMechanism:
        # without noise the bit is the side of the centre that the value is on
        return LDPQ(epsilon_per_coordinate=math.inf)

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """At most radius^2 (pairs (2 alpha^2 - 1) + others alpha^2) / n^2.

        The error of a pair is a function of |x1| and |x2| with a saddle inside. It is largest with one client
        at the edge of the range and the other at its centre.
        """
        answered = set(clients)
        pairs = sum(len(group) == 2 and answered.issuperset(group) for group in context.groups)
        square = self.coin.scale**2
        worst = pairs * (2.0 * square - 1.0) + (len(answered) - 2 * pairs) * square
        return context.radius**2 * worst / len(answered) ** 2

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return one loss per coordinate for every adversary, see the module."""
        claimed = coin_thresholds(self.epsilon_per_coordinate)
        if len(context.groups) == len(context.cohort):
            return independent_claims(claimed, context)
        nu, laws = self._nu, self._known_laws()
        one, other = randomized_response_pair(*claimed.probabilities)
        bit = PmfPairs(((one, other),), "randomised response, the partner's bit known")

        def behind(num_known: int) -> _EveryoneHides:
            """Return the loss of a sum if `num_known` clients, perhaps the partner, reveal what they know."""
            others = len(context.cohort) - 2
            places = [HiddenPair(one, other, max(others - num_known, 0))]
            if num_known:
                places += [_SecretKnown(p, q, max(others + 1 - num_known, 0)) for p, q in laws]
            note = "one bit among the other clients' bits, with their secrets and the partner's bit known"
            return _EveryoneHides(nu, 1.0 - nu, tuple(places), note, hiding="other clients")

        known_secret = PmfPairs(laws, "a bit and its pair's secret")
        return coin_claims((bit, bit, known_secret), behind, context, shared=True)
