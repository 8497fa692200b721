"""The homomorphic exact-error mechanisms behind secure aggregation that really runs, with dropouts."""

import pytest
import torch
from scipy import stats

import lightning_fedq as fedq
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.secagg.simulation import Aggregation
from tests.one_round import decode, encode, make_context

DIM, SIZE = 20_000, 6


def aggregation(mechanism, context):
    rand = PublicRandomness(SeededKeys(0), 0)
    given = {"session": b"s" * 16, "weights": torch.zeros(1), "num_clients": SIZE}
    return Aggregation(fedq.SecAgg(), mechanism, context, rand, **given)


@pytest.mark.parametrize(
    "mechanism",
    [
        fedq.AggregateGaussian(1.0, 0.7),
        fedq.IrwinHall(1.0, 0.7),
        fedq.DistributedDiscreteGaussian(1.0, 0.1, 0.01, max_dropped_clients=2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dropped", [(), (1, 4)])
def test_the_masked_sum_is_the_sum(mechanism, dropped):
    context = make_context(mechanism, range(SIZE), (DIM,))
    updates = torch.randn(SIZE, DIM, generator=torch.Generator().manual_seed(0))
    updates = updates / updates.norm(dim=1, keepdim=True)
    symbols = encode(mechanism, updates, context).symbols
    survivors = [client for client in range(SIZE) if client not in dropped]
    run = aggregation(mechanism, context)
    run.add(survivors, symbols[survivors])
    total = run.finish()
    exact = symbols[survivors].sum(0, dtype=torch.int64)
    counted = context.cohort if mechanism.fixed_cohort else survivors
    summed = decode(mechanism, total, counted, context)
    assert torch.equal(summed, decode(mechanism, exact, counted, context))
    if isinstance(mechanism, fedq.AggregateGaussian):
        error = (summed.double() - updates[survivors].double().sum(0)) / (2 * 0.7)
        smoothed = error + (torch.rand(DIM, generator=torch.Generator().manual_seed(1)) - 0.5) * 2.0**-9
        # false alarm 1e-4
        assert stats.kstest(smoothed.numpy(), "norm").pvalue > 1e-4
