"""The neighbours that the audit plays, and the classes that it counts."""

import numpy as np
import pytest
import torch

from lightning_fedq.audit.bench import Bench, Bins
from lightning_fedq.mechanisms import CPA, CSGM, LDPQ, CorBin, DistributedDiscreteGaussian


def test_worlds_and_rounds_hold_opposite_labels_and_so_do_layers():
    bench = Bench(LDPQ(1.0), 0, (3, 2))
    plays = {(round, world): bench.play(round, world).labels for round in (0, 1) for world in (0, 1)}
    assert plays[0, 0].tolist() == [0, 0, 0, 1, 1]
    assert (plays[0, 0] == plays[1, 1]).all() and (plays[0, 1] == plays[1, 0]).all()
    assert (plays[0, 0] == 1 - plays[0, 1]).all()


def test_what_is_zeroed_out_is_zero():
    updates = Bench(CSGM(1.0, 1.0), 0, (3, 2))._inputs[0][0]
    assert updates.tolist() == [4.0, 4.0, 4.0, 0.0, 0.0]


def test_all_labels_are_equal_where_symbols_are_no_coordinates():
    for mechanism in (CPA(1.0, lattice="D4"), DistributedDiscreteGaussian(1.0, 1.0, 0.1)):
        bench = Bench(mechanism, 0, (5, 2))
        assert not bench.aligned
        played = bench.play(0, 0)
        assert set(played.labels.tolist()) == {0}
        assert played.labels_of(4).tolist() == [0, 0, 0, 0]


def test_a_concentrated_difference_lies_in_the_first_coordinate():
    bench = Bench(LDPQ(1.0), 0, (2, 1), concentrated=True)
    first, second = bench._inputs
    assert torch.nonzero((first != second).any(0)).tolist() == [[0]]


def test_views_of_a_round():
    bench = Bench(CorBin(1.0), 0, (40, 24))
    played = bench.play(0, 0)
    bits = played.symbols.numpy().astype(int)
    assert (played.total() == bits.sum(0)).all()
    assert (played.group() == 2 * bits[0] + bits[1]).all()
    released, others = played.released(), played.others()
    alone = played.decoded([3])
    assert np.allclose(released, others + alone, atol=1e-5)


def test_few_values_are_classes_and_many_are_quantiles():
    few = Bins(np.array([0.0, 3.0, 3.0, 7.0]))
    assert few.fine(np.array([0.0, 3.0, 7.0, 8.0, -1.0])).tolist() == [0, 1, 2, 2, 0]
    assert few.coarse(np.array([0, 1, 2])).tolist() == [0, 1, 2]
    values = np.random.default_rng(0).normal(size=20_000)
    many = Bins(values)
    counts = np.bincount(many.fine(values), minlength=many.size)
    assert many.size == 32 and counts.min() > 600 and counts.max() < 650
    assert many.coarse_size == 8 and many.coarse(np.array([0, 31])).tolist() == [0, 7]
    assert (many.fine(values) == np.searchsorted(many.edges, values, side="right")).all()


@pytest.mark.parametrize("mechanism", [LDPQ(1.0), CSGM(1.0, 1.0)])
def test_calibration_uses_rounds_of_its_own(mechanism):
    bench = Bench(mechanism, 0, (512, 509))
    assert all(played.context.round > 1 << 39 for played in bench.calibration(3))
    assert len(bench.calibration(3)) == 3
