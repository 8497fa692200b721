import math

import numpy as np
import pytest
from scipy import stats

from lightning_fedq.functional.irwin_hall import (
    half_support,
    irwin_hall_cdf,
    irwin_hall_pdf,
    irwin_hall_slope,
)

# section 11 of the specification: f(0), f(1), f(2), f(3), upper tail at 2, -f'(1)
VECTORS = {
    3: (0.375, 0.25, 0.0625, 0.0, 0.0208333333, 0.25),
    5: (0.38662594168, 0.24642354686, 0.057207444968, 0.0027119675534, 0.021509228, 0.226269936),
    10: (0.39291586868, 0.24434993438, 0.055467763638, 0.0036872700357, 0.0221746302, 0.234335749),
    50: (0.39774362912, 0.2424533714, 0.054265492927, 0.0042960549854, 0.0226407592, 0.240503831),
    100: (0.39834340734, 0.24221238085, 0.054127072622, 0.0043646705691, 0.0226957945, 0.241241047),
    1000: (0.39888243443, 0.24199491853, 0.054004475417, 0.0044251937199, 0.0227447294, 0.241898096),
    10000: (0.398936296, 0.2419731442, 0.0539923164, 0.0044311836, None, None),
}
FAR = {10: 1.4218183876e-9, 50: 8.711151138e-7, 100: 1.1553721693e-6, 1000: 1.4514284346e-6}


@pytest.mark.parametrize("n", VECTORS)
def test_published_vectors(n):
    *density, tail, slope = VECTORS[n]
    # tolerances are half a unit of the last printed digit
    assert irwin_hall_pdf(np.array([0.0, 1.0, 2.0, 3.0]), n) == pytest.approx(
        density, abs=5e-10 if n == 10_000 else 5e-12
    )
    if tail is not None:
        assert 1.0 - irwin_hall_cdf(2.0, n) == pytest.approx(tail, abs=5e-10)
        assert -irwin_hall_slope(1.0, n) == pytest.approx(slope, abs=5e-10)
    if n in FAR:
        assert irwin_hall_pdf(5.0, n) == pytest.approx(FAR[n], rel=1e-7)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 40])
def test_scipy_agrees_where_it_is_accurate(n):
    kappa, law = math.sqrt(n / 12), stats.irwinhall(n)
    x = np.linspace(-0.97, 0.97, 41) * half_support(n)
    np.testing.assert_allclose(irwin_hall_pdf(x, n), kappa * law.pdf(kappa * x + n / 2), rtol=1e-11)
    np.testing.assert_allclose(irwin_hall_cdf(x, n), law.cdf(kappa * x + n / 2), rtol=1e-11, atol=1e-14)


def test_the_two_evaluations_meet():
    # n = 40 by splines against n = 41 by cosines would differ by 6e-5; Edgeworth to 1/n^2 removes that
    x = np.linspace(0.0, 4.0, 9)
    hermite4, hermite6 = x**4 - 6 * x**2 + 3, x**6 - 15 * x**4 + 45 * x**2 - 15
    hermite8 = x**8 - 28 * x**6 + 210 * x**4 - 420 * x**2 + 105
    for n in (40, 41):
        edgeworth = 1 - hermite4 / (20 * n) + hermite6 / (105 * n * n) + hermite8 / (800 * n * n)
        assert irwin_hall_pdf(x, n) == pytest.approx(stats.norm.pdf(x) * edgeworth, abs=3e-7)


@pytest.mark.parametrize("n", [2, 3, 41, 1000])
def test_slope_and_cdf_are_the_derivative_and_the_integral(n):
    x = np.linspace(0.05, 0.9 * min(half_support(n), 6.0), 20)
    step = 1e-5
    slope = (irwin_hall_pdf(x + step, n) - irwin_hall_pdf(x - step, n)) / (2 * step)
    density = (irwin_hall_cdf(x + step, n) - irwin_hall_cdf(x - step, n)) / (2 * step)
    assert irwin_hall_slope(x, n) == pytest.approx(slope, abs=2e-9)
    assert irwin_hall_pdf(x, n) == pytest.approx(density, abs=2e-9)


@pytest.mark.parametrize("n", [1, 5, 60])
def test_nothing_lies_outside_the_support(n):
    ends = np.array([-1.001, 1.001]) * half_support(n)
    assert not irwin_hall_pdf(ends, n).any()
    np.testing.assert_array_equal(irwin_hall_cdf(ends, n), [0.0, 1.0])


def test_bad_numbers_of_uniforms():
    with pytest.raises(ValueError, match="n must be >= 1, got 0"):
        irwin_hall_pdf(0.0, 0)
    with pytest.raises(ValueError, match="n must be >= 2"):
        irwin_hall_slope(0.0, 1)
