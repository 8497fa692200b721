"""Cures that mechanisms and their building blocks name."""

from dataclasses import replace

import numpy as np
import torch

from lightning_fedq import Cyclic
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import ByzantineClients
from lightning_fedq.cli import main
from lightning_fedq.data.models.backbones import CNN2
from lightning_fedq.functional.blocks.codeword import sign_words, word_table
from lightning_fedq.functional.blocks.design import block_design
from lightning_fedq.functional.blocks.lattice_codebook import finite_codebook, voronoi_codebook
from lightning_fedq.functional.noise.discrete_gaussian import discrete_gaussian_variance
from lightning_fedq.functional.trade_off import recovery_leakage
from lightning_fedq.leakage.control import allowed_hits, check_controllable
from lightning_fedq.mechanisms import (
    CPA,
    LDPQ,
    MVU,
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
)
from lightning_fedq.mechanisms.contract import BrokenContractError, check_claims
from lightning_fedq.mechanisms.contract_suite import RULES, check_mechanism
from lightning_fedq.mechanisms.interface import Adversary, HandOver, PrivacyClaim, RoundContext, Unit
from lightning_fedq.mechanisms.registry import mechanism_class
from lightning_fedq.privacy.losses import LaplaceLoss, NonPrivate
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from tests.cures.rows import fed, fit, row
from tests.cures.rows_rounds import TURNS, handed
from tests.digits_run import Classifier, Digits
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
    "claims() has no claim about {}. Return NonPrivate('why') if nothing holds",
    lambda: check_claims(claims_of()[1:]),
    lambda: check_claims([PrivacyClaim(claims_of()[0].adversary, NonPrivate("why"), 1), *claims_of()[1:]]),
    error=BrokenContractError,
)
row(
    "the claim about {} has no assumptions. Name keys and randomness",
    lambda: check_claims([replace(claims_of()[0], assumptions=()), *claims_of()[1:]]),
    lambda: check_claims(claims_of()),
    error=BrokenContractError,
)
row(
    "there is no rule {}. Choose from {}",
    lambda: check_mechanism(LDPQ(1.0), rules=["integers"]),
    lambda: check_mechanism(LDPQ(1.0), rules=[next(iter(RULES))]),
)
row(
    "Use DistributedDiscreteGaussian if every client takes part in every round",
    lambda: handed(num_cohorts=1),
    lambda: fit(fed(ddg(0.01, 0.4))),
)
row(
    "is a mechanism, not a {}. Pass it to the callback Federated",
    lambda: pl.Trainer(callbacks=[LDPQ(1.0)], logger=False).fit(Classifier(), Digits(80)),
    lambda: fit(fed(LDPQ(1.0))),
    error=TypeError,
)
row(
    "Use disjoint cohorts that take turns: cohort=Cyclic(...)",
    lambda: HandOver((0, 0), before=((0, 1),)).check(1, 0, frozenset({0, 1})),
    lambda: fit(fed(handed(), **TURNS)),
)
row(
    "there is no mechanism {}.{} Run `fedq mechanisms` to list them",
    lambda: mechanism_class("Nothing"),
    lambda: main(["mechanisms"]),
)
row(
    "claims() has several claims about {}. Return the worst case.",
    lambda: check_claims(claims_of(PrivacyClaim(Adversary.SERVER, LaplaceLoss(1.0), 1))),
    lambda: check_claims(claims_of()),
    error=BrokenContractError,
)
row(
    "has no privacy parameter that a target could set. Leave the target out.",
    lambda: fit(fed(FedAvg(), seed=None, privacy=TARGET)),
    lambda: fit(fed(FedAvg(), seed=None)),
)
row(
    "has no noise that a Byzantine client could leave out. Use the attack inverted.",
    lambda: fit(fed(CorrelatedQuantization()), ByzantineClients(0.25, "inverted_without_coin")),
    lambda: fit(fed(CorrelatedQuantization()), ByzantineClients(0.25, "inverted")),
)
row(
    "words of {} points need a table of {} signs, at most {}. Choose fewer points, or words='hadamard'",
    lambda: sign_words(32, "iid"),
    lambda: sign_words(8, "iid"),
    lambda: word_table(np.zeros((32, 1)), "hadamard"),
)
row(
    "balanced words need an even number of points, got {}. Choose words='hadamard', which pads, or",
    lambda: sign_words(5, "balanced"),
    lambda: sign_words(5, "hadamard"),
    lambda: sign_words(5, "near_balanced"),
)
row("near_balanced words", lambda: sign_words(6, "near_balanced"), lambda: sign_words(6, "balanced"))
row("can't be expressed by a coin of {} bits. Choose", lambda: LDPQ(1e-12), lambda: fit(fed(LDPQ(1e-3))))
row("can't be expressed by a pair", lambda: PairedCoins(2.5e-9), lambda: fit(fed(PairedCoins(7.5e-9))))
row(
    "is too small for sums of {} clients in {} bits. Raise it.",
    lambda: fit(fed(AggregateGaussian(1.0, 1e-18))),
    lambda: fit(fed(AggregateGaussian(1.0, 1e-2))),
)
row(
    "a message of some blocks needs decoder='unbiased' and no threshold. Otherwise use epsilon_scope='bit'",
    lambda: CPA(1.0, epsilon_scope="round", blocks_per_round=1, threshold=True),
    lambda: fit(fed(CPA(1.0, epsilon_scope="bit"))),
)
row(
    "has {} entries for",
    lambda: fit(fed(CPA((1.0, 2.0), epsilon_scope="bit"))),
    lambda: fit(fed(CPA((1.0, 2.0, 1.0, 2.0), epsilon_scope="bit"))),
)
row("local_sigma must be at most {} times granularity, got", lambda: ddg(1e-9), lambda: fit(fed(ddg(0.01))))
row(
    "local_sigma must be at least {} times granularity, got {}. Use a smaller granularity and more bits.",
    lambda: handed(granularity=0.1),
    lambda: fit(fed(handed(granularity=0.01), **TURNS)),
)
row(
    'entropy_code="fixed" needs a shortest step, which {} lacks. '
    'Take LayeredGaussian(layering="shifted"), IrwinHall or entropy_code="range".',
    lambda: LayeredGaussian(1.0, 1.0, entropy_code="fixed"),
    lambda: fit(fed(LayeredGaussian(1.0, 1.0, layering="shifted", entropy_code="fixed"))),
    lambda: fit(fed(IrwinHall(1.0, 1.0, entropy_code="fixed"))),
    lambda: fit(fed(LayeredGaussian(1.0, 1.0, entropy_code="range"))),
)
row(
    "levels are too coarse at epsilon = {}, because no noise is left. "
    "Choose more levels or a smaller epsilon.",
    lambda: JoPEQ(50.0, levels=2),
    lambda: fit(fed(JoPEQ(50.0, levels=256))),
    lambda: fit(fed(JoPEQ(0.5, levels=2))),
)
row(
    "epsilon must be at most {}, got {}. Choose a smaller one, or SubtractiveDither without privacy.",
    lambda: MVU(60.0),
    lambda: fit(fed(MVU(5.0))),
    lambda: fit(fed(SubtractiveDither())),
)
row("integers over 2^32 can't express epsilon = {}.", lambda: MVU(1e-12), lambda: fit(fed(MVU(0.1))))
row(
    "whose noise follows from a measured leakage. Use GaussianNoise, which has the same noise.",
    lambda: fit(fed(leaky(), seed=None, privacy=TARGET)),
    lambda: fit(fed(GaussianNoise(1.0, 1.0), seed=None, privacy=TARGET)),
)
row("noise_std must be > 0 and finite, got", lambda: leaky(noise_std=0.0), lambda: fit(fed(FedAvg())))
row(
    "epsilon must be finite, got {}. Use CorrelatedQuantization() without privacy.",
    lambda: PairedCoins(float("inf")),
    lambda: fit(fed(CorrelatedQuantization())),
)
row(
    "epsilon_per_bit of RotatedCoins is not set. Set it, or train with",
    lambda: fit(fed(RotatedCoins(1.0))),
    lambda: fit(fed(RotatedCoins(1.0, epsilon_per_bit=1.0))),
    lambda: fit(fed(RotatedCoins(1.0), seed=None, privacy=TARGET)),
)
row(
    "nesting = {} has no effect with one stage. Choose stages >= 2",
    lambda: block_design("A2", None, None, 1, 2, "near_balanced", True),
    lambda: block_design("A2", None, None, 2, 2, "hadamard", True),
)
row("radius {} gives about {}", lambda: finite_codebook("A2", 300.0), lambda: finite_codebook("A2", 2.0))
row("ratio {} gives {}^{}", lambda: voronoi_codebook("A2", 300), lambda: voronoi_codebook("A2", 2))
row("in (0, {}] integer", lambda: discrete_gaussian_variance(1e9), lambda: discrete_gaussian_variance(1e3))
row("num_candidates must be >= 2,", lambda: recovery_leakage(0.5, 1), lambda: recovery_leakage(0.5, 2))
row("in [{}, {}], where", lambda: GaussianNoise(1e-200, 1.0), lambda: fit(fed(GaussianNoise(1.0, 1.0))))
row("radius must be at least {} in every segment, got {}.", lambda: context(0.0), lambda: context(1e-6))
row(
    "losses make up one message. Set unit to Unit.COORDINATE or Unit.BLOCK.",
    lambda: claim(Unit.MESSAGE),
    lambda: claim(Unit.COORDINATE),
    lambda: claim(Unit.BLOCK),
)
row(
    "An image of {} x {} can't be halved twice. Use an image_size >= 4.",
    lambda: CNN2(image_size=3),
    lambda: CNN2(image_size=4),
)
row(
    "epsilon covers {} rounds, but this is round number {}. Set rounds to the rounds of the whole run.",
    lambda: fit(fed(CPA(4.0, rounds=1, epsilon_scope="total")), max_epochs=2),
    lambda: fit(fed(CPA(4.0, rounds=2, epsilon_scope="total")), max_epochs=2),
)
row(
    "a modulus of 2^{} is too small for {} clients. Use more bits.",
    lambda: fit(fed(aimed(bits=2), 40, seed=None, privacy=BEHIND, secure_aggregation=SecAgg())),
    lambda: fit(fed(aimed(bits=16), 40, seed=None, privacy=BEHIND, secure_aggregation=SecAgg())),
)
row("measured_leakage must be", lambda: leaky(measured_leakage=0.9), lambda: leaky(measured_leakage=0.4))
row(
    "LeakageBudget sets the noise of NearOptimalUtility, got {}. Use that mechanism, or leave",
    lambda: check_controllable(LDPQ(1.0)),
    lambda: check_controllable(leaky()),
    lambda: fit(fed(LDPQ(1.0))),
)
row(
    "but public_calibration=True says that nobody does. Set it to false",
    lambda: check_controllable(leaky(public_calibration=True)),
    lambda: check_controllable(leaky(public_calibration=False)),
)
row(
    "can't be shown with {} attempts, even without a hit. Use more attempts",
    lambda: allowed_hits(10, 100, 0.2),
    lambda: allowed_hits(100, 100, 0.2),
    lambda: allowed_hits(10, 100, 0.9),
)
row(
    "the leakage of a guess among {} candidates. Use a larger budget or more candidates",
    lambda: allowed_hits(1000, 2, 0.01),
    lambda: allowed_hits(1000, 2, 0.9),
    lambda: allowed_hits(100000, 1000, 0.05),
)
row(
    "Correlated noise of clients needs fixed disjoint cohorts, got {}. Use",
    lambda: fed(cohort=2).planner.successors(0),
    lambda: fed(cohort=Cyclic(2)).planner.successors(0),
)


def context(radius):
    return RoundContext(0, ((0,), (1,)), (2,), torch.zeros(1), torch.full((1,), radius))
