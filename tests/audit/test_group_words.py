"""Joint laws of groups, given the public streams, over all words; and plants that no other law shows."""

from dataclasses import dataclass
from fractions import Fraction

import pytest

from lightning_fedq.audit.group_words import _Encoder, enumerate_group_words
from lightning_fedq.functional.one_bit.coupled_coins import flip_threshold
from lightning_fedq.mechanisms import AugCorBin, CorBin, PairedCoins, RotatedCoins
from lightning_fedq.mechanisms.bases.one_bit import COINS, ComplementaryBits
from tests.audit import plants

ROTATED = RotatedCoins(128.0, 1.0, kappa=0.5, paired=True)


@pytest.mark.parametrize(
    "mechanism",
    [
        *(CorBin(1.0, 3), CorBin(1.0, None), AugCorBin(1.0, 5, 0.4)),
        *(PairedCoins(1.0), PairedCoins(0.1), ROTATED),
    ],
    ids=repr,
)
def test_the_joint_law_keeps_the_claims(mechanism):
    pair = mechanism.counted_group()
    assert pair is not None and enumerate_group_words(pair) == []


@dataclass(frozen=True)
class ByTheMiddleBit(CorBin):
    """Shares what the seventh bit of a word says, which changes 2^25 times."""

    def coupling(self, group, rand):
        coupled = ComplementaryBits(rand.peer(group, COINS), self.shared_bits)
        coupled.mask = 1 << 7
        return coupled


def test_words_of_which_middle_bits_count_are_refused():
    with pytest.raises(ValueError, match="the law of a group changes elsewhere than between few stretches"):
        enumerate_group_words(ByTheMiddleBit(1.0, 32))


def test_counts_are_the_specified_ones():
    shares, ones = _Encoder(PairedCoins(1.0), 0).pieces()
    coin, flip = PairedCoins(1.0).coin, flip_threshold(PairedCoins(1.0).coin)
    assert shares == [Fraction(1, 2)] * 2
    assert ones[0].tolist() == [[coin.high] * 2] * 2
    assert ones[1].tolist() == [[coin.low] * 2] * 2
    assert ones[2].tolist() == [[flip, 2**32 - flip], [2**32 - flip, flip]]
    shares, ones = _Encoder(ROTATED, 0).pieces()
    assert sorted(set(ones.flatten().tolist())) == [ROTATED.coin.low, ROTATED.coin.high]
    high = [share for share, one in zip(shares, ones[2, 0], strict=True) if one == ROTATED.coin.high]
    assert sum(high) == Fraction(1, 2)


@dataclass(frozen=True)
class TwoPercentLouder(CorBin):
    """Coins of a fiftieth more epsilon than is claimed."""

    def claims(self, context):
        return CorBin(0.98 * self.epsilon, self.shared_bits).claims(context)


PLANTS = {
    "coins of a group 2% louder": TwoPercentLouder(1.0, 3),
    "flips of the shared rounding 2% rarer": plants.FlipsTwoPercentRarer(**vars(ROTATED)),
    "flips of the pair's secret 2% rarer": plants.SecretTwoPercentLouder(1.0),
    "the pair's secret from the public stream": plants.SecretFromThePublicStream(1.0),
    "rounding words from the public stream": plants.RoundingFromThePublicStream(**vars(ROTATED)),
    "half of the secret from the public stream": plants.HalfOfTheSecretPublic(1.0),
}


@pytest.mark.parametrize("name", PLANTS)
def test_plants_are_caught(name):
    assert enumerate_group_words(PLANTS[name])
