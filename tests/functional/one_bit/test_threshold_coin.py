"""Closed forms against the specification's vectors, and the integer coin against exact enumeration."""

import math
from decimal import Decimal
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from lightning_fedq.functional.one_bit import threshold_coin as ob
from lightning_fedq.functional.one_bit.threshold_coin import coin_thresholds
from reproductions.corbin import errors
from tests.functional.one_bit.closed_forms import group_variance, single_mse
from tests.functional.one_bit.oracle import one_bit_quantize, one_bit_thresholds

INF = None  # unlimited shared bits


def close(value, expected, rel=1e-10):
    assert value == pytest.approx(expected, rel=rel, abs=1e-13)


# ---- vectors of the specification, section 11 -------------------------------------------------------


@pytest.mark.parametrize(
    "epsilon, alpha",
    [(0.1, 20.0166638896), (0.5, 4.08298816507), (1, 2.16395341374), (3, 1.10479139298), (5, 1.01356730981)],
)
def test_output_scale(epsilon, alpha):
    close(errors.output_scale(epsilon), alpha)
    close(coin_thresholds(epsilon).scale, alpha, rel=1e-7)


@pytest.mark.parametrize(
    "epsilon, high", [(0.1, 0.524979187479), (0.5, 0.622459331202), (1, 0.731058578630), (5, 0.993307149076)]
)
def test_largest_probability(epsilon, high):
    close(errors.one_probability(9.0, 0.0, 1.0, epsilon), high)
    close(coin_thresholds(epsilon).probabilities[1], high, rel=1e-9)


def test_single_client():
    q = errors.one_probability(0.35, 0.1, 0.5, 1.0)
    close(q, 0.615529289315)
    outputs = [0.1 + sign * 0.5 * errors.output_scale(1.0) for sign in (-1, 1)]
    close(outputs[0], -0.981976706869)
    close(outputs[1], 1.18197670687)
    close(single_mse(0.35, 0.1, 0.5, 1.0), 1.10817359421)


@pytest.mark.parametrize(
    "first, second, law",
    [(7 / 10, 2 / 5, (3 / 25, 29 / 50, 7 / 25, 1 / 50)), (5 / 8, 3 / 8, (1 / 16, 9 / 16, 5 / 16, 1 / 16))],
)
def test_pair_law_of_two_shared_bits(first, second, law):
    for value, expected in zip(ob.pair_law(first, second, 2), law, strict=True):
        close(value, expected)


PAIRS = [
    (0.3, -0.2, 1, 0, (0.260292721841, 0.378342425337, 0.147283846707, 0.214081006115), 2.21134718842),
    (0.3, -0.2, 1, 1, (0.113008875134, 0.525626272044, 0.294567693414, 0.0667971594079), 0.831976706869),
    (0.3, -0.2, 1, 3, (0.046211715726, 0.592423431452, 0.361364852822, 0), 0.206395341374),
    (0.3, -0.2, 1, 5, (0.046211715726, 0.592423431452, 0.361364852822, 0), 0.206395341374),
    (0.3, -0.2, 1, INF, (0.046211715726, 0.592423431452, 0.361364852822, 0), 0.206395341374),
    (-0.45, -0.4, 0.5, 5, (0, 0.389786601918, 0.402032535039, 0.208180863043), 2.74803994031),
    (0.1, -0.12, 3, 4, (0.0073431158397, 0.583171709525, 0.384039093723, 0.0254460809126), 0.0396213138664),
]


@pytest.mark.parametrize("first, second, epsilon, bits, law, mse", PAIRS)
def test_pairs_at_radius_one_half(first, second, epsilon, bits, law, mse):
    q1, q2 = (errors.one_probability(value, 0.0, 0.5, epsilon) for value in (first, second))
    for value, expected in zip(ob.pair_law(q1, q2, bits), law, strict=True):
        close(value, expected)
    close(errors.pair_mse(first, second, 0.0, 0.5, epsilon, bits), mse)


