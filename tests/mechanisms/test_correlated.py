import math

import pytest
import torch

from lightning_fedq.functional.one_bit.multi_level import level_step
from lightning_fedq.mechanisms import CorrelatedQuantization
from tests.functional.one_bit.closed_forms import group_variance
from tests.one_round import decode, encode, make_context


def _variances(mechanism, values, dim=4000, orders=60):
    """Variance of the decoded sum in units of radius^2, for random orders of the cohort."""
    generator = torch.Generator().manual_seed(3)
    for seed in range(orders):
        order = tuple(torch.randperm(len(values), generator=generator).tolist())
        context = make_context(mechanism, order, (dim,))
        updates = torch.tensor(values)[:, None].expand(-1, dim)
        symbols = encode(mechanism, updates, context, seed=seed).symbols
        error = decode(mechanism, symbols, context.cohort, context, seed).double() - sum(values)
        yield error.square().mean().item()


@pytest.mark.parametrize("values", [[0.1] * 5, [0.9, 0.3, 0.0, -0.5, -0.8], [0.4, -0.4]])
def test_one_bit_has_the_error_of_the_strata(values):
    """4 Var of the number of ones, averaged over orders; 5 standard errors of 60 orders."""
    found = torch.tensor(list(_variances(CorrelatedQuantization(), values)))
    expected = 4 * group_variance([(1 + v) / 2 for v in values])
    assert abs(found.mean().item() - expected) < 5 * found.std().item() / math.sqrt(60) + 1e-6


def test_equal_clients_err_like_one_over_n_squared():
    """n identical values: the sum's error is at most that of one stratum, 4 * 1/4, whatever n is."""
    for n in (4, 16):
        assert max(_variances(CorrelatedQuantization(), [0.123] * n, 1000, 5)) < 1.1


@pytest.mark.parametrize("levels", [3, 5, 16])
def test_more_levels_shrink_the_error_with_their_step(levels):
    """At most (step)^2 / 4 for equal clients: one stratum's worth."""
    worst = max(_variances(CorrelatedQuantization(levels), [0.2] * 6, 4000, 5))
    assert worst < 1.05 * level_step(levels) ** 2 / 4


@pytest.mark.parametrize("levels, bits", [(2, 1), (3, 2), (4, 2), (5, 3), (256, 8)])
def test_bits_on_the_wire(levels, bits):
    mechanism = CorrelatedQuantization(levels)
    context = make_context(mechanism, (0, 1), (10,))
    assert encode(mechanism, torch.ones(2, 10), context).num_bits == 20 * bits
