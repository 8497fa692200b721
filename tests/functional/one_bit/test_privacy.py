"""The vertices against full scans, the closed forms against the specification's test vectors."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from lightning_fedq.functional.divergences import hockey_stick
from lightning_fedq.functional.one_bit import privacy as obp
from lightning_fedq.functional.one_bit.threshold_coin import pair_law

GRID = np.linspace(-3.0, 6.0, 61)


def extremes(epsilon):
    return 1.0 / (1.0 + math.exp(epsilon)), 1.0 / (1.0 + math.exp(-epsilon))


def envelope(pairs):
    curves = [hockey_stick(np.array(p), np.array(q), GRID) for p, q in pairs]
    return np.max(curves, axis=0)


def knots(low, high, shared_bits):
    cells = 2**shared_bits
    inner = [k / cells for k in range(cells + 1) if low < k / cells < high]
    return [low, *inner, high]


def test_hockey_stick_keeps_its_precision_for_tiny_losses():
    noise = obp.coin_sum_pmf(2_000_000, 1_000_000, *extremes(0.1))
    p, q = np.convolve(noise, extremes(0.1)), np.convolve(noise, extremes(0.1)[::-1])
    losses, masses = np.log(p / q), p
    point = 4.0 * math.sqrt(masses @ losses**2)
    exact = math.fsum((-np.expm1(point - losses) * masses)[losses > point])
    assert hockey_stick(p, q, np.array([-point, point]))[1] == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("epsilon", "shared_bits"), [(1.0, 1), (1.0, 3), (0.5, 4), (3.0, 2), (2.0, 5), (0.1, 1)]
)
def test_joint_vertices_are_as_bad_as_every_knot(epsilon, shared_bits):
    low, high = extremes(epsilon)
    points = knots(low, high, shared_bits)
    every = (
        (pair_law(a, partner, shared_bits), pair_law(b, partner, shared_bits))
        for a, b, partner in itertools.product(points, repeat=3)
    )
    clean = [tuple(np.maximum(law, 0.0) for law in pair) for pair in every]
    expected = envelope(clean)
    np.testing.assert_allclose(envelope(obp.joint_pairs(low, high, shared_bits)), expected, atol=1e-13)


@pytest.mark.parametrize(("epsilon", "shared_bits"), [(1.0, 1), (1.0, 3), (0.5, 4), (3.0, 2)])
def test_interior_inputs_are_never_worse_than_the_vertices(epsilon, shared_bits):
    low, high = extremes(epsilon)
    bound = envelope(obp.joint_pairs(low, high, shared_bits))
    rng = np.random.default_rng(1)
    for a, b, partner in rng.uniform(low, high, (400, 3)):
        pair = [np.maximum(pair_law(q, partner, shared_bits), 0.0) for q in (a, b)]
        assert (hockey_stick(*pair, GRID) <= bound + 1e-12).all()


@pytest.mark.parametrize(
    ("epsilon", "shared_bits", "mass"),
    [(1.0, 1, 0.23105857863), (1.0, 3, 0.35605857863), (1.0, 5, 0.44980857863), (0.5, 4, 0.184959331202)],
)
def test_infinite_mass_of_the_joint_view(epsilon, shared_bits, mass):
    pairs = obp.joint_pairs(*extremes(epsilon), shared_bits)
    worst = max(sum(a for a, b in zip(p, q, strict=True) if b <= 1e-16) for p, q in pairs)
    assert worst == pytest.approx(mass, abs=1e-11)


@pytest.mark.parametrize(
    ("epsilon", "shared_bits", "delta"),
    [(1.0, 1, 0.23105857863), (1.0, 3, 0.429570457115), (1.0, 5, 0.44980857863), (0.5, 4, 0.243270476513)],
)
def test_known_word_view_of_the_specification(epsilon, shared_bits, delta):
    pairs = obp.known_word_pairs(*extremes(epsilon), shared_bits)
    worst = max(hockey_stick(np.array(p), np.array(q), np.array([epsilon]))[0] for p, q in pairs)
    assert worst == pytest.approx(delta, abs=1e-11)


@pytest.mark.parametrize(("epsilon", "shared_bits"), [(1.0, 2), (0.3, 3), (4.0, 4)])
def test_known_word_vertices_are_as_bad_as_every_pair(epsilon, shared_bits):
    low, high = extremes(epsilon)
    cells = 2**shared_bits

    def law(q):
        ones = np.clip(q * cells - np.arange(cells), 0.0, 1.0) / cells
        return np.concatenate([ones, 1.0 / cells - ones])

    points = [*knots(low, high, shared_bits), *np.random.default_rng(2).uniform(low, high, 20)]
    expected = envelope((law(a), law(b)) for a, b in itertools.permutations(points, 2))
    np.testing.assert_allclose(envelope(obp.known_word_pairs(low, high, shared_bits)), expected, atol=1e-13)


@pytest.mark.parametrize(("epsilon", "shared_bits"), [(1.0, 1), (1.0, 3), (0.1, 1), (3.0, 2), (0.5, 5)])
@pytest.mark.parametrize("num_coins", [0, 1, 4])
def test_no_input_of_a_pair_beats_the_sum_vertices(epsilon, shared_bits, num_coins):
    low, high = extremes(epsilon)
    noises = [obp.coin_sum_pmf(num_coins, j, low, high) for j in range(num_coins + 1)]
    pairs = obp.pair_sum_pairs(low, high, shared_bits)
    ends = itertools.product([*pairs, *((q, p) for p, q in pairs)], noises)
    bound = envelope((np.convolve(n, a), np.convolve(n, b)) for (a, b), n in ends)

    def sums(q1, q2):
        both, one, other, none = pair_law(q1, q2, shared_bits)
        return np.maximum([none, one + other, both], 0.0)

    rng = np.random.default_rng(3)
    points = [*itertools.product([low, high], repeat=3), *rng.uniform(low, high, (150, 3))]
    for a, b, partner in points:
        for noise in noises:
            p, q = np.convolve(noise, sums(a, partner)), np.convolve(noise, sums(b, partner))
            assert (hockey_stick(p, q, GRID[GRID >= 0]) <= bound[GRID >= 0] + 1e-12).all()


@pytest.mark.parametrize(
    ("epsilon", "coins", "alone", "first_order", "paired", "mass"),
    [
        (1.0, 10, 0.0178548120916, 0.00301403212037, 0.0458409602660, 0.0201499452425),
        (0.5, 30, 0.000169275349059, 2.73543152658e-5, 0.00170194793102, 1.63061462094e-7),
    ],
)
def test_worst_curves_behind_a_sum(epsilon, coins, alone, first_order, paired, mass):
    low, high = extremes(epsilon)
    at = np.array([epsilon / 2.0])

    def delta(p, q, num_high):
        noise = obp.coin_sum_pmf(coins, num_high, low, high)
        return hockey_stick(np.convolve(noise, p), np.convolve(noise, q), at)[0]

    bit = ((low, high), (high, low))
    shift = ((1.0 - (high - low), high - low), (1.0, 0.0))
    every = range(coins + 1)
    assert max(delta(*bit, j) for j in every) == pytest.approx(alone, rel=1e-9)
    assert delta(*bit, 0) == pytest.approx(first_order, rel=1e-9)
    worst = max(max(delta(*shift, j), delta(*shift[::-1], j)) for j in every)
    assert worst == pytest.approx(paired, rel=1e-9)
    assert (high - low) * high**coins == pytest.approx(mass, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(("coins", "ones"), [(0, 0), (1, 1), (7, 3), (300, 0), (300, 100), (4000, 3900)])
def test_the_sum_of_coins_is_a_convolution_of_binomials(coins, ones, epsilon):

    low, high = extremes(epsilon)
    upper = stats.binom.pmf(np.arange(ones + 1), ones, high)
    lower = stats.binom.pmf(np.arange(coins - ones + 1), coins - ones, low)
    wanted, found = np.convolve(upper, lower), obp.coin_sum_pmf(coins, ones, low, high)
    shift = int(wanted.argmax()) - int(found.argmax())
    both = wanted[max(shift, 0) : shift + len(found)]
    np.testing.assert_allclose(found[max(-shift, 0) :][: len(both)], both, rtol=1e-9, atol=1e-25)
    assert wanted.sum() - both.sum() < 1e-13


def test_coin_splits_are_all_up_to_400_and_cover_all_beyond():
    assert obp.coin_splits(400) == tuple((400, j) for j in range(401))
    for coins in (401, 1000, 12_345, 2_000_000):
        stretches = obp.coin_splits(coins)
        assert 200 < len(stretches) <= 401
        # a stretch covers what has at least its coins at high and at low; the next one starts where it ends
        ends = [coins - (left - high) for left, high in stretches]
        starts = [high for _, high in stretches]
        assert starts == [0, *(end + 1 for end in ends[:-1])] and ends[-1] == coins
        assert min(left for left, _ in stretches) >= coins * (1 - 1 / 401) - 1


def test_stretches_of_splits_dominate_every_split():
    low, high = extremes(4.5)
    points = np.linspace(0.0, 1.5, 40)

    def worst(splits, at):
        noises = [obp.coin_sum_pmf(*split, low, high) for split in splits]
        laws = [(np.convolve(n, [high, low]), np.convolve(n, [low, high])) for n in noises]
        return np.max([hockey_stick(*pair, at) for pair in laws], 0)

    every, bound = [(1000, j) for j in range(1001)], worst(obp.coin_splits(1000), points)
    assert (bound >= worst(every, points) * (1 - 1e-12)).all()
    assert (bound <= 1.005 * worst(every, 0.995 * points)).all()  # at most 0.5% of epsilon is lost


def test_lone_survivors():
    assert [obp.coin_count_quantile((2,) * (n // 2), 0.5, 5e-6) for n in (50, 500, 5000)] == [2, 90, 1140]


def test_coin_count_quantile_agrees_with_simulation():
    assert obp.coin_count_quantile((1,) * 7, 0.0, 1e-9) == 7
    assert obp.coin_count_quantile((), 0.3, 1e-9) == 0
    groups = (1, 1, 1, 2, 2, 3)
    rng = np.random.default_rng(4)
    answers = rng.random((200_000, sum(groups))) >= 0.4
    edges = np.cumsum((0, *groups))
    alone = sum((answers[:, a:b].sum(1) == 1).astype(int) for a, b in itertools.pairwise(edges))
    k = obp.coin_count_quantile(groups, 0.4, 0.05)
    # six standard errors of a proportion of 0.05 in 200,000: false alarm below 1e-8
    assert (alone < k).mean() <= 0.05 + 6 * math.sqrt(0.05 * 0.95 / 200_000)
    assert (alone < k + 1).mean() > 0.05 - 6 * math.sqrt(0.05 * 0.95 / 200_000)
