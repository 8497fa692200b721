import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from lightning_fedq.functional.exact_error.decompose import LEAST_SCALE_BITS, core_probability, decomposition
from lightning_fedq.functional.exact_error.dither import dither_quantize_row
from lightning_fedq.functional.exact_error.irwin_hall import half_support, irwin_hall_pdf, irwin_hall_slope
from lightning_fedq.functional.exact_error.tables import InverseTable
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from reproductions.exact.formulas import draw_mixture, irwin_hall_cdf

# table 5.9 of the specification: lambda, L f(0), E[-log2 A], E[A]
TABLE = {
    1: (0.0, 1.0, 0.2661593, 0.92131773),
    2: (0.0, 2.0, 2.4875071, 0.39088201),
    3: (0.6999736989, 2.25, 1.0061895, 0.78236684),
    5: (0.8941761459, 2.99479167, 0.50247826, 0.91154565),
    10: (0.9476081130, 4.30417769, 0.35089823, 0.95221812),
    50: (0.9899120526, 9.74268940, 0.13576525, 0.99011613),
    1000: (0.9994997843, 43.69538143, 0.024837801, 0.99950036),
    10000: (0.9999499978, 138.19558681, 0.0072918217, 0.99995),
}


def words(purpose):
    return PublicRandomness(SeededKeys(2), 0).public(purpose).words64


def irwin_hall(n, count, seed):
    if n > 200:
        # the sum of n uniforms by the inverse distribution function, to 1e-9
        grid = np.linspace(-8, 8, 400_001)
        return np.interp(np.random.default_rng(seed).random(count), irwin_hall_cdf(grid, n), grid)
    rng = np.random.default_rng(seed)
    return sum(rng.random(count) - 0.5 for _ in range(n)) / math.sqrt(n / 12)


@pytest.mark.parametrize("n", TABLE)
def test_core_probability_and_rounds(n):
    plan = decomposition(n)
    assert plan.core == pytest.approx(TABLE[n][0], abs=2e-10)
    assert plan.rounds == pytest.approx(TABLE[n][1], rel=1e-8)


def test_core_probability_of_three_by_hand():
    # the minimiser solves x^3 - 3 x^2 + 3 = 0
    x = 2.532088886237956
    by_hand = 8 * x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi) / (3 - x)
    assert core_probability(3) == pytest.approx(by_hand, abs=1e-11)


def test_large_n_follows_the_expansion():
    for n in (500, 10_000):
        assert core_probability(n) == pytest.approx(1 - 1 / (2 * n) - 0.216 / n**2, abs=0.02 / n**2)


@pytest.mark.parametrize("target", ["gaussian", "laplace"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 10, 100])
def test_the_mixture_has_exactly_the_target_law(n, target):
    # false alarm 1e-4 per case
    scale, shift = draw_mixture(decomposition(n, target), 200_000, words(f"{n}{target}"))
    law = stats.norm if target == "gaussian" else stats.laplace(scale=math.sqrt(0.5))
    assert stats.kstest(scale * irwin_hall(n, 200_000, n) + shift, law.cdf).pvalue > 1e-4


def test_the_test_can_fail_irwin_hall_alone_is_not_gaussian():
    assert stats.kstest(irwin_hall(3, 200_000, 1), "norm").pvalue < 1e-12


@pytest.mark.parametrize("n", [1, 2, 3, 5, 10, 50])
def test_mean_scale_and_mean_log_scale(n):
    # 400,000 draws: 4 standard errors, false alarm 6e-5 per figure
    scale, _ = draw_mixture(decomposition(n), 400_000, words(f"mean {n}"))
    logs = -np.log2(scale)
    assert logs.mean() == pytest.approx(TABLE[n][2], abs=4 * logs.std() / 632)
    assert scale.mean() == pytest.approx(TABLE[n][3], abs=4 * scale.std() / 632 + 1e-9)


# section 11 of the specification: E log2(2 r / L) over special coordinates, E log2(1/2 - c) over cuts
LOGARITHMS = {
    3: (-1.1858263, -1.7342759),
    10: (-2.1922703, -1.3635156),
    100: (-3.8743959, -1.1073236),
    1000: (-5.5373684, -1.0332924),
}


