"""The exact-error family: laws of the error, dropouts, codes, claims, refusals."""

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.functional.exact_error.decompose import LEAST_SCALE_BITS
from lightning_fedq.functional.exact_error.dither import round_to_grid
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.aggregate_gaussian import AggregateGaussian
from lightning_fedq.mechanisms.bases.calibration import gaussian_noise_multiplier
from lightning_fedq.mechanisms.interface import Adversary, GaussianLoss, NonPrivate
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.mechanisms.irwin_hall import IrwinHall
from lightning_fedq.mechanisms.layered import LayeredGaussian
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.wire.range_coding import ConditionalRange
from reproductions.exact.formulas import conditional_entropy, irwin_hall_cdf
from tests.one_round import decode, encode, make_context

DIM = 60_000
GAUSSIAN = [
    LayeredGaussian(2.0, 0.7, entropy_code="elias"),
    LayeredGaussian(2.0, 0.7, entropy_code="elias", layering="shifted"),
    AggregateGaussian(2.0, 0.7, entropy_code="elias"),
]
EVERY = [*GAUSSIAN, IrwinHall(2.0, 0.7, entropy_code="elias")]


def inputs(kind, size, dim=DIM, norm=2.0):
    """Zero, all clients at the edge of the ball in one direction, or random inside it."""
    if kind == "zero":
        return torch.zeros(size, dim)
    if kind == "edge":
        return torch.full((size, dim), 0.999999 * norm / math.sqrt(dim))
    rows = torch.randn(size, dim, generator=torch.Generator().manual_seed(size))
    return rows * (0.9 * norm / rows.norm(dim=1, keepdim=True))


def errors(mechanism, size, kind, seed=0, dim=DIM):
    """Errors of the released sum in units of its std, with its grid smoothed over."""
    context, updates = make_context(mechanism, range(size), (dim,)), inputs(kind, size, dim)
    symbols = encode(mechanism, updates, context, seed=seed).symbols
    summed = decode(mechanism, symbols, context.cohort, context, seed)
    released = round_to_grid(summed, mechanism.grid(context))
    error = released - updates.double().sum(0)
    jitter = torch.rand(dim, generator=torch.Generator().manual_seed(1)).double() - 0.5
    spread = mechanism.clip_norm * mechanism.sigma(context) * size
    return ((error + mechanism.grid(context) * jitter) / spread).numpy()


@pytest.mark.parametrize("mechanism", GAUSSIAN, ids=repr)
@pytest.mark.parametrize(
    ("size", "kind"),
    [
        *itertools.product([1, 2, 3, 10], ["zero", "edge", "random"]),
        *(pytest.param(size, "random", marks=pytest.mark.slow) for size in (50, 1000)),
    ],
)
def test_the_mean_errs_exactly_as_a_gaussian(mechanism, size, kind):
    # false alarm 1e-4 a case, 42 cases
    assert stats.kstest(errors(mechanism, size, kind), "norm").pvalue > 1e-4


@pytest.mark.parametrize("size", [3, 10])
def test_laplace_by_the_aggregate_mechanism_and_irwin_hall_by_its_own(size):
    # false alarm 1e-4 a case
    laplace = errors(AggregateGaussian(2.0, 0.7, entropy_code="elias", error_law="laplace"), size, "random")
    assert stats.kstest(laplace, stats.laplace(scale=math.sqrt(0.5)).cdf).pvalue > 1e-4
    irwin_hall = errors(EVERY[-1], size, "random")
    assert stats.kstest(irwin_hall, lambda x: irwin_hall_cdf(x, size)).pvalue > 1e-4
    assert stats.kstest(errors(EVERY[-1], 3, "random"), "norm").pvalue < 1e-4


@pytest.mark.parametrize("mechanism", GAUSSIAN, ids=repr)
def test_the_error_does_not_depend_on_the_update(mechanism):
    # correlations of 60,000 independent pairs: 4.5 standard errors, false alarm 4e-5 together
    error, updates = errors(mechanism, 3, "random"), inputs("random", 3).sum(0).double().numpy()
    for statistic in (error, error**2, np.abs(error)):
        assert abs(np.corrcoef(statistic, updates)[0, 1]) < 4.5 / math.sqrt(DIM)


def engine_for(mechanism, clients, dim, seed):
    planner = RoundPlanner(clients, seed, dropout_probability=0.4)
    return RoundEngine(mechanism, planner, SeededKeys(seed), torch.zeros(dim), (dim,), FixedRange(1.0))


