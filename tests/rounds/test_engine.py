import copy
import io
import math

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import CPA, LDPQ, FedAvg, RotatedAxes
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange, FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from tests.one_round import make_context

DIM, SEGMENTS = 12, (8, 4)


def make_engine(mechanism=None, num_clients=5, ranges=None, planner=None, seed=3, **options):
    weights = torch.linspace(-0.5, 0.5, DIM)
    planner, keys = planner or RoundPlanner(num_clients, seed), SeededKeys(seed)
    mechanism, ranges = mechanism or fedq.CorBin(1.0), ranges or fedq.FixedRange(1.0)
    return RoundEngine(mechanism, planner, keys, weights, SEGMENTS, ranges, **options)


def update_of(client, round=0):
    return 0.4 * torch.randn(DIM, generator=torch.Generator().manual_seed(100 * round + client))


def run_round(engine, order=None, stack=1, updates=update_of):
    plan = engine.start()
    order = list(order or plan.survivors)
    for start in range(0, len(order), stack):
        clients = order[start : start + stack]
        engine.receive(clients, torch.stack([updates(c, plan.round) for c in clients]))
    return engine.finish()


def test_fedavg_is_the_mean():
    engine, start = make_engine(fedq.FedAvg()), torch.linspace(-0.5, 0.5, DIM)
    record = run_round(engine)
    mean = torch.stack([update_of(c) for c in range(5)]).mean(0)
    torch.testing.assert_close(engine.weights, start + mean)
    assert record.num_received == record.cohort_size == 5
    assert record.mse < 1e-14
    assert record.cosine == pytest.approx(1.0)
    assert record.update_norm == pytest.approx(mean.norm().item(), rel=1e-5)


def test_records_count_bits():
    engine = make_engine(num_clients=5)
    record = run_round(engine)
    assert record.uplink_bits == 5 * DIM
    assert record.downlink_bits == 5 * (32 * DIM + 2 * 64)
    assert record.setup_bits == 5 * 256
    assert run_round(engine).setup_bits == 0
    assert engine.total_uplink_bits == 10 * DIM
    names = {"uplink_bits", "sim_mse", "sim_snr_db", "sim_num_non_finite", "radius_max"}
    assert set(record.metrics()) >= names
    assert all(isinstance(value, int | float) for value in record.metrics().values())


@pytest.mark.parametrize("mechanism", [fedq.LDPQ(1.0), fedq.CorBin(1.0), fedq.GaussianNoise(2.0, 1.0)])
def test_neither_the_stack_size_nor_the_order_of_arrival_matters(mechanism):
    reference = make_engine(mechanism, 7)
    run_round(reference)
    for order, stack in ((None, 7), (None, 3), ([6, 1, 0, 3, 5, 2, 4], 2)):
        engine = make_engine(mechanism, 7)
        run_round(engine, order, stack)
        assert torch.equal(engine.weights, reference.weights)


@pytest.mark.parametrize(
    "mechanism", [fedq.LayeredGaussian(8.0, 0.1), fedq.AggregateGaussian(8.0, 0.1), fedq.SIGM(1.0, 2.0)]
)
@pytest.mark.parametrize("dropped", [0.0, 0.4])
def test_a_sum_of_floats_is_rounded_once_before_it_is_released(mechanism, dropped):
    # where float64 sums are 1e-16 of a grid's step apart, whatever the stacks, the released mean is the same
    def engine():
        planner = RoundPlanner(7, 0, dropout_probability=dropped)
        return make_engine(mechanism, 7, planner=planner)

    reference = engine()
    record = run_round(reference)
    assert dropped == 0.0 or record.num_dropped > 0
    grid = mechanism.grid(make_context(mechanism, range(7), (DIM,)))
    total = (reference.weights - torch.linspace(-0.5, 0.5, DIM)).double() * record.num_received
    assert ((total / grid).round() - total / grid).abs().max() < 1e-4  # float32 weights
    assert total.abs().max() > 10 * grid
    for stack in (2, 3, 7):
        other = engine()
        run_round(other, None, stack)
        assert torch.equal(other.weights, reference.weights)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e60, 1e300])
