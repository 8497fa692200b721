"""Rotated coins: clip in l2, rotate, one biased coin a coordinate. Behind a sum as good as Gaussian noise.

A client clips the l2 norm of its update, rotates it by a public random rotation (`functional.rotation`),
clips every coordinate to a range of `kappa` standard deviations, and sends one coin (or several) a coordinate
whose bias says where in the range the coordinate lies. The server adds the coins up and rotates back. One
coin of n - 1 others that nobody can predict hides about as much of an update of bounded l2 norm as Gaussian
noise of the sum's variance would (`functional.one_bit.hidden_coin`): whole-client guarantees that do not grow
with the number of parameters, at one bit a parameter (Poisson-binomial mechanism of Chen, Ozgur, Kairouz,
2022, with one coin; the l2 analysis is ours). Sums are taken modulo a power of two, so that masks cost 8 bits
a coordinate at 1,000 clients, and with `share` only some rotated coordinates are sent.

What the claims rest on: thresholds are integers that are compared with uniform words; the norm is clipped
after the rotation, on the very floats that become thresholds, in float64 and rounded up, so the rotation may
err in its last digits; rounding to thresholds counts as a change of 2^-32 in every coordinate's probability.
Towards the sum's views the claim is a Renyi curve for a whole message; single messages are randomised
response, coin by coin.

`paired` clients round with complementary words that the two share and respond at random afterwards: rounding
errors of a pair cancel, and every view but one keeps its claim. Who knows the shared word and the sum (a
partner, as curious client or colluding with the server) sees which coordinates flipped: a change in l2 then
counts like one in l1.
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

from lightning_fedq.functional.checks import check_positive
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
    NO_COLLUSION,
    SUM_ONLY,
)
from lightning_fedq.mechanisms.interface import (
    Adversary,
    AuditCase,
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
"""Norm of a share s of the rotated coordinates that is allowed, in units of clip_norm sqrt(s)."""

_moments = lru_cache(maxsize=256)(hidden_coin_moments)


@dataclass(frozen=True)
class RotatedCoins(Mechanism):
    """Rotated, l2-clipped updates with one randomised bit (or a few) per coordinate, for private sums.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        epsilon: Level of one coin, > 0, in nats; small if a whole update is to be private. None: a privacy
            target sets it when the fit starts.
        kappa: Range of a rotated coordinate in standard deviations, clip_norm / sqrt(D), > 0; 4.5 holds
            practically all of them.
        coins: Coins a coordinate, 1 to 255; more of them only where `epsilon` would be above 1.
        share: Part of the rotated coordinates that is sent in a round, a power of 1/2: the first ones, which
            a fresh rotation makes a random subspace; the same for all clients.
        paired: Do pairs of clients share the words that round? See above; worth it above `epsilon` 0.6 or so.
        max_dropped: Dropouts that the claims about sums allow for; a round with more is given up.
        wrap_chance: Chance that a coordinate of a sum wraps around, at most, if all updates are alike (the
            worst case); in [0, 0.01]. 0: sums never wrap.

    Raises:
        ValueError: If a value is out of its range.

    References:
        Chen, Ozgur, Kairouz, The Poisson Binomial Mechanism for Secure and Private Federated Learning, 2022.

    Example:
        >>> round(RotatedCoins(clip_norm=1.0, epsilon=1.0).coin.high / 2**32, 3)  # chance of the likelier bit
        0.731
    """

    homomorphic = True
    alike_clients = True
    clips_norm = True

    clip_norm: float
    epsilon: float | None = None
    kappa: float = 4.5
    coins: int = 1
    share: float = 1.0
    paired: bool = False
    max_dropped: int = 0
    wrap_chance: float = 1e-4

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm, kappa=self.kappa)
        if self.epsilon is not None:
            coin_thresholds(self.epsilon)
        if not 1 <= self.coins <= 255:
            raise ValueError(f"coins must be in [1, 255], got {self.coins}")
        if not 0.0 < self.share <= 1.0 or math.frexp(self.share)[0] != 0.5:
            raise ValueError(f"share must be 1, 1/2, 1/4 or another power of 1/2, got {self.share}")
        if self.max_dropped < 0:
            raise ValueError(f"max_dropped must be >= 0, got {self.max_dropped}")
        if not 0.0 <= self.wrap_chance <= 0.01:
            raise ValueError(f"wrap_chance must be in [0, 0.01], got {self.wrap_chance}")

    @property
    def coin(self) -> CoinThresholds:
        """The coin of every coordinate.

        Raises:
            ValueError: If its level is not set.
        """
        if self.epsilon is None:
            raise ValueError(
                "the level of RotatedCoins is not set: give epsilon, or train with "
                "Federated(privacy=PrivacyTarget(...)), which finds it when the fit starts"
            )
        return coin_thresholds(self.epsilon)

    @property
    def _bias(self) -> float:
        low, high = self.coin.probabilities
        return high - low

    @classmethod
    def plan_settings(cls, params: int) -> dict[str, Mechanism]:
        """Every message private by itself, in pairs, or half or an eighth of the coordinates."""
        return {
            "RotatedCoins": cls(1.0, 1.0),
            "RotatedCoins, paired": cls(1.0, 1.0, paired=True),
            "RotatedCoins, share 1/2": cls(1.0, 1.0, share=0.5),
            "RotatedCoins, share 1/8": cls(1.0, 1.0, share=0.125),
        }

    @classmethod
    def poisson_binomial(cls, clip_norm: float, theta: float, coins: int, kappa: float = 4.5) -> RotatedCoins:
        """Return the Poisson binomial mechanism in its authors' parameters, behind sums that never wrap.

        Args:
            clip_norm: Largest l2 norm of an update, > 0.
            theta: A coin is one with chance 1/2 + theta x / r, r the range of a coordinate; in (0, 1/4].
            coins: Coins a coordinate, their m, 1 to 255.
            kappa: Range of a rotated coordinate in standard deviations, as in the class.

        Raises:
            ValueError: If a value is out of its range.
        """
        if not 0.0 < theta <= 0.25:
            raise ValueError(f"theta must be in (0, 1/4], got {theta}")
        level = math.log((0.5 + theta) / (0.5 - theta))
        return cls(clip_norm, level, kappa, coins, wrap_chance=0.0)

    def with_level(self, level: float, context: RoundContext, max_dropped: int) -> RotatedCoins:
        return replace(self, epsilon=level, max_dropped=max(self.max_dropped, max_dropped))

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Pairs and an odd client out if `paired`, else everybody alone."""
        pairs = num_clients // 2 if self.paired else 0
        return (2,) * pairs + (1,) * (num_clients - 2 * pairs)

    def num_symbols(self, context: RoundContext) -> int:
        """Rotated coordinates that are sent."""
        size = padded_size(context.dim)
        return max(int(size * self.share), int(kernel_order(size)))

    def _norm(self, context: RoundContext) -> float:
        """Largest norm of what is sent, in units of clip_norm."""
        sent = self.num_symbols(context) / padded_size(context.dim)
        return 1.0 if sent == 1.0 else min(_SUBSET_SLACK * math.sqrt(sent), 1.0)

    def _reach(self, context: RoundContext) -> float:
        """That norm in units of the range of a coordinate."""
        return self._norm(context) * math.sqrt(padded_size(context.dim)) / self.kappa

    @staticmethod
    def _words(context: RoundContext, rand: PublicRandomness) -> Words:
        return rand.public(_ROTATION).words(sign_words(padded_size(context.dim)))

    # ---- messages ---------------------------------------------------------------------------------------

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are uint8, how many of a rotated coordinate's coins are one
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous()
        count, signs = self.num_symbols(context), self._words(context, rand)
        symbols = np.empty((len(rows), count), np.uint8)
        clipped = 0
        for row, client in enumerate(rand.clients):
            scaled, scale = float32_range(rows[row : row + 1].numpy())  # no float overflows in the transform
            rotated = rotate(scaled, signs, count)  # the l2 norm is spread over all coordinates alike
            bound = self.clip_norm * scale * self._norm(context)
            factor, shortened = unit_ball_factor(rotated[0], bound)
            radius = np.array([[float(count)], [0.0], [1.0 / (factor * self._reach(context))]])
            outside = self._throw(rotated, radius, symbols[row : row + 1], client, context, rand)
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
        """Write how many of one row's coins are one. Return how many coordinates were out of range."""
        group, rank = context.place(client)
        private, coin, outside = rand.private(client, _COINS), self.coin, 0
        shared = rand.peer(group, _ROUNDING) if len(group) == 2 else None
        which = np.zeros(1, np.int64)
        for number in range(self.coins):
            bits = np.empty_like(ones) if number else ones
            for first in range(0, ones.shape[1], _CHUNK):
                part = slice(first, min(first + _CHUNK, ones.shape[1]))
                words = private.words(part.stop - first)[None]
                if shared is None:
                    out = one_bit_quantize_rows(
                        rotated, which, first, words, ranges, coin.low, coin.high, bits
                    )
                else:
                    common = shared.words(part.stop - first)[None]
                    common = ~common if rank else common  # one rounds up where its partner rounds down
                    out = one_bit_quantize_rows(
                        rotated, which, first, common, ranges, 0, 2**WORD_BITS - 1, bits
                    )
                    bits[:, part] ^= words < np.uint32(coin.low)
                outside += out if number == 0 else 0
                if number:
                    ones[:, part] += bits[:, part]
        return outside

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # also takes the sum modulo `symbol_modulus`
        total = sum_of_rows(symbols).numpy()  # coins add up: no single message is needed
        modulus = self.symbol_modulus(context)[0]
        thrown = len(clients) * self.coins
        lowest = (thrown + 1 - modulus) // 2  # the values around half of the coins
        radius = self.kappa * self.clip_norm / math.sqrt(padded_size(context.dim))
        share = len(total) / padded_size(context.dim)
        scale, estimate = radius / (self._bias * self.coins * share), np.empty(len(total), np.float32)
        for first in range(0, len(total), CHUNK):
            ones = lowest + ((total[first : first + CHUNK].astype(np.int64) - lowest) & (modulus - 1))
            estimate[first : first + CHUNK] = (2 * ones - thrown) * scale  # over its bias
        back = rotate_back(estimate, self._words(context, rand), context.dim)
        return torch.from_numpy(back)

    def code(self, context: RoundContext) -> FixedLength:
        """Bits that hold a count of coins. One for one coin."""
        return FixedLength(self.coins.bit_length())

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """None to all of a coordinate's coins. Their code may have room for more."""
        return 0, self.coins

    def tolerated_dropouts(self, context: RoundContext) -> int:
        """`max_dropped`: every further dropout would take a coin away that the claims count on."""
        return self.max_dropped

    def symbol_modulus(self, context: RoundContext) -> tuple[int, int]:
        """Smallest power of two for which a sum wraps around with `wrap_chance` at most, and the symbols."""
        thrown = len(context.cohort) * self.coins
        bits = thrown.bit_length()
        if self.wrap_chance:
            # of the coins, and of a rotated coordinate of updates that are all alike
            std = math.hypot(0.5 * math.sqrt(thrown), thrown * self._bias / (2.0 * self.kappa))
            reach = -float(special.ndtri(self.wrap_chance / 2.0)) * std
            bits = min(bits, max(math.ceil(math.log2(2.0 * reach + 2.0)), 1))
        return 1 << bits, self.num_symbols(context)

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Coins, at most (kappa / t)^2 / (coins n) of clip_norm^2 / D, over the share. And the share's own.

        Wrapped sums are not in it.
        """
        share = self.num_symbols(context) / padded_size(context.dim)
        one = (self.kappa / self._bias) ** 2 / (self.coins * len(clients)) / share
        one += 2.0 * (1.0 / share - 1.0)
        return torch.full_like(context.radius, one * self.clip_norm**2 / padded_size(context.dim))

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float:
        # The coins', and what lies outside of a shared random subspace. For updates of norm clip_norm, spread
        # evenly. A coin's variance falls by the square of what it tells: (kappa / t)^2 - 1 over all rotated
        # coordinates, of which the padding's are cut. Of a pair's coins 2 (1 / t^2 - 1) + 2 E|s| - E s^2 is
        # left, s the sum of two rotated coordinates in units of the range: about Gaussian. The subspace loses
        # |mean|^2 (1 / share - 1) before the cut, most of it within blocks of as many coordinates as are
        # sent; in the worst case, `noise_variance`, all updates agree.
        size, square = padded_size(context.dim), (self.kappa / self._bias) ** 2
        sent = self.num_symbols(context)
        lost = size / sent - 1.0
        pairs = 2 * (num_clients // 2) / num_clients if self.paired else 0.0
        alike = 1.0 + homogeneity
        rounding = self.kappa * math.sqrt(4.0 * alike / math.pi) - alike
        coin = (1.0 - pairs) * (square - 1.0) + pairs * (square - self.kappa**2 + rounding)
        coins = coin / (self.coins * num_clients) * context.dim / sent
        # The transform's first rows fold D coordinates into `sent`, `lost` others onto each. Each of them
        # adds 2 / D to E G_ij^2 where i and j lie in one block; elsewhere (lost - 1) / 2 of them do.
        blocks, rest = divmod(context.dim, sent)
        within = blocks * sent**2 + rest**2
        between = (context.dim**2 - within) * (0.5 * lost - 0.5)
        subspace = 2.0 * (within * lost + between) / (context.dim * size)
        return self.clip_norm**2 * (coins + homogeneity * subspace)

    # ---- claims -----------------------------------------------------------------------------------------

    def _behind(self, known: int, others: int, context: RoundContext) -> Loss:
        """The sum, `others` coins in it, for an adversary that knows all about `known` clients."""
        low, high = self.coin.probabilities
        moments = _moments(low, high, others)
        count, reach = self.num_symbols(context), self._reach(context)
        grain = 2.0 ** -(WORD_BITS - 1)  # both thresholds are rounded to whole words
        if self.paired and known:
            # the partner knows which flips of the shared rounding an update would make: they count in l1
            change = min(math.sqrt(count) * (reach + math.sqrt(count) * grain), float(count))
            square, note = change * (high - low) ** 2, "a pair's word is known, the sum is seen"
        else:
            change = min((high - low) * reach + math.sqrt(count) * grain, (high - low) * math.sqrt(count))
            square, note = change * change, "one coin a rotated coordinate among those of the others"
        # of `count` coordinates that share the square of the change: the logarithm is concave
        coins = self.coins * count
        grown = np.log1p(moments * (square * (1.0 + 1e-9)) / count)
        divergences = coins * grown * (1.0 + 1e-9) / (np.array(ORDERS) - 1.0)
        return RenyiLoss(ORDERS, tuple(divergences.tolist()), note)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Single messages are randomised response. Behind a sum `hidden_coin` holds."""
        if self.epsilon is None or not self.coin.low:
            unset = self.epsilon is None
            missing = "the level of the coin is not set yet" if unset else "epsilon is infinite"
            return no_guarantee(f"{missing}: the coin has no noise that an input could not force", 1)
        low, high = self.coin.probabilities
        places = np.arange(self.coins + 1)
        laws = [tuple(stats.binom.pmf(places, self.coins, p).tolist()) for p in (high, low)]
        if self.coins == 1:
            laws = [(low, high), (high, low)]
        alone = PmfPairs(((laws[0], laws[1]),), "randomised response on the coins of one rotated coordinate")
        corrupt, keys = context.num_corrupt, (AUTHENTICATED,) if self.paired else ()
        left = len(context.cohort) - self.max_dropped
        answer = (f"at least {max(left, 1)} of {len(context.cohort)} clients answer",)
        colluding = f"the server colludes with {corrupt} clients at most" if corrupt else NO_COLLUSION
        stated = {
            Adversary.CLIENT: (MODELS_ONLY, *answer),
            Adversary.SECAGG_SERVER: (SUM_ONLY, colluding, *answer, *keys),
            Adversary.OUTSIDER: (MODELS_ONLY, *answer, *keys),
        }
        summed = {
            who: PrivacyClaim(
                who, self._behind(known, hidden - 1, context), 1, assumptions=(ARBITRARY, FRESH, *stated[who])
            )
            for who, (known, hidden) in count_hidden_clients(context, self.max_dropped).items()
        }
        singles = same_for_all(alone, self.num_symbols(context), (ARBITRARY, FRESH), unit=Unit.COORDINATE)
        return tuple(summed.get(claim.adversary, claim) for claim in singles)

    # ---- how it is attacked -----------------------------------------------------------------------------

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        """Messages at the level of the mechanism. Sums of many small coins, whose claim is near the truth.

        With the range at two standard deviations, an update in the worst direction takes half of every range,
        and one that is not clipped in l2 all of it. The clip is wide enough for the audit's other clients,
        whose coordinates are within +-1.
        """
        wide = replace(self, kappa=1.0, clip_norm=4.0 * math.sqrt(dim), max_dropped=0)
        sums = replace(wide, kappa=2.0, epsilon=0.5, coins=16)
        half = replace(sums, share=0.5, max_dropped=1)
        return (
            AuditCase(wide),
            AuditCase(sums, title="16 coins", only_sums=True),
            AuditCase(replace(sums, paired=True), title="16 coins, paired", only_sums=True),
            AuditCase(half, title="16 coins, half of the axes, one dropout", only_sums=True, num_dropped=1),
        )

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        """The two updates that the rotation turns into all ones and all minus ones, far outside the clip."""
        ones = np.ones(self.num_symbols(context), np.float32)
        high = torch.from_numpy(rotate_back(ones, self._words(context, public), context.dim)).double()
        high *= 4.0 * self.clip_norm / max(float(high.norm()), 1e-30)
        return high, -high

    def lever(self, client: int, context: RoundContext) -> float:
        """Length of a message of all ones over the longest honest one."""
        share = self.num_symbols(context) / padded_size(context.dim)
        return max(self.kappa / (self._bias * math.sqrt(share)), 1.0)

    def without_noise(self, context: RoundContext) -> RotatedCoins:
        # the coin rounds, and hides nothing else
        return replace(self, epsilon=math.inf)
