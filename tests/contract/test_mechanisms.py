"""The contract: every mechanism, every rule of `mechanisms.contract_suite`. A mechanism means a row here."""

import json

import pytest

from lightning_fedq import mechanisms as m
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.noise.discrete_gaussian import discrete_gaussian_variance
from lightning_fedq.mechanisms.contract_suite import (
    RULES,
    BrokenContractError,
    check_mechanism,
    golden_symbols,
    make_context,
)
from tests.contract.golden import GOLDEN

ROWS = [
    m.FedAvg(),
    m.LDPQ(epsilon_per_coordinate=1.0),
    m.CorBin(epsilon_per_coordinate=1.0, shared_bits=5),
    m.CorBin(epsilon_per_coordinate=1.0, shared_bits=None),
    m.AugCorBin(epsilon_per_coordinate=2.0, shared_bits=3, unpaired_fraction=0.4),
    m.PairedCoins(epsilon_per_coordinate=1.0),
    m.CorrelatedQuantization(),
    m.CorrelatedQuantization(levels=5),
    m.GaussianNoise(clip_norm=4.0, noise_multiplier=0.5),
    m.LaplaceNoise(clip_norm=8.0, noise_multiplier=0.5),
    m.PerCoordinateGaussian(epsilon_per_coordinate=1.0, delta=1e-5),
    m.PerCoordinateLaplace(epsilon_per_coordinate=1.0),
    m.CPA(epsilon=1.0, epsilon_scope="bit"),
    m.CPA(epsilon=1.0, levels=4, dither="plain", epsilon_scope="bit"),
    m.CPA(epsilon=1.0, stages=3, nesting=3, epsilon_scope="bit"),
    m.CPA(epsilon=2.0, lattice="A2", stages=2, epsilon_scope="bit"),
    m.CPA(epsilon=2.0, lattice="A2", codebook_radius=2.0, epsilon_scope="bit"),
    m.CPA(epsilon=20.0, epsilon_scope="round"),
    m.CPA(epsilon=2.0, lattice="A2", stages=2, blocks_per_round=9, epsilon_scope="bit"),
    m.RotatedCoins(clip_norm=8.0, epsilon_per_bit=0.5),
    m.RotatedCoins(clip_norm=8.0, epsilon_per_bit=1.0, bits_per_coordinate=3, paired=True),
    m.RotatedCoins(clip_norm=8.0, epsilon_per_bit=1.0, fraction=0.5, max_dropped_clients=1),
    m.RotatedCoins(clip_norm=18.0, epsilon_per_bit=8.0, bits_per_coordinate=32, fraction=0.125),
    m.SignRR(epsilon_per_coordinate=1.0),
    m.JoPEQ(epsilon_per_coordinate=1.0),
    m.MVU(epsilon_per_coordinate=2.0),
    m.LayeredGaussian(clip_norm=8.0, noise_multiplier=0.05),
    m.LayeredGaussian(clip_norm=8.0, noise_multiplier=0.05, entropy_code="elias", layering="shifted"),
    m.LayeredGaussian(clip_norm=8.0, noise_multiplier=0.05, layering="shifted", error_law="laplace"),
    m.LayeredGaussian(clip_norm=8.0, noise_multiplier=0.05, entropy_code="fixed", layering="shifted"),
    m.IrwinHall(clip_norm=8.0, noise_multiplier=0.05),
    m.IrwinHall(clip_norm=8.0, noise_multiplier=0.05, entropy_code="fixed"),
    m.NearOptimalUtility(clip_norm=8.0, leakage_budget=0.3, noise_std=0.4, measured_leakage=0.2),
    m.AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05),
    m.DistributedDiscreteGaussian(clip_norm=8.0, local_sigma=0.05, granularity=0.01),
    m.DistributedDiscreteGaussian(clip_norm=8.0, local_sigma=0.005, granularity=0.01),
    m.HandedOnGaussian(clip_norm=8.0, local_sigma=0.05, granularity=0.002, num_cohorts=2),
    m.SIGM(clip_value=1.0, noise_multiplier=0.5, sampling_probability=0.4),
    m.SIGM(clip_value=1.0, noise_multiplier=0.5),
    m.SIGM(clip_value=1.0, noise_multiplier=0.5, sampling_probability=0.4, entropy_code="fixed"),
    m.SIGM(clip_value=0.5, noise_multiplier=0.5, sampling_probability=0.4, flatten=True),
    m.CSGM(clip_value=1.0, noise_multiplier=0.5, sampling_probability=0.4, bits=2),
    m.CSGM(clip_value=1.0, noise_multiplier=0.5, bits=2),
    m.CSGM(clip_value=0.5, noise_multiplier=0.5, sampling_probability=0.4, flatten=True),
    m.SubtractiveDither(bits=4),
    m.RotatedAxes(epsilon_per_message=8.0, clip_norm=4.0),
    m.QSGD(levels=4),
    m.TernGrad(),
    m.DRIVE(),
    m.TopK(fraction=0.1),
    m.RandomK(fraction=0.1),
    m.EDEN(bits=3),
    m.BandedGaussian(clip_norm=8.0, noise_multiplier=0.05, band=1),
    m.AdaptiveClip(m.GaussianNoise(clip_norm=4.0, noise_multiplier=0.5)),
    m.AdaptiveClip(m.RotatedCoins(clip_norm=8.0, epsilon_per_bit=0.5), quantile=0.8, fraction=0.1),
    m.AdaptiveClip(m.LayeredGaussian(clip_norm=8.0, noise_multiplier=0.05)),
    m.AdaptiveClip(m.AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05)),
    m.AdaptiveClip(m.DistributedDiscreteGaussian(clip_norm=8.0, local_sigma=0.05, granularity=0.01)),
]

