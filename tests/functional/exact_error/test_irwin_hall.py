import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from lightning_fedq.functional.exact_error.irwin_hall import (
    PDF_ERROR,
    SLOPE_ERROR,
    half_support,
    irwin_hall_pdf,
    irwin_hall_slope,
)
from reproductions.exact.formulas import irwin_hall_cdf

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
    digit = 5e-10 if n == 10_000 else 5e-12  # half a unit of the last that is printed
    assert irwin_hall_pdf(np.array([0.0, 1.0, 2.0, 3.0]), n) == pytest.approx(density, abs=digit)
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


@pytest.mark.parametrize("n", [2, 3, 40, 41])
def test_not_a_number_stays_one_and_infinity_is_outside(n):
    x = np.array([math.nan, math.inf, -math.inf])
    for function in (irwin_hall_pdf, irwin_hall_slope):
        np.testing.assert_array_equal(function(x, n), [math.nan, 0.0, 0.0])


@pytest.mark.parametrize("n", [2, 3, 10, 40, 41, 1000])
def test_the_density_is_even_and_the_slope_odd(n):
    x = np.linspace(0.01, 0.99, 50).reshape(5, 10) * min(half_support(n), 10.0)
    np.testing.assert_array_equal(irwin_hall_pdf(-x, n), irwin_hall_pdf(x, n))
    np.testing.assert_array_equal(irwin_hall_slope(-x, n), -irwin_hall_slope(x, n))
    peak = irwin_hall_slope(0.0, n)
    assert peak == pytest.approx(-1 / 6 if n == 2 else 0.0, abs=1e-15)


def _alternating(x, n):
    """f and f' by the textbook's sum, with the n digits more that it cancels."""
    with mpmath.workdps(n + 70):
        kappa = mpmath.sqrt(mpmath.mpf(n) / 12)
        u = mpmath.mpf(n) / 2 - kappa * abs(mpmath.mpf(x))
        density = slope = mpmath.mpf(0)
        for k in range(int(mpmath.floor(u)) + 1):
            power = (-1) ** k * math.comb(n, k) * (u - k) ** (n - 2)
            density += power * (u - k)
            slope += power * (n - 1)
        scale = kappa / mpmath.factorial(n - 1)
        return scale * density, -mpmath.sign(x) * kappa * scale * slope


def _inverted(x, n):
    """f and f' by Fourier inversion through the saddle point, 40 digits: a period of 26 stds."""
    with mpmath.workdps(60):
        kappa = mpmath.sqrt(mpmath.mpf(n) / 12)
        s, theta, mean, variance = kappa * mpmath.mpf(x), mpmath.mpf(0), mpmath.mpf(0), mpmath.mpf(1) / 12
        for _ in range(12):
            theta += (s / n - mean) / variance
            mean = mpmath.coth(theta / 2) / 2 - 1 / theta
            variance = 1 / theta**2 - 1 / (4 * mpmath.sinh(theta / 2) ** 2)
        period, peak = 26 * mpmath.sqrt(n * variance), mpmath.sinh(theta / 2) / (theta / 2)
        density, slope, k, term = mpmath.mpf(1), -theta, 0, mpmath.mpf(1)
        while abs(term) > mpmath.mpf(10) ** -45:
            k += 1
            z = mpmath.mpc(theta, 2 * mpmath.pi * k / period)
            term = (mpmath.sinh(z / 2) / (z / 2) / peak) ** n * mpmath.expj(-z.imag * s)
            density += 2 * term.real
            slope -= 2 * (term * z).real
        scale = peak**n * mpmath.exp(-theta * s) * kappa / period
        return scale * density, scale * kappa * slope


def _errors(points, n, reference):
    """Largest |f~ - f| / f and |f'~ - f'| / (|f'| + f)."""
    worst = [0.0, 0.0]
    computed = zip(irwin_hall_pdf(points, n).tolist(), irwin_hall_slope(points, n).tolist(), strict=True)
    for x, (density, slope) in zip(points.tolist(), computed, strict=True):
        f, df = reference(x, n)
        worst[0] = max(worst[0], float(abs(density - f) / f))
        worst[1] = max(worst[1], float(abs(slope - df) / (abs(df) + f)))
    print(f"n = {n}: density 2^{math.log2(worst[0]):.2f}, slope 2^{math.log2(worst[1]):.2f}")
    return worst


def _points(n, count):
    """Half uniform, half crowding at the end; |x| <= 10, and the density above 1e-290."""
    rng, end = np.random.default_rng(n), min(half_support(n), 10.0)
    points = end * np.concatenate([rng.random(count // 2), 1.0 - 10.0 ** -rng.uniform(1, 10, count // 2)])
    points = np.append(points, 10.0) if end == 10.0 else points
    return points[irwin_hall_pdf(points, n) > 1e-290]


@pytest.mark.parametrize("n", [2, 3, 5, 10, 25, 40, 41, 48, 50, 100, 500, 1000, 5000, 10_000])
def test_density_and_slope_keep_their_relative_accuracy(n):
    density, slope = _errors(_points(n, 24), n, _alternating if n <= 100 else _inverted)
    assert density <= PDF_ERROR
    assert slope <= SLOPE_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("n", [*range(2, 51), 64, 100, 200, 500, 1000, 2000, 5000, 10_000, 1_000_000])
def test_density_and_slope_keep_their_relative_accuracy_at_many_points(n):
    density, slope = _errors(_points(n, 400), n, _alternating if n <= 200 else _inverted)
    assert density <= PDF_ERROR
    assert slope <= SLOPE_ERROR