@pytest.mark.parametrize("epsilon, worst", [(0.5, 6.16597633015), (1, 2.32790682748), (5, 0.51365934576)])
def test_worst_pair(epsilon, worst):
    close(ob.worst_pair_mse(errors.output_scale(epsilon), 3) / 2, worst)


def test_worst_pair_at_ln_3():
    close(errors.output_scale(math.log(3)), 2.0)
    close(ob.worst_pair_mse(2.0, 1), 4.0)
    close(ob.worst_pair_mse(2.0, 0), 8.0)


def test_lowest_threshold_of_32_bits():
    assert coin_thresholds(1.0).low == 1155094610


# ---- the coin ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 0.1, 0.5, 1, 3, 5, 8, 20])
def test_the_attained_level_is_at_most_epsilon(epsilon):
    coin = coin_thresholds(epsilon)
    assert coin.high == 2**32 - coin.low
    assert (Decimal(coin.high) / Decimal(coin.low)).ln() <= Decimal(epsilon)
    one_more = Decimal(coin.high + 1) / Decimal(coin.low - 1) if coin.low > 1 else Decimal(math.inf)
    assert one_more.ln() > Decimal(epsilon)
    assert coin.epsilon == pytest.approx(epsilon, rel=1e-3)


def test_an_infinite_epsilon_has_no_privacy_and_says_so():
    coin = coin_thresholds(math.inf)
    assert (coin.low, coin.high) == (0, 2**32 - 1)
    assert coin.epsilon == math.inf


def test_thresholds_stay_in_the_coin_and_hit_its_ends():
    coin, one = coin_thresholds(0.7), torch.ones(1)
    x = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0, 1e30, -1e30])
    thresholds = one_bit_thresholds(x, 0 * one, one, coin).tolist()
    assert thresholds == [coin.low, coin.low, 2**31, coin.high, coin.high, coin.high, coin.low]


@pytest.mark.parametrize("word_bits", [4, 5])
def test_the_joint_law_of_the_shipped_words_is_the_closed_form(word_bits):
    """Every shared word, both private words, all thresholds, all d: counted exactly (spec, v14)."""
    size = 2**word_bits
    shared, first, second = np.indices((size,) * 3, np.uint32).reshape(3, -1)
    for bits in range(word_bits + 1):
        mask = size - (size >> bits)
        words = [first.copy(), second.copy()]
        ob.splice_words(words[0], shared, 0, mask, 0)
        ob.splice_words(words[1], shared, 0, mask, mask)
        for word in words:
            assert np.array_equal(np.bincount(word, minlength=size), np.full(size, size**2))
        below = [np.array([word < k for k in range(size + 1)]).astype(np.int64) for word in words]
        counts = below[0] @ below[1].T
        for k1, k2 in product(range(size + 1), repeat=2):
            law = ob.pair_law(k1 / size, k2 / size, bits)
            assert law[0] == pytest.approx(counts[k1, k2] / size**3, abs=1e-15)
            assert sum(law) == pytest.approx(1.0, abs=1e-15)


def test_the_excess_is_bounded_and_the_bound_is_met():
    """0 <= e <= 2^-(d + 2), with equality at the middle of a cell."""
    for bits in range(6):
        cells = 2**bits
        middle = (cells // 2 + 0.5) / cells
        assert ob.pair_excess(middle, 1.0 - middle, bits) == 2.0 ** -(bits + 2)
        assert max(ob.pair_excess(a / 64, b / 64, bits) for a in range(65) for b in range(65)) <= 0.25 / cells


def test_no_pair_is_worse_than_the_worst():
    """Scan of 201^2 inputs for 4 levels and 4 numbers of shared bits; the bound is attained to 1%."""
    grid = np.linspace(-1, 1, 201).tolist()
    for epsilon, bits in product((0.3, 1.0, math.log(3), 4.0), (1, 2, 5, INF)):
        worst = ob.worst_pair_mse(errors.output_scale(epsilon), bits)
        found = max(errors.pair_mse(a, b, 0.0, 1.0, epsilon, bits) for a in grid[::4] for b in grid)
        assert found <= worst * (1 + 1e-12)
        assert found >= 0.99 * worst


def test_the_row_kernel_equals_the_tensor_form_over_segments_and_chunks():
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(3, 1000, generator=generator)
    words = torch.randint(0, 2**32, (3, 1000), generator=generator)
    sizes, center = [1, 600, 399], torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    radius, coin = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), coin_thresholds(1.3)
    expand = lambda t: t.repeat_interleave(torch.tensor(sizes))  # noqa: E731
    expected = one_bit_quantize(updates, words, expand(center), expand(radius), coin)
    outside = ((updates.double() - expand(center)).abs() > expand(radius)).sum().item()
    ranges = np.stack([np.cumsum(sizes), center.numpy(), 1.0 / radius.numpy()])
    bits, clipped = np.empty((3, 1000), np.uint8), 0
    for rows, (first, stop) in product([[2], [1, 0]], [(0, 300), (300, 601), (601, 1000)]):
        part = words[rows, first:stop].numpy().astype(np.uint32)
        clipped += ob.one_bit_quantize_rows(
            updates.numpy(), np.array(rows), first, part, ranges, coin.low, coin.high, bits
        )
    assert torch.equal(torch.from_numpy(bits), expected)
    assert clipped == outside


