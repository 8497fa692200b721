"""SIGM and CSGM: law of the noise, error, claims, refusals."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.functional.exact_error.float_error import Inputs, layered_law_error
from lightning_fedq.functional.rotation import rotate
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import CSGM, SIGM
from lightning_fedq.mechanisms.interface import (
    Adversary,
    GaussianLoss,
    Neighbours,
    NonPrivate,
    SampledGaussianLoss,
)
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from tests.functional.transform import hadamard
from tests.one_round import decode, encode, make_context

DIM, SIZE = 60_000, 4


def updates():
    return torch.rand(SIZE, DIM, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_the_noise_of_the_mean_is_exactly_gaussian_empty_coordinates_included(probability):
    # false alarm 1e-4 a case; 0.7^4 = 24% of the coordinates are sent by nobody
    mechanism = SIGM(2.0, 0.6, probability)
    context, values = make_context(mechanism, range(SIZE), (DIM,)), 2.0 * updates()
    rand = PublicRandomness(SeededKeys(0), 0)
    symbols = encode(mechanism, values, context).symbols
    masks = torch.stack([torch.from_numpy(mechanism.selected(c, context, rand)) for c in range(SIZE)])
    assert masks.double().mean().item() == pytest.approx(probability, abs=0.005)
    assert not symbols[~masks].any()
    exact = (values.double() * masks).sum(0) / probability
    error = (decode(mechanism, symbols, context.cohort, context).double() - exact) / (2.0 * 0.6 / probability)
    assert stats.kstest(error.numpy(), "norm").pvalue > 1e-4
    empty = ~masks.any(0)
    if probability < 1:
        assert stats.kstest(error[empty].numpy(), "norm").pvalue > 1e-4


FINE, SILENT = {SIGM: (), CSGM: (16,)}, {"dropout_probability": 0.4}


def noise_of_a_round(mechanism, dim, planner):
    """Noise of the mean of zeros in units of its std, and how many clients have answered."""
    engine = RoundEngine(mechanism, planner, SeededKeys(1), torch.zeros(dim), (dim,), FixedRange(1.0))
    survivors = list(engine.start().survivors)
    for some in (survivors[:2], survivors[2:]):
        engine.receive(some, torch.zeros(len(some), dim))
    engine.finish()
    return engine.weights.double().numpy() * len(survivors) / (5.0 / 0.5), len(survivors)


@pytest.mark.parametrize("make", [SIGM, CSGM])
def test_dropouts_leave_the_noise_as_it_was(make):
    # false alarm 1e-4 a case: zero updates, so that what remains is noise (and CSGM's rounding, made fine)
    noise, survivors = noise_of_a_round(make(1.0, 5.0, 0.5, *FINE[make]), DIM, RoundPlanner(10, 3, **SILENT))
    assert 3 <= survivors <= 8
    assert stats.kstest(noise, "norm").pvalue > 1e-4


@pytest.mark.parametrize(("make", "bits"), [(SIGM, None), (CSGM, 2), (CSGM, 3)])
def test_the_mean_squared_error_is_the_closed_form(make, bits):
    # 60,000 coordinates: 3% is five standard errors
    gamma, z, values = 0.4, 0.5, updates()
    mechanism = make(1.0, z, gamma) if bits is None else make(1.0, z, gamma, bits)
    context = make_context(mechanism, range(SIZE), (DIM,))
    decoded = decode(mechanism, encode(mechanism, values, context).symbols, context.cohort, context)
    measured = (decoded / SIZE - values.mean(0)).double().square().mean().item()
    x, n = values.double(), SIZE
    wanted = (1 - gamma) / gamma / n**2 * x.square().sum(0).mean().item() + (z / gamma / n) ** 2
    if bits is not None:
        place = (x + 1) * 0.5 * (2**bits - 2)
        up = place - place.floor()
        wanted += ((2 / (2**bits - 2)) ** 2 * up * (1 - up)).sum(0).mean().item() / gamma / n**2
    assert measured == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("make", [SIGM, CSGM])
def test_flattened_noise_is_the_same_gaussian(make):
    # false alarm 1e-4 a case: 40,000 of 65,536 rotated coordinates, one of six clients silent, zero updates
    dim, mechanism = 40_000, make(1.0, 5.0, 0.5, *FINE[make], flatten=True)
    noise, survivors = noise_of_a_round(mechanism, dim, RoundPlanner(6, 5, **SILENT))
    assert 0 < survivors < 6
    assert stats.kstest(noise, "norm").pvalue > 1e-4
    # and it can only be Gaussian together: neighbours, and the same under another rotation
    spectrum = hadamard(torch.from_numpy(noise[: 2**15])).numpy()
    assert stats.kstest(spectrum, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 4.0 / math.sqrt(dim)


@pytest.mark.parametrize("make", [SIGM, CSGM])
def test_what_is_turned_back_is_on_the_grid(make):
    """The release is a public map of a rounded sum, that of the silent clients' zeros included."""
    mechanism = make(0.5, 3.0, 0.5, flatten=True)
    context, rand = make_context(mechanism, range(SIZE), (1024,)), PublicRandomness(SeededKeys(0), 0)
    values = updates()[:, :1024]
    symbols = encode(mechanism, values, context).symbols
    assert mechanism.joint and mechanism.grid(context) is None
    summed = decode(mechanism, symbols, context.cohort, context)
    assert summed.dtype == torch.float32
    steps = rotate(summed.double().numpy()[None], mechanism._words(context, rand)) / mechanism._grid
    assert np.abs(steps - steps.round()).max() < 1e-4


