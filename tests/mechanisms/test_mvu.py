import math

import numpy as np
import pytest
import torch

from lightning_fedq.mechanisms.interface import Adversary, PmfPairs
from lightning_fedq.mechanisms.mvu import MVU, solve_mvu
from tests.one_round import decode, encode, make_context

BEST = {  # cpa.md section 16, vector 14: mean variance, exact for one bit, best found for the others
    (1, 1, 0.5): 3.917698,
    (1, 1, 2.0): 0.181015,
    (2, 2, 0.5): 4.028809,
    (2, 2, 2.0): 0.208274,
    (3, 2, 2.0): 0.209574,
}


def mean_variance(design):
    """Mean over grid points of the variance of the decoded value."""
    return float((design.probabilities @ design.outputs**2 - design.inputs**2).mean())


@pytest.mark.parametrize("setting", BEST)
def test_designs_reach_the_specification(setting):
    """Within 5 in 10,000 of the best known; unbiased to 1e-8 and private as integers."""
    design = solve_mvu(*setting)
    assert mean_variance(design) <= BEST[setting] * 1.0005
    assert (design.counts.sum(1) == 2**32).all()
    np.testing.assert_allclose(design.probabilities @ design.outputs, design.inputs, atol=1e-8)
    ratios = design.counts[:, None] / design.counts[None]
    assert np.log(ratios.max()) <= setting[2]
    assert design.epsilon == pytest.approx(setting[2], rel=1e-6)


def test_one_bit_is_randomised_response():
    design = solve_mvu(1, 1, 0.5)
    np.testing.assert_allclose(design.outputs, [-1.54149, 2.54149], atol=1e-5)
    assert design.probabilities[0, 0] == pytest.approx(1 / (1 + math.exp(-0.5)), abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "best"), [(1.0, 0.991963), (3.0, 0.068530)])
def test_three_bit_designs_reach_the_specification(epsilon, best):
    assert mean_variance(solve_mvu(3, 3, epsilon)) <= best * 1.0005


def test_the_worst_variance_is_the_worst():
    design = solve_mvu(2, 2, 2.0)
    x = np.linspace(0, 1, 3001)
    moments = np.interp(x, design.inputs, design.probabilities @ design.outputs**2)
    assert design.worst_variance == pytest.approx(4 * (moments - x**2).max(), abs=4e-6)


@pytest.mark.parametrize("x", [-1.0, 0.15, 0.9])
def test_unbiased_with_its_variance(x):
    mechanism, dim = MVU(epsilon_per_coordinate=2.0), 60_000
    context = make_context(mechanism, (0,), (dim,), radius=0.5, center=0.3)
    symbols = encode(mechanism, torch.full((1, dim), 0.5 * x + 0.3), context).symbols
    estimate = decode(mechanism, symbols, (0,), context)
    error, design, unit = estimate.double() - 0.5 * x - 0.3, mechanism.design, (x + 1) / 2
    # 3 cases, two comparisons at 5 standard errors: false alarm 3e-6.
    assert abs(error.mean()) < 5 * error.std() / math.sqrt(dim)
    moment = np.interp(unit, design.inputs, design.probabilities @ design.outputs**2)
    squared = error.square()
    assert abs(squared.mean() - (moment - unit**2)) < 5 * squared.std() / math.sqrt(dim)
    assert moment - unit**2 <= mechanism.noise_variance(context, (0,)).item() * (1 + 1e-9)


def test_claims_hold_all_pairs_of_rows():
    mechanism = MVU(epsilon_per_coordinate=2.0, input_bits=2, output_bits=2)
    claims = mechanism.claims(make_context(mechanism, (0, 1), (5,)))
    assert [claim.adversary for claim in claims] == list(Adversary)
    for claim in claims:
        assert isinstance(claim.loss, PmfPairs) and claim.compositions == 5
        assert len(claim.loss.pairs) == 6
        assert np.abs(np.log([np.divide(*pair) for pair in claim.loss.pairs])).max() <= 2.0
