import itertools
import math

import numpy as np
import pytest
from scipy.stats import chi2

from lightning_fedq.functional.blocks.codeword import BLOCKS_TAG, prf_bases
from lightning_fedq.functional.blocks.scalar_loops import choose_blocks


def subsets(num_blocks, count, draws):
    out = np.empty((draws, count), np.int64)
    for row, key in zip(out, prf_bases(3, 0, range(draws), 0, BLOCKS_TAG), strict=True):
        choose_blocks(key, num_blocks, row)
    return out


@pytest.mark.parametrize(("num_blocks", "count"), [(5, 2), (6, 5), (4, 1), (4, 4)])
def test_every_subset_is_as_likely(num_blocks, count):
    """Chi-square over all subsets, false alarm 1e-6 each."""
    draws = 20_000
    found = [tuple(row) for row in subsets(num_blocks, count, draws).tolist()]
    every = list(itertools.combinations(range(num_blocks), count))
    assert set(found) <= set(every)
    expected = draws / len(every)
    statistic = sum((found.count(s) - expected) ** 2 / expected for s in every)
    assert statistic <= chi2.isf(1e-6, max(len(every) - 1, 1))


def test_large_subsets_are_ascending_without_repetition():
    rows = subsets(7850, 4000, 50)
    assert (np.diff(rows, axis=1) > 0).all() and rows.min() >= 0 and rows.max() < 7850
    # each block is in half of 50 subsets: the mean over blocks is exact, and the extremes are binomial
    counts = np.bincount(rows.ravel(), minlength=7850)
    assert counts.max() <= 50 and counts.min() >= 25 - 5.5 * math.sqrt(12.5)  # false alarm 3e-4 (7850 blocks)
