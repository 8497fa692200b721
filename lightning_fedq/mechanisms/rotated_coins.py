"""Rotated coins: clip in l2, rotate, and send one randomised bit per coordinate.

A client clips the l2 norm of its update and rotates it by a public random rotation (`functional.rotation`).
It then clips every coordinate to a range of `clip_stds` standard deviations and sends one randomised bit (or
several) a coordinate. The bias of the bit encodes the coordinate's place in the range. The server adds the
bits and rotates back.

The bits of n - 1 other clients, which no adversary can predict, hide an update of bounded l2 norm about as
well as Gaussian noise of the sum's variance would (`functional.one_bit.hidden_coin`). The guarantee is for
the whole update and does not grow with the number of parameters, at one bit a parameter. This is the
Poisson-binomial mechanism of Chen, Ozgur, Kairouz, 2022, with one bit, and the l2 analysis is ours. Sums are
taken modulo a power of two, so that masks cost 8 bits a coordinate at 1,000 clients. With `fraction` only
some rotated coordinates are sent.

The claims rest on these facts. Thresholds are integers that are compared with uniform words. The norm is
clipped after the rotation, on the floats that become thresholds, in float64 and rounded up, so the rotation
may err in its last digits. Rounding to thresholds counts as a change of 2^-32 in every coordinate's
probability. Against adversaries that see sums the claim is a Renyi curve for a whole message. Single messages
are randomised response, bit by bit.

`paired` clients round with complementary words that the two share, and apply randomised response afterwards.
The rounding errors of a pair cancel, and the claims against all adversaries but one stay the same. The
exception is an adversary that knows the shared word and the sum, that is a partner as curious client or
colluding with the server. It knows which coordinates flipped, so a change in l2 counts like one in l1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats
from torch import Tensor

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.checks import check_at_least, check_positive
from lightning_fedq.functional.chunks import CHUNK
from lightning_fedq.functional.clip import float32_range, unit_ball_factor
from lightning_fedq.functional.hadamard import Floats, kernel_order, padded_size
from lightning_fedq.functional.linear_decode import sum_of_rows
from lightning_fedq.functional.one_bit.hidden_coin import ORDERS, hidden_coin_moments
from lightning_fedq.functional.one_bit.threshold_coin import (
    WORD_BITS,
    CoinThresholds,
    coin_thresholds,
    one_bit_quantize_rows,
)
from lightning_fedq.functional.rotation import Words, rotate, rotate_back, sign_words
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.claims import (
    ARBITRARY,
    AUTHENTICATED,
    FRESH,
    MODELS_ONLY,
    SUM_ONLY,
    bounded_collusion,
)
from lightning_fedq.mechanisms.interface import (
    Adversary,
    Mechanism,
    Message,
    PrivacyClaim,
    RoundContext,
    Unit,
    count_hidden_clients,
    no_guarantee,
    same_for_all,
)
from lightning_fedq.privacy.losses import Loss, PmfPairs, RenyiLoss
from lightning_fedq.wire.coding import FixedLength

_ROTATION, _COINS, _ROUNDING = "rotation signs", "rotated coins", "rounding words"
_CHUNK = 1 << 15
_SUBSET_SLACK = 1.1
"""Largest norm of a share s of the rotated coordinates, in units of clip_norm sqrt(s)."""

_moments = lru_cache(maxsize=256)(hidden_coin_moments)


@dataclass(frozen=True)
class RotatedCoins(Mechanism):
    """Rotated updates, clipped in l2, with one random bit (or a few) a coordinate, for private sums.

    Take it for whole-update privacy at about one bit per parameter, with secure aggregation and large
    cohorts.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        epsilon_per_bit: Level of one randomised bit, > 0, in nats. Choose a small one if a whole update is to
            be private.
            None: a privacy target sets it when the fit starts.
        clip_stds: Range of a rotated coordinate in standard deviations, clip_norm / sqrt(D), > 0. 4.5
            contains practically all of them.
        bits_per_coordinate: Number of randomised bits per coordinate, 1 to 255. More than one only helps if
            `epsilon_per_bit` would be above 1.
        fraction: Part of the rotated coordinates that is sent in a round, a power of 1/2. These are the first
            ones, which a fresh rotation makes a random subspace, the same for all clients.
        paired: Whether pairs of clients share the words that round. Useful above an `epsilon_per_bit` of
            about 0.6.
        max_dropped_clients: Dropouts that the claims about sums allow for. A round with more is aborted.
        wrap_probability: Largest probability that a coordinate of a sum wraps around if all updates are
            identical (the worst case), in [0, 0.01]. With 0, sums never wrap.

    Raises:
        ValueError: If a value is out of its range.

    The claim is about the whole update against outsiders, curious clients and the server behind secure
    aggregation. Against an eavesdropper or a server that sees messages, it is `epsilon_per_bit` per rotated
    coordinate and bit.

    A message has one bit (or the bits of a count up to `bits_per_coordinate`) per rotated coordinate that is
    sent.

    References:
        Chen, Ozgur, Kairouz, The Poisson Binomial Mechanism for Secure and Private Federated Learning, 2022.

    Examples:
        >>> round(RotatedCoins(clip_norm=1.0, epsilon_per_bit=1.0).coin.high / 2**32, 3)  # P(likelier bit)
        0.731
    """

    homomorphic = True
    has_exchangeable_clients = True
    clips_norm = True

    clip_norm: float
    epsilon_per_bit: float | None = None
    clip_stds: float = 4.5
    bits_per_coordinate: int = 1
    fraction: float = 1.0
    paired: bool = False
    max_dropped_clients: int = 0
    wrap_probability: float = 1e-4

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm, clip_stds=self.clip_stds)
        if self.epsilon_per_bit is not None:
            coin_thresholds(self.epsilon_per_bit)
        if not 1 <= self.bits_per_coordinate <= 255:
            raise ValueError(f"bits_per_coordinate must be in [1, 255], got {self.bits_per_coordinate}")
        if not 0.0 < self.fraction <= 1.0 or math.frexp(self.fraction)[0] != 0.5:
            raise ValueError(f"fraction must be 1, 1/2, 1/4 or another power of 1/2, got {self.fraction}")
        check_at_least(0, max_dropped_clients=self.max_dropped_clients)
        if not 0.0 <= self.wrap_probability <= 0.01:
            raise ValueError(f"wrap_probability must be in [0, 0.01], got {self.wrap_probability}")

    @property
    def coin(self) -> CoinThresholds:
        """Thresholds of the randomised bit of every coordinate.

        Raises:
            ValueError: If its level is not set.
        """
        if self.epsilon_per_bit is None:
            raise ValueError(
                "epsilon_per_bit of RotatedCoins is not set. "
                "Set it, or train with Federated(privacy=PrivacyTarget(...))."
            )
        return coin_thresholds(self.epsilon_per_bit)

    @property
    def _bias(self) -> float:
        """Difference t = tanh(epsilon / 2) of the probabilities of a one, the shrinkage of a bit's mean."""
        low, high = self.coin.probabilities
        return high - low

    def with_level(self, level: float, context: RoundContext, max_dropped_clients: int) -> RotatedCoins:
        dropped = max(self.max_dropped_clients, max_dropped_clients)
        return replace(self, epsilon_per_bit=level, max_dropped_clients=dropped)

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Return pairs and an unpaired client if `paired`, else unpaired clients only."""
        pairs = num_clients // 2 if self.paired else 0
        return (2,) * pairs + (1,) * (num_clients - 2 * pairs)

    def num_symbols(self, context: RoundContext) -> int:
        """Return the number of rotated coordinates that are sent."""
        size = padded_size(context.dim)
        return max(int(size * self.fraction), int(kernel_order(size)))

    def _norm(self, context: RoundContext) -> float:
        """Return the largest norm of the coordinates that are sent, in units of clip_norm."""
        sent = self.num_symbols(context) / padded_size(context.dim)
        return 1.0 if sent == 1.0 else min(_SUBSET_SLACK * math.sqrt(sent), 1.0)

    def _reach(self, context: RoundContext) -> float:
        """Return the largest norm of the sent coordinates, in units of the range of a coordinate."""
        return self._norm(context) * math.sqrt(padded_size(context.dim)) / self.clip_stds

    @staticmethod
    def _words(context: RoundContext, rand: PublicRandomness) -> Words:
        return rand.public(_ROTATION).words(sign_words(padded_size(context.dim)))

    # ---- messages ---------------------------------------------------------------------------------------

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are uint8: the number of ones among a rotated coordinate's bits
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous()
        count, signs = self.num_symbols(context), self._words(context, rand)
        symbols = np.zeros((len(rows), count), np.uint8)
        clipped = 0
        for row, client in enumerate(rand.clients):
            scaled, scale = float32_range(rows[row : row + 1].numpy())  # no float overflows in the transform
            rotated = rotate(scaled, signs, count)  # spreads the l2 norm evenly over all coordinates
            bound = self.clip_norm * scale * self._norm(context)
            factor, shortened = unit_ball_factor(rotated[0], bound)
            radius = 1.0 / (factor * self._reach(context))
            ranges = np.array([[float(count)], [0.0], [1.0 / radius]])
            outside = self._throw(rotated, ranges, symbols[row : row + 1], client, context, rand)
            clipped += context.dim if shortened else min(outside, context.dim)
        sent = torch.from_numpy(symbols).reshape((*update.shape[:-1], count))
        return Message(sent, self.code(context).bits_per_symbol * symbols.size, clipped)

    def _throw(
        self,
        rotated: Floats,
        ranges: NDArray[np.float64],
        ones: NDArray[np.uint8],
        client: int,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> int:
        """Draw one client's randomised bits and write the number of ones per coordinate.

        Args:
            rotated: `(1, count)`, the rotated update.
            ranges: Length, centre and inverse radius of the one segment.
            ones: `(1, count)` uint8, filled with the number of ones.
            client: Client, whose private stream and pair's stream are read.
            context: Public facts of the round.
            rand: Random streams of the client.

        Returns:
            Number of coordinates that were out of range.
        """
        group, rank = context.place(client)
        private, coin, outside = rand.private(client, _COINS), self.coin, 0
        shared = rand.peer(group, _ROUNDING) if len(group) == 2 else None
        only_row, bits = np.zeros(1, np.int64), np.empty_like(ones)
        for number in range(self.bits_per_coordinate):
            for first in range(0, ones.shape[1], _CHUNK):
                part = slice(first, min(first + _CHUNK, ones.shape[1]))
                words = private.words(part.stop - first)[None]
                rounding, low, high = words, coin.low, coin.high
                if shared is not None:  # the pair's words round, and own words randomise afterwards
                    rounding, low, high = shared.words(part.stop - first)[None], 0, 2**WORD_BITS - 1
                    rounding = ~rounding if rank else rounding  # one member rounds up, its partner down
                out = one_bit_quantize_rows(rotated, only_row, first, rounding, ranges, low, high, bits)
                if shared is not None:
                    bits[:, part] ^= words < np.uint32(coin.low)
                ones[:, part] += bits[:, part]
                outside += out if number == 0 else 0
        return outside

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # `symbols` may also be the sum modulo `symbol_modulus`
        total = sum_of_rows(symbols).numpy()
        modulus = self.symbol_modulus(context)[0]
        thrown = len(clients) * self.bits_per_coordinate
        lowest = (thrown + 1 - modulus) // 2  # residues stand for the values around half of the bits
        radius = self.clip_stds * self.clip_norm / math.sqrt(padded_size(context.dim))
        share = len(total) / padded_size(context.dim)
        scale = radius / (self._bias * self.bits_per_coordinate * share)
        estimate = np.empty(len(total), np.float32)
        for first in range(0, len(total), CHUNK):
            ones = lowest + ((total[first : first + CHUNK].astype(np.int64) - lowest) & (modulus - 1))
            estimate[first : first + CHUNK] = (2 * ones - thrown) * scale  # divides by the bits' bias
        back = rotate_back(estimate, self._words(context, rand), context.dim)
        return torch.from_numpy(back)

    def code(self, context: RoundContext) -> FixedLength:
        """Return the bits of a count up to `bits_per_coordinate`, which is one bit by default."""
        return FixedLength(self.bits_per_coordinate.bit_length())

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """Return 0 to `bits_per_coordinate`. The code has room for more."""
        return 0, self.bits_per_coordinate

    def tolerated_dropouts(self, context: RoundContext) -> int:
        """Return `max_dropped_clients`, because a further dropout removes a bit that the claims count."""
        return self.max_dropped_clients

    def symbol_modulus(self, context: RoundContext) -> tuple[int, int]:
        """Return the smallest modulus that wraps with `wrap_probability` at most, and `num_symbols`."""
        thrown = len(context.cohort) * self.bits_per_coordinate
        bits = thrown.bit_length()
        if self.wrap_probability:
            # std of the bits, and of a rotated coordinate if all updates are identical
            std = math.hypot(0.5 * math.sqrt(thrown), thrown * self._bias / (2.0 * self.clip_stds))
            reach = -float(special.ndtri(self.wrap_probability / 2.0)) * std
            bits = min(bits, max(math.ceil(math.log2(2.0 * reach + 2.0)), 1))
        return 1 << bits, self.num_symbols(context)

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Bound the variance of randomised bits and of coordinates that are not sent, without wrapped sums.

        The bits' term is (clip_stds / t)^2 / (coins n share) in units of clip_norm^2 / D.
        """
        share = self.num_symbols(context) / padded_size(context.dim)
        variance = (self.clip_stds / self._bias) ** 2 / (self.bits_per_coordinate * len(clients)) / share
        variance += 2.0 * (1.0 / share - 1.0)
        return torch.full_like(context.radius, variance * self.clip_norm**2 / padded_size(context.dim))

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float:
        # the bits' variance, and the part of the mean outside the random subspace, for updates of norm
        # clip_norm that are spread evenly; in the worst case, `noise_variance`, all updates agree
        coins = self._coin_error(num_clients, homogeneity) * context.dim / self.num_symbols(context)
        return self.clip_norm**2 * (coins + homogeneity * self._subspace_error(context))

    def _coin_error(self, num_clients: int, homogeneity: float) -> float:
        """Return the variance of the mean's randomised bits, summed over all rotated coordinates.

        A bit's variance is reduced by its squared mean: (clip_stds / t)^2 - 1. A pair's bits have 2 (1 / t^2
        - 1) + 2 E|s| - E s^2, with s the sum of two rotated coordinates in units of the range, which is about
        Gaussian.
        """
        alone = (self.clip_stds / self._bias) ** 2 - 1.0
        sum_variance = 1.0 + homogeneity
        rounding = self.clip_stds * math.sqrt(4.0 * sum_variance / math.pi) - sum_variance
        in_pair = (self.clip_stds / self._bias) ** 2 - self.clip_stds**2 + rounding
        paired = 2 * (num_clients // 2) / num_clients if self.paired else 0.0
        bit = (1.0 - paired) * alone + paired * in_pair
        return bit / (self.bits_per_coordinate * num_clients)

    def _subspace_error(self, context: RoundContext) -> float:
        """Return the share of |mean|^2 that a random subspace of the rotated coordinates loses.

        It is 1 / share - 1 before the padding is cut, mostly within blocks of as many coordinates as are
        sent. The transform's first rows fold D coordinates into `sent` ones, with `folded` others onto each.
        Each of these adds 2 / D to E G_ij^2 if i and j are in one block. Otherwise (folded - 1) / 2 of them
        do.
        """
        dim, size, sent = context.dim, padded_size(context.dim), self.num_symbols(context)
        folded = size / sent - 1.0
        blocks, rest = divmod(dim, sent)
        pairs_in_a_block = blocks * sent**2 + rest**2
        other_pairs = dim**2 - pairs_in_a_block
        return 2.0 * (pairs_in_a_block * folded + other_pairs * (0.5 * folded - 0.5)) / (dim * size)

    # ---- claims -----------------------------------------------------------------------------------------

    def _behind(self, known: int, others: int, context: RoundContext) -> Loss:
        """Return the loss of a sum with `others` unknown bits, to an adversary that knows `known` clients."""
        low, high = self.coin.probabilities
        count, reach = self.num_symbols(context), self._reach(context)
        rounding = math.sqrt(count) * 2.0 ** -(WORD_BITS - 1)  # both thresholds are rounded to whole words
        if self.paired and known:
            # the partner knows which shared roundings a changed update flips, so changes count in l1
            changed_bits = min(math.sqrt(count) * (reach + rounding), float(count))
            square_change = changed_bits * (high - low) ** 2
            note = "a pair's shared word is known, and the sum is seen"
        else:
            change = min((high - low) * reach + rounding, (high - low) * math.sqrt(count))
            square_change = change * change
            note = "one randomised bit a rotated coordinate, hidden by other clients"
        # `count` coordinates share the squared change evenly in the worst case, as the logarithm is concave
        moments = _moments(low, high, others)
        of_a_bit = np.log1p(moments * (square_change * (1.0 + 1e-9)) / count)
        num_bits = self.bits_per_coordinate * count
        divergences = num_bits * of_a_bit * (1.0 + 1e-9) / (np.array(ORDERS) - 1.0)
        return RenyiLoss(ORDERS, tuple(divergences.tolist()), note)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return randomised response for single messages, and the loss of `hidden_coin` for sums."""
        if self.epsilon_per_bit is None or not self.coin.low:
            unset = self.epsilon_per_bit is None
            missing = "epsilon_per_bit is not set yet" if unset else "epsilon_per_bit is infinite"
            return no_guarantee(f"{missing}: an extreme input determines its bits", 1)
        low, high = self.coin.probabilities
        ones = np.arange(self.bits_per_coordinate + 1)
        laws = [tuple(stats.binom.pmf(ones, self.bits_per_coordinate, p).tolist()) for p in (high, low)]
        if self.bits_per_coordinate == 1:
            laws = [(low, high), (high, low)]
        alone = PmfPairs(((laws[0], laws[1]),), "randomised response on the bits of one rotated coordinate")
        keys = (AUTHENTICATED,) if self.paired else ()
        size = len(context.cohort)
        least = max(size - self.max_dropped_clients, 1)
        there = f"at least {least} of {size} clients answer"
        answer = kind.DROPOUTS(f"{there}, and a round with fewer is aborted")
        stated = {
            Adversary.CLIENT: (MODELS_ONLY, answer),
            Adversary.SECAGG_SERVER: (SUM_ONLY, bounded_collusion(context.num_colluding), answer, *keys),
            Adversary.OUTSIDER: (MODELS_ONLY, answer, *keys),
        }
        summed = {}
        for who, (known, hidden) in count_hidden_clients(context, self.max_dropped_clients).items():
            loss, about = self._behind(known, hidden - 1, context), (ARBITRARY, FRESH, *stated[who])
            summed[who] = PrivacyClaim(who, loss, 1, assumptions=about, colluders=known)
        singles = same_for_all(alone, self.num_symbols(context), (ARBITRARY, FRESH), unit=Unit.COORDINATE)
        return tuple(summed.get(claim.adversary, claim) for claim in singles)

    # ---- attacks ----------------------------------------------------------------------------------------

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        """Return the updates that the rotation turns into all ones and all minus ones, beyond the clip."""
        ones = np.ones(self.num_symbols(context), np.float32)
        high = torch.from_numpy(rotate_back(ones, self._words(context, public), context.dim)).double()
        high *= 4.0 * self.clip_norm / max(float(high.norm()), 1e-30)
        return high, -high

    def influence(self, client: int, context: RoundContext) -> float:
        """Return the length of a decoded message of all ones over the longest honest update."""
        share = self.num_symbols(context) / padded_size(context.dim)
        return max(self.clip_stds / (self._bias * math.sqrt(share)), 1.0)

    def without_noise(self, context: RoundContext) -> RotatedCoins:
        # a bit of infinite epsilon only rounds
        return replace(self, epsilon_per_bit=math.inf)
