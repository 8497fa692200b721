"""The contract: every mechanism, every property. Adding a mechanism means adding a row."""

import math
import pickle
from dataclasses import fields

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_fedq import mechanisms
from lightning_fedq.core import Adversary, Mechanism, NonPrivate
from lightning_fedq.functional.exact_error.dither import round_to_grid
from lightning_fedq.mechanisms import (
    CPA,
    CSGM,
    LDPQ,
    MVU,
    SIGM,
    AggregateGaussian,
    AugCorBin,
    CorBin,
    CorrelatedQuantization,
    DistributedDiscreteGaussian,
    FedAvg,
    GaussianNoise,
    IrwinHall,
    JoPEQ,
    LaplaceNoise,
    LayeredGaussian,
    NearOptimalUtility,
    PairedCoins,
    PerCoordinateGaussian,
    PerCoordinateLaplace,
    RotatedAxes,
    RotatedCoins,
    SignRR,
    StratifiedCorBin,
    SubtractiveDither,
)
from lightning_fedq.randomness import PublicRandomness, SeededKeys
from tests.one_round import context_of, decode, encode

ROWS: list[Mechanism] = [
    FedAvg(),
    LDPQ(epsilon=1.0),
    CorBin(epsilon=1.0, shared_bits=5),
    CorBin(epsilon=1.0, shared_bits=None),
    AugCorBin(epsilon=2.0, shared_bits=3, unpaired_fraction=0.4),
    StratifiedCorBin(epsilon=1.0, group_size=3),
    PairedCoins(epsilon=1.0),
    CorrelatedQuantization(),
    CorrelatedQuantization(levels=5),
    GaussianNoise(clip_norm=4.0, noise_multiplier=0.5),
    LaplaceNoise(clip_norm=8.0, noise_multiplier=0.5),
    PerCoordinateGaussian(epsilon=1.0, delta=1e-5),
    PerCoordinateLaplace(epsilon=1.0),
    CPA(epsilon=1.0),
    CPA(epsilon=1.0, levels=4, dither="plain"),
    CPA(epsilon=1.0, stages=3, nesting=3),
    CPA(epsilon=2.0, lattice="A2", stages=2),
    CPA(epsilon=2.0, lattice="D4"),
    CPA(epsilon=2.0, lattice="E8", stages=2),
    CPA(epsilon=20.0, epsilon_scope="round"),
    CPA(epsilon=2.0, lattice="A2", stages=2, blocks_per_round=9),
    RotatedCoins(clip_norm=8.0, epsilon=0.5),
    RotatedCoins(clip_norm=8.0, epsilon=1.0, coins=3, paired=True),
    RotatedCoins(clip_norm=8.0, epsilon=1.0, share=0.5, max_dropped=1),
    SignRR(epsilon=1.0),
    JoPEQ(epsilon=1.0),
    MVU(epsilon=2.0),
    LayeredGaussian(clip_norm=8.0, noise_multiplier=0.05),
    LayeredGaussian(clip_norm=8.0, noise_multiplier=0.05, entropy_code="elias", layering="shifted"),
    IrwinHall(clip_norm=8.0, noise_multiplier=0.05),
    NearOptimalUtility(clip_norm=8.0, leakage_budget=0.3, noise_std=0.4, measured_leakage=0.2),
    AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05),
    DistributedDiscreteGaussian(clip_norm=8.0, local_sigma=0.05, granularity=0.01),
    SIGM(clip_value=1.0, noise_multiplier=0.5, sampling_probability=0.4),
    SIGM(clip_value=1.0, noise_multiplier=0.5),
    CSGM(clip_value=1.0, noise_multiplier=0.5, sampling_probability=0.4, bits=2),
    SubtractiveDither(bits=4),
    RotatedAxes(epsilon=8.0, clip_norm=4.0),
]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
SEGMENTS = (40, 24)
CLIENTS = (11, 3, 8, 0, 5, 7, 2)  # odd, and not in order

BIASED = (JoPEQ, RotatedAxes, SignRR)
"""Their stated bias is tested with each of them."""

EXACT_ERROR = (AggregateGaussian, IrwinHall, LayeredGaussian)
WHOLE_VECTOR = (
    GaussianNoise,
    LaplaceNoise,
    NearOptimalUtility,
    DistributedDiscreteGaussian,
    RotatedAxes,
    RotatedCoins,
    *EXACT_ERROR,
)
"""They clip the norm of the whole vector, not coordinates."""

every_mechanism = pytest.mark.parametrize("mechanism", ROWS, ids=repr)


def updates_for(num_clients: int, dim: int = sum(SEGMENTS)) -> torch.Tensor:
    """Inside every row's range: coordinates within +-0.9, rows shorter than the clipping norms."""
    generator = torch.Generator().manual_seed(5)
    values = torch.rand(num_clients, dim, generator=generator) * 2 - 1
    return values * min(0.9, 4.0 / dim)


