"""Noise for a leakage budget: against attempts played one by one, and against messages really sent."""

import math

import pytest
import torch

from lightning_fedq.functional.trade_off import clopper_pearson, recovery_leakage
from lightning_fedq.leakage import Matching
from lightning_fedq.leakage.control import LEAST_NOISE, NoiseLevel, failing_levels, noise_for_budget
from lightning_fedq.mechanisms import NearOptimalUtility
from lightning_fedq.mechanisms.interface import Adversary
from tests.leakage.settings import candidates, generator as seeded, study


def updates(count=12, dim=40):
    common = torch.randn(dim, generator=seeded(1))
    return torch.randn(count, dim, generator=seeded(2)) + 0.5 * common


def test_levels_agree_with_attempts_played_one_by_one():
    """Hit rates at four noise levels, 4,000 attempts on either side: 5 standard errors, alarms below 1e-5."""
    u = updates()
    levels = failing_levels(u, 4000, seeded())
    unit = u / u.norm(dim=1, keepdim=True)
    generator = seeded(3)
    for std in (0.3, 1.0, 3.0, 30.0):
        victims = torch.randint(len(u), (4000,), generator=generator)
        seen = u[victims] + std * torch.randn(4000, u.shape[1], generator=generator)
        played = ((seen @ unit.T).argmax(1) == victims).double().mean().item()
        error = math.sqrt(0.25 * 2 / 4000)
        assert abs((levels > std).double().mean().item() - played) < 5 * error, std
    assert (levels > 1e12).double().mean().item() == pytest.approx(1 / 12, abs=5 * math.sqrt(1 / 12 / 4000))


def test_the_limit_of_the_order_statistic_is_kept():
    """200 calibrations at 95%: the true hit rate is above the limit in about 10; 25 would be 5 sigma."""
    u, broken = updates(), 0
    exact = failing_levels(u, 200_000, seeded(9))
    for seed in range(200):
        found = noise_for_budget(u, 100.0, 0.5, 200, seeded(100 + seed))
        true = (exact > found.std).double().mean().item()
        broken += recovery_leakage(true, len(u)) > found.leakage
    assert 1 <= broken < 25


def test_tighter_budgets_need_more_noise_and_clipping_less():
    u = updates()
    stds = [noise_for_budget(u, 100.0, budget, 1000, seeded()).std for budget in (0.7, 0.5, 0.3)]
    assert stds == sorted(stds) and stds[0] < stds[-1]
    assert noise_for_budget(u, 0.1, 0.3, 1000, seeded()).std < stds[-1]
    loose = noise_for_budget(u, 10.0, 0.82, 1000, seeded())
    assert loose == NoiseLevel(LEAST_NOISE * 10.0, pytest.approx(loose.unprotected), loose.unprotected)
    assert loose.unprotected == recovery_leakage(1.0, 12)


def test_what_is_really_sent_leaks_as_measured():
    """The mechanism's own messages, attacked by the shipped `Matching`: within the Clopper-Pearson limits.

    99.99% limits of 300 attempts, false alarm 1e-4 at most.
    """
    inputs, labels = candidates(40)
    setting = study(attack=Matching(), inputs=inputs, labels=labels)
    largest = setting.largest_norm
    found = noise_for_budget(setting.learning_rate * setting.gradients, largest, 0.4, 4000, seeded())
    levels = failing_levels(setting.learning_rate * setting.gradients, 20_000, seeded(5))
    expected = (levels > found.std).double().mean().item()
    mechanism = NearOptimalUtility(largest, 0.4, found.std, found.leakage)
    sent = setting.run(mechanism, Adversary.EAVESDROPPER, 300, seeded(6)).estimate
    low, high = clopper_pearson(sent.hits, sent.attempts, 0.9999)
    assert low <= expected <= high
    assert 0.05 < expected < 0.9


def test_a_budget_that_chance_breaks_is_refused():
    """Two twins among four: every noise leaves guesses, and ten attempts may show too many of them."""
    twins = updates(2).repeat(2, 1)
    with pytest.raises(ValueError, match="No noise brings the leakage among"):
        for seed in range(200):
            noise_for_budget(twins, 1.0, 0.2, 60, seeded(seed))
