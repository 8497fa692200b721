"""A federation behind secure aggregation: the same weights, other bits, and rounds that are given up."""

from functools import partial

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.secagg import Aggregation, Stage, expected_traffic
from lightning_fedq.secagg.messages import FRAME_BYTES
from tests.digits_run import Classifier, Digits, make_trainer, weights_of

CLIENTS, DIM = 8, 20
NOISY = fedq.DistributedDiscreteGaussian(1.0, 0.1, 0.01, max_dropped_clients=3)


def run(secagg, *others, **settings):
    """A short run on digits: the callback and the weights at the end."""
    values = {"mechanism": fedq.LDPQ(1.0), "dropout_probability": 0.2, "seed": 0, "clients_per_step": 4}
    federated = fedq.Federated(num_clients=CLIENTS, secure_aggregation=secagg, **{**values, **settings})
    model = Classifier()
    make_trainer(federated, *others, max_epochs=3).fit(model, datamodule=Digits(160))
    return federated, weights_of(model)


def engine_of(mechanism, secagg, dropout_probability=0.0, **options):
    return RoundEngine(
        mechanism,
        RoundPlanner(CLIENTS, 3, dropout_probability=dropout_probability),
        SeededKeys(3),
        torch.linspace(-0.5, 0.5, DIM),
        (12, 8),
        fedq.AdaptiveRange(),
        secure_sums=None if secagg is None else partial(Aggregation, secagg),
        **options,
    )


def answer(engine, clients, stack=3):
    for start in range(0, len(clients), stack):
        part = clients[start : start + stack]
        generators = (torch.Generator().manual_seed(client) for client in part)
        engine.receive(part, torch.stack([0.4 * torch.randn(DIM, generator=g) for g in generators]))


# ---- the same model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients_per_step", [1, 4])
@pytest.mark.parametrize("active", [False, True])
def test_a_masked_run_ends_with_the_same_weights(active, clients_per_step):
    settings = {"clients_per_step": clients_per_step, "dropout_probability": 0.1, "seed": 2}
    plain, expected = run(None, **settings)
    masked, weights = run(fedq.SecAgg(active=active), **settings)
    assert torch.equal(weights, expected)
    assert sum(record.num_dropped for record in masked.records) > 0
    for record, other in zip(masked.records, plain.records, strict=True):
        assert (record.mse, record.cosine, record.radius_max) == (other.mse, other.cosine, other.radius_max)
        assert not record.aborted and record.num_received == other.num_received
        assert record.uplink_bits > other.uplink_bits and record.downlink_bits > other.downlink_bits


@pytest.mark.parametrize("run", ["masked", "counted"])
@pytest.mark.parametrize(
    "mechanism",
    [fedq.LDPQ(1.0), fedq.CorBin(1.0), fedq.AggregateGaussian(1.0, 0.1), fedq.IrwinHall(1.0, 0.1), NOISY],
    ids=repr,
)
def test_every_kind_of_sum_gives_the_same_weights(mechanism, run):
    """Also where an absent client counts as zeros, scales are public, or sums are modular."""
    engines = [engine_of(mechanism, secagg, 0.2) for secagg in (None, fedq.SecAgg(simulation=run))]
    dropped = 0
    for _ in range(3):
        for engine in engines:
            answer(engine, engine.start().survivors)
            record = engine.finish()
            assert not record.aborted
        dropped += record.num_dropped
        assert torch.equal(engines[0].weights, engines[1].weights)
        assert torch.equal(engines[0].ranges.radius, engines[1].ranges.radius)
    assert dropped > 0


