import math
from fractions import Fraction
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.functional.noise.grid_noise import (
    FINE_BITS,
    GridNoise,
    analytic_gaussian_multiplier,
    quantile,
    rounded_noise,
    signed_tails,
)
from lightning_fedq.keys.randomness import Stream

LAWS = ["gaussian", "laplace"]
DRAWS = [(partial(rounded_noise, "gaussian"), stats.norm), (partial(rounded_noise, "laplace"), stats.laplace)]
LAST = 2**64 - 1


def chosen(*parts):
    """Words in the order in which they are asked for; as many as are asked for, and no more."""
    left = [np.array(part, np.uint64) for part in parts]

    def words64(count):
        assert count == len(left[0])
        return left.pop(0)

    return words64


MULTIPLIERS = {
    # section 8.1 of the specification of exact errors, and two more digits elsewhere
    0.5: 7.0318266756,
    0.75: 4.8505743501,
    1: 3.73063163482,
    2: 1.9938124456,
    4: 1.0811618495,
    5: 0.891868264952,
    6: 0.7636351799,
    10: 0.4998886197,
}


@pytest.mark.parametrize(("epsilon", "sigma"), MULTIPLIERS.items())
def test_analytic_gaussian_vectors(epsilon, sigma):
    assert analytic_gaussian_multiplier(epsilon, 1e-5) == pytest.approx(sigma, rel=1e-10)


@pytest.mark.parametrize("epsilon, delta", [(0.01, 1e-9), (1, 1e-5), (20, 1e-3)])
def test_the_analytic_gaussian_spends_its_delta_and_no_more(epsilon, delta):
    s = analytic_gaussian_multiplier(epsilon, delta)
    with mpmath.workdps(40):
        spent = mpmath.ncdf(0.5 / mpmath.mpf(s) - epsilon * mpmath.mpf(s))
        spent -= mpmath.exp(epsilon) * mpmath.ncdf(-0.5 / mpmath.mpf(s) - epsilon * mpmath.mpf(s))
    assert float(spent) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("law, bound", [("gaussian", 2.0**-50), ("laplace", 2.0**-51)])
def test_the_quantile_is_as_exact_as_the_slack_assumes(law, bound):
    """Relative error of the quantile and of its product with a scale, at 800 levels, against 40 digits."""
    rng = np.random.default_rng(0)
    levels = np.concatenate([0.5 * rng.random(400), 2.0 ** -rng.uniform(1, 129, 399), [2.0**-129]])
    tails, scale = torch.from_numpy(levels), 1.1e9
    found = quantile(law, tails) * scale
    with mpmath.workdps(40):
        for level, z in zip(levels.tolist(), found.tolist(), strict=True):
            z = mpmath.mpf(z) / mpmath.mpf(scale)
            if law == "gaussian":
                error = (mpmath.ncdf(z) - mpmath.mpf(level)) / (mpmath.npdf(z) * abs(z))
            else:
                error = mpmath.log(2 * mpmath.mpf(level)) / z - 1
            assert abs(error) < bound


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.3, 1.99, 20.0])
@pytest.mark.parametrize("law", LAWS)
def test_the_slack_covers_every_cell(law, scale):
    """Both ends of every cell, at the exact density; for values anywhere between two ends."""
    noise, exact = GridNoise(law, scale), stats.norm if law == "gaussian" else stats.laplace
    reach, relative = {"gaussian": (13.11, 2.0**-50), "laplace": (88.73, 2.0**-51)}[law]
    assert -exact.ppf(2.0**-129) <= reach
    for shift in (0.0, 0.3, 0.5):
        last = math.ceil(reach * scale / noise.step)
        ends = (np.arange(-last, 1) + shift) * noise.step / scale  # the left side; the right is its mirror
        z = ends[(ends >= -reach) & (ends <= 0.0)]
        off = relative * np.abs(z) * exact.pdf(z) + 2.0**-51 * exact.cdf(z)
        cells = np.diff(exact.cdf(z))
        assert ((off[1:] + off[:-1]) / cells).max() < 0.9 * noise.log_ratio
        assert 2 * len(z) * 2.0**-129 + 2 * exact.cdf(-reach) <= noise.total_variation < 2.0**-117


FINE = [0, 1, 2, 2**12, 2**53 - 1]  # words from an end that have a second word
COARSE = [2**53, 2**53 + 1, 2**54 + 1, 2**63 - 1]


@pytest.mark.parametrize("second", [0, 1, 2**63, LAST])
def test_tails_of_chosen_words(second):
    """Both ends of each part, on both sides, against fractions: two roundings to 53 bits, together 2^-52."""
    first = FINE + COARSE + [LAST - k for k in FINE + COARSE]
    tails, right = signed_tails(len(first), chosen(first, [second] * 2 * len(FINE)))
    assert right.tolist() == [False] * 9 + [True] * 9
    assert torch.equal(tails[:9], tails[9:])
    half = Fraction(1, 2)
    exact = [(k + (second + half) / 2**64) / 2**64 for k in FINE] + [(k + half) / 2**64 for k in COARSE]
    for tail, wanted in zip(tails.tolist(), exact, strict=False):
        assert abs(Fraction(tail) / wanted - 1) < Fraction(1, 2**52)