every_mechanism = pytest.mark.parametrize("mechanism", ROWS, ids=repr)


def test_every_mechanism_has_a_row():
    assert {type(row).__name__ for row in ROWS} == set(m.__all__)


LAWS = ("unbiased", "noise_bound_holds")
"""Of 60 rounds each, which takes longer than all other rules."""
SAME_LAW = [
    row
    for row in ROWS
    if getattr(row, "entropy_code", "") == "fixed"
    or (isinstance(row, m.AdaptiveClip) and not isinstance(row.mechanism, m.GaussianNoise | m.RotatedCoins))
]
"""Another code of the symbols of another row, or a clip around it: the laws of their errors are slow ones."""


def without_share(row, found, clients):
    """`noise_variance` less the error of the share of coordinates that is sent."""
    return found - 2.0 * (1.0 / row.fraction - 1.0) * row.clip_norm**2 / padded_size(1100)


def without_rounding(row, found, clients):
    return found - 0.25 * (row.granularity * row.clip_norm) ** 2 / len(clients)


def without_noise(row, found, clients):
    variance = discrete_gaussian_variance(row.steps) * (row.granularity * row.clip_norm) ** 2
    return found - variance / len(clients)


def without_selection(row, found, clients):
    gamma = row.sampling_probability
    return found - (1.0 - gamma) / gamma * row.clip_value**2 / len(clients)


def without_levels(row, found, clients):
    return found - (row.clip_value / row._cells) ** 2 / row.sampling_probability / len(clients)


def without_the_mean_s_noise(row, found, clients):
    return found - (row.clip_value * row.noise_multiplier / row.sampling_probability / len(clients)) ** 2


def without_fresh(row, found, clients):
    context = make_context(row, (6, 1, 4))
    return found - (row.fresh_std(context) * row.granularity * row.clip_norm) ** 2 / len(clients)


TERMS = [
    (m.RotatedCoins, without_share),
    (m.DistributedDiscreteGaussian, without_rounding),
    (m.DistributedDiscreteGaussian, without_noise),
    (m.HandedOnGaussian, without_fresh),
    (m.SIGM, without_selection),
    (m.SIGM, without_the_mean_s_noise),
    (m.CSGM, without_selection),
    (m.CSGM, without_levels),
    (m.CSGM, without_the_mean_s_noise),
]
"""Bounds of several terms. Others: a pair and a client alone, which odd cohorts have; a rounding that is a
fixed part of the noise (grids of Gaussian and Laplace noise and of exact errors), below one in a hundred; and
noise that is taken back, of which a round without a block has none (`test_handed_on_blocks`)."""


@pytest.mark.parametrize(("kind", "term"), TERMS, ids=lambda value: value.__name__)
def test_a_bound_without_a_term_is_noticed(kind, term, monkeypatch):
    """In one row at least, every term is so large that the law notices where it is gone."""
    rows, bound = [row for row in ROWS if type(row) is kind], kind.noise_variance

    def forgetful(row, context, clients):
        return term(row, bound(row, context, clients), clients)

    monkeypatch.setattr(kind, "noise_variance", forgetful)

    def noticed(row):
        try:
            RULES["noise_bound_holds"](row)
        except BrokenContractError:
            return True
        return False

    assert any(noticed(row) for row in rows)


@every_mechanism
def test_keeps_the_contract(mechanism):
    """Every rule that is broken is named; the rules' own tests: `test_check_mechanism`."""
    check_mechanism(mechanism, [rule for rule in RULES if mechanism not in SAME_LAW or rule not in LAWS])
    assert mechanism.noise_variance(make_context(mechanism, (6, 1, 4)), (1, 4)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", SAME_LAW, ids=repr)
def test_keeps_the_laws_too(mechanism):
    check_mechanism(mechanism, LAWS)


def test_golden_symbols():
    """A change breaks recorded runs and the wire format: `python -m tests.contract.golden --help`."""
    assert json.loads(GOLDEN.read_text()) == {repr(row): golden_symbols(row) for row in ROWS}