@pytest.mark.parametrize("target", ["updates", "weights"])
@pytest.mark.parametrize(
    "mechanism", [fedq.CorBin(1.0), fedq.FedAvg(), fedq.GaussianNoise(1.0, 1.0), fedq.RotatedCoins(1.0, 1.0)]
)
def test_a_client_that_is_not_finite_counts_as_zero_and_is_named(mechanism, target, bad):
    """So does a number of float64 that float32 can't hold."""
    kind = torch.float64 if math.isfinite(bad) else torch.float32

    def poisoned(client, round):
        update = update_of(client, round).to(kind)
        update[5] = bad if client == 2 else update[5]
        return update

    def zeroed(client, round):
        return update_of(client, round).to(kind) * (client != 2)

    engine, reference = make_engine(mechanism, target=target), make_engine(mechanism, target=target)
    record = run_round(engine, stack=5, updates=poisoned)
    clean = run_round(reference, stack=5, updates=zeroed)
    assert torch.equal(engine.weights, reference.weights)
    assert record.non_finite_clients == (2,)
    assert record.metrics()["sim_num_non_finite"] == 1
    assert clean.non_finite_clients == ()
    assert record.mse == clean.mse


def test_large_finite_updates_are_not_taken_for_infinite_ones():
    engine = make_engine(num_clients=1)
    engine.start()
    engine.receive([0], torch.full((1, DIM), 3e38))
    assert engine.finish().non_finite_clients == ()
    assert bool(torch.isfinite(engine.weights).all())


def test_a_round_without_answers_leaves_the_model_and_is_recorded():
    engine = make_engine(num_clients=4)
    before, radius = engine.weights.clone(), engine.ranges.radius.clone()
    engine.start()
    record = engine.finish()
    assert torch.equal(engine.weights, before)
    assert torch.equal(engine.ranges.radius, radius)
    assert (record.num_received, record.cohort_size, record.uplink_bits) == (0, 4, 0)
    assert engine.round == 1


def test_dropouts_are_missing_from_the_mean():
    planner = RoundPlanner(6, 5, dropout_probability=0.5)
    engine = make_engine(fedq.FedAvg(), planner=planner)
    survivors = planner.plan(0, fedq.FedAvg()).survivors
    assert 0 < len(survivors) < 6
    record = run_round(engine)
    mean = torch.stack([update_of(c) for c in survivors]).mean(0)
    torch.testing.assert_close(engine.weights, torch.linspace(-0.5, 0.5, DIM) + mean)
    assert record.num_dropped == 6 - len(survivors)
    assert record.num_received == len(survivors)


def test_a_client_that_the_plan_kept_may_still_vanish():
    engine = make_engine(fedq.FedAvg(), 3)
    engine.start()
    engine.receive([1], update_of(1)[None])
    assert engine.finish().num_received == 1
    torch.testing.assert_close(engine.weights, torch.linspace(-0.5, 0.5, DIM) + update_of(1))


def test_the_weights_themselves_can_be_quantised():
    """FedAvg: the model becomes the client's weights; LDP-FL: it stays within alpha radii of the centre."""
    engine = make_engine(fedq.FedAvg(), 1, fedq.PreviousMinMax(), target="weights")
    run_round(engine)
    torch.testing.assert_close(engine.weights, torch.linspace(-0.5, 0.5, DIM) + update_of(0))
    mechanism = fedq.LDPQ(1.0)
    engine = make_engine(mechanism, 3, fedq.PreviousMinMax(margin=1.0), target="weights")
    ranges = engine.ranges
    run_round(engine)
    reach = engine._context.expand(ranges.radius) * mechanism.coin.scale
    inside = (engine.weights.double() - engine._context.expand(ranges.center)).abs()
    assert bool((inside <= reach * (1 + 1e-6)).all())


def test_smoothing_moves_part_of_the_way():
    whole, part = make_engine(), make_engine(server_lr=0.25)
    start = whole.weights.clone()
    run_round(whole)
    run_round(part)
    torch.testing.assert_close(part.weights - start, 0.25 * (whole.weights - start))


def test_sgd_with_unit_rate_is_no_server_optimiser():
    plain, sgd = make_engine(), make_engine(server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    for _ in range(2):
        run_round(plain)
        run_round(sgd)
    torch.testing.assert_close(sgd.weights, plain.weights)


def test_the_server_optimiser_keeps_its_momentum():
    engine = make_engine(fedq.FedAvg(), server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5))
    constant = lambda client, round: torch.ones(DIM)  # noqa: E731
    start = engine.weights.clone()
    run_round(engine, updates=constant)
    run_round(engine, updates=constant)
    torch.testing.assert_close(engine.weights - start, torch.full((DIM,), 1.0 + 1.5))


