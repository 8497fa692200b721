"""The constants of `float_error`: measured in exact arithmetic, or computed from the exact law."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import special

from lightning_fedq.functional.exact_error.decompose import decomposition
from lightning_fedq.functional.exact_error.depths import LEAST_DEPTH, complementary_depths, draw_depths
from lightning_fedq.functional.exact_error.dither import dither_quantize_row
from lightning_fedq.functional.exact_error.float_error import Inputs, aggregate_law_error, layered_law_error
from lightning_fedq.functional.exact_error.layered import layer_row
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys


def words(count, purpose):
    return PublicRandomness(SeededKeys(4), 0).public(purpose).words64(count)


def extreme_words():
    """Uniform words, with first and second ones of every magnitude at both ends, and angles near 0 and 1."""
    drawn = words(4 * 3000, "extreme").reshape(-1, 4)
    shift = np.arange(3000, dtype=np.uint64) % np.uint64(64)
    drawn[:, 1] >>= shift
    drawn[1000:, 2] >>= shift[::-1][:2000]
    drawn[::2, 1] = ~drawn[::2, 1]
    drawn[::3, 2] = ~drawn[::3, 2]
    drawn[::5, 3] >>= np.uint64(40)
    drawn[::7, 3] = ~(drawn[::7, 3] >> np.uint64(45))
    return drawn


def exact_depth(row):
    w0, w1, w2, w3 = (int(word) for word in row)
    first = -mpmath.log((mpmath.mpf(w1) * 2**11 + (w0 & 2047) + 0.5) / mpmath.mpf(2) ** 75)
    second = -mpmath.log((mpmath.mpf(w2) * 2**10 + ((w3 & 2047) >> 1) + 0.5) / mpmath.mpf(2) ** 74)
    angle = mpmath.pi / 2 * ((w3 >> 11) + mpmath.mpf(0.5)) / mpmath.mpf(2) ** 53
    return first + mpmath.cos(angle) ** 2 * second


def test_depths_in_float64_are_as_accurate_as_stated():
    """Relatively, below 2^-48.9 = 2.1 2^-50."""
    rows = extreme_words()
    depths = np.empty(len(rows))
    draw_depths(rows.ravel(), True, depths)
    with mpmath.workdps(60):
        for row, depth in zip(rows, depths, strict=True):
            exact = max(exact_depth(row), mpmath.mpf(LEAST_DEPTH))
            assert abs(mpmath.mpf(depth) - exact) <= 2.0**-48.9 * exact


def test_complementary_depths_are_as_accurate_as_stated():
    """-ln(1 - e^-l), relatively, from the least depth to the largest, and next to multiples of ln 2."""
    rng = np.random.default_rng(0)
    multiples = math.log(2.0) * np.repeat(np.arange(1, 150), 3) * (1.0 + np.tile([-1e-15, 0.0, 1e-15], 149))
    depths = np.concatenate([[LEAST_DEPTH, 104.0], np.exp2(rng.uniform(-60, 6.7, 1500)), multiples])
    found = np.empty(len(depths))
    complementary_depths(depths, found)
    with mpmath.workdps(60):
        for depth, value in zip(depths, found, strict=True):
            exact = -mpmath.log(-mpmath.expm1(-mpmath.mpf(depth)))
            assert abs(mpmath.mpf(value) - exact) <= 2.0**-49.5 * exact


@pytest.mark.parametrize("bits", [4, 6, 7])
def test_tails_of_few_bits_are_as_close_as_stated(bits):
    """P(l' > x) where both tails and the angle have few bits: exact enumeration against the exact law."""
    uniforms = (np.arange(2**bits) + 0.5) / 2**bits
    tails, squares = -np.log(uniforms), np.cos(np.pi / 2 * uniforms) ** 2
    depths = tails[:, None, None] + squares[:, None] * tails
    for x in np.linspace(0.05, 6.0, 60):
        exact = special.gammaincc(1.5, x)
        # half a cell of each tail, at most; the angle moves the probability monotonically by x e^-x in all
        bound = 2.0 ** -(bits + 1) * (1.0 + 1.0 + x * math.exp(-x))
        assert abs((depths > x).mean() - exact) <= bound


def layers(kind):
    """Half-widths b and b' of layers and the weights of the exact law of their depth, finely cut."""
    edges = np.concatenate([np.geomspace(2.0**-50, 0.1, 60_000), np.linspace(0.1, 60.0, 240_001)[1:]])
    middle = 0.5 * (edges[1:] + edges[:-1])
    b = np.sqrt(2.0 * middle)
    other = np.sqrt(-2.0 * np.log(-np.expm1(-middle)))
    return middle, b, (b if kind == "direct" else other)


@pytest.mark.parametrize("grid", [2.0**-6, 2.0**-5])
@pytest.mark.parametrize("kind", ["direct", "shifted"])
def test_what_the_depths_tails_do_to_a_cell(kind, grid):
    """Sum by parts: the change of a cell is the integral of |dq| times the distance of the tails."""
    depth, b, other = layers(kind)
    upper = special.gammaincc(1.5, depth)
    below = np.minimum(2.0**-46.9 * depth, 2.0**-49) if kind == "shifted" else np.inf
    error = np.minimum(np.minimum(2.0**-43.9 * upper, 2.0**-49), below)
    for a in np.linspace(-grid / 2, 7.1, 72):
        width = b + other
        right = np.clip(b, 0.0, a + grid) - np.clip(b, 0.0, max(a, 0.0))
        left = np.clip(other, 0.0, a + grid) - np.clip(other, 0.0, max(a, 0.0))
        across = np.minimum(other, -a) + np.minimum(b, -a) if a < 0.0 else 0.0
        share = (0.5 * (right + left) + 0.5 * across) / width
        cell = special.ndtr(a + grid) - special.ndtr(a)
        assert (np.abs(np.diff(share)) * error[1:]).sum() <= 2.0**-41 * cell


def test_layers_that_reach_a_cell_are_not_wide():
    # E[w | N = a], direct: S(a) / f(a); shifted: P(b > a) over the density, both sides
    for kind, most in (("direct", 14.5), ("shifted", 9.0)):
        depth, b, other = layers(kind)
        mass = -np.diff(special.gammaincc(1.5, depth))
        b, other = b[1:], other[1:]
        for a in np.linspace(0.0, 7.1, 40):
            reach = 0.5 * ((b > a).astype(float) + (other > a))
            density = (mass * reach / (b + other)).sum()
            assert density == pytest.approx(math.exp(-a * a / 2) / math.sqrt(2 * math.pi), rel=0.01)
            assert (mass * reach).sum() / density < most


@pytest.mark.parametrize("shifted", [False, True])
def test_a_message_is_displaced_by_as_little_as_stated(shifted):
    """Float64 against fractions: a floor is late by a rounding at most, and a decoded value near."""
    count = 3000
    dither, step, offset = (np.empty(count) for _ in range(3))
    layer_row(extreme_words().ravel(), 0.37, True, shifted, dither, step, offset)
    rng = np.random.default_rng(8)
    values = rng.normal(size=count) * 10.0 ** rng.uniform(-6, 6, count)
    values[::3] = (rng.integers(-40, 40, values[::3].size) - dither[::3] + 0.5) * step[::3]  # near an edge
    symbols = np.empty(count, np.int64)
    dither_quantize_row(values, 1.0, dither, step, symbols)
    decoded = (symbols - dither) * step + offset
    for x, u, w, mid, symbol, found in zip(values, dither, step, offset, symbols, decoded, strict=True):
        x, u, w, mid = Fraction(x), Fraction(u), Fraction(w), Fraction(mid)
        place = x / w + u + Fraction(1, 2) - int(symbol)
        late = Fraction(2) ** -53 * (3 * abs(x / w) + Fraction(8, 5))
        assert -late <= place < 1 + late
        exact = (int(symbol) - u) * w + mid
        assert abs(Fraction(found) - exact) <= Fraction(2) ** -53 * 3 * (abs(x) + w)


def test_a_displacement_costs_what_is_stated():
    # the worst cell of the normal law, displaced by d at both ends
    for grid in (2.0**-6, 2.0**-5):
        a, d = np.linspace(0.0, 7.0, 2000), grid / 1024.0
        cell = special.ndtr(-a) - special.ndtr(-a - grid)
        wider = special.ndtr(-a + d) - special.ndtr(-a - grid - d)
        narrower = special.ndtr(-a - d) - special.ndtr(-a - grid + d)
        assert 2.0 * d / grid < np.log(wider / cell).max() <= 2.5 * d / grid
        assert 2.0 * d / grid < -np.log(narrower / cell).min() <= 2.5 * d / grid


def test_the_widths_of_a_sums_layers():
    # E[w | N_1 = b] <= 2.51 + 2 |b| stds for one client, so 4.1 sqrt(n) + 14.2 for n whose sum is 7.1 stds
    for kind in ("direct", "shifted"):
        depth, b, other = layers(kind)
        mass = -np.diff(special.gammaincc(1.5, depth))
        for a in np.linspace(0.0, 9.0, 40):
            reach = 0.5 * ((b[1:] > a).astype(float) + (other[1:] > a))
            width = (mass * reach).sum() / (mass * reach / (b + other)[1:]).sum()
            assert width <= 2.52 + 2.0 * a
    for n in (1, 10, 1000):
        width = 2.51 + 2.0 * (7.1 / math.sqrt(n) + math.sqrt(2.0 / math.pi))
        assert n * width / math.sqrt(n) <= 4.11 * math.sqrt(n) + 14.2


def test_the_bounds_in_figures():
    small = Inputs(0.0, 0.0)
    for n, wanted in ((1, (-37.2, -69.0)), (100, (-33.3, -62.4)), (10_000, (-26.9, -55.7))):
        error = layered_law_error(n, 2.0**-6, small)
        assert (math.log2(error.log_ratio), math.log2(error.distance)) == pytest.approx(wanted, abs=0.06)
    error = aggregate_law_error(decomposition(100), 2.0**-6, small, 50)
    assert (math.log2(error.log_ratio), math.log2(error.distance)) == pytest.approx((-33.4, -65.3), abs=0.06)


def test_noise_that_float64_does_not_resolve_is_known_to_nothing():
    for largest, distance in ((2.0**44, 1.0), (2.0**8, 2.0**-60)):
        one_spike = Inputs(largest, largest / 1000.0)
        assert layered_law_error(10, 2.0**-6, one_spike).distance <= distance
        assert aggregate_law_error(decomposition(3), 2.0**-6, one_spike, 50).distance <= distance
    assert layered_law_error(10, 2.0**-6, Inputs(2.0**44, 0.0)).distance == 1.0
    assert aggregate_law_error(decomposition(3), 2.0**-6, Inputs(2.0**44, 0.0), 50).distance == 1.0


def test_other_targets_have_no_bound():
    with pytest.raises(ValueError, match="the bound is for a Gaussian target, got 'laplace'"):
        aggregate_law_error(decomposition(3, "laplace"), 2.0**-6, Inputs(0.0, 0.0), 50)


def test_a_symbol_that_does_not_fit_counts_as_a_distance():
    # |M| >= 2^30 where a direct layer is narrower than |x| / 2^30: P(r < e) is below 0.27 e^3
    x = 2.0**20
    assert special.gammainc(1.5, 0.5 * (x / 2.0**31) ** 2) < x**3 * 2.0**-94
    inputs = Inputs(x, x)
    assert layered_law_error(1, 2.0**-6, inputs).distance > x**3 * 2.0**-94