@pytest.mark.parametrize("mechanism", EVERY, ids=repr)
@pytest.mark.parametrize("stack", [1, 4])
def test_dropouts_leave_the_law_as_it_was(mechanism, stack):
    # false alarm 1e-4 a case; 40% of ten clients drop out after n was fixed
    engine = engine_for(mechanism, 10, DIM, 3)
    plan, updates = engine.start(), inputs("random", 10)
    survivors = list(plan.survivors)
    assert 3 <= len(survivors) <= 8
    for first in range(0, len(survivors), stack):
        part = survivors[first : first + stack]
        engine.receive(part, updates[part])
    engine.finish()
    context = make_context(mechanism, range(10), (DIM,))
    error = engine.weights.double() - updates[survivors].double().mean(0)
    jitter = torch.rand(DIM, generator=torch.Generator().manual_seed(2)).double() - 0.5
    spread = mechanism.clip_norm * mechanism.sigma(context) * 10 / len(survivors)
    error = (error + mechanism.grid(context) * jitter / len(survivors)).numpy() / spread
    law = (lambda x: irwin_hall_cdf(x, 10)) if isinstance(mechanism, IrwinHall) else "norm"
    assert stats.kstest(error, law).pvalue > 1e-4
    bound = mechanism.noise_variance(context, survivors).item()
    assert (error * spread).var() == pytest.approx(bound, rel=0.03)


def test_subtracting_the_survivors_dithers_only_would_be_wrong():
    mechanism = GAUSSIAN[2]
    context, updates = make_context(mechanism, range(10), (DIM,)), inputs("random", 10)
    symbols = encode(mechanism, updates, context).symbols[:6]
    naive = decode(mechanism, symbols, context.cohort[:6], context).double() - updates[:6].double().sum(0)
    spread = mechanism.clip_norm * mechanism.sigma(context) * 10
    assert stats.kstest((naive / spread).numpy(), "norm").pvalue < 1e-10


@pytest.mark.parametrize("layering", ["direct", "shifted"])
def test_a_message_costs_its_conditional_entropy(layering):
    # x uniform on 8 noise stds; the coder's Gaussian model costs less than log(2 pi e / 12) / 2 = 0.25 bits
    # more
    mechanism, dim = LayeredGaussian(1.0, 1e-3, layering=layering), 100_000
    context = make_context(mechanism, (0,), (dim,))
    half = 4.0 * mechanism.sigma(context)
    updates = (torch.rand(1, dim, generator=torch.Generator().manual_seed(0)) * 2 - 1) * half
    norm = float(updates.norm()) * 1.01
    mechanism = LayeredGaussian(norm, 1e-3 / norm, layering=layering)
    message = encode(mechanism, updates, context)
    exact = conditional_entropy(8.0, 1.0, "gaussian", layering)
    assert exact - 0.01 < message.num_bits / dim < exact + 0.15
    rand = PublicRandomness(SeededKeys(0), 0)
    code = mechanism.message_code(0, context, rand)
    assert isinstance(code, ConditionalRange)
    assert torch.equal(code.unpack(code.pack(message.symbols[0]), dim), message.symbols[0].long())


@pytest.mark.parametrize("mechanism", [AggregateGaussian(2.0, 0.05), IrwinHall(2.0, 0.05)], ids=repr)
def test_symbols_lie_in_the_declared_range(mechanism):
    context = make_context(mechanism, range(5), (400,))
    spikes = torch.zeros(5, 400)
    spikes[0], spikes[1, 3], spikes[2, 5], spikes[3, 7] = 0.1, 2.0, -2.0, 1e9
    symbols = encode(mechanism, spikes, context).symbols
    low, high = mechanism.symbol_range(context, PublicRandomness(SeededKeys(0), 0))
    assert bool((low <= symbols).all() and (symbols <= high).all())
    assert high.max() < 2**62 // 5


def test_updates_longer_than_the_bound_are_shortened_and_counted():
    mechanism, context = LayeredGaussian(1.0, 1e-4), make_context(LayeredGaussian(1.0, 1e-4), (0, 1), (100,))
    updates = torch.stack([torch.full((100,), 7.0), torch.full((100,), 0.05)])
    message = encode(mechanism, updates, context)
    assert message.num_clipped == 100
    decoded = decode(mechanism, message.symbols[:1], (0,), context)
    assert decoded == pytest.approx(np.full(100, 0.1), abs=2e-3)


