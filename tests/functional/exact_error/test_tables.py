import math

import numpy as np
import pytest

from lightning_fedq.functional.exact_error.tables import NOWHERE, inverse_table, polynomial_table


def test_an_inverse_table_inverts():
    table = inverse_table(lambda y: 2.0 * y, 1.0 / 256, 256)  # distribution function y^2
    u = np.concatenate([[2.0**-54], np.random.default_rng(0).random(10_000), [1.0 - 2.0**-54]])
    np.testing.assert_allclose(table.sample(u), np.sqrt(u), atol=1e-13, rtol=1e-9)
    assert table.error < 2.0**-50


def test_an_inverse_tables_error_covers_what_it_misses():
    # a few wide cells: the cubic misses a lot, and says so
    table = inverse_table(lambda y: np.exp(-y) / (1.0 - math.exp(-4.0)), 1.0, 4)
    u = np.linspace(0.001, 0.999, 5_000)
    missed = np.abs(-np.expm1(-table.sample(u)) / (1.0 - math.exp(-4.0)) - u).max()
    assert 1e-5 < missed <= table.error < 1e-2


def test_a_density_that_does_not_integrate_to_one_shows_in_the_error():
    assert inverse_table(lambda y: 2.02 * y, 0.01, 100).error == pytest.approx(0.01, rel=1e-6)


def test_a_polynomial_table_interpolates_and_ends():
    table = polynomial_table(np.sin, 0.125, 16)
    points = np.linspace(0.0, 1.999, 3_001)
    assert np.abs(table(points) - np.sin(points)).max() <= 2.0 * table.error < 1e-10
    assert table(np.array([2.0, 3.0])).tolist() == [0.0, 0.0]
    assert polynomial_table(np.sin, 1.0, 2).error > 1e-7
    assert NOWHERE(np.array([0.0, 5.0])).tolist() == [0.0, 0.0]