@pytest.mark.parametrize("mechanism", [fedq.FedAvg(), fedq.GaussianNoise(9.0, 1e-5)])
def test_a_weighted_mean(mechanism):
    weights = torch.tensor([1.0, 2.0, 0.5, 4.0, 1.0])
    engine = make_engine(mechanism, client_weights=weights)
    record = run_round(engine, stack=2)
    rows = torch.stack([update_of(c) for c in range(5)])
    expected = (rows * weights[:, None]).sum(0) / weights.sum()
    torch.testing.assert_close(engine.weights - torch.linspace(-0.5, 0.5, DIM), expected, atol=2e-3, rtol=0)
    assert record.mse < 1e-6


def test_the_noise_bound_knows_who_answered_and_how_much_they_weigh():
    engine = make_engine(fedq.LDPQ(1.0), 4, client_weights=torch.tensor([3.0, 1.0, 1.0, 1.0]))
    engine.start()
    for client in (0, 1):
        engine.receive([client], update_of(client)[None])
    bound = engine._sum.noise_variance()
    alone = engine.mechanism.noise_variance(engine._context, [0])
    torch.testing.assert_close(bound, alone * (9 + 1) / 16)


def test_diagnostics_can_be_left_out():
    record = run_round(make_engine(diagnostics=False))
    assert math.isnan(record.mse)
    assert math.isnan(record.snr_db)
    assert record.update_norm > 0


def test_the_error_of_many_rounds_is_the_closed_form():
    """Mean of mse over 300 rounds of LDP-FL with zero updates: r^2 alpha^2 / n, within 5 standard errors."""
    mechanism = fedq.LDPQ(1.0)
    engine = make_engine(mechanism, 4)
    zero = lambda client, round: torch.zeros(DIM)  # noqa: E731
    errors = torch.tensor([run_round(engine, stack=4, updates=zero).mse for _ in range(300)])
    expected = mechanism.coin.scale**2 / 4
    assert abs(errors.mean().item() - expected) < 5 * errors.std().item() / math.sqrt(300)


def test_clip_rate_counts_coordinates_outside():
    engine = make_engine(num_clients=2, ranges=fedq.FixedRange(0.5))
    half = torch.cat([torch.ones(DIM // 2), torch.zeros(DIM // 2)])
    assert run_round(engine, updates=lambda c, r: half).clip_rate == 0.5


def test_wide_symbols_do_not_overflow_the_sum():
    """Three clients at 25 bits: the accumulator of 32-bit symbols has 64 bits."""
    engine = make_engine(fedq.GaussianNoise(1.0, 1e-6), 3)
    run_round(engine)
    assert engine._sum.integer_sum.dtype == torch.int64


# ---- misuse -----------------------------------------------------------------------------------------


def test_receive_and_finish_need_an_open_round():
    engine = make_engine()
    with pytest.raises(RuntimeError, match=r"No round is open. Call start\(\) first"):
        engine.finish()
    with pytest.raises(RuntimeError, match="No round is open"):
        engine.receive([0], torch.zeros(1, DIM))


def test_answers_are_expected_once_and_in_shape():
    engine = make_engine(planner=RoundPlanner(5, 0, fedq.FixedSize(3)))
    plan = engine.start()
    client, stranger = plan.survivors[0], next(c for c in range(5) if c not in plan.cohort)
    engine.receive([client], torch.zeros(1, DIM))
    for clients in ([client], [stranger], [plan.survivors[1]] * 2):
        with pytest.raises(ValueError, match="not expected, or answered twice"):
            engine.receive(clients, torch.zeros(len(clients), DIM))
    with pytest.raises(ValueError, match=r"updates must have shape \(1, 12\), got \(1, 11\)"):
        engine.receive([plan.survivors[1]], torch.zeros(1, DIM - 1))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"target": "gradients"}, "target must be 'updates' or 'weights', got 'gradients'"),
        ({"server_lr": 0.0}, r"server_lr must be in \(0, 1\], got 0.0"),
        ({"server_lr": math.nan}, r"server_lr must be in \(0, 1\], got nan"),
        ({"client_weights": torch.ones(4)}, r"shape \(5,\), one weight per client, got \(4,\)"),
        ({"client_weights": torch.tensor([1, 1, 1, 1, 0.0])}, "client_weights must be > 0 and finite"),
    ],
)
def test_senseless_engines_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        make_engine(**options)