@pytest.mark.parametrize("mechanism", EVERY, ids=repr)
def test_who_sees_what(mechanism):
    context = make_context(mechanism, range(9), (10,))
    losses = {claim.adversary: claim.loss for claim in mechanism.claims(context)}
    assert set(losses) == set(Adversary)
    blind = set() if isinstance(mechanism, IrwinHall) else {Adversary.OUTSIDER}
    if isinstance(mechanism, LayeredGaussian):
        blind.add(Adversary.CLIENT)
    for who, loss in losses.items():
        assert isinstance(loss, GaussianLoss if who in blind else NonPrivate), who
    if blind:
        assert losses[Adversary.OUTSIDER].noise_multiplier == 0.7
        assert "dither" in losses[Adversary.SERVER].reason
    if Adversary.CLIENT in blind:
        assert losses[Adversary.CLIENT].noise_multiplier == pytest.approx(0.7 * math.sqrt(8 / 9))


def test_a_lone_client_and_a_laplace_target_get_no_such_claim():
    alone = {c.adversary: c.loss for c in GAUSSIAN[0].claims(make_context(GAUSSIAN[0], (4,), (10,)))}
    assert isinstance(alone[Adversary.CLIENT], NonPrivate)
    laplace = AggregateGaussian(1.0, 1.0, error_law="laplace")
    claims = laplace.claims(make_context(laplace, range(3), (10,)))
    assert all(isinstance(claim.loss, NonPrivate) for claim in claims)


def test_the_outsiders_claim_holds_for_the_measured_noise():
    """Sensitivity and noise, both measured: two worlds that differ in one client, error std of the mean."""
    mechanism, size = GAUSSIAN[2], 5
    context = make_context(mechanism, range(size), (DIM,))
    updates = inputs("zero", size)
    updates[0, 0] = 1e6
    other = updates.clone()
    other[0, 0] = -1e6
    means = [
        decode(mechanism, encode(mechanism, u, context).symbols, context.cohort, context) / size
        for u in (updates, other)
    ]
    sensitivity = (means[0] - means[1]).norm().item()
    noise = means[0][1:].std().item()
    # 60,000 coordinates: 2% is 7 standard errors; one step of noise in coordinate 0
    assert sensitivity == pytest.approx(4.0 / size, abs=8 * noise)
    assert noise == pytest.approx(0.7 * 4.0 / size, rel=0.02)


@pytest.mark.parametrize("mechanism", GAUSSIAN, ids=repr)
def test_the_slack_is_stated_and_leaves_an_epsilon(mechanism):
    # 1e6 coordinates, 100 rounds, 100 clients: what floats may have done costs little
    claim = mechanism.claims(make_context(mechanism, range(100), (1_000_000,)))[-1]
    assert any("charged to epsilon and delta" in text for text in claim.assumptions)
    price = 100 * claim.slack.log_ratio, 100 * claim.slack.distance
    assert 0.0 < price[0] < 0.03
    assert 0.0 < price[1] < 1e-10
    multiplier = gaussian_noise_multiplier(8.0, 1e-5, 100)
    strict = spent(GaussianLoss(multiplier), 1e-5, rounds=100)
    charged = spent(GaussianLoss(multiplier), 1e-5, rounds=100, slack=claim.slack)
    assert strict.epsilon < charged.epsilon < strict.epsilon + 0.1
    assert "cover the sampler's error" in charged.method


def test_large_cohorts_with_little_noise_get_a_higher_cap():
    # figure 9 at n = 5,000: epsilon 10 under zero-out is 0.25 times the sensitivity under substitution
    mechanism, context = AggregateGaussian(10.0, 0.25), make_context(GAUSSIAN[2], range(5000), (20,))
    assert mechanism.least_scale_bits(context) == 44
    assert mechanism.law_error(context).log_ratio < 2.0**-24
    low, high = mechanism.symbol_range(context, PublicRandomness(SeededKeys(0), 0))
    assert 5000 * int((high - low).max()) < 2**63
    plenty = AggregateGaussian(10.0, 3.0)
    assert plenty.least_scale_bits(context) == 47
    assert plenty.law_error(context).log_ratio < mechanism.law_error(context).log_ratio
    assert mechanism.least_scale_bits(make_context(mechanism, range(100), (20,))) == LEAST_SCALE_BITS


