import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from lightning_fedq.functional.axis_choice import WORD_BITS
from lightning_fedq.functional.direction_choice import best_direction_choice, top_moments


@pytest.mark.parametrize("epsilon, on_sphere, normal", [(1.0, 6478.30, 6481.96), (8.0, 135.537, 136.102)])
def test_many_directions_have_the_error_of_privunit_and_privunitg(epsilon, on_sphere, normal):
    """In 1,024 dimensions the errors of the ideal mechanisms, from their densities; 65,536 directions."""
    for spherical, ideal in ((True, on_sphere), (False, normal)):
        found = best_direction_choice(1024, 2**16, epsilon, spherical)
        assert ideal <= found.mean_squared_error * (1 + 1e-5)
        assert found.mean_squared_error == pytest.approx(ideal, rel=6e-4)


@pytest.mark.parametrize(
    "num_directions, excess", [(1024, (0.0017, 0.0038, 0.0342)), (4096, (0.0005, 0.001, 0.0085))]
)
def test_the_price_of_a_finite_codebook(num_directions, excess):
    """What the docstring of `mechanisms.priv_unit` says of epsilon 1, 4 and 8."""
    for epsilon, ideal, more in zip((1.0, 4.0, 8.0), (6481.96, 445.768, 136.102), excess, strict=True):
        found = best_direction_choice(1024, num_directions, epsilon, False).mean_squared_error
        assert found == pytest.approx(ideal * (1 + more), rel=3e-4)


@pytest.mark.parametrize("spherical", [False, True])
def test_the_moments_of_the_closest_directions(spherical):
    """50,000 codebooks of 16 in 8 dimensions, k = 3; false alarm below 1e-5 a comparison (4.5 errors)."""
    values = np.random.default_rng(0).standard_normal((50_000, 16, 8))
    along = values[..., 0]
    if spherical:
        along = along / np.linalg.norm(values, axis=2)
    top = np.sort(along, axis=1)[:, -3:]
    for sample, expected in zip(
        (top.sum(1), np.square(top).sum(1)), top_moments(8, 16, 3, spherical), strict=True
    ):
        assert abs(sample.mean() - expected) <= 4.5 * sample.std() / math.sqrt(len(sample))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 8.0, 20.0])
@pytest.mark.parametrize("num_directions", [2, 256, 1024])
def test_the_ratio_of_the_exact_law_is_within_epsilon(epsilon, num_directions):
    """Of integers: chance of a preferred direction over that of another, for every pair of updates."""
    choice = best_direction_choice(64, num_directions, epsilon, False)
    top = Fraction(choice.threshold, 2**WORD_BITS)
    ratio = (top / choice.num_top) / ((1 - top) / (num_directions - choice.num_top))
    assert 1 <= choice.num_top <= num_directions // 2
    with localcontext() as context:
        context.prec = 50
        assert Decimal(ratio.numerator) / ratio.denominator <= Decimal(epsilon).exp()
    assert math.log(ratio) >= 0.999 * epsilon


def test_a_coin_that_forgets_how_large_the_cap_is_has_another_ratio():
    """The plant p = e^epsilon / (1 + e^epsilon), right for half of all directions only: epsilon 1 is 1.64."""
    choice = best_direction_choice(1024, 2**16, 1.0, False)
    share = 1.0 / (1.0 + math.exp(-1.0))
    cap = choice.num_top / 2**16
    assert math.log(share * (1 - cap) / ((1 - share) * cap)) == pytest.approx(1.64, abs=0.005)
