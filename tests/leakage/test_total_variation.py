"""Total variation between Gaussians: the specification's vectors, and a sample as an outside reference."""

import pytest
import torch

from lightning_fedq.leakage.total_variation import isotropic_tv
from tests.leakage.printed import diagonal_tv, paper_ratio, paper_tv_bounds


@pytest.mark.parametrize(
    "dim, ratio, expected",
    [
        (1, 1.0, 0.166064075),
        (1, 0.01, 0.002407684),
        (10, 0.1, 0.083461164),
        (100, 0.05, 0.136726921),
        (1000, 0.01, 0.088565613),
        (7850, 0.005, 0.124149015),
        (7850, 0.05, 0.873559399),
    ],
)
def test_vectors(dim, ratio, expected):
    assert isotropic_tv(dim, ratio) == pytest.approx(expected, abs=6e-10)


@pytest.mark.parametrize("dim", [1, 7, 1000])
def test_it_rises_with_the_noise_and_the_papers_bounds_hold(dim):
    ratios = [10.0**k for k in range(-5, 4)]
    values = [isotropic_tv(dim, ratio) for ratio in ratios]
    assert values == sorted(values)
    assert isotropic_tv(dim, 0.0) == 0.0
    for ratio, value in zip(ratios, values, strict=True):
        low, high = paper_tv_bounds(dim, ratio)
        assert 16.0 * low <= value <= high  # the factor 1/100 is at least 16 times too small


def test_against_a_sample():
    """5 standard errors: a fresh seed alarms with probability 1e-6."""
    normals = torch.randn(20_000, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, error = diagonal_tv(torch.full((30,), 0.2), normals)
    assert abs(value - isotropic_tv(30, 0.2)) <= 5 * error
    assert error < 0.005


def test_lemma_6_8_asks_for_28_times_the_noise_that_it_needs():
    assert paper_ratio(7850, 0.005) == pytest.approx(0.0056433265, rel=1e-8)
    assert paper_ratio(100, 0.001) == pytest.approx(0.01)
    enough = paper_ratio(7850, 0.005) / 28.2
    assert isotropic_tv(7850, enough) == pytest.approx(0.005, rel=2e-3)


def test_refusals():
    with pytest.raises(ValueError, match="dim must be >= 1, got 0"):
        isotropic_tv(0, 1.0)
    with pytest.raises(ValueError, match="ratio must be >= 0 and finite"):
        isotropic_tv(3, -1.0)
    with pytest.raises(ValueError, match=r"Lemma 6\.8 says nothing for a gap outside"):
        paper_ratio(3, 0.5)