@pytest.mark.parametrize("make", [SIGM, CSGM])
def test_claims_of_flattened_updates_count_the_padding(make):
    mechanism, context = make(0.5, 3.0, 0.25, flatten=True), make_context(CSGM(1.0, 3.0), range(4), (6, 1, 4))
    for claim, other in zip(mechanism.claims(context), make(0.5, 3.0, 0.25).claims(context), strict=True):
        assert claim.compositions == 16 and other.compositions == 11 and claim.loss == other.loss
        assert claim.slack.log_ratio == pytest.approx(16 / 11 * other.slack.log_ratio)


def test_flattening_spreads_one_large_coordinate():
    """One coordinate of 1 among 1,024 is below .169 in each rotated one, but for 1 rotation in 1,000.

    So it is the same claim with 5.9 times less noise.
    """
    values = torch.zeros(SIZE, 1024)
    values[:, 7] = 1.0
    errors, clip = [], math.sqrt(2.0 * math.log(2.0 * 1024 / 1e-3) / 1024)
    for mechanism in (SIGM(1.0, 2.0), SIGM(clip, 2.0, flatten=True)):
        context = make_context(mechanism, range(SIZE), (1024,))
        message = encode(mechanism, values, context)
        assert message.num_clipped == 0
        decoded = decode(mechanism, message.symbols, context.cohort, context)
        errors.append((decoded - values.sum(0)).norm().item())
        assert {c.compositions for c in mechanism.claims(context)} == {1024}
    assert errors[0] / errors[1] == pytest.approx(1.0 / clip, rel=0.15)


@pytest.mark.parametrize("make", [SIGM, CSGM])
def test_who_sees_what(make):
    mechanism = make(1.0, 3.0, 0.25)
    claims = {c.adversary: c for c in mechanism.claims(make_context(mechanism, range(4), (10,)))}
    outsider = claims[Adversary.OUTSIDER]
    assert isinstance(outsider.loss, SampledGaussianLoss)
    assert (outsider.loss.noise_multiplier, outsider.loss.sampling_probability) == (3.0, 0.25)
    assert outsider.neighbours is Neighbours.ZERO_OUT and outsider.compositions == 10
    for who in (Adversary.SERVER, Adversary.SECAGG_SERVER, Adversary.EAVESDROPPER):
        assert isinstance(claims[who].loss, NonPrivate)
    client = claims[Adversary.CLIENT].loss
    assert isinstance(client, GaussianLoss)
    assert client.noise_multiplier == pytest.approx(3.0 * math.sqrt(0.5 if make is SIGM else 0.75))
    alone = {c.adversary: c.loss for c in CSGM(1.0, 3.0).claims(make_context(mechanism, (1,), (10,)))}
    assert isinstance(alone[Adversary.CLIENT], NonPrivate)


@pytest.mark.parametrize("make", [SIGM, CSGM])
def test_what_floats_do_is_charged(make):
    # noise of std 3 / 0.25 = 12 on a grid of 8 / 32; four clients, each up to 1 / 0.25 in every coordinate
    mechanism, context = make(1.0, 3.0, 0.25), make_context(CSGM(1.0, 3.0), range(4), (10,))
    assert mechanism.grid(context) == 0.25
    error = layered_law_error(4, 0.25 / 12.0, Inputs(16.0 / 12.0, 16.0 / 12.0))
    for claim in mechanism.claims(context):
        assert claim.slack.log_ratio == pytest.approx(10 * error.log_ratio)
        assert claim.slack.distance == pytest.approx(10 * error.distance)
        assert any("charged to epsilon and delta" in text for text in claim.assumptions)


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_a_fixed_length_holds_every_symbol(probability):
    mechanism = SIGM(1.0, 0.01, probability, entropy_code="fixed")
    context, values = make_context(mechanism, range(5), (999,)), torch.ones(5, 999)
    values[:, ::2] = -1.0
    message, rand = encode(mechanism, values, context), PublicRandomness(SeededKeys(0), 0)
    shortest = 2.0 * math.sqrt(math.log(4.0)) * 0.01 / math.sqrt(5)
    bits, sent = math.ceil(math.log2(2.0 + 2.0 / shortest)), 0
    for client in context.cohort:
        row, code = message.symbols[client].long(), mechanism.message_code(client, context, rand)
        assert torch.equal(code.unpack(code.pack(row), 999), row)
        assert code.num_bits(row) == bits * int(mechanism.selected(client, context, rand).sum())
        sent += code.num_bits(row)
    assert message.num_bits == sent
