"""Cures that mechanisms and their building blocks name."""

import numpy as np
import torch

from lightning_fedq import Cyclic
from lightning_fedq.callbacks import ByzantineClients
from lightning_fedq.data.models.backbones import CNN2
from lightning_fedq.functional.blocks.codeword import sign_words, word_table
from lightning_fedq.functional.blocks.design import block_design
from lightning_fedq.functional.blocks.lattice_codebook import finite_codebook, voronoi_codebook
from lightning_fedq.functional.noise.discrete_gaussian import discrete_gaussian_variance
from lightning_fedq.functional.trade_off import recovery_leakage
from lightning_fedq.leakage.control import allowed_hits, check_controllable
from lightning_fedq.mechanisms import (
    CPA,
    DRIVE,
    EDEN,
    LDPQ,
    MVU,
    QSGD,
    AggregateGaussian,
    CorrelatedQuantization,
    DistributedDiscreteGaussian,
    FedAvg,
    GaussianNoise,
    IrwinHall,
    JoPEQ,
    LayeredGaussian,
    NearOptimalUtility,
    PairedCoins,
    RotatedCoins,
    SubtractiveDither,
    TernGrad,
)
from lightning_fedq.mechanisms.contract import BrokenContractError, check_claims
from lightning_fedq.mechanisms.interface import Adversary, PrivacyClaim, RoundContext, Unit
from lightning_fedq.privacy.losses import LaplaceLoss
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from tests.cures.rows import fed, fit, row
from tests.cures.rows_rounds import TURNS, handed
from tests.one_round import make_context

BEHIND = PrivacyTarget(8.0, delta=1e-5, adversary="secagg_server")
TARGET = PrivacyTarget(8.0, delta=1e-5, adversary="server")


def leaky(**settings):
    given = {"leakage_budget": 0.5, "noise_std": 0.1, "measured_leakage": 0.4}
    return NearOptimalUtility(1.0, **{**given, **settings})


def ddg(granularity, sigma=0.1):
    return DistributedDiscreteGaussian(1.0, granularity=granularity, local_sigma=sigma, bits=16)


def aimed(bits):
    """Its noise and grid are set by a target."""
    return DistributedDiscreteGaussian(1.0, granularity=0.01, local_sigma=0.1, bits=bits)


def claim(unit):
    return PrivacyClaim(Adversary.SERVER, LaplaceLoss(1.0), 10, unit=unit, unit_losses=5)


def claims_of(*more):
    return [*LDPQ(1.0).claims(make_context(LDPQ(1.0), range(4))), *more]


