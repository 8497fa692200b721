import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.functional.grid_noise import (
    FINE_BITS,
    GridNoise,
    analytic_gaussian_multiplier,
    rounded_gaussian,
    rounded_laplace,
)
from lightning_fedq.randomness import Stream

ENDS = np.array([0, 2**64 - 1], np.uint64)
LAWS = ["gaussian", "laplace"]


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


def test_the_quantile_is_as_exact_as_the_slack_assumes():
    """Relative error of the normal quantile, against 40 digits: below the 2^-50 behind the bound."""
    rng = np.random.default_rng(0)
    levels = np.concatenate([0.5 * rng.random(400), 2.0**-65 + 2.0 ** -rng.uniform(1, 65, 400)])
    found = torch.special.ndtri(torch.from_numpy(levels)).tolist()
    with mpmath.workdps(40):
        for level, z in zip(levels.tolist(), found, strict=True):
            error = (mpmath.ncdf(mpmath.mpf(z)) - mpmath.mpf(level)) / (mpmath.npdf(z) * abs(z))
            assert abs(error) < 2.0**-50


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.3, 1.99, 20.0])
@pytest.mark.parametrize("law", LAWS)
def test_the_slack_covers_every_cell(law, scale):
    """Both ends of every cell, at the exact density; for values anywhere between two ends."""
    noise, exact = GridNoise(law, scale), stats.norm if law == "gaussian" else stats.laplace
    reach = -exact.ppf(2.0**-65)
    assert reach <= {"gaussian": 9.16, "laplace": 44.4}[law]
    for shift in (0.0, 0.3, 0.5):
        last = math.ceil(reach * scale / noise.step)
        ends = (np.arange(-last, 1) + shift) * noise.step / scale  # the left side; the right is its mirror
        z = ends[(ends >= -reach) & (ends <= 0.0)]
        off = 2.0**-50 * np.abs(z) * exact.pdf(z) + 2.0**-52 * exact.cdf(z)
        cells = np.diff(exact.cdf(z))
        assert ((off[1:] + off[:-1]) / cells).max() < 0.85 * noise.log_ratio
        assert 2 * len(z) * 2.0**-65 + 2 * exact.cdf(-reach) <= noise.total_variation < 2.0**-54


def test_larger_words_give_larger_noise():
    words = np.sort(np.concatenate([ENDS, Stream(b"o" * 32).words64(10_000)]))
    for draw in (rounded_gaussian, rounded_laplace):
        noise = draw(words, 1000.0)
        assert (noise.diff() >= 0).all() and int(noise[0]) == -int(noise[-1])


@pytest.mark.parametrize("draw, law", [(rounded_gaussian, stats.norm), (rounded_laplace, stats.laplace)])
def test_rounded_noise_has_the_right_law(draw, law):
    """Chi-square of 100,000 draws at scale 3 over -8..8 and tails; exceeds 60 with chance 2e-6."""
    sample = draw(Stream(b"n" * 32).words64(100_000), 3.0).clamp(-9, 9).numpy()
    edges = law.cdf(np.arange(-8.5, 9.0) / 3.0)
    expected = np.diff(np.concatenate([[0.0], edges, [1.0]])) * len(sample)
    counts = np.bincount(sample + 9, minlength=19)
    assert ((counts - expected) ** 2 / expected).sum() < 60


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("scale", [1e-6, 0.02, 1.0, 2.0, 3.999, 57.0, 1e6])
def test_no_symbol_is_wider_than_declared(law, scale):
    noise = GridNoise(law, scale)
    bound = torch.tensor([-(2**FINE_BITS), 2**FINE_BITS])
    symbols = noise.add(bound, ENDS)
    assert symbols.abs().max() < 2 ** (noise.bits - 1)
    assert symbols.abs().max() > 2 ** (noise.bits - 3)
    assert 8 <= scale / noise.step < 16


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
    released = noise.add(value, Stream(b"m" * 32).words64(200_000)).double() * noise.step
    assert released.mean().item() == pytest.approx(
        345_678_901 / 2**FINE_BITS, abs=5 * (noise.variance / 2e5) ** 0.5
    )
    assert released.var().item() == pytest.approx(noise.variance, rel=0.03)