def test_every_mechanism_has_a_row():
    assert {type(row).__name__ for row in ROWS} == set(mechanisms.__all__)


@every_mechanism
def test_the_same_streams_give_the_same_message(mechanism):
    context, updates = context_of(mechanism, CLIENTS, SEGMENTS), updates_for(len(CLIENTS))
    first, second = (encode(mechanism, updates, context) for _ in range(2))
    assert torch.equal(first.symbols, second.symbols)
    assert first.num_bits == second.num_bits


@every_mechanism
def test_another_client_round_attempt_or_seed_gives_another_message(mechanism):
    """1,000 equal coordinates: two independent messages agree everywhere with probability below 1e-40."""
    if isinstance(mechanism, FedAvg):
        pytest.skip("FedAvg draws nothing")
    equal = torch.full((2, 1000), 0.1)  # not zero: a centred dither sends zero as zero
    make = lambda **changes: context_of(mechanism, (4, 9), (1000,), **changes)  # noqa: E731
    reference = encode(mechanism, equal, make()).symbols
    assert not torch.equal(reference[0], reference[1])
    for other in (
        encode(mechanism, equal, make(round=1)),
        encode(mechanism, equal, make(attempt=1)),
        encode(mechanism, equal, make(), seed=1),
    ):
        assert not torch.equal(other.symbols[0], reference[0])
        assert not torch.equal(other.symbols[1], reference[1])


@every_mechanism
def test_a_stack_equals_its_rows_encoded_one_by_one(mechanism):
    context, updates = context_of(mechanism, CLIENTS, SEGMENTS), updates_for(len(CLIENTS))
    stack = encode(mechanism, updates, context)
    single = [encode(mechanism, updates[i], context, [client]) for i, client in enumerate(context.cohort)]
    assert torch.equal(stack.symbols, torch.stack([message.symbols for message in single]))
    assert stack.num_bits == sum(message.num_bits for message in single)
    assert stack.num_clipped == sum(message.num_clipped for message in single)


@every_mechanism
def test_the_sum_decodes_like_its_parts(mechanism):
    context = context_of(mechanism, CLIENTS, SEGMENTS, radius=(1.0, 2.0), center=(0.1, -0.2))
    updates = updates_for(len(CLIENTS))
    symbols, cohort = encode(mechanism, updates, context).symbols, context.cohort
    parts = sum(decode(mechanism, symbols[i : i + 1], [c], context).double() for i, c in enumerate(cohort))
    together = decode(mechanism, symbols, cohort, context)
    # float32 output: relative rounding 2^-24 for each of the 7 parts, of size <= 100
    assert together.dtype == (torch.float32 if mechanism.grid(context) is None else torch.float64)
    torch.testing.assert_close(together.double(), parts, rtol=1e-5, atol=1e-4)
    if (grid := mechanism.grid(context)) is not None:  # rounding is the server's, of the whole sum only
        assert (round_to_grid(together, grid) - together).abs().max() > grid / 10
    if mechanism.homomorphic:
        summed = decode(mechanism, symbols.sum(0, dtype=torch.int64), cohort, context)
        assert torch.equal(summed, together)


@every_mechanism
def test_num_bits_is_the_length_of_a_bitstream_that_unpacks(mechanism):
    context, updates = context_of(mechanism, CLIENTS, SEGMENTS), updates_for(len(CLIENTS))
    message, rand = encode(mechanism, updates, context), PublicRandomness(SeededKeys(0), context.round)
    codes = [mechanism.message_code(client, context, rand) for client in context.cohort]
    rows = zip(codes, message.symbols, strict=True)
    assert message.num_bits == sum(code.num_bits(symbols) for code, symbols in rows)
    for code, symbols in zip(codes, message.symbols, strict=True):
        stream = code.pack(symbols)
        assert len(stream) == (code.num_bits(symbols) + 7) // 8
        assert torch.equal(code.unpack(stream, len(symbols)).to(symbols), symbols)


def _mean_of_decoded(mechanism, updates, clients, answered, repeats, center=0.0):
    """Average of the decoded mean over `repeats` equal coordinates, and its standard error."""
    dim = updates.shape[1] * repeats
    context = context_of(mechanism, clients, (dim,), radius=1.0, center=center)
    rows = torch.stack([updates[clients.index(c)] for c in answered]).repeat(1, repeats)
    symbols = encode(mechanism, rows, context, answered).symbols
    estimate = decode(mechanism, symbols, answered, context).double() / len(answered)
    estimate = estimate.reshape(repeats, -1)
    return estimate.mean(0), estimate.std(0) / math.sqrt(repeats), context


