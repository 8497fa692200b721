import math

import numpy as np
import pytest

from lightning_fedq.functional.axis_choice import (
    WORD_BITS,
    AxisChoice,
    best_axis_choice,
    expected_top_sum,
    top_threshold,
)


def choice_of(size, num_top, epsilon):
    threshold = top_threshold(2 * size, num_top, epsilon)
    share = threshold / 2**WORD_BITS
    gap = share / num_top - (1.0 - share) / (2 * size - num_top)
    return AxisChoice(size, num_top, threshold, gap * expected_top_sum(size, num_top))


def squared_error(choice):
    """Of one decoded message, for a unit vector, summed over D coordinates."""
    return 1.0 / choice.mean_length**2 - 1.0


@pytest.mark.parametrize(
    "size, epsilon, num_top, share, error",
    [
        (8, 1.0, 6, 0.61991192, 48.7072),
        (1024, 4.0, 139, 0.79901334, 445.543),
        (8192, 8.0, 53, 0.90631692, 1090.4),
    ],
)
def test_the_spec_s_vectors_and_nothing_better_is_missed(size, epsilon, num_top, share, error):
    """The spec scanned k coarsely: 133 and 50 are a little better than its 139 and 53."""
    given, best = choice_of(size, num_top, epsilon), best_axis_choice(size, epsilon)
    assert given.top_probability == pytest.approx(share, abs=5e-9)
    assert squared_error(given) == pytest.approx(error, rel=5e-6)
    assert squared_error(best) <= squared_error(given) * (1 + 1e-12)


@pytest.mark.parametrize("size", [1, 2, 8, 32])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 10.0])
def test_the_best_k_is_the_best_of_all(size, epsilon):
    errors = [squared_error(choice_of(size, k, epsilon)) for k in range(1, size + 1)]
    assert squared_error(best_axis_choice(size, epsilon)) <= 1.001 * min(errors)


@pytest.mark.parametrize("size, num_top", [(1, 1), (2, 1), (8, 3), (8, 8), (64, 5)])
def test_the_expected_top_sum(size, num_top):
    """400,000 random directions; 5 standard errors, so each case alarms with probability 6e-7."""
    normals = np.abs(np.random.default_rng(0).standard_normal((400_000 // size, size)))
    unit = normals / np.linalg.norm(normals, axis=1, keepdims=True)
    sums = np.sort(unit, axis=1)[:, -num_top:].sum(1)
    error = sums.std() / math.sqrt(len(sums))
    assert abs(sums.mean() - expected_top_sum(size, num_top)) <= 5 * error + 1e-9


@pytest.mark.parametrize("epsilon", [1e-6, 0.3, 8.0, 44.0, 500.0])
@pytest.mark.parametrize("size", [1, 16, 1280, 2**20])
def test_the_attained_level_is_at_most_what_was_asked_for(size, epsilon):
    choice = best_axis_choice(size, epsilon)
    k, others = choice.num_top, 2 * size - choice.num_top
    assert 0 < choice.threshold < 2**WORD_BITS
    assert choice.epsilon <= epsilon * (1 + 1e-12)
    # in integers: threshold / k over (2^64 - threshold) / others, one unit more would be too much
    attained = math.log(choice.threshold * others) - math.log(k * (2**WORD_BITS - choice.threshold))
    assert attained <= epsilon + 1e-12


def test_a_level_whose_exponential_no_number_holds_has_the_largest_threshold():
    assert top_threshold(64, 3, 3e6) == top_threshold(64, 3, 1e3) == 2**64 - 1
    assert best_axis_choice(64, 3e6) == best_axis_choice(64, 1e3)


@pytest.mark.parametrize("size, epsilon", [(0, 1.0), (2**31, 1.0)])
def test_a_wrong_size_is_refused(size, epsilon):
    with pytest.raises(ValueError, match="size must be in"):
        best_axis_choice(size, epsilon)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_a_wrong_epsilon_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be > 0 and finite"):
        best_axis_choice(8, epsilon)
