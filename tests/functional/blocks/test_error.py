import math

import numpy as np
import pytest

from lightning_fedq.functional.blocks.design import block_design
from lightning_fedq.functional.blocks.error import longest_pull, worst_second_moment, worst_variance


def design(name="Z", levels=None, stages=1, nesting=None, words="hadamard", dithered=True):
    return block_design(name, levels, None, stages, nesting, words, dithered)


@pytest.mark.parametrize("keep", [0.2, 0.8, 1.0])
def test_two_levels_by_hand(keep):
    """Points +-1, step 2: variance 1/c^2 - 1 + 1/3 with a subtracted dither, second moment 1/c^2 + 1/3."""
    two = design()
    assert worst_variance(two, "subtractive", "unbiased", keep) == pytest.approx(1 / keep**2 - 2 / 3)
    assert worst_second_moment(two, "subtractive", keep) == pytest.approx(1 / keep**2 + 1 / 3)
    assert worst_second_moment(two, "plain", keep) == pytest.approx(1 / keep**2)
    assert longest_pull(two, "unbiased", keep) == pytest.approx(1 / keep)
    assert longest_pull(two, "authors_code", keep) == pytest.approx(2.0)  # b W = 2, as it comes


@pytest.mark.parametrize(
    "kwargs",
    [
        {"levels": 5},
        {"levels": 4, "words": "iid"},
        {"stages": 2, "nesting": 3},
        {"name": "A2"},
        {"name": "A2", "stages": 2},
    ],
)
def test_the_second_moment_bounds_that_of_every_point(kwargs):
    """Exactly, by enumerating fine points and words: plain dither, so that nothing is subtracted."""
    code, keep = design(**kwargs), 0.5
    bound = worst_second_moment(code, "plain", keep)
    worst = np.zeros(code.block_dim)
    for points in np.ndindex(*code.counts):
        mean, variance = np.zeros(code.block_dim), np.zeros(code.block_dim)
        for table, index in zip(code.tables, points, strict=True):
            signs = table.signs
            if not len(signs):
                rows = np.arange(1, table.num_rows + 1)[:, None] & np.arange(len(table.points))
                signs = 1 - 2 * np.array([[bin(v).count("1") % 2 for v in row] for row in rows])
            b = signs[:, index, None]
            sent = table.offset + table.gain / keep * b * table.weights  # coin: second moment only
            own = (1 + keep) / 2 * sent + (1 - keep) / 2 * (2 * table.offset - sent)
            square = (1 + keep) / 2 * sent**2 + (1 - keep) / 2 * (2 * table.offset - sent) ** 2
            np.testing.assert_allclose(own.mean(0), table.points[index], atol=1e-9)
            mean += own.mean(0)
            variance += square.mean(0) - own.mean(0) ** 2
        worst = np.maximum(worst, variance + mean**2)
    assert worst.max() <= bound * (1 + 1e-9)
    if code.tables[1:] == ():
        assert worst.max() == pytest.approx(bound)
    assert math.isfinite(bound)