def test_the_bits_are_those_of_the_protocol():
    federated, _ = run(fedq.SecAgg())
    engine = federated.engine
    assert engine is not None
    plan = engine.planner.plan(0, engine.mechanism)
    rand, context = PublicRandomness(engine.keys, 0), engine.context(plan)
    layout = fedq.SecAgg().layout(engine.mechanism, context, rand)
    terms = fedq.SecAgg().terms(engine.keys.public(), 0, 0, plan.cohort, layout, num_clients=CLIENTS)
    expected = expected_traffic(terms, len(plan.survivors))
    record, dim = federated.records[0], engine.weights.numel()
    assert record.uplink_bits == expected.uplink_bits
    model_bits = CLIENTS * (32 * dim + 64 * len(engine.segments))
    assert record.downlink_bits == model_bits + expected.downlink_bits
    assert expected.uplink[Stage.MASK] >= 4 * dim * record.num_received  # 8 clients of one bit sum to 4 bits
    assert engine.total_uplink_bits == sum(record.uplink_bits for record in federated.records)
    # the masked updates themselves: one frame and four bits a parameter of every client that answered
    framed = record.num_received * 8 * FRAME_BYTES
    assert record.uplink_bits - record.protocol_bits == framed + record.num_received * 8 * layout.num_bytes
    assert run(None)[0].records[0].protocol_bits == 0


def test_liars_hide_behind_the_masks():
    """Their lies are in the sum like anybody's updates: nothing can filter them, nothing breaks."""
    liars = partial(fedq.ByzantineClients, 0.25, "inverted")
    masked, weights = run(fedq.SecAgg(), liars())
    assert torch.equal(weights, run(None, liars())[1])
    assert not any(record.aborted for record in masked.records)


# ---- rounds that are given up ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["masked", "counted"])
def test_too_many_dropouts_abort_the_round_and_the_run_goes_on(mode):
    engine, seen = engine_of(fedq.LDPQ(1.0), fedq.SecAgg(simulation=mode), 0.45), set()
    start = torch.linspace(-0.5, 0.5, DIM)
    for round in range(6):
        before, plan = engine.weights, engine.start()
        answer(engine, plan.survivors)
        record = engine.finish()
        seen.add(bool(record.aborted))
        assert bool(record.aborted) == (len(plan.survivors) < 5)
        assert torch.equal(engine.weights, before) == bool(record.aborted)
        assert engine.ledger.charges.tolist() == [round + 1] * CLIENTS  # charged, aborted or not
        if record.aborted:
            assert f"5 clients are needed, {len(plan.survivors)} are left" in record.aborted
            assert record.num_received == len(plan.survivors)
        assert record.uplink_bits > 8 * 8 * 64 + 4 * DIM * record.num_received  # keys and shares, too
    assert seen == {True, False} and engine.round == 6
    assert not torch.equal(engine.weights, start)


def test_an_aborted_round_of_a_run_warns_is_charged_and_logged():
    with pytest.warns(UserWarning, match=r"Round \d was aborted, so the model is unchanged: \[masked input"):
        federated, _ = run(fedq.SecAgg(threshold=8))
    aborted = [record for record in federated.records if record.aborted]
    assert aborted and len(federated.records) == 3
    assert all(record.metrics()["aborted"] == 1 for record in aborted)
    assert federated.engine is not None and federated.engine.ledger.charges.tolist() == [3] * CLIENTS


def test_clients_that_fall_silent_unannounced_abort_the_round_at_its_end():
    bits = []
    for mode in ("masked", "counted"):
        engine = engine_of(fedq.LDPQ(1.0), fedq.SecAgg(simulation=mode))
        before = engine.weights
        answer(engine, engine.start().survivors[:4])
        record = engine.finish()
        assert "5 clients are needed, 4 are left" in record.aborted and record.num_received == 4
        assert torch.equal(engine.weights, before) and engine.ledger.max_charges == 1
        bits.append((record.uplink_bits, record.downlink_bits))
    assert bits[0] == bits[1]  # what was sent was sent: keys, shares, four masked inputs
    assert bits[0][0] > 8 * 4 * DIM


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_client_that_is_not_finite_counts_as_zero_behind_the_masks(bad):
    engines, records = [engine_of(fedq.LDPQ(1.0), fedq.SecAgg()) for _ in range(2)], []
    for engine, value in zip(engines, (bad, 0.0), strict=True):
        updates = torch.linspace(-0.5, 0.5, CLIENTS * DIM).reshape(CLIENTS, DIM)
        updates[3] = 0.0
        updates[3, 5] = value
        engine.receive(sorted(engine.start().survivors), updates)
        records.append(engine.finish())
    assert torch.equal(engines[0].weights, engines[1].weights)
    assert [record.non_finite_clients for record in records] == [(3,), ()]
    assert records[0].uplink_bits == records[1].uplink_bits


