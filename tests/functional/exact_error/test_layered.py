import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.functional.exact_error.dither import centred_dither
from lightning_fedq.functional.exact_error.layered import layer_row, minimal_step
from lightning_fedq.functional.exact_error.layered_cost import known_dither_delta, layer_mean
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from reproductions.exact.formulas import (
    cell_entropy,
    conditional_entropy,
    fixed_length_bits,
    lower_bound,
    upper_bound,
)
from tests.functional.exact_error.reference import dither_dequantize, dither_quantize, layer

CASES = [(law, kind) for law in ("gaussian", "laplace") for kind in ("direct", "shifted")]


def f64(value):
    return torch.tensor(value, dtype=torch.float64)


# section 11 of the specification: step at height p, sigma = 1, in the order of CASES
STEPS = {
    1e-12: (14.8676887554, 7.4338457919, 39.0761648044, 19.5380824022),
    0.001: (7.4338443777, 3.7616547348, 9.7690412011, 4.8852280611),
    0.1: (4.2919320526, 2.6050096313, 3.2563470670, 1.7026746686),
    0.25: (3.3302184446, 2.4236368388, 1.9605162869, 1.1836800877),
    0.5: (2.3548200450, 2.3548200450, 0.9802581435, 0.9802581435),
    0.9: (0.9180872101, 2.6050096313, 0.1490022702, 1.7026746686),
    0.999: (0.0894650919, 3.7616547348, 0.0014149211, 4.8852280611),
}


@pytest.mark.parametrize("height", STEPS)
def test_steps_equal_the_published_vectors(height):
    for (law, kind), wanted in zip(CASES, STEPS[height], strict=True):
        step, _ = layer(f64(-math.log(height)), f64(1.0), law, kind, 1.0)
        assert step.item() == pytest.approx(wanted, abs=1.1e-10 * max(1, wanted))


@pytest.mark.parametrize(
    ("law", "kind", "x", "u", "p", "step", "offset", "symbol", "decoded"),
    [
        ("gaussian", "direct", 2.3, 0.25, 0.3, 3.1035113073, 0.0, 1, 2.3276334805),
        ("gaussian", "shifted", 2.3, 0.25, 0.3, 2.3963560846, 0.3535776114, 1, 2.1508446748),
        ("laplace", "shifted", 2.3, 0.25, 0.3, 1.1035446058, 0.2995650314, 2, 2.2307680916),
        ("gaussian", "shifted", -7.81, 0.9, 0.02, 2.9981606039, 1.2980693206, -2, -7.3965964308),
        ("gaussian", "shifted", 0.4, 0.5, 0.97, 2.8950453647, -1.2007061210, 1, 0.2468165614),
    ],
)
def test_encode_and_decode_equal_the_published_vectors(law, kind, x, u, p, step, offset, symbol, decoded):
    w, mid = layer(f64(-math.log(p)), f64(1.0), law, kind, 1.0)
    m = dither_quantize(f64(x), f64(u), w)
    assert (w.item(), mid.item()) == pytest.approx((step, offset), abs=1e-10)
    assert m.item() == symbol
    assert (dither_dequantize(m, f64(u), w) + mid).item() == pytest.approx(decoded, abs=1e-10)


def draw(law, kind, count, purpose="layers"):
    words = PublicRandomness(SeededKeys(3), 0).public(purpose).words64(4 * count)
    dither, step, offset = (np.empty(count) for _ in range(3))
    layer_row(words, 2.0, law == "gaussian", kind == "shifted", dither, step, offset)
    return torch.from_numpy(dither), torch.from_numpy(step), torch.from_numpy(offset)


def scaled_law(law):
    return stats.norm(scale=2.0) if law == "gaussian" else stats.laplace(scale=math.sqrt(2.0))


@pytest.mark.parametrize(("law", "kind"), CASES)
@pytest.mark.parametrize("x", [0.0, 17.77, -12345.678])
def test_the_error_has_exactly_the_law(law, kind, x):
    # false alarm 1e-4 per case
    dither, step, offset = draw(law, kind, 200_000, f"{law}{kind}{x}")
    values = torch.full_like(step, x)
    error = dither_dequantize(dither_quantize(values, dither, step), dither, step) + offset - values
    assert stats.kstest(error.numpy(), scaled_law(law).cdf).pvalue > 1e-4


