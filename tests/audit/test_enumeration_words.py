"""Layer A at full word length: exact laws of shipped encoders, by bisection over chosen words."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import special

import lightning_fedq as fedq
from lightning_fedq.functional.one_bit.threshold_coin import coin_thresholds
from lightning_fedq.mechanisms.bases.one_bit import COINS
from tests.audit import plants
from tests.audit.enumeration_words import enumerate_words, exact_law

DITHERS = (0, 1 << 51, 12_345_678_901_234, (1 << 52) - 1)


@pytest.mark.parametrize("kind", [fedq.LDPQ, fedq.SignRR, fedq.CorBin, fedq.AugCorBin])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_counts_of_a_bit_are_the_specified_ones(kind, epsilon):
    mechanism = kind(epsilon)
    high, low = (Fraction(count, 2**32) for count in (mechanism.coin.high, mechanism.coin.low))
    assert exact_law(mechanism, 4.0) == {1: high, 0: 1 - high}
    assert exact_law(mechanism, -4.0) == {1: low, 0: 1 - low}


def test_counts_of_a_flip_are_the_specified_ones():
    low = Fraction(coin_thresholds(1.0).low, 2**32)
    assert set(exact_law(fedq.CPA(1.0, epsilon_scope="bit"), 4.0).values()) == {low, 1 - low}


def test_counts_of_an_mvu_row_are_the_designed_ones():
    design = fedq.MVU(1.0).design
    for value, row in ((4.0, -1), (-4.0, 0)):
        counts = [Fraction(int(count), 2**32) for count in design.counts[row]]
        assert exact_law(fedq.MVU(1.0), value) == dict(enumerate(counts))


def test_cells_of_gaussian_noise_have_their_exact_probabilities():
    """Outside reference: scipy's normal distribution function, at the 132 ends of the cells."""
    mechanism = fedq.PerCoordinateGaussian(1.0, 1e-5)
    noise, law = mechanism.noise, exact_law(fedq.PerCoordinateGaussian(1.0, 1e-5), 0.0)
    assert sum(law.values()) == 1
    for symbol, probability in law.items():
        ends = (np.array([symbol - 0.5, symbol + 0.5]) * noise.step) / noise.scale
        # a fine grid of 2^-30 moves the ends of a cell by less than 1e-9
        assert float(probability) == pytest.approx(float(np.diff(special.ndtr(ends))[0]), abs=1e-9)


@pytest.mark.parametrize(
    "mechanism",
    [
        *(fedq.LDPQ(1.0), fedq.SignRR(0.5), fedq.CPA(2.0, epsilon_scope="bit"), fedq.MVU(1.0)),
        *(fedq.CorBin(1.0), fedq.AugCorBin(1.0), fedq.PairedCoins(1.0)),
        *(
            fedq.PerCoordinateLaplace(1.0),
            fedq.PerCoordinateGaussian(1.0, 1e-5),
            fedq.GaussianNoise(1.0, 1 / 32),
            fedq.LaplaceNoise(1.0, 1 / 1024),
            fedq.NearOptimalUtility(1.0, 0.3, 1 / 32, 0.2, public_calibration=True),
        ),
    ],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_the_exact_law_keeps_the_claim(mechanism):
    assert enumerate_words(mechanism) == []


def test_the_exact_law_keeps_the_claim_whatever_the_dither():
    assert enumerate_words(fedq.JoPEQ(1.0), DITHERS) == []
    assert exact_law(fedq.JoPEQ(1.0), 4.0, DITHERS[0]) != exact_law(fedq.JoPEQ(1.0), 4.0, DITHERS[1])


def test_nothing_claimed_is_nothing_compared():
    assert enumerate_words(fedq.FedAvg()) == []


class TieBreak(fedq.LDPQ):
    """`<=` for `<` at 32 bits, where no simulation could see it."""

    def encode(self, update, context, rand):
        words = torch.from_numpy(rand.private(0, COINS).words(context.dim).astype(np.int64))
        one = torch.ones(1)
        bits = plants.tie_break(update, words, 0 * one, one, self.coin)
        return replace(super().encode(update, context, rand), symbols=bits)


class Parity(fedq.LDPQ):
    """Not monotone in its word."""

    def encode(self, update, context, rand):
        words = rand.private(0, COINS).words(context.dim)
        bits = torch.from_numpy(((words >> 30) % 3 == 0).astype(np.uint8)).expand(len(rand.clients), -1)
        return replace(super().encode(update, context, rand), symbols=bits)


class LessLaplace(fedq.JoPEQ):
    """Noise one millionth too small for the claim."""

    @property
    def noise_scale(self):
        return super().noise_scale * (1.0 - 1e-6)

    def claims(self, context):
        return fedq.JoPEQ(self.epsilon_per_coordinate).claims(context)


def test_one_word_too_many_shows():
    assert exact_law(TieBreak(1.0), 4.0)[1] - exact_law(fedq.LDPQ(1.0), 4.0)[1] == Fraction(1, 2**32)


def test_noise_a_millionth_too_small_shows():
    assert "delta is" in enumerate_words(LessLaplace(1.0))[0]


def test_the_wrong_epsilon_shows():
    assert "LDPQ" not in str(enumerate_words(plants.AlphaOffByOne(1.0)))
    assert "AlphaOffByOne: at epsilon 0" in enumerate_words(plants.AlphaOffByOne(1.0))[0]


def test_what_is_not_monotone_is_refused():
    with pytest.raises(ValueError, match="is not one interval of words"):
        exact_law(Parity(1.0), 4.0)