def test_segments_must_cover_the_model():
    planner, keys = RoundPlanner(1, 0), SeededKeys(0)
    with pytest.raises(ValueError, match="segments sum to 9, expected 12 parameters"):
        RoundEngine(fedq.FedAvg(), planner, keys, torch.zeros(12), (9,), fedq.FixedRange(1.0))


# ---- checkpoints ------------------------------------------------------------------------------------


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


@pytest.mark.parametrize("options", [{}, {"server_optimizer": adam, "server_lr": 0.5}, {"target": "weights"}])
def test_a_resumed_run_ends_with_the_same_bits(options):
    whole, first, second = (make_engine(ranges=fedq.AdaptiveRange(), **options) for _ in range(3))
    for _ in range(4):
        run_round(whole)
    for _ in range(2):
        run_round(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        run_round(second)
    assert torch.equal(second.weights, whole.weights)
    assert torch.equal(second.ranges.radius, whole.ranges.radius)
    assert second.total_uplink_bits == whole.total_uplink_bits
    assert second.round == 4


def test_a_state_is_a_snapshot():
    """What is kept in memory (the best model so far) does not change when training goes on."""
    engine = make_engine(server_optimizer=adam)
    run_round(engine)
    state = engine.state_dict()
    kept = copy.deepcopy(state)
    run_round(engine)
    assert torch.equal(state["weights"], kept["weights"])
    moments = [s["optimizer"]["state"][0]["exp_avg"] for s in (state, kept)]
    assert torch.equal(*moments)
    engine.load_state_dict(state)
    run_round(engine)
    assert torch.equal(*[s["optimizer"]["state"][0]["exp_avg"] for s in (state, kept)])


def test_an_open_round_is_repeated_with_fresh_streams():
    engine, resumed = make_engine(fedq.LDPQ(1.0)), make_engine(fedq.LDPQ(1.0))
    plan = engine.start()
    resumed.load_state_dict(engine.state_dict())
    assert resumed.attempt == 1
    assert resumed.start() == plan
    assert resumed._context.attempt == 1
    engine.abandon()
    assert engine.attempt == 1
    engine.abandon()
    assert engine.attempt == 1


def test_a_repeated_round_draws_other_coins():
    first, second = make_engine(fedq.LDPQ(1.0)), make_engine(fedq.LDPQ(1.0))
    second.start()
    second.abandon()
    run_round(first)
    run_round(second)
    assert not torch.equal(first.weights, second.weights)
    assert second.attempt == 0


def test_another_models_state_is_refused():
    engine, other = make_engine(), make_engine(server_optimizer=adam)
    state = engine.state_dict()
    with pytest.raises(ValueError, match="The state has 3 weights in 2 segments, the model 12 in 2"):
        engine.load_state_dict({**state, "weights": torch.zeros(3)})
    for target, source in ((engine, other), (other, engine)):
        with pytest.raises(ValueError, match=r"Only one of .* has a server_optimizer"):
            target.load_state_dict(source.state_dict())


# ---- what a simulation may look at and change -------------------------------------------------------


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])])
def test_the_exact_mean_is_that_of_the_encoded_updates(weights):
    engine = make_engine(fedq.LDPQ(1.0), client_weights=weights)
    assert engine.exact_mean is None
    plan = engine.start()
    assert engine.exact_mean is None
    rows = torch.stack([update_of(c) for c in plan.survivors])
    engine.receive(plan.survivors, rows.clone())
    engine.finish()
    shares = torch.ones(5) if weights is None else weights[list(plan.survivors)]
    torch.testing.assert_close(engine.exact_mean, shares @ rows / shares.sum())
    quiet = make_engine(fedq.LDPQ(1.0), diagnostics=False)
    run_round(quiet)
    assert quiet.exact_mean is None


def test_a_transform_sees_every_update_before_it_is_encoded():
    """With FedAvg the model shows it; a client's own memory is the point of the list of clients."""
    kept = {}

    def momentum(clients, updates):
        rows = [updates[i] + 0.5 * kept.get(c, 0.0) for i, c in enumerate(clients)]
        kept.update(zip(clients, rows, strict=True))
        return torch.stack(rows)

    engine = make_engine(fedq.FedAvg())
    engine.transform, before = momentum, engine.weights.clone()
    run_round(engine, stack=2, updates=lambda c, r: update_of(c))
    run_round(engine, stack=3, updates=lambda c, r: update_of(c))
    mean = torch.stack([update_of(c) for c in range(5)]).mean(0)
    torch.testing.assert_close(engine.exact_mean, 1.5 * mean)
    torch.testing.assert_close(engine.weights, before + 2.5 * mean)