def test_the_capped_error_is_still_gaussian():
    # 2^-40, the highest cap; false alarm 1e-4
    mechanism = AggregateGaussian(2.0, 2e-6, entropy_code="elias")
    context = make_context(mechanism, range(10), (DIM,))
    assert mechanism.least_scale_bits(context) == 40
    assert stats.kstest(errors(mechanism, 10, "random"), "norm").pvalue > 1e-4


GOLDEN = {
    # symbols of three clients, decoded sum, bitstream of the first client: heads of SHA-256, and bits in all
    LayeredGaussian(8.0, 0.05): ("fc4f730f1f", "ed1800f39f", "8ac0cfe927", 26440),
    LayeredGaussian(8.0, 0.001, layering="shifted"): ("eddadc7ba6", "46768f038b", "266aac153e", 608904),
    AggregateGaussian(8.0, 0.05): ("af4a440dd2", "ce30166621", "183d221063", 131312),
    AggregateGaussian(8.0, 0.0005, error_law="laplace"): ("7b91b2d692", "23c0bcbf40", "c1a93561e3", 1635928),
    IrwinHall(8.0, 0.05): ("6f128a680b", "327478470f", "42aa2efc8b", 19880),
}


@pytest.mark.parametrize("mechanism", GOLDEN, ids=repr)
@pytest.mark.parametrize("threads", [1, 2])
def test_golden_messages_whatever_the_number_of_threads(mechanism, threads):
    # 150,007 coordinates in three segments: ten chunks, so that two threads really share them
    context = make_context(mechanism, range(3), (100_000, 7, 50_000), radius=0.1)
    updates = 0.05 * torch.randn(3, context.dim, generator=torch.Generator().manual_seed(0))
    updates[:, 5000:9000] *= 100
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        message = encode(mechanism, updates, context)
        decoded = decode(mechanism, message.symbols, context.cohort, context)
    finally:
        torch.set_num_threads(before)
    code = mechanism.message_code(0, context, PublicRandomness(SeededKeys(0), 0))
    parts = (message.symbols.numpy().tobytes(), decoded.numpy().tobytes(), code.pack(message.symbols[0]))
    found = tuple(hashlib.sha256(part).hexdigest()[:10] for part in parts)
    assert (*found, message.num_bits) == GOLDEN[mechanism]


@pytest.mark.parametrize(
    "mechanism",
    [
        LayeredGaussian(1.0, 1e-3, layering="shifted", entropy_code="fixed"),
        LayeredGaussian(1.0, 1e-3, layering="shifted", error_law="laplace", entropy_code="fixed"),
        IrwinHall(1.0, 1e-3, entropy_code="fixed"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_a_fixed_length_holds_every_symbol_and_is_the_papers(mechanism, value):
    # all of the norm in one coordinate is as far as an input gets; proposition 2 counts 2 + t / step symbols
    context = make_context(mechanism, range(3), (2000,))
    spikes = torch.zeros(3, 2000)
    spikes[:, 7] = value
    message = encode(mechanism, spikes, context)
    bits = message.num_bits // message.symbols.numel()
    t = 2.0 / mechanism.shortest_step(context)
    assert math.log2(t) < bits <= math.ceil(math.log2(2 + t))
    rand = PublicRandomness(SeededKeys(0), 0)
    for row, client in enumerate(context.cohort):
        code = mechanism.message_code(client, context, rand)
        stream = code.pack(message.symbols[row])
        assert len(stream) == 2000 * bits // 8 == code.max_bytes(2000)
        assert torch.equal(code.unpack(stream, 2000), message.symbols[row].long())
        with pytest.raises(ValueError, match="Symbols must be in"):
            code.pack(message.symbols[row] + 2 ** (bits + 1))


@pytest.mark.parametrize("layering", ["direct", "shifted"])
def test_one_laplace_message_errs_as_laplace_and_claims_nothing(layering):
    # false alarm 1e-4 a case
    mechanism = LayeredGaussian(2.0, 0.7, entropy_code="elias", layering=layering, error_law="laplace")
    error = errors(mechanism, 1, "random")
    assert stats.kstest(error, stats.laplace(scale=math.sqrt(0.5)).cdf).pvalue > 1e-4
    assert stats.kstest(error, "norm").pvalue < 1e-10
    assert not mechanism.gaussian_error
    claims = mechanism.claims(make_context(mechanism, range(5), (10,)))
    assert all(isinstance(claim.loss, NonPrivate) for claim in claims)
    assert {claim.adversary for claim in claims} == set(Adversary)