class OutOfRange(fedq.LDPQ):
    """Sends a symbol that it said it never would."""

    def encode(self, update, context, rand):
        message = super().encode(update, context, rand)
        message.symbols[0, 0] = 3
        return message


def test_a_symbol_out_of_range_aborts_the_round():
    engine = engine_of(OutOfRange(1.0), fedq.SecAgg())
    before, plan = engine.weights, engine.start()
    answer(engine, plan.survivors)
    record = engine.finish()
    assert "symbols must lie in [0, 1]" in record.aborted and torch.equal(engine.weights, before)
    assert engine.ledger.max_charges == 1


@pytest.mark.parametrize("secagg", [None, fedq.SecAgg()])
def test_noise_of_too_few_clients_is_not_released(secagg):
    """DDG counts on all but `max_dropped_clients` clients' noise: with fewer the sum is not even unmasked."""
    engine = engine_of(fedq.DistributedDiscreteGaussian(1.0, 0.1, 0.01, max_dropped_clients=1), secagg, 0.2)
    outcomes = set()
    for _ in range(6):
        before, plan = engine.weights, engine.start()
        answer(engine, plan.survivors)
        record = engine.finish()
        outcomes.add(bool(record.aborted))
        assert bool(record.aborted) == (len(plan.dropped) > 1)
        assert torch.equal(engine.weights, before) == bool(record.aborted)
        if record.aborted and len(plan.survivors) >= 5:
            assert f"{len(plan.dropped)} clients did not answer, but the claims of" in record.aborted
            assert record.aborted.endswith("allow 1")
    assert outcomes == {True, False} and engine.ledger.charges.tolist() == [6] * CLIENTS


def test_an_abandoned_round_is_a_new_attempt_with_new_masks():
    engines = [engine_of(fedq.LDPQ(1.0), secagg) for secagg in (None, fedq.SecAgg())]
    for engine in engines:
        answer(engine, engine.start().survivors[:3])
        engine.abandon()
        answer(engine, engine.start().survivors)
        assert not engine.finish().aborted
        assert engine.ledger.max_charges == 2
    assert torch.equal(engines[0].weights, engines[1].weights)


# ---- refusals -------------------------------------------------------------------------------------------


def test_weights_are_refused():
    with pytest.raises(ValueError, match="Client weights are impossible"):
        engine_of(fedq.LDPQ(1.0), fedq.SecAgg(), client_weights=torch.ones(CLIENTS))


def test_a_cohort_that_does_not_suit_is_refused():
    with pytest.raises(ValueError, match="needs a cohort of 2 or more to hide in, got 1"):
        fedq.Federated(fedq.LDPQ(1.0), CLIENTS, cohort=1, secure_aggregation=fedq.SecAgg())
    with pytest.raises(ValueError, match=r"threshold must be in \[5, 8\]"):
        fedq.Federated(fedq.LDPQ(1.0), CLIENTS, secure_aggregation=fedq.SecAgg(threshold=3))


def test_a_modulus_that_wraps_is_refused_before_the_first_round():
    federated = fedq.Federated(fedq.LDPQ(1.0), CLIENTS, seed=0, secure_aggregation=fedq.SecAgg(modulus=4))
    with pytest.raises(ValueError, match="modulus"):
        make_trainer(federated).fit(Classifier(), datamodule=Digits(160))
    assert federated.engine is None and federated.ledger.max_charges == 0