def test_a_transform_keeps_the_shape():
    engine = make_engine(fedq.FedAvg())
    engine.transform = lambda clients, updates: updates[:, 1:]
    plan = engine.start()
    with pytest.raises(ValueError, match=r"transformed updates must have shape \(1, 12\), got \(1, 11\)"):
        engine.receive(plan.survivors[:1], torch.zeros(1, DIM))


def test_the_noise_bound_of_a_weighted_mean_is_made_of_each_client_s():
    """Clients with their own epsilon: the first one's noise is nobody else's."""
    epsilons, weights = (0.5, 4.0, 0.5, 4.0, 0.5), torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0])
    engine = make_engine(fedq.CPA(epsilons, epsilon_scope="bit"), client_weights=weights)
    run_round(engine)
    ones = [1 / math.tanh(e / 2) ** 2 - 2 / 3 for e in epsilons]
    expected = sum((w / 9) ** 2 * one for w, one in zip(weights.tolist(), ones, strict=True))
    expected = torch.full((2,), expected).double()
    torch.testing.assert_close(engine._sum.noise_variance(), expected, rtol=1e-6, atol=0)


# ---- the server when parameters join and leave ---------------------------------------------------------
def halves(client, round=0):
    return update_of(client, round)[:6]


def test_what_stays_keeps_weights_range_and_server_state():
    engine = make_engine(FedAvg(), ranges=AdaptiveRange(), server_optimizer=adam)
    run_round(engine)
    weights, ranges = engine.weights.clone(), engine.ranges
    moments = engine.state_dict()["optimizer"]["state"][0]
    engine.rearrange([torch.full((3,), 7.0), torch.zeros(4)], [None, 1], None)
    assert engine.segments == (3, 4)
    assert torch.equal(engine.weights, torch.cat([torch.full((3,), 7.0), weights[8:]]))
    assert engine.ranges.radius[1] == ranges.radius[1]
    state = engine.state_dict()["optimizer"]["state"][0]
    assert torch.equal(state["exp_avg"], torch.cat([torch.zeros(3), moments["exp_avg"][8:]]))
    assert state["step"] == moments["step"]
    record = run_round(engine, updates=lambda c, r: update_of(c, r)[:7])
    assert record.round == 1 and engine.weights.shape == (7,)


def test_a_round_that_somebody_has_answered_keeps_its_vector():
    engine = make_engine(FedAvg())
    engine.start()
    engine.rearrange([torch.zeros(6)], [None], None)  # nobody yet
    engine.receive([0], halves(0)[None])
    with pytest.raises(RuntimeError, match="can't change after a client has answered in the open round"):
        engine.rearrange([torch.zeros(3)], [None], None)


def test_every_charge_counts_the_longest_vector():
    engine = make_engine(LDPQ(1.0))
    run_round(engine)
    engine.rearrange([torch.zeros(6)], [None], None)
    run_round(engine, updates=halves)
    plan = engine.planner.plan(engine.round, engine.mechanism)
    assert engine.context(plan).dim == 6
    assert engine.charged_context(plan).dim == engine.ledger.dim == DIM
    again = make_engine(LDPQ(1.0))
    again.ledger.load_state_dict(engine.ledger.state_dict())
    assert again.ledger.dim == DIM


@pytest.mark.parametrize("mechanism", [RotatedAxes(0.5, 1.0), CPA(1.0, epsilon_scope="round")])
def test_no_length_covers_another_where_few_coordinates_cost_more(mechanism):
    engine = make_engine(mechanism)
    run_round(engine)
    words = f"needs one vector length for the whole run.*{DIM} coordinates became 6"
    with pytest.raises(ValueError, match=words):
        engine.rearrange([torch.zeros(6)], [None], None)
    planner, keys, ranges = engine.planner, engine.keys, FixedRange(1.0)
    other = RoundEngine(mechanism, planner, keys, torch.zeros(6), [6], ranges, ledger=engine.ledger)
    with pytest.raises(ValueError, match=rf"parameters = {DIM} \(here 6\)"):
        other.start()
    engine.rearrange([torch.zeros(DIM)], [None], None)
    run_round(engine)
