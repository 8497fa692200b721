"""What is released of noise that is handed on, when it begins anew, and how a user meets it."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_fedq import Cyclic, DisjointOnce
from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation
from lightning_fedq.callbacks import RunFolder
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.keys.randomness import RootKeys, SeededKeys
from lightning_fedq.mechanisms import BandedGaussian, HandedOnGaussian
from lightning_fedq.mechanisms.handed_on_gaussian import OWN, TAKEN_BACK, square_of_participations
from lightning_fedq.mechanisms.interface import HandOver
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.secagg import SecAgg
from tests.callbacks.test_participation import in_turn
from tests.digits_run import weights_of
from tests.mechanisms.test_banded_gaussian import Early, engine_of, largest_mu, play
from tests.mechanisms.test_handed_on_gaussian import noise_of, own_matrix, small
from tests.one_round import make_context
from tests.training.test_privacy_target import trained

Array = np.ndarray


# ---- what is released, and when it begins anew ----------------------------------------------------------


def turns(clients=12, size=4, **settings):
    return RoundPlanner(clients, 0, Cyclic(size), **settings)


def in_steps(engine, released):
    """What was released, rotated back to integer steps but for its rotation, which keeps covariances."""
    return released / (engine.mechanism.granularity * engine.mechanism.clip_norm)


def test_released_noise_has_the_covariance_of_the_matrix():
    mechanism, rounds, dim = small(), 5, 1 << 15
    engine = engine_of(mechanism, turns(), dim)
    released = np.stack([in_steps(engine, play(engine)) for _ in range(rounds)])
    g = own_matrix(np.ones(rounds))
    fresh = mechanism.fresh_std(make_context(mechanism, range(4), (dim,)))
    wanted = 4 * (mechanism.steps**2 * g @ g.T + (fresh**2 + 0.0) * np.eye(rounds))
    # 32,768 coordinates: an entry is off by 1/128 of the variances at one or 1.4 stds; six are allowed
    assert np.abs(np.cov(released) - wanted).max() < 0.05 * wanted.max()
    assert released.sum(0).var() == pytest.approx(wanted.sum(), rel=0.05)
    assert wanted.sum() < 0.27 * rounds * wanted[0, 0]


def test_a_model_of_a_hundred_rounds_has_the_noise_of_the_matrix():
    """Ten cohorts, zeros: root mean square over rounds, in units of the sensitivity, is 10.02, not 22.47."""
    mechanism, rounds = small(10, granularity=0.001, bits=24), 100
    engine = engine_of(mechanism, turns(100, 10), 1 << 10)
    models = np.cumsum([in_steps(engine, play(engine)) for _ in range(rounds)], 0)
    one = np.linalg.norm(np.linalg.inv(own_matrix(np.ones(rounds)))[:, ::10].sum(1))
    unit = math.sqrt(float(np.mean(models**2))) / (mechanism.steps * math.sqrt(10)) * one
    # 1,024 coordinates: the root is off by 2% at one standard deviation, as rounds share their noise
    assert unit == pytest.approx(10.017, rel=0.08)


def told(engine, rounds, client):
    """How well all that is released tells two updates of a client apart, and in how many rounds it was there.

    The square of the best linear test's mean at a sensitivity of one step.
    """
    mu, there = largest_mu(engine, rounds, client)
    step = engine.mechanism.granularity * engine.mechanism.clip_norm
    return (step * mu / 2) ** 2, there


def claimed(engine, size, charges):
    """The same square that is claimed of so many charges, of a sum of the shares of so many."""
    return square_of_participations(engine.mechanism.separation, charges) / (size * engine.mechanism.steps**2)


@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_releases_tell_what_is_claimed_and_no_more(chance):
    mechanism = small(max_dropped_clients=3)
    engine = engine_of(mechanism, turns(dropout_probability=chance), 1 << 15)
    there = min(len(engine.planner.plan(r, mechanism).survivors) for r in range(9))
    victim = engine.planner.cohort(0)[0]
    square, number = told(engine, 9, victim)
    assert number == 3 == int(engine.ledger.max_charges)
    assert square <= claimed(engine, there, number)
    if not chance:
        g, moved = own_matrix(np.ones(9)), np.tile([1.0, 0.0, 0.0], 3)
        fresh = mechanism.fresh_std(make_context(mechanism, range(4), (1 << 15,)))
        sigma = 4 * (mechanism.steps**2 * g @ g.T + fresh**2 * np.eye(9))
        assert square == pytest.approx(moved @ np.linalg.solve(sigma, moved), rel=0.05)
        assert square > 0.3 * claimed(engine, there, number)


def test_a_predecessor_that_was_silent_is_not_taken_back():
    mechanism = small(max_dropped_clients=3)
    engine = engine_of(mechanism, turns(dropout_probability=0.3), 16)
    for round in range(8):
        before = engine.planner.plan(round - 1, mechanism).survivors if round else ()
        plan = engine.start()
        handed_over = engine._context.hand_over
        assert handed_over is not None
        place = {client: i for i, client in enumerate(plan.cohort)}
        last = engine.planner.cohort(round - 1) if round else []
        assert {other for _, other in handed_over.before} == set(before)
        assert all(last[place[client]] == other for client, other in handed_over.before)
        assert [other for _, other in handed_over.after] == engine.planner.cohort(round + 1)
        engine.receive(plan.survivors, torch.zeros(len(plan.survivors), 16))
        engine.finish()


def test_what_dropouts_leave_in_a_model():
    """Share by share: a fifth of each stays, or all of it where its successor is silent."""
    mechanism, rounds, dim = small(max_dropped_clients=19), 30, 1 << 11
    engine = engine_of(mechanism, turns(60, 20, dropout_probability=0.2), dim)
    model = sum(in_steps(engine, play(engine)) for _ in range(rounds))
    plans = [engine.planner.plan(round, mechanism) for round in range(rounds + 1)]
    wanted = 0.0
    for round, plan in enumerate(plans[:-1]):
        after = dict(engine.planner.successors(round))
        for client in plan.survivors:
            taken = round + 1 < rounds and after[client] in plans[round + 1].survivors
            wanted += mechanism.share_std**2 * (OWN - TAKEN_BACK * taken) ** 2
        wanted += len(plan.survivors) * mechanism.fresh_std(engine.context(plan)) ** 2
    # 2,048 coordinates: the variance is off by 3% at one standard deviation
    assert np.var(model) == pytest.approx(wanted, rel=0.15)


def test_a_round_that_was_aborted_hands_nothing_on():
    engine = engine_of(small(), turns(), 16)
    play(engine)
    engine.start()
    engine.abort("for a test")
    engine.finish()
    engine.start()
    assert engine._context.hand_over == HandOver((0, 0), (), engine.planner.successors(2))


def test_where_somebody_is_early_the_noise_begins_anew():
    engine = engine_of(small(5), Early(4, 0, Cyclic(2)), 1 << 14)
    square, number = told(engine, 8, 0)
    assert number == 4 and engine._since is not None and engine._since[0] >= 6
    assert square <= 1.03 * claimed(engine, 2, number)


def test_a_client_that_is_early_is_caught(monkeypatch):
    """The plant: no new block, and everybody is there in every second round, of the five that are claimed."""
    monkeypatch.setattr(RoundEngine, "_has_early_client", lambda *_: False)
    engine = engine_of(small(50), Early(4, 0, Cyclic(2)), 1 << 14)
    square, number = told(engine, 16, 0)
    assert square > 1.2 * claimed(engine, 2, number)


def banded():
    return BandedGaussian(1.0, 1.0, 3), RoundPlanner(6, 0, Cyclic(2))


def handed_on(**settings):
    return small(max_dropped_clients=3), turns(**settings)


# of 20,000 numbers two that are independent correlate by 1/141 at one std, and six are allowed
@pytest.mark.parametrize("kind", [banded, handed_on])
def test_a_repeated_round_and_what_follows_begin_anew(kind):
    """A round is released, its checkpoint is put back, and it is repeated; false alarm 2e-8 together."""

    def made():
        mechanism, planner = kind()
        return engine_of(mechanism, planner, 20_000, RootKeys())

    def correlation(one, other):
        return np.corrcoef(one, other)[0, 1]

    engine, again = made(), made()
    play(engine)
    again.load_state_dict(engine.state_dict())
    first, second = ([play(one) for _ in range(3)] for one in (engine, again))
    assert again._since == (1, 0)
    assert all(abs(correlation(*pair)) < 0.0425 for pair in itertools.product(first, second))
    # in one process: an open round is given up, and the next attempt is the first of a new block
    engine.start()
    engine.abandon()
    released = play(engine)
    assert engine._since == (4, 1) and abs(correlation(released, first[-1])) < 0.0425
    assert correlation(released, play(engine)) < -0.3 and engine._since == (4, 1)


@pytest.mark.parametrize(
    "kind", [banded, lambda: handed_on(dropout_probability=0.2)], ids=["banded", "handed on"]
)
def test_a_seeded_engine_goes_on_in_its_block(kind):
    engine, again = (engine_of(*kind(), 64) for _ in range(2))
    play(engine)
    play(engine)
    again.load_state_dict(engine.state_dict())
    following = [play(engine) for _ in range(3)]
    assert all(np.array_equal(play(again), one) for one in following)
    assert again._since == (0, 0)


@pytest.mark.parametrize("kind", [banded, handed_on])
def test_a_vector_of_another_length_begins_a_block(kind):
    engine = engine_of(*kind(), 4)
    play(engine)
    engine.rearrange([torch.zeros(4), torch.zeros(3)], [0, None], None)
    assert len(play(engine)) == 7
    assert engine._since == (1, 0)


def test_the_last_disjoint_cohort_hands_on_to_nobody():
    planner = RoundPlanner(12, 0, DisjointOnce(4))
    engine = engine_of(small(), planner, 1 << 10)
    released = [play(engine) for _ in range(3)]
    assert np.corrcoef(released[1], released[2])[0, 1] < -0.3
    assert planner.successors(2) == ()


def test_a_block_ends_after_65536_rounds():
    mechanism, keys = small(), SeededKeys(1)
    pairs = {"before": ((0, 2), (1, 3)), "after": ((0, 4), (1, 5))}
    for round, taken in ((65535, True), (65536, False), (65537, True)):
        context = replace(
            make_context(mechanism, (0, 1), (16,), round=round), hand_over=HandOver((0, 0), **pairs)
        )
        alone = replace(context, hand_over=HandOver((0, 0), (), pairs["after"]))
        one, other = noise_of(mechanism, keys, context, 0), noise_of(mechanism, keys, alone, 0)
        assert np.array_equal(one, other) != taken


# ---- as a user meets it ----------------------------------------------------------------------------------


def federation(**settings):
    given = {"mechanism": small(5, bits=24), "privacy": None, "secure_aggregation": SecAgg()}
    return in_turn(**{**given, **settings})


def test_a_target_towards_the_server_sets_the_noise_for_the_turns_of_a_client(tmp_path):
    target, folder = PrivacyTarget(4.0, 1e-3, "secagg_server"), RunFolder("run", str(tmp_path))
    federated = federation(privacy=target)
    trained(federated, rounds=12, callbacks=[folder])
    assert federated.calibration is not None and federated.calibration.charges == 3
    assert 3.99 < federated.calibration.epsilon <= 4.0
    assert federated.ledger.max_charges == 3 and not any(r.aborted for r in federated.records)
    page = (tmp_path / "run" / "report.md").read_text()
    assert "each client's successor is dealt out once, before any data, one client to one client" in page
    assert "rounds are at least 5 apart" in page and "no error feedback" in page


@pytest.mark.filterwarnings("ignore:the keys come from a seed", "ignore:round .* was aborted")
def test_masks_and_dropouts_leave_the_weights_of_the_plain_sum():
    settings = {"seed": 1, "dropout_probability": 0.15, "mechanism": small(5, max_dropped_clients=1)}
    masked, plain = federation(**settings), federation(**settings, secure_aggregation=None)
    ends = []
    for federated in (masked, plain):
        torch.manual_seed(0)
        ends.append(weights_of(trained(federated, rounds=6).lightning_module))
    assert torch.equal(*ends)
    assert [r.num_received for r in masked.records] == [r.num_received for r in plain.records]
    assert {r.num_received for r in masked.records} > {4}
    assert masked.engine is not None and plain.engine is not None
    bits = [r.uplink_bits for r in plain.records if r.num_received == 4]
    assert set(bits) == {4 * 18 * padded_size(plain.engine.weights.numel())}  # a share costs no bit


def test_signs_that_change_every_round_would_not_cancel(monkeypatch):
    def correlation():
        engine = engine_of(small(), turns(), 1 << 12)
        return float(np.corrcoef(play(engine), play(engine))[0, 1])

    assert correlation() < -0.5
    fresh = HandedOnGaussian.__mro__[1]._words
    monkeypatch.setattr(HandedOnGaussian, "_words", fresh)
    assert abs(correlation()) < 0.1


def test_noise_cancels_in_a_plain_sum_only_so_others_are_refused():
    with pytest.raises(ValueError, match="leave the aggregator out"):
        federation(secure_aggregation=None, aggregator=RobustAggregation("median"))