row(
    "claims() speaks more than once about {}; give the worst case",
    lambda: check_claims(claims_of(PrivacyClaim(Adversary.SERVER, LaplaceLoss(1.0), 1))),
    lambda: check_claims(claims_of()),
    error=BrokenContractError,
)
row(
    "has no privacy parameter that a target could set; leave the target out",
    lambda: fit(fed(FedAvg(), seed=None, privacy=TARGET)),
    lambda: fit(fed(FedAvg(), seed=None)),
)
row(
    "has no coin that a Byzantine client could skip; use inverted",
    lambda: fit(fed(CorrelatedQuantization()), ByzantineClients(0.25, "inverted_without_coin")),
    lambda: fit(fed(CorrelatedQuantization()), ByzantineClients(0.25, "inverted")),
)
row(
    "words of {} points need a table of {} signs, at most {}; choose fewer points, or words='hadamard'",
    lambda: sign_words(32, "iid"),
    lambda: sign_words(8, "iid"),
    lambda: word_table(np.zeros((32, 1)), "hadamard"),
)
row(
    "balanced words need an even number of points, got {}; choose words='hadamard', which pads, or",
    lambda: sign_words(5, "balanced"),
    lambda: sign_words(5, "hadamard"),
    lambda: sign_words(5, "near_balanced"),
)
row("near_balanced words", lambda: sign_words(6, "near_balanced"), lambda: sign_words(6, "balanced"))
row("can't be expressed by a coin of {} bits; choose", lambda: LDPQ(1e-12), lambda: fit(fed(LDPQ(1e-3))))
row("can't be expressed by a pair", lambda: PairedCoins(2.5e-9), lambda: fit(fed(PairedCoins(7.5e-9))))
row(
    "is too small for a cohort of {}: sums would not fit {} bits; raise it",
    lambda: fit(fed(AggregateGaussian(1.0, 1e-18))),
    lambda: fit(fed(AggregateGaussian(1.0, 1e-2))),
)
row(
    "a message of some blocks only is scaled by their rarity, which needs decoder='unbiased' and no",
    lambda: CPA(1.0, epsilon_scope="round", blocks_per_round=1, threshold=True),
    lambda: fit(fed(CPA(1.0, epsilon_scope="bit"))),
)
row("has {} entries for", lambda: fit(fed(CPA((1.0, 2.0)))), lambda: fit(fed(CPA((1.0, 2.0, 1.0, 2.0)))))
row("local_sigma must be at most {} of granularity, got", lambda: ddg(1e-9), lambda: fit(fed(ddg(0.01))))
row("DRIVE sends one bit a coordinate, got {};", lambda: DRIVE(bits=2), lambda: fit(fed(EDEN(bits=2))))
row("TernGrad has one level besides zero,", lambda: TernGrad(levels=3), lambda: fit(fed(QSGD(levels=3))))
row(
    "local_sigma must be at least {} of granularity, got {} of them; use a finer grid, which takes more",
    lambda: handed(granularity=0.1),
    lambda: fit(fed(handed(granularity=0.01), **TURNS)),
)
row(
    'target="laplace" can\'t meet a budget: {}; give noise_multiplier, or take target="gaussian"',
    lambda: AggregateGaussian(1.0, epsilon=1.0, delta=1e-5, rounds=2, target="laplace"),
    lambda: fit(fed(AggregateGaussian(1.0, noise_multiplier=1.0, target="laplace"))),
    lambda: fit(fed(AggregateGaussian(1.0, epsilon=1.0, delta=1e-5, rounds=2))),
)
row(
    'entropy_code="fixed" wants steps with a shortest one, which {} as set here has not: take '
    'LayeredGaussian(layering="shifted") or IrwinHall, or entropy_code="range"',
    lambda: LayeredGaussian(1.0, 1.0, entropy_code="fixed"),
    lambda: fit(fed(LayeredGaussian(1.0, 1.0, layering="shifted", entropy_code="fixed"))),
    lambda: fit(fed(IrwinHall(1.0, 1.0, entropy_code="fixed"))),
    lambda: fit(fed(LayeredGaussian(1.0, 1.0, entropy_code="range"))),
)
row(
    "IrwinHall can't meet a budget: its noise is bounded; use AggregateGaussian",
    lambda: IrwinHall(1.0, epsilon=1.0, delta=1e-5, rounds=2),
    lambda: fit(fed(AggregateGaussian(1.0, epsilon=1.0, delta=1e-5, rounds=2))),
)
row(
    "levels are so coarse that no noise is left at epsilon = {}; choose more levels or a smaller epsilon",
    lambda: JoPEQ(50.0, levels=2),
    lambda: fit(fed(JoPEQ(50.0, levels=256))),
    lambda: fit(fed(JoPEQ(0.5, levels=2))),
)
row(
    "beyond, outputs are too rare to be made of whole words; choose a smaller one, or SubtractiveDither",
    lambda: MVU(60.0),
    lambda: fit(fed(MVU(5.0))),
    lambda: fit(fed(SubtractiveDither())),
)
row("integers over 2^32 can't express epsilon = {};", lambda: MVU(1e-12), lambda: fit(fed(MVU(0.1))))
row(
    "so a target can't set it; take GaussianNoise, whose noise is the same",
    lambda: fit(fed(leaky(), seed=None, privacy=TARGET)),
    lambda: fit(fed(GaussianNoise(1.0, 1.0), seed=None, privacy=TARGET)),
)
row("noise_std must be > 0 and finite, got", lambda: leaky(noise_std=0.0), lambda: fit(fed(FedAvg())))
row("{}; without privacy", lambda: PairedCoins(float("inf")), lambda: fit(fed(CorrelatedQuantization())))
row(
    "the level of RotatedCoins is not set: give epsilon, or train with",
    lambda: fit(fed(RotatedCoins(1.0))),
    lambda: fit(fed(RotatedCoins(1.0, epsilon=1.0))),
    lambda: fit(fed(RotatedCoins(1.0), seed=None, privacy=TARGET)),
)
row(
    "nesting = {} does nothing with one stage; choose stages >= 2",
    lambda: block_design("A2", None, None, 1, 2, "near_balanced", True),
    lambda: block_design("A2", None, None, 2, 2, "hadamard", True),
)
row("radius {} gives about {}", lambda: finite_codebook("A2", 300.0), lambda: finite_codebook("A2", 2.0))
row("ratio {} gives {}^{}", lambda: voronoi_codebook("A2", 300), lambda: voronoi_codebook("A2", 2))
row("in (0, {}] integer", lambda: discrete_gaussian_variance(1e9), lambda: discrete_gaussian_variance(1e3))
row("num_candidates must be >= 2,", lambda: recovery_leakage(0.5, 1), lambda: recovery_leakage(0.5, 2))
row("in [{}, {}], where", lambda: GaussianNoise(1e-200, 1.0), lambda: fit(fed(GaussianNoise(1.0, 1.0))))
row("radius must be > 0 in every segment, {} at least, so", lambda: context(0.0), lambda: context(1e-6))
row(
    "losses make up a message, so one of them is of a smaller unit; say which: Unit.COORDINATE or",
    lambda: claim(Unit.MESSAGE),
    lambda: claim(Unit.COORDINATE),
    lambda: claim(Unit.BLOCK),
)
row("an image of {} x {} can't be halved twice;", lambda: CNN2(image_size=3), lambda: CNN2(image_size=4))
row(
    "epsilon is for {} rounds and this would be number {}; give it the rounds of the whole run",
    lambda: fit(fed(CPA(4.0, rounds=1, epsilon_scope="total")), max_epochs=2),
    lambda: fit(fed(CPA(4.0, rounds=2, epsilon_scope="total")), max_epochs=2),
)
row(
    "a modulus of 2^{} has no room for {} clients; take more bits",
    lambda: fit(fed(aimed(bits=2), 40, seed=None, privacy=BEHIND, secure_aggregation=SecAgg())),
    lambda: fit(fed(aimed(bits=16), 40, seed=None, privacy=BEHIND, secure_aggregation=SecAgg())),
)
row("measured_leakage must be", lambda: leaky(measured_leakage=0.9), lambda: leaky(measured_leakage=0.4))
row(
    "LeakageBudget sets the noise of NearOptimalUtility, got {}; use that mechanism, or leave",
    lambda: check_controllable(LDPQ(1.0)),
    lambda: check_controllable(leaky()),
    lambda: fit(fed(LDPQ(1.0))),
)
row(
    "and public_calibration=True says that nobody did; set it to false",
    lambda: check_controllable(leaky(public_calibration=True)),
    lambda: check_controllable(leaky(public_calibration=False)),
)
row(
    "can't be shown with {} attempts: even without a hit the leakage may be larger; use more attempts",
    lambda: allowed_hits(10, 100, 0.2, 0.95),
    lambda: allowed_hits(100, 100, 0.2, 0.95),
    lambda: allowed_hits(10, 100, 0.9, 0.95),
)
row(
    "what guessing among {} candidates scores under any noise; use a larger budget or more candidates",
    lambda: allowed_hits(1000, 2, 0.01, 0.95),
    lambda: allowed_hits(1000, 2, 0.9, 0.95),
    lambda: allowed_hits(100000, 1000, 0.05, 0.95),
)
row(
    "noise is handed on between cohorts that are dealt out once, got {}; use",
    lambda: fed(cohort=2).planner.successors(0),
    lambda: fed(cohort=Cyclic(2)).planner.successors(0),
)


def context(radius):
    return RoundContext(0, ((0,), (1,)), (2,), torch.zeros(1), torch.full((1,), radius))
