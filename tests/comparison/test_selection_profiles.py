"""The winner by privacy profiles: the specification's vectors, and exact winners of finite runs."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from lightning_fedq.comparison.selection import (
    NegativeBinomialTrials,
    profile_epsilon,
    run_loss,
    run_profile,
    selection_epsilon,
)
from lightning_fedq.privacy.losses import ConcentratedLoss, GaussianLoss

# eta, E K, mu, delta, epsilon by profiles, of one Gaussian run
VECTORS = [
    (-0.5, 5, 0.25, 1e-5, 1.22758),
    (-0.5, 5, 1.0, 1e-5, 5.53134),
    (-0.5, 20, 1.0, 1e-5, 6.25925),
    (0.0, 5, 0.25, 1e-5, 1.28003),
    (0.0, 5, 1.0, 1e-3, 4.60991),
    (0.0, 20, 1.0, 1e-5, 6.65404),
    (1.0, 5, 1.0, 1e-5, 5.95986),
    (1.0, 20, 2.0, 1e-6, 16.15201),
    (5.0, 10, 0.25, 1e-5, 1.71185),
    (5.0, 20, 1.0, 1e-5, 8.69303),
]


def gaussian(mu):
    return run_profile([(GaussianLoss(1.0 / mu, ""), 1)])


@pytest.mark.parametrize(("kind", "mean", "mu", "delta", "expected"), VECTORS)
def test_the_vectors(kind, mean, mu, delta, expected):
    found = profile_epsilon(gaussian(mu), delta, NegativeBinomialTrials.of_mean(kind, mean))
    assert found == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("kind", "mean", "mu", "delta", "by_profile"), VECTORS)
def test_the_smaller_bound_is_told(kind, mean, mu, delta, by_profile):
    loss, trials = run_loss(GaussianLoss(1.0 / mu, ""), 1), NegativeBinomialTrials.of_mean(kind, mean)
    by_orders = selection_epsilon(loss, delta, trials)
    both = selection_epsilon(loss, delta, trials, profile=gaussian(mu))
    assert both == pytest.approx(min(by_orders, by_profile), abs=1e-4)
    assert both < by_orders


def test_the_numbers_of_the_table():
    """Those of docs/audit.md, before and after."""
    rows = ((1, 10, 1, 8.515, 6.618), (0, 5, 1, 6.892, 5.733), (5, 20, 4, 3.684, 2.050))
    for eta, mean, z, before, after in rows:
        loss = GaussianLoss(float(z), "")
        trials, whole = NegativeBinomialTrials.of_mean(float(eta), float(mean)), run_loss(loss, 1)
        assert selection_epsilon(whole, 1e-5, trials) == pytest.approx(before, abs=2e-3)
        found = selection_epsilon(whole, 1e-5, trials, profile=run_profile([(loss, 1)]))
        assert found == pytest.approx(after, abs=2e-3)


def winner(law, weights):
    """Exact law of the best of K runs, outcomes in ascending order: P(best <= i) = sum_k p_k F_i^k."""
    reached = np.concatenate([[0.0], np.cumsum(law)])
    reached[-1] = 1.0
    return np.diff(np.polyval(weights[::-1], reached))


def hockey_stick(first, second, epsilon):
    return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())


@pytest.mark.parametrize("kind", [-0.5, 0.0, 1.0, 5.0])
def test_exact_winners_of_finite_runs_are_below_the_bound(kind):
    """Random pairs of laws on two to five outcomes: ties are broken by chance, so outcomes are split."""
    trials, draws = NegativeBinomialTrials.of_mean(kind, 4.0), np.random.default_rng(0)
    count = 400 if kind != -0.5 else 3000
    weights = [trials.probability(k) for k in range(count)]
    assert sum(weights) == pytest.approx(1.0, abs=1e-6)
    tightest = 0.0
    for _ in range(40):
        size = int(draws.integers(2, 6))
        one, two = draws.dirichlet(np.full(size, 0.5), 2)
        if draws.random() < 0.5:
            two = 0.7 * one + 0.3 * two
        split = 20
        fine = [np.repeat(law / split, split) for law in (one, two)]
        profile = lambda e, a=one, b=two: max(hockey_stick(a, b, e), hockey_stick(b, a, e))  # noqa: E731
        best = [winner(law, weights) for law in fine]
        for delta, (a, b) in itertools.product((1e-3, 0.03, 0.2), (best, best[::-1])):
            claimed = profile_epsilon(profile, delta, trials)
            if claimed < 50.0:
                exact = hockey_stick(a, b, claimed)
                assert exact <= delta * (1.0 + 1e-9) + 2e-6, (one, two, delta)
                tightest = max(tightest, exact / delta)
    assert tightest > 0.3  # the bound is no trifle


@pytest.mark.parametrize(("kind", "mean", "mu", "delta", "expected"), VECTORS)
def test_the_winner_of_gaussian_scores_is_below_the_bound_and_near(kind, mean, mu, delta, expected):
    """The score is the Gaussian itself: an integral, of which the specification has the epsilon."""
    trials = NegativeBinomialTrials.of_mean(kind, mean)
    gamma, eta = trials.gamma, trials.eta

    def density(y, shift):  # in logarithms up to one constant, which is fixed by the mean
        below = stats.norm.sf(y - shift)
        return stats.norm.logpdf(y - shift) - (1 + eta) * np.log(gamma + (1 - gamma) * below)

    log_mean = math.log(trials.mean) + (1 + eta) * math.log(gamma)

    def beyond(y):
        a, b = density(y, mu) + log_mean, density(y, 0.0) + log_mean
        return np.maximum(np.exp(a) - np.exp(expected + b), 0.0)

    grid = np.linspace(-12, 14, 400_001)
    exact = integrate.trapezoid(beyond(grid), grid)
    total = integrate.trapezoid(np.exp(density(grid, 0.0) + log_mean), grid)
    assert total == pytest.approx(1.0, abs=1e-6)
    assert exact <= delta


def test_a_law_that_is_cut_at_a_number_breaks_the_bound_and_pays_for_it():
    """All mass beyond 30 runs on 30: three outcomes within e^(1/2), whose winners are not within e^(3/2)."""
    eps0, trials, draws = 0.5, NegativeBinomialTrials(1.0, 0.001, 30), np.random.default_rng(1)
    whole = [NegativeBinomialTrials(1.0, 0.001).probability(k) for k in range(30_000)]
    cut = whole[:31]
    cut[30] += 1.0 - sum(cut)
    worst = {"whole": 0.0, "cut": 0.0}
    for trial in range(3000):
        first = draws.dirichlet((0.3, 0.3, 0.3)) * (1 - 1e-3) + 1e-3 / 3
        signs = draws.permutation([eps0, -eps0, 0.0])
        second = first * np.exp(signs)
        second[signs == 0.0] += 1.0 - second.sum()
        if not (second > 0).all() or np.abs(np.log(second / first)).max() > eps0 + 1e-12:
            continue
        for name, weights in (("cut", cut), ("whole", whole)):
            if name == "cut" or trial < 60:
                a, b = winner(first, weights), winner(second, weights)
                seen = (a > 1e-12) & (b > 1e-12)
                worst[name] = max(worst[name], float(np.abs(np.log(a[seen] / b[seen])).max()))
    assert worst["whole"] <= 3 * eps0 + 1e-3 < worst["cut"]
    assert trials.beyond > 0.9  # such a cut is paid for as a distance, and then nothing is claimed


def test_the_slack_of_a_run_is_paid():
    loss, trials = GaussianLoss(1.0, ""), NegativeBinomialTrials.of_mean(1.0, 10.0)
    exact = profile_epsilon(run_profile([(loss, 1)]), 1e-5, trials)
    one = profile_epsilon(run_profile([(loss, 1)]), 1e-5, trials, log_ratio=0.01)
    assert exact + 0.02 < one < exact + 4 * 0.02 + 0.05


def test_the_worst_candidate_counts():
    pairs = [(GaussianLoss(2.0, ""), 4), (ConcentratedLoss(0.02, ""), 3)]
    worst = run_profile(pairs)
    for epsilon in (0.0, 0.5, 2.0):
        assert worst(epsilon) == max(run_profile([pair])(epsilon) for pair in pairs)
    assert run_profile(pairs[:1])(1.0) == pytest.approx(gaussian(1.0)(1.0), rel=1e-12)
