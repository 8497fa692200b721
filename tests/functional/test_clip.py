import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_fedq.functional.clip import unit_ball_factor, unit_ball_factors
from tests.functional.grid import truncate_to_grid


@given(
    values=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=60),
    clip_norm=st.floats(1e-6, 1e6),
    order=st.sampled_from([1, 2]),
)
@settings(max_examples=200, deadline=None)
def test_the_integer_vector_never_leaves_the_ball(values, clip_norm, order):
    """Checked with Python's unbounded integers: sum |x|^p <= (2^30)^p, exactly."""
    rows = torch.tensor([values], dtype=torch.float64)
    factors, _ = unit_ball_factors(rows, clip_norm, order)
    integers = truncate_to_grid(rows[0] * factors[0], 30).tolist()
    assert sum(abs(x) ** order for x in integers) <= 2 ** (30 * order)


@pytest.mark.parametrize("order", [1, 2])
def test_rows_on_the_sphere_stay_inside(order):
    """Norms exactly at the bound are where rounding could push them out."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 300, generator=generator, dtype=torch.float64)
    rows = rows / torch.linalg.vector_norm(rows, order, dim=1, keepdim=True)
    factors, _ = unit_ball_factors(rows, 1.0, order)
    integers = truncate_to_grid(rows * factors[:, None], 30)
    for row in integers.tolist():
        assert sum(abs(x) ** order for x in row) <= 2 ** (30 * order)


def test_short_rows_keep_their_size_and_long_ones_are_reported():
    rows = torch.tensor([[0.3, 0.4], [3.0, 4.0]], dtype=torch.float64)
    factors, clipped = unit_ball_factors(rows, 1.0, 2)
    assert clipped.tolist() == [False, True]
    assert factors.tolist() == pytest.approx([1.0, 0.2], rel=1e-13)


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 5000])
@pytest.mark.parametrize("clip_norm", [1e-3, 1e9])
def test_one_row_stays_in_the_ball_in_exact_arithmetic(size, clip_norm):
    """Squares of float32 and their sum as fractions: the product with the factor is never longer than one."""
    generator = np.random.default_rng(size)
    row = (generator.normal(size=size) * 10.0 ** generator.uniform(-6, 6, size)).astype(np.float32)
    factor, shortened = unit_ball_factor(row, clip_norm)
    norm = math.sqrt(math.fsum(float(value) ** 2 for value in row))
    assert shortened == (norm > clip_norm)
    assert factor == pytest.approx(1.0 / max(norm, clip_norm), rel=1e-11)
    assert Fraction(factor) ** 2 * sum(Fraction(float(value)) ** 2 for value in row) <= 1