def test_second_words_come_after_all_first_ones():
    tails, _ = signed_tails(3, chosen([0, 2**60, LAST], [7, 9]))
    assert tails.tolist() == [7.5 * 2.0**-128, 2.0**-4, 9.5 * 2.0**-128]


@pytest.mark.parametrize("draw", [draw for draw, _ in DRAWS])
def test_larger_words_give_larger_noise(draw):
    """The first word decides, then the second: on the left a larger one is nearer to the centre."""
    first = np.sort(np.append(Stream(b"o" * 32).words64(10_000), np.array([0, LAST], np.uint64)))
    few = np.minimum(first, ~first) < 2**53
    seconds = Stream(b"p" * 32).words64(int(few.sum()))
    assert len(seconds) > 2
    noise = draw(1000.0, len(first), chosen(first, seconds))
    assert (noise.diff() >= 0).all()
    for word in (0, 1, 2**53 - 1):
        second = [0, 1, 2**32, 2**62, 2**63, LAST]
        assert (draw(1e9, 6, chosen([word] * 6, second)).diff() >= 0).all()
        assert (draw(1e9, 6, chosen([LAST - word] * 6, second)).diff() <= 0).all()


@pytest.mark.parametrize("draw, law", DRAWS)
def test_noise_is_symmetric_to_the_last_word(draw, law):
    first = np.concatenate([np.arange(100), Stream(b"s" * 32).words64(1000) >> 1]).astype(np.uint64)
    second = Stream(b"t" * 32).words64(int((first < 2**53).sum()))
    left, right = (draw(1e9, 1100, chosen(words, second)) for words in (first, ~first))
    assert torch.equal(left, -right)
    assert left.unique().numel() == 1100


@pytest.mark.parametrize("draw, law", DRAWS)
def test_far_tails_have_the_right_law(draw, law):
    """Kolmogorov-Smirnov on 20,000 draws beyond the tail 2^-60: 16 first words, where second ones decide.

    A p-value below 1e-6 has that chance; 16 values instead of a continuum would have 1e-17.
    """
    first = Stream(b"f" * 32).words64(20_000) >> np.uint64(60)
    noise = draw(1e9, 20_000, chosen(first, Stream(b"g" * 32).words64(20_000)))
    assert stats.kstest(law.cdf(noise.numpy() / 1e9) * 2.0**60, "uniform").pvalue > 1e-6


@pytest.mark.parametrize("draw, law", DRAWS)
def test_rounded_noise_has_the_right_law(draw, law):
    """Chi-square of 100,000 draws at scale 3 over -8..8 and tails; exceeds 60 with chance 2e-6."""
    sample = draw(3.0, 100_000, Stream(b"n" * 32).words64).clamp(-9, 9).numpy()
    edges = law.cdf(np.arange(-8.5, 9.0) / 3.0)
    expected = np.diff(np.concatenate([[0.0], edges, [1.0]])) * len(sample)
    counts = np.bincount(sample + 9, minlength=19)
    assert ((counts - expected) ** 2 / expected).sum() < 60


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("scale", [1e-6, 0.02, 1.0, 2.0, 3.999, 57.0, 1e6])
def test_no_symbol_is_wider_than_declared(law, scale):
    """Tails of 2^-65 still fit, on either side; the smallest ones are cut where they don't."""
    noise = GridNoise(law, scale)
    bound, top = torch.tensor([-(2**FINE_BITS), 2**FINE_BITS]), 2 ** (noise.bits - 1)
    symbols = noise.add(bound, chosen([0, LAST], [2**63, 2**63]))
    sums = bound + rounded_noise(law, scale * 2.0**FINE_BITS, 2, chosen([0, LAST], [2**63, 2**63]))
    assert torch.equal(symbols, (sums + 2 ** (noise.shift - 1)) >> noise.shift)
    assert symbols.abs().max() < top
    assert symbols.abs().max() > 2 ** (noise.bits - 3)
    assert 8 <= scale / noise.step < 16
    furthest = noise.add(bound, chosen([0, LAST], [0, 0]))
    assert -top <= furthest[0] <= symbols[0] and symbols[1] <= furthest[1] < top


def test_what_is_too_far_becomes_the_last_symbol():
    """Laplace noise of 88.7 scales, where the symbol holds 63."""
    noise = GridNoise("laplace", 1.0)
    assert noise.add(torch.zeros(2).long(), chosen([0, LAST], [0, 0])).tolist() == [-512, 511]


def test_a_unit_of_noise_takes_eight_bits():
    assert GridNoise("gaussian", 1.0).bits == 8
    assert GridNoise("laplace", 1.0).bits == 10


@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e7, math.nan, math.inf])
def test_senseless_noise_is_refused(scale):
    with pytest.raises(ValueError, match="between 1e-6 and 1e6 clipping bounds"):
        GridNoise("gaussian", scale)


@pytest.mark.parametrize("law", LAWS)
def test_moments_of_what_is_released(law):
    """200,000 draws: mean within 5 standard errors; variance within 3% (over 5 for both laws)."""
    noise = GridNoise(law, 1.7)
    value = torch.full((200_000,), 345_678_901)
    released = noise.add(value, Stream(b"m" * 32).words64).double() * noise.step
    error = 5 * (noise.variance / 2e5) ** 0.5
    assert released.mean().item() == pytest.approx(345_678_901 / 2**FINE_BITS, abs=error)
    assert released.var().item() == pytest.approx(noise.variance, rel=0.03)