@pytest.mark.parametrize(
    "n", [pytest.param(n, marks=[pytest.mark.slow] * (n in (10, 100))) for n in LOGARITHMS]
)
def test_mean_logarithms_of_radii_and_cuts(n):
    # midpoint rules: over the density of special radii, and over the quantile function of the cuts
    plan, u = decomposition(n), (np.arange(2_000_000) + 0.5) / 2_000_000
    r = 10.0 * u
    weights = 2.0 * r**2 * stats.norm.pdf(r) * (1.0 - plan.coin(r))
    radius = (weights * np.log2(r / half_support(n))).sum() / weights.sum()
    assert weights.mean() * 10.0 == pytest.approx(1.0 - plan.core, abs=1e-11)
    cut = np.log2(0.5 - plan.cut.sample(u) / (2.0 * half_support(n))).mean()
    assert (radius, cut) == pytest.approx(LOGARITHMS[n], abs=1e-5)


def test_an_aggregate_decodes_as_published():
    # section 11: n = 3, sigma = 1, A = 0.5, B = 0.3; w = 2 sqrt(9)
    x, dither, step = np.array([1.0, -2.0, 4.0]), np.array([0.1, -0.4, 0.25]), np.full(3, 0.5 * 6.0)
    symbols = np.empty(3, np.int64)
    dither_quantize_row(x, 1.0, dither, step, symbols)
    assert symbols.tolist() == [0, -1, 2]
    total = (symbols.sum() - dither.sum()) * step[0] + 3 * 0.3
    assert total / 3 == pytest.approx(1.35, abs=1e-12)


def test_the_special_part_equals_its_closed_law():
    # For special coordinates, E over (A, B) of F((x - B) / A) is the law psi; false alarm 1e-4
    n, x = 10, np.array([0.3, 1.0, 2.0])
    plan = decomposition(n)
    scale, shift = draw_mixture(plan, 400_000, words("special"))
    chosen = scale != 1.0
    terms = irwin_hall_cdf((x[:, None] - shift[chosen]) / scale[chosen], n)
    wanted = (stats.norm.cdf(x) - plan.core * irwin_hall_cdf(x, n)) / (1 - plan.core)
    sigmas = (terms.mean(1) - wanted) / (terms.std(1) / math.sqrt(chosen.sum()))
    assert np.abs(sigmas).max() < 4.2
    # and how many there are: binomial, 4.2 standard deviations
    assert chosen.mean() == pytest.approx(1 - plan.core, abs=4.2 * math.sqrt((1 - plan.core) / 4e5))


@pytest.mark.parametrize("target", ["gaussian", "laplace"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 10, 20, 40, 41, 100, 1000, 10_000])
def test_the_error_of_the_tables_is_small(n, target):
    plan = decomposition(n, target)
    assert plan.coin.error < 2.0**-38.5
    assert plan.uniform_error <= plan.rounds * 2.0**-48.5


@pytest.mark.parametrize("n", [2, 3, 10, 40, 100])
def test_the_error_of_the_cuts_is_bounded(n):
    """The tabled distribution function at drawn cuts against its closed form in exact arithmetic."""
    plan, u = decomposition(n), (np.arange(40) + 0.37) / 40.0
    with mpmath.workdps(60 + n):
        end, kappa = mpmath.sqrt(3 * n), mpmath.sqrt(mpmath.mpf(n) / 12)

        def alternating(y, power):
            terms = (
                (-1) ** k * mpmath.binomial(n, k) * (y + mpmath.mpf(n) / 2 - k) ** power
                for k in range(math.floor(y + mpmath.mpf(n) / 2) + 1)
            )
            return mpmath.fsum(terms) / mpmath.factorial(power)

        peak = kappa * alternating(mpmath.mpf(0), n - 1)
        worst = 0.0
        for wanted, y in zip(u, plan.cut.sample(u), strict=True):
            density, mass = kappa * alternating(kappa * y, n - 1), alternating(kappa * y, n)
            area = peak - (1 - y / end) * density - (mass - 0.5) / end
            worst = max(worst, abs(float(2 * end * area / (2 * end * peak - 1) - mpmath.mpf(wanted))))
    assert worst <= plan.cut.error


