"""The papers' theorems by number: verdicts and the figures that the pages give."""

import itertools

import numpy as np
import pytest

from lightning_fedq.functional.blocks.codeword import sign_words
from reproductions.__main__ import main
from reproductions.corbin import theorems as corbin
from reproductions.corbin.theorems import corbin_theorems
from reproductions.cpa import theorems as cpa
from reproductions.cpa.theorems import anonymity, cpa_theorems
from reproductions.optimal.theorems import optimal_theorems


def verdicts(summary):
    """Verdicts by the statement's name."""
    found = {}
    for claim in summary["claims"]:
        found.setdefault(claim["paper"].split(":")[0].split(",")[0], []).append(claim["held"])
    return found


def test_corbin(tmp_path):
    summary = corbin_theorems(out=str(tmp_path / "run"))
    assert verdicts(summary) == {
        "proposition 1": [True],
        "algorithm 2": [True],
        "theorem 1": [True],
        "theorem 1 as printed": [False],
        "theorem 2": [True, True],
        "theorem 3": [False, True],
        "theorem 3 applies to the paper's experiments": [False],
        "theorem 4": [True, True],
        "theorem 4 applies in cohorts of this size": [False],
        "section IV-5": [True, True],
    }
    words = " ".join(claim["ours"] for claim in summary["claims"])
    # the specification's figures: equation 5 printed 0.0108, true delta 0.0049; dropouts 9.08; theorem 2 at 1
    assert "printed epsilon_u 0.0108 at delta 1e-05, true delta 0.0049" in words
    assert "epsilon 9.08 at 1e-05 towards an outsider, without dropouts inf" in words
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


def test_cpa(tmp_path):
    summary = cpa_theorems(out=str(tmp_path / "run"), steps=20_000)
    assert verdicts(summary) == {
        "proposition 1": [False],
        "proposition 2": [True],
        "section 5.1": [False],
        "corollary 1": [True],
        "lemma 4.2.1": [False, True],
        "theorem 4.1": [False, True],
        "theorem 4.2": [False, False, True, True],
        "claim 1": [True],
        "lemma 4.3.1": [True],
        "lemma 4.3.2": [True],
    }
    assert "30 rounds 29,842" in summary["claims"][0]["ours"]
    # the specification's vectors of the recursion at 200,000 steps
    assert cpa.recursion(2, 50.0, 200_000) == pytest.approx(199.985, abs=0.01)
    assert cpa.recursion(1, 50.0, 200_000) == pytest.approx(547.5, abs=0.1)


def test_near_optimal_utility(tmp_path, capsys):
    out = tmp_path / "run"
    assert main("optimal-theorems", "--samples", "100000", "--worlds", "500", "--out", str(out)) == 0
    assert "NOT held: theorem 6.11, the headline" in capsys.readouterr().out
    found = verdicts(optimal_theorems(worlds=500, samples=100_000, out=str(out)))
    assert found == {
        "lemma 6.2": [True],
        "lemma 6.3": [False],
        "lemma 6.4": [True],
        "lemma 6.9": [True],
        "theorem 6.10": [False],
        "theorem 6.11": [False, False],
        "equations 10 and 19 choose the same p": [False],
        "lemma B.1": [True],
        "lemma B.3": [True],
        "appendix Q": [False],
        "lemma Q.1": [True],
        "lemma Q.2": [True, False],
    }


def test_anonymity_under_repetition():
    assert [anonymity(8, t) for t in (1, 2, 3, 4)] == pytest.approx([4, 16 / 7, 1.5510, 1.2362], abs=1e-4)
    words = sign_words(8, "balanced").astype(int)
    agree = [
        ((words[[a, b]] == words[[a, b], 0][:, None]).all(0)).sum()
        for a, b in itertools.product(range(70), repeat=2)
    ]
    assert np.mean(agree) == pytest.approx(16 / 7)
