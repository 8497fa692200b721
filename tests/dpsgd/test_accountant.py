"""The accountant of DP-SGD against dp_accounting and Opacus."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from opacus.accountants import create_accountant
from scipy import integrate, stats

from lightning_fedq.dpsgd.accountant import Account, SampledGaussianAccountant, sampled_gaussian_grid


def accountant(noise_multiplier, sample_rate, steps):
    made = SampledGaussianAccountant()
    made.history = [(noise_multiplier, sample_rate, steps)]
    return made


@pytest.mark.parametrize(
    ("noise_multiplier", "sample_rate", "steps", "delta"),
    [(1.1, 0.01, 1000, 1e-5), (2.0, 1.0, 10, 1e-5), (0.7, 1e-4, 1000, 1e-6)],
)
def test_agrees_with_dp_accounting(noise_multiplier, sample_rate, steps, delta):
    theirs = pld.from_gaussian_mechanism(noise_multiplier, sampling_prob=sample_rate).self_compose(steps)
    ours = accountant(noise_multiplier, sample_rate, steps).get_epsilon(delta)
    # 1e-4 is the step of their grid
    assert ours == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=2e-4, abs=1e-4)


@pytest.mark.parametrize("removal", [True, False])
def test_the_grid_dominates_the_mechanism(removal):
    s, q = 0.9, 0.2
    grid = sampled_gaussian_grid(s, q, removal, 1e-12)

    def difference(x, epsilon):
        without = stats.norm.pdf(x, 0, s)
        mixture = (1 - q) * without + q * stats.norm.pdf(x, 1, s)
        p, other = (mixture, without) if removal else (without, mixture)
        return max(p - np.exp(epsilon) * other, 0.0)

    for epsilon in (0.0, 0.05, 0.15, 0.5, 1.5):
        exact, error = integrate.quad(difference, -9, 10, args=(epsilon,), limit=400, epsabs=1e-12)
        assert exact - error - 1e-12 <= grid.delta(epsilon) <= exact + 1e-4


def test_opacus_makes_it_by_name_and_steps_it():
    made = create_accountant("fedq")
    assert isinstance(made, SampledGaussianAccountant)
    for _ in range(3):
        made.step(noise_multiplier=1.0, sample_rate=0.1)
    made.step(noise_multiplier=2.0, sample_rate=0.1)
    assert made.history == [(1.0, 0.1, 3), (2.0, 0.1, 1)]
    assert len(made) == 4
    restored = create_accountant("fedq")
    restored.load_state_dict(made.state_dict())
    assert restored.get_epsilon(1e-5) == made.get_epsilon(1e-5)


def test_different_steps_add_up():
    one, two = accountant(1.0, 0.1, 20), accountant(1.0, 0.1, 20)
    two.history.append((1.0000001, 0.1, 20))
    both = accountant(1.0, 0.1, 40)
    assert one.get_epsilon(1e-5) < two.get_epsilon(1e-5)
    assert two.get_epsilon(1e-5) == pytest.approx(both.get_epsilon(1e-5), rel=2e-3)


def test_nothing_spent_and_nothing_more_than_fits():
    fresh = Account(1.0, 0.1)
    assert fresh.epsilon(1e-5) == SampledGaussianAccountant().get_epsilon(1e-5) == 0.0
    steps = fresh.steps_within(3.0, 1e-5)
    assert accountant(1.0, 0.1, steps).get_epsilon(1e-5) <= 3.0
    assert accountant(1.0, 0.1, steps + 1).get_epsilon(1e-5) > 3.0
    assert fresh.steps_within(1e-9, 1e-12) == 0


def test_bad_steps_are_refused():
    fresh = SampledGaussianAccountant()
    with pytest.raises(ValueError, match="noise_multiplier must be > 0"):
        fresh.step(noise_multiplier=0.0, sample_rate=0.1)
    with pytest.raises(ValueError, match="sample_rate must be in"):
        fresh.step(noise_multiplier=1.0, sample_rate=1.1)
    with pytest.raises(ValueError, match="delta must be > 0"):
        fresh.get_epsilon(0.0)
    with pytest.raises(TypeError, match="takes delta only"):
        fresh.get_epsilon(1e-5, alphas=[2])


def test_next_to_no_noise_protects_nothing():
    assert accountant(1e-6, 0.5, 2).get_epsilon(1e-3) == np.inf
    mixed = SampledGaussianAccountant()
    mixed.history = [(1.0, 0.1, 3), (1e-6, 0.5, 2)]
    assert mixed.get_epsilon(1e-3) == np.inf


def test_an_account_pays_within_its_limit():
    account = Account(1.0, 0.1)
    account.step_limit = account.steps_within(2.0, 1e-5)
    assert account.fits(account.step_limit)
    assert not account.fits(account.step_limit + 1)
    assert [account.charge() for _ in range(account.step_limit)] == list(range(account.step_limit))
    assert account.epsilon(1e-5) <= 2.0
    assert account.steps_within(2.0, 1e-5) == account.step_limit
    with pytest.raises(RuntimeError, match=f"The privacy budget allows {account.step_limit} steps"):
        account.charge()
