"""Poisson batches: each sample by a coin of its own, the same coins from the same stream."""

import math

import numpy as np
import pytest
import torch

from lightning_fedq.data.batches import LocalWork
from lightning_fedq.dpsgd.poisson import PoissonBatches, PoissonEpoch
from lightning_fedq.keys.randomness import Stream


def batches_of(size, batch_size, stream):
    return PoissonBatches(LocalWork([torch.arange(size)], batch_size, False, True, 1, None), stream)


def stream(client, step):
    return Stream(client.to_bytes(16, "big") + step.to_bytes(16, "big"))


def test_poisson_sampling_takes_each_sample_with_its_probability():
    batches = batches_of(500, 25, stream)
    assert batches.sample_rate(0) == pytest.approx(0.05, abs=1e-9)
    assert batches.sample_rate(0) <= 0.05
    assert batches.steps == [20]
    counts = np.zeros(500)
    for step in range(7, 27):
        counts[batches.draw_samples(0, step)] += 1
    # 10,000 coins of 0.05: 6 standard errors, false alarm below 1e-8
    assert abs(counts.sum() - 500) < 6 * math.sqrt(10_000 * 0.05 * 0.95)


def test_every_client_draws_from_its_own_data_at_its_own_rate():
    held = [torch.arange(40), torch.arange(40, 45), torch.arange(45, 105)]
    for limit, steps in ((1.0, [8, 2, 12]), (2, [4, 2, 4]), (0.5, [4, 0, 6])):
        batches = PoissonBatches(LocalWork(held, 10, False, True, 2, None, limit), stream)
        assert batches.steps == steps
        assert [batches.sample_rate(c) for c in range(3)] == pytest.approx([1 / 4, 1.0, 1 / 6], abs=1e-9)
    assert torch.equal(batches.draw_samples(1, 3), held[1])
    taken = batches.draw_samples(2, 0)
    assert torch.isin(taken, held[2]).all() and torch.equal(taken, batches.draw_samples(2, 0))
    assert not torch.equal(taken, batches.draw_samples(2, 1))


def test_an_epoch_goes_on_from_the_next_step_and_remembers_steps_and_sizes():
    batches = batches_of(60, 20, stream)
    epoch = PoissonEpoch(batches, lambda: 5, lambda step: bytes([step]) * 32)
    assert len(epoch) == 3
    found, keys = zip(*epoch, strict=True)
    assert all(torch.equal(taken, batches.draw_samples(0, 5 + i)) for i, taken in enumerate(found))
    assert list(epoch.drawn) == [(5 + i, len(taken)) for i, taken in enumerate(found)]
    assert list(keys) == epoch.keys == [bytes([5 + i]) * 32 for i in range(3)]