@pytest.mark.parametrize(("law", "kind"), CASES)
def test_the_kernel_equals_the_formula(law, kind):
    words = PublicRandomness(SeededKeys(5), 0).public("kernel").words64(4 * 2000)
    dither, step, offset = (np.empty(2000) for _ in range(3))
    layer_row(words, 0.7, law == "gaussian", kind == "shifted", dither, step, offset)
    block = words.reshape(-1, 4)
    low = (block & np.uint64(2047)).astype(np.float64)
    first = (block[:, 1].astype(np.float64) + (low[:, 0] + 0.5) * 2.0**-11) * 2.0**-64
    second = (block[:, 2].astype(np.float64) + (np.floor(low[:, 3] / 2) + 0.5) * 2.0**-10) * 2.0**-64
    angle = (block[:, 3] >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
    squared = np.cos(math.pi / 2 * angle) ** 2 if law == "gaussian" else 1.0
    depth = torch.from_numpy(-np.log(first) - squared * np.log(second))
    side = 1.0 - 2.0 * torch.from_numpy((block[:, 3] & np.uint64(1)).astype(np.float64))
    wanted_step, wanted_offset = layer(depth, side, law, kind, 0.7)
    np.testing.assert_allclose(step, wanted_step, rtol=1e-12)
    np.testing.assert_allclose(offset, wanted_offset, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(dither, centred_dither(block[:, 0].copy()))


def test_the_shifted_code_has_a_shortest_step_and_few_symbols():
    assert minimal_step("gaussian", 1.0) == pytest.approx(2.3548200450, abs=1e-10)
    assert minimal_step("laplace", 1.0) == pytest.approx(0.9802581435, abs=1e-10)
    for law in ("gaussian", "laplace"):
        dither, step, _ = draw(law, "shifted", 100_000, "fewest")
        assert step.min() >= minimal_step(law, 2.0)
        low, high = (dither_quantize(torch.full_like(step, end), dither, step) for end in (-16.0, 16.0))
        assert (high - low).max() < 2 ** fixed_length_bits(32.0, law, 2.0)


FIXED = {
    1: (1, 1, 2, 1),
    2: (1, 1, 2, 1),
    4: (2, 1, 3, 2),
    8: (3, 2, 4, 2),
    16: (3, 2, 5, 3),
    32: (4, 3, 6, 4),
    64: (5, 4, 7, 5),
    128: (6, 5, 8, 6),
    256: (7, 6, 9, 7),
    512: (8, 7, 10, 8),
    1024: (9, 8, 11, 9),
    2048: (10, 9, 12, 10),
}


@pytest.mark.parametrize("interval", FIXED)
def test_fixed_lengths_equal_the_table(interval):
    laws = [("gaussian", 1.0), ("gaussian", 3.0), ("laplace", 1.0), ("laplace", 3.0)]
    assert tuple(fixed_length_bits(interval, *law) for law in laws) == FIXED[interval]


# section 3.4 of the specification
ENTROPIES = {
    1: (0.285807, 0.287776, 0.095851, 0.095925, 0.456356, 0.510070, 0.163597, 0.170023),
    2: (0.560466, 0.575552, 0.191262, 0.191851, 0.826278, 0.990745, 0.315289, 0.340046),
    4: (1.047614, 1.124674, 0.379087, 0.383701, 1.393416, 1.697080, 0.587912, 0.678605),
    8: (1.761454, 1.897022, 0.733135, 0.767199, 2.144966, 2.547044, 1.036837, 1.260783),
    16: (2.617566, 2.783196, 1.320264, 1.425886, 3.017568, 3.471966, 1.686036, 2.037149),
    32: (3.545622, 3.726283, 2.104548, 2.255147, 3.953810, 4.434427, 2.496354, 2.924543),
    64: (4.509650, 4.697826, 2.996632, 3.169777, 4.921930, 5.415658, 3.400727, 3.868234),
    128: (5.491664, 5.683598, 3.942674, 4.127092, 5.905991, 6.406273, 4.352908, 4.840080),
    256: (6.482671, 6.676484, 4.915695, 5.105750, 6.898021, 7.401581, 5.328998, 5.826003),
    512: (7.478175, 7.672927, 5.902205, 6.095078, 7.894036, 8.399234, 6.317043, 6.818964),
    1024: (8.475926, 8.671148, 6.895460, 7.089743, 8.892044, 9.398061, 7.311066, 7.815445),
    2048: (9.474802, 9.670259, 7.892088, 8.087075, 9.891047, 10.397475, 8.308077, 8.813685),
}


@pytest.mark.parametrize("interval", ENTROPIES)
def test_entropies_equal_the_table(interval):
    cases = itertools.product(("gaussian", "laplace"), (1.0, 3.0), ("direct", "shifted"))
    found = [conditional_entropy(interval, s, law, kind) for law, s, kind in cases]
    assert found == pytest.approx(ENTROPIES[interval], abs=1e-6)


@pytest.mark.parametrize(("law", "kind"), CASES)
def test_entropy_by_counting(law, kind):
    # entropy of the symbol given one layer, averaged; std of the mean below 0.004, four allowed
    dither, step, _ = draw(law, kind, 20_000, "counting")
    low, high = -8.0, 8.0
    edges = (torch.arange(-30, 31)[:, None] - 0.5 - dither) * step
    inside = edges.clamp(low, high).diff(dim=0) / (high - low)
    measured = -torch.xlogy(inside, inside).sum(0).mean().item() / math.log(2.0)
    wide = step > 16 / 28
    inside, exact = inside[:, wide], conditional_entropy(16.0, 2.0, law, kind)
    if bool(wide.all()):
        assert measured == pytest.approx(exact, abs=0.016)
    else:
        per_layer = -torch.xlogy(inside, inside).sum(0) / math.log(2.0)
        exact = cell_entropy(16.0 / step[wide].numpy()).mean()
        assert per_layer.mean().item() == pytest.approx(exact, abs=0.016)


@pytest.mark.parametrize(("law", "kind"), CASES)
@pytest.mark.parametrize("interval", [4.0, 64.0])
def test_bounds_hold(law, kind, interval):
    exact = conditional_entropy(interval, 1.5, law, kind)
    assert lower_bound(interval, 1.5, law) <= exact <= upper_bound(interval, 1.5, law, kind)


def test_mean_steps_equal_the_table():
    found = [layer_mean(lambda step: step, *case) for case in CASES]
    assert found == pytest.approx([3.1915382432, 2.5247464681, 2.8284271247, 1.6652830915], abs=1e-9)
    logs = [-layer_mean(math.log2, *case) for case in CASES]
    assert logs == pytest.approx([-1.5263219523, -1.3306303043, -1.1099488636, -0.6031117429], abs=1e-9)


def test_no_entropy_of_nothing():
    with pytest.raises(ValueError, match="interval and sigma must be > 0"):
        conditional_entropy(0.0, 1.0, "gaussian", "direct")


@pytest.mark.parametrize(
    ("distance", "direct", "shifted"),
    [(0.1, 0.0399, 0.0399), (0.5, 0.1974, 0.1995), (1.0, 0.3829, 0.3990), (2.0, 0.6827, 0.7979)],
)
def test_whoever_knows_the_dither_tells_inputs_apart(distance, direct, shifted):
    # specification 8.2, and the direct column by counting: 200,000 layers, 4.5 standard errors
    found = [known_dither_delta(distance, 1.0, "gaussian", kind) for kind in ("direct", "shifted")]
    assert found == pytest.approx([direct, shifted], abs=1e-4)
    _, step, _ = draw("gaussian", "direct", 200_000, "known")
    assert found[0] == pytest.approx((2 * distance / step).clamp(max=1).mean().item(), abs=4.5 * 0.5 / 447)