@pytest.mark.parametrize("n", [3, 10, 100])
def test_the_error_of_the_coin_is_bounded(n):
    plan, r = decomposition(n), np.linspace(0.003, 9.9, 20_011)
    exact = plan.core * irwin_hall_slope(r, n) / (-r * stats.norm.pdf(r))
    assert np.abs(plan.coin(r) - exact).max() <= plan.coin.error + 2.0**-45
    assert exact.max() <= 1.0


def test_pieces_that_are_off_by_little_add_up_to_nearly_a_uniform():
    """`uniform_error`, with cuts that are drawn wrong on purpose: Kolmogorov distance over m rounds."""
    n, count = 10, 2_000_000
    plan, rng = decomposition(n), np.random.default_rng(5)
    wrong = 0.05  # a distribution function that is off by so much
    cut = InverseTable(plan.cut.width, plan.cut.cdf, plan.cut.pdf, 0.0)
    total, scale = np.zeros(count), np.ones(count)
    alive = np.arange(count)
    while len(alive := alive[rng.random(len(alive)) < 1.0 - 1.0 / plan.rounds]):
        u = np.clip(rng.random(len(alive)) - wrong, 1e-12, 1.0)
        place = np.minimum(cut.sample(u) / (2.0 * half_support(n)), 0.5)
        sign = rng.choice([-1.0, 1.0], len(alive))
        total[alive] += scale[alive] * sign * (place + 0.5) / 2.0
        scale[alive] *= 0.5 - place
    values = total + scale * irwin_hall(n, count, 6) / (2.0 * half_support(n))
    found = stats.kstest(values + 0.5, "uniform").statistic
    # sampling: 2.3e-3 with a false alarm of 1e-9; the fault itself has to show
    assert 4e-3 < found < plan.rounds * wrong + 2.3e-3


def test_the_remainder_is_a_unimodal_density():
    for n in (3, 4, 10, 1000):
        x = np.linspace(1e-3, 0.999 * min(half_support(n), 8.0), 5000)
        slope = -x * stats.norm.pdf(x) - core_probability(n) * irwin_hall_slope(x, n)
        assert slope.max() <= 1e-13


def test_the_scale_is_capped_and_the_shift_small():
    scale, _ = draw_mixture(decomposition(1000), 3_000_000, words("cap"))
    assert scale.min() == 2.0**-LEAST_SCALE_BITS
    assert decomposition(1000).cap_shift() < 2.0**-44
    higher, _ = draw_mixture(decomposition(1000), 100_000, words("cap"), least_bits=10)
    assert higher.min() == 2.0**-10


def decompose_literally(n, count, rng):
    """The paper's algorithms, one coordinate at a time, with L f(L x) where it prints f(x / L) / L."""
    core, length = core_probability(n), 2.0 * half_support(n)

    def remainder(x):
        return stats.norm.pdf(x) - core * irwin_hall_pdf(x, n)

    def root(function, low, high):
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if function(middle) else (low, middle)
        return (low + high) / 2

    pairs = []
    for x, height in zip(rng.normal(size=count), rng.random(count), strict=True):
        v = height * stats.norm.pdf(x)
        if v > remainder(x):
            pairs.append((1.0, 0.0))
            continue
        r = root(lambda t, v=v: v <= remainder(t), 0.0, 12.0)
        a, b, peak = 1.0, 0.0, irwin_hall_pdf(0.0, n)
        while True:
            u, level = rng.random() - 0.5, rng.random() * peak
            if level <= irwin_hall_pdf(length * u, n):
                break
            c = root(lambda t, level=level: irwin_hall_pdf(length * t, n) > level, 0.0, 0.5)
            b += a * math.copysign((c + 0.5) / 2, u)
            a *= 0.5 - c
        pairs.append((2 * a * r / length, 2 * b * r))
    return np.array(pairs).T


def test_the_tables_equal_the_literal_algorithm():
    # two samples, false alarm 1e-4 per figure
    literal = decompose_literally(3, 500, np.random.default_rng(4))
    batched = np.array(draw_mixture(decomposition(3), 200_000, words("literal")))
    assert stats.ks_2samp(literal[0], batched[0]).pvalue > 1e-4
    assert stats.ks_2samp(literal[1], batched[1]).pvalue > 1e-4


def test_bad_arguments():
    with pytest.raises(ValueError, match="target must be 'gaussian' or 'laplace', got 'cauchy'"):
        decomposition(3, "cauchy")
