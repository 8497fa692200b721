"""Attacks on messages and steps; calibration meets its budget; counter-examples on real images."""

import dataclasses
import time

import pytest
import torch

from lightning_fedq.leakage import Matching
from lightning_fedq.leakage.gradients import LocalSteps
from lightning_fedq.leakage.total_variation import isotropic_tv
from lightning_fedq.mechanisms import LDPQ, FedAvg, NearOptimalUtility
from lightning_fedq.mechanisms.interface import Adversary
from reproductions.leakage.calibration import calibrate
from reproductions.leakage.inversion import DLG, Analytic, InvertingGradients, iDLG
from reproductions.optimal.bounds import leakage_bounds, paper_sufficient
from tests.leakage.clock import cpu_clock
from tests.leakage.printed import paper_ratio
from tests.leakage.settings import generator, mlp, study

VIEW = Adversary.EAVESDROPPER


def test_one_bit_hides_images_from_inversion_and_not_from_matching():
    """A weak attack is no evidence of privacy."""
    asked = LDPQ(epsilon_per_coordinate=5.0), VIEW, 30
    assert study(attack=Analytic()).run(*asked, generator()).estimate.hits == 0
    assert study().run(*asked, generator()).estimate.hit_rate > 0.7


@pytest.mark.parametrize("attack", [iDLG(60), DLG(60), InvertingGradients(150), Matching()], ids=repr)
@pytest.mark.parametrize("known", [True, False])
def test_every_attack_uses_both_messages(attack, known):
    """Two clients with one sample each, without noise: both are found, each in its own row."""
    setting = study(attack=attack, model=mlp(), labels_known=known)
    rows = torch.tensor([3, 8])
    shares = setting.gradients[rows]
    problem = setting._problem(shares.mean(0), setting.labels[rows])
    problem = dataclasses.replace(problem, shares=shares, share_weight=0.5)
    found = attack.invert(problem, generator(1))
    errors = (found - setting.inputs[rows]).square().mean((1, 2, 3))
    assert (errors < 0.02).all()


@pytest.mark.parametrize("attack", [iDLG(100), InvertingGradients(120), Matching()], ids=repr)
def test_attacks_that_simulate_the_steps_see_through_them(attack):
    """Steps of length 1: assuming one step, the search for the same update ends at other images."""
    setting = study(model=mlp(), attack=attack, learning_rate=1.0, local_steps=4)
    found = setting.run(FedAvg(), VIEW, 3, generator())
    assert found.estimate.hits >= 2
    if isinstance(attack, iDLG):
        problem = setting._problem(setting.gradients[0], setting.labels[:1])
        blind = dataclasses.replace(problem, steps=LocalSteps(1.0, 1), gradient=problem.gradient / 4)
        guesses = [attack.invert(p, generator(2)) for p in (problem, blind)]
        errors = [(guess - setting.inputs[:1]).square().mean().item() for guess in guesses]
        assert errors[0] < 0.1 * errors[1]


def test_a_search_that_does_not_end_in_time_is_given_up(monkeypatch):
    cpu_clock(monkeypatch)
    setting = study(model=mlp(), attack=InvertingGradients(10**6))
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"one attempt takes longer than 0\.2 s. Allow more time, or"):
        setting.run(FedAvg(), VIEW, 3, generator(), seconds=0.2)
    assert time.perf_counter() - start < 1.0  # an iteration takes milliseconds


def test_calibration_meets_the_budget_and_says_how():
    setting = study()
    found = calibrate(setting, 0.5, generator(), attempts=50, max_probes=6)
    assert found.mechanism.measured_leakage <= 0.5
    assert len(found.probes) == 6
    fresh = setting.run(found.mechanism, VIEW, 200, generator(9)).estimate
    assert fresh.leakage_limits[0] <= 0.5


def test_tighter_budgets_take_more_noise():
    setting = study()
    few = {"attempts": 60, "max_probes": 6}
    loose, tight = (calibrate(setting, budget, generator(), **few).mechanism for budget in (0.7, 0.3))
    assert tight.noise_std > loose.noise_std


def test_budgets_that_cannot_be_met_have_a_reason():
    setting = study()
    with pytest.raises(ValueError, match="max_probes must be >= 2"):
        calibrate(setting, 0.5, generator(), max_probes=1)


# ---- counter-examples to the paper, on real images, kept --------------------------------------------------


def test_lemma_6_8_leaves_every_image_recoverable():
    """Its noise for tau = C1 - .005 moves the law by TV > .005 and the attack still finds every digit."""
    setting = study(attack=Analytic())
    c1 = setting.run(FedAvg(), VIEW, 40, generator()).estimate
    dim, budget = sum(setting.segments), c1.leakage - 0.005
    spread = setting.learning_rate**2 * setting.gradients.var(0).mean().item()
    ratio = paper_ratio(dim, 0.005)
    noise = (ratio * spread) ** 0.5
    mechanism = NearOptimalUtility(setting.largest_norm, 0.83, noise, 0.83)
    leak = setting.run(mechanism, VIEW, 40, generator()).estimate
    assert leak.hit_rate == 1.0
    tv = isotropic_tv(dim, ratio)
    bound = paper_sufficient(c1.leakage, budget, tv)
    assert not bound.holds(leak.leakage) and not bound.sound
    assert all(b.holds(leak.leakage) for b in leakage_bounds(c1.leakage, c1.c2, tv) if b.sound)