@every_mechanism
@pytest.mark.parametrize("clients, answered", [((6, 1, 4), (1, 4, 6)), ((6, 1, 4), (1, 4)), ((2,), (2,))])
def test_unbiased_for_odd_cohorts_lone_clients_and_broken_groups(mechanism, clients, answered):
    """5 standard errors, 4 coordinates, 3 cases, 12 rows: a fresh seed alarms with probability 1e-4.

    (6, 1) is the pair and 6 drops out in the second case.
    """
    if isinstance(mechanism, BIASED):
        pytest.skip("its stated bias is tested with it")
    repeats = 4000
    values = torch.tensor([[0.5, -0.3, 0.0, 0.02], [-0.4, -0.35, 0.25, 0.0], [0.1, 0.6, -0.2, 0.01]])
    bound = 1.0 if not isinstance(mechanism, WHOLE_VECTOR) else 0.9 / (4 * repeats)
    mean, error, _ = _mean_of_decoded(mechanism, values[: len(clients)] * bound, clients, answered, repeats)
    exact = torch.stack([values[clients.index(c)] for c in answered]).double().mean(0) * bound
    # float32 output and the grids of the mechanisms: 1e-7 of the range at most
    assert bool(((mean - exact).abs() <= 5.0 * error + 1e-7).all()), (mean, exact, error)


@every_mechanism
@pytest.mark.parametrize("answered", [(1, 3, 4, 6), (1, 3, 4)])
def test_the_noise_bound_holds(mechanism, answered):
    """Variance over 10,000 equal coordinates; 20% is 9 standard errors for Laplace noise, more for others."""
    clients, repeats = (6, 1, 4, 3), 10_000
    values = torch.tensor([[0.0], [0.0], [0.0], [0.0]])
    _, error, context = _mean_of_decoded(mechanism, values, clients, answered, repeats)
    bound = mechanism.noise_variance(context, answered)
    assert bound is not None
    assert (error.square() * repeats).item() <= 1.2 * bound.item()


@every_mechanism
def test_one_claim_for_every_adversary(mechanism):
    for clients in (CLIENTS, (3,), (5, 2)):
        context = context_of(mechanism, clients, SEGMENTS)
        claims = mechanism.claims(context)
        symbols = encode(mechanism, torch.zeros(len(clients), context.dim), context).symbols.shape[1]
        assert sorted(claim.adversary.name for claim in claims) == sorted(who.name for who in Adversary)
        for claim in claims:
            assert claim.compositions in (1, context.dim, symbols)
            if isinstance(claim.loss, NonPrivate):
                assert claim.loss.reason
            else:
                assert claim.assumptions


@every_mechanism
def test_pickles(mechanism):
    assert pickle.loads(pickle.dumps(mechanism)) == mechanism


@every_mechanism
def test_builds_from_yaml(mechanism, tmp_path):
    lines = [
        f"    {f.name}: {'null' if (value := getattr(mechanism, f.name)) is None else value}"
        for f in fields(mechanism)
    ]
    body = "  init_args:\n" + "\n".join(lines) if lines else ""
    name = f"lightning_fedq.mechanisms.{type(mechanism).__name__}"
    config = tmp_path / "mechanism.yaml"
    config.write_text(f"mechanism:\n  class_path: {name}\n{body}\n")
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--mechanism", type=Mechanism)
    built = parser.instantiate(parser.parse_args([f"--config={config}"])).mechanism
    assert built == mechanism


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_updates_of_any_float_type(mechanism, dtype):
    context = context_of(mechanism, CLIENTS, SEGMENTS)
    updates = updates_for(len(CLIENTS)).to(dtype)
    expected = encode(mechanism, updates.float(), context)
    assert torch.equal(encode(mechanism, updates, context).symbols, expected.symbols)


@every_mechanism
@pytest.mark.parametrize("device", DEVICES)
def test_devices_agree(mechanism, device):
    context, updates = context_of(mechanism, CLIENTS, SEGMENTS), updates_for(len(CLIENTS))
    here = encode(mechanism, updates, context)
    there = encode(mechanism, updates.to(device), context)
    assert there.symbols.device.type == device
    assert torch.equal(there.symbols.cpu(), here.symbols)
    mean = decode(mechanism, there.symbols, context.cohort, context)
    torch.testing.assert_close(mean.cpu(), decode(mechanism, here.symbols, context.cohort, context))


@every_mechanism
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_groups_cover_the_cohort(mechanism, size):
    sizes = mechanism.group_sizes(size)
    assert sum(sizes) == size
    assert min(sizes) >= 1


@every_mechanism
def test_values_outside_the_range_are_clipped_and_counted(mechanism):
    if isinstance(mechanism, FedAvg):
        pytest.skip("FedAvg clips nothing")
    context = context_of(mechanism, (1,), (64,))
    far, edge = torch.full((1, 64), 1e30), torch.ones(1, 64)
    message = encode(mechanism, far, context)
    assert message.num_clipped == 64
    if not isinstance(mechanism, WHOLE_VECTOR):
        assert torch.equal(message.symbols, encode(mechanism, edge, context).symbols)
        assert encode(mechanism, 0.999 * edge, context).num_clipped == 0
