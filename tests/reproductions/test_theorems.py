"""Closed forms behind the papers' theorems; what their commands say is held by test_results.py."""

import numpy as np
import pytest

from lightning_fedq.functional.blocks.codeword import sign_words
from reproductions.corbin import theorems as corbin
from reproductions.cpa import theorems as cpa
from reproductions.cpa.theorems import anonymity


def test_corbin_in_closed_form():
    assert corbin.theorem_2_bound(1.0) == pytest.approx(4.00530060215)
    assert corbin.theorem_4_errors(1.0, 1e-9)[0] == pytest.approx(2.32790682748, rel=1e-6)  # no dropouts


def test_a_rival_pair_refutes_theorem_1_as_printed():
    """By its definition: unbiased, private, and its sum, by both values of the shared bit."""
    for epsilon in (0.1, 1.0, 5.0):
        level, error = corbin.rival_pair(epsilon)
        assert level == pytest.approx(epsilon) and error == pytest.approx(0.0, abs=1e-12)
    # where (4) allows more than CorBinQ errs, it is not refuted
    assert corbin.theorem_1_as_printed(((1.0, 5),)).held is True
    assert corbin.theorem_1_as_printed(((1.0, 5), (1.0, 8))).held is False


def test_theorem_4_as_printed_at_a_cohort():
    assert corbin.theorem_4_errors(0.5, 0.5, 400_000)[1] == np.inf
    assert corbin.theorem_4_errors(0.5, 0.5, 500_000)[1] == pytest.approx(582, abs=1)
    assert corbin.theorem_4_errors(0.5, 0.5)[1] == pytest.approx(52.43, abs=0.01)


def test_cpas_recursion():
    """The specification's vectors at 200,000 steps."""
    assert cpa.recursion(2, 50.0, 200_000) == pytest.approx(199.985, abs=0.01)
    assert cpa.recursion(1, 50.0, 200_000) == pytest.approx(547.5, abs=0.1)


def test_anonymity_under_repetition():
    assert [anonymity(8, t) for t in (1, 2, 3, 4)] == pytest.approx([4, 16 / 7, 1.5510, 1.2362], abs=1e-4)
    words = sign_words(8, "balanced").astype(int)
    same = words == words[:, :1]
    assert (same[:, None] & same).sum(2).mean() == pytest.approx(16 / 7)