# ---- strata -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strata", [1, 2, 3, 7, 1000, 2**20 + 7])
def test_stratified_words_are_the_exact_integer_quotient(strata):
    """(pi, word) -> pi 2^32 + word is one to one onto [0, g 2^32), so its quotient by g is uniform."""
    rng = np.random.default_rng(1)
    words = np.concatenate([rng.integers(0, 2**32, 500), [0, 2**32 - 1] * 4]).astype(np.uint32)
    offsets = rng.integers(0, strata, len(words)).astype(np.uint32)
    for rank in {0, strata // 2, strata - 1}:
        out = ob.stratify_words(words, offsets, rank, strata)
        pairs = zip(offsets.tolist(), words.tolist(), strict=True)
        assert out.tolist() == [(((rank + o) % strata << 32) + w) // strata for o, w in pairs]


def _exact_group_variance(probabilities):
    """Straight from the definition: every ordered pair of distinct strata is equally likely."""
    g = len(probabilities)
    inside = lambda q, s: min(max(g * q - s, Fraction(0)), Fraction(1))  # noqa: E731
    total = sum(q * (1 - q) for q in probabilities)
    for i, k in product(range(g), repeat=2):
        if i != k:
            a, b = probabilities[i], probabilities[k]
            both = sum(inside(a, s) * inside(b, t) for s in range(g) for t in range(g) if s != t)
            total += both / (g * (g - 1)) - a * b
    return total


@pytest.mark.parametrize("g", [2, 3, 4, 6])
def test_group_variance_is_the_definition_in_fractions(g):
    rng = np.random.default_rng(g)
    for _ in range(20):
        probabilities = [Fraction(int(k), 64) for k in rng.integers(0, 65, g)]
        exact = _exact_group_variance(probabilities)
        assert group_variance([float(q) for q in probabilities]) == pytest.approx(float(exact), abs=1e-12)


def test_two_strata_are_one_shared_bit():
    for first, second in product(np.linspace(0.01, 0.99, 23).tolist(), repeat=2):
        law = ob.pair_law(first, second, 1)
        variance = 4 * law[0] + law[1] + law[2] - (first + second) ** 2
        assert group_variance([first, second]) == pytest.approx(variance, abs=1e-12)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 5.0, math.inf])
@pytest.mark.parametrize("g", [2, 3, 5, 12])
def test_no_group_is_worse_than_the_bound(epsilon, g):
    """Random laws of probabilities of four shapes, 400 each; the bound is not idle (factor 3)."""
    low, high = coin_thresholds(epsilon).probabilities
    rng, worst = np.random.default_rng(g), 0.0
    bound = ob.worst_group_variance(g, high - low)
    for shape in (0.05, 0.5, 1.0, 5.0):
        for _ in range(400):
            worst = max(worst, group_variance((low + (high - low) * rng.beta(shape, shape, g)).tolist()))
    assert worst <= bound * (1 + 1e-12)
    assert worst >= bound / 3
