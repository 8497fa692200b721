"""The neighbours that the audit plays, and the classes that it counts."""

import numpy as np
import pytest
import torch

from lightning_fedq.audit.audit_case import AuditCase
from lightning_fedq.audit.bench import Bench
from lightning_fedq.audit.bins import Bins
from lightning_fedq.audit.fixed_parts import HeldKeys
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import CPA, CSGM, LDPQ, CorBin, DistributedDiscreteGaussian, LayeredGaussian
from lightning_fedq.mechanisms.interface import Adversary


def test_worlds_and_rounds_hold_opposite_labels_and_so_do_layers():
    bench = Bench(AuditCase(LDPQ(1.0)), 0, (3, 2))
    plays = {(round, world): bench.play(round, world).labels for round in (0, 1) for world in (0, 1)}
    assert plays[0, 0].tolist() == [0, 0, 0, 1, 1]
    assert (plays[0, 0] == plays[1, 1]).all() and (plays[0, 1] == plays[1, 0]).all()
    assert (plays[0, 0] == 1 - plays[0, 1]).all()


def test_what_is_zeroed_out_is_zero():
    high, low = Bench(AuditCase(CSGM(1.0, 1.0)), 0, (3, 2)).pair(1, 0, SeededKeys(0))
    assert high.tolist() == [4.0] * 5 and low.tolist() == [0.0] * 5


def test_all_labels_are_equal_where_symbols_are_no_coordinates():
    for mechanism in (
        CPA(1.0, lattice="A2", epsilon_scope="bit"),
        DistributedDiscreteGaussian(1.0, 1.0, 0.1),
    ):
        bench = Bench(AuditCase(mechanism), 0, (5, 2))
        assert not bench.aligned
        played = bench.play(0, 0)
        assert set(played.labels.tolist()) == {0}
        assert played.position_labels(4).tolist() == [0, 0, 0, 0]


def test_a_concentrated_difference_lies_in_the_first_coordinate():
    bench = Bench(AuditCase(LDPQ(1.0), concentrated=True), 0, (2, 1))
    first, second = bench.pair(1, 0, SeededKeys(0))
    assert torch.nonzero(first != second).tolist() == [[0]]


def test_views_of_a_round():
    bench = Bench(AuditCase(CorBin(1.0)), 0, (40, 24))
    played = bench.play(0, 0)
    bits = played.symbols.numpy().astype(int)
    assert (played.total() == bits.sum(0)).all()
    assert (played.group() == 2 * bits[0] + bits[1]).all()
    released, others = played.released(), played.honest_sum()
    alone = played.decoded([played.curious])
    assert np.allclose(released, others + alone, atol=1e-5)


def test_the_victim_takes_every_place_for_two_rounds_each():
    bench = Bench(AuditCase(CorBin(1.0)), 0, (5, 2))
    assert [bench.play(round, 0).victim for round in range(10)] == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]
    assert [bench.play(round, 1).curious for round in (0, 2, 4, 6)] == [1, 2, 3, 0]


def test_an_adversary_holds_its_keys_and_no_others():
    held, fresh = SeededKeys(0), SeededKeys(1)
    knows = {}
    for who in Adversary:
        keys = HeldKeys(who, held, fresh, frozenset([2]) if who is Adversary.CLIENT else frozenset())
        pairs = {
            "public": (keys.public(), held.public()),
            "members": (keys.members(), held.members()),
            "server": (keys.client(1), held.client(1)),
            "peer": (keys.peer((1, 2)), held.peer((1, 2))),
            "private": (keys.private(1), held.private(1)),
            "own": (keys.private(2) + keys.client(2), held.private(2) + held.client(2)),
        }
        knows[who] = {name for name, (found, own) in pairs.items() if found == own}
    assert knows[Adversary.OUTSIDER] == knows[Adversary.EAVESDROPPER] == {"public"}
    assert knows[Adversary.SERVER] == knows[Adversary.SECAGG_SERVER] == {"public", "members", "server"}
    assert knows[Adversary.CLIENT] == {"public", "members", "peer", "own"}


def test_a_pair_follows_the_selection_only_for_whoever_knows_it():
    """CSGM leaves alike what is not sent; an outsider does not know what that is."""
    mechanism = CSGM(1.0, 1.0, 0.5)
    matches = {}
    for level in (Adversary.OUTSIDER, Adversary.CLIENT):
        bench = Bench(AuditCase(mechanism), 0, (512, 509), level=level)
        played = bench.play(0, 0)
        sent = played.row(0).numpy() != 0
        matches[level] = float((sent == (played.labels >= 0)).mean())
    assert matches[Adversary.CLIENT] == 1.0 and 0.4 < matches[Adversary.OUTSIDER] < 0.6


def test_silent_clients_send_nothing_and_are_never_the_victim():
    bench = Bench(AuditCase(LayeredGaussian(1.0, 1.0), num_dropped=1), 0, (5, 2), num_clients=3)
    played = [bench.play(round, 0) for round in range(8)]
    assert {p.victim for p in played} == {0, 1} and all(len(p.symbols) == 2 for p in played)
    assert np.allclose(played[0].released(), played[0].honest_sum() + played[0].decoded([1]), atol=0.1)


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
    bench = Bench(AuditCase(mechanism), 0, (512, 509))
    assert all(played.context.round > 1 << 39 for played in bench.calibration(3))
    assert len(bench.calibration(3)) == 3
