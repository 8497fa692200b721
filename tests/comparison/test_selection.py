"""The best of a random number of runs: vectors, dp_accounting, and exact laws that a plant breaks."""

import math

import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent, ZCDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import special

from lightning_fedq.comparison.selection import NegativeBinomialTrials, run_loss, selected, selection_epsilon
from lightning_fedq.keys.randomness import Stream
from lightning_fedq.mechanisms.interface import Slack
from lightning_fedq.privacy.losses import ConcentratedLoss, GaussianLoss, PmfPairs, RenyiLoss

ORDERS = (1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512)
ORDERS = tuple(float(a) for a in ORDERS)
# rho of a run, mean number of runs, epsilon at 1e-5: eta 0, eta 1
VECTORS = [
    (0.01, 5, 0.91603, 1.08800),
    (0.01, 10, 0.99286, 1.20994),
    (0.01, 30, 1.09679, 1.37767),
    (0.05, 5, 2.10800, 2.46193),
    (0.05, 10, 2.27353, 2.73918),
    (0.05, 30, 2.49705, 3.09520),
    (0.125, 5, 3.37892, 3.90156),
    (0.125, 10, 3.64684, 4.32515),
    (0.125, 30, 4.00484, 4.90340),
    (0.5, 5, 6.89796, 7.67316),
    (0.5, 10, 7.41841, 8.52501),
    (0.5, 30, 8.11600, 9.66311),
    (1.0, 5, 9.89457, 10.6994),
    (1.0, 10, 10.6359, 11.8985),
    (1.0, 30, 11.6117, 13.4901),
]


def concentrated(rho):
    """At the vectors' orders only, as dp_accounting has it."""
    return RenyiLoss(ORDERS, tuple(a * rho for a in ORDERS))


@pytest.mark.parametrize(("rho", "mean", "eta0", "eta1"), VECTORS)
def test_the_vectors(rho, mean, eta0, eta1):
    for eta, expected in ((0.0, eta0), (1.0, eta1)):
        trials = NegativeBinomialTrials.of_mean(eta, mean)
        found = selection_epsilon(concentrated(rho), 1e-5, trials, orders=ORDERS)
        assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("rho", [0.01, 0.125, 1.0])
@pytest.mark.parametrize("mean", [3.0, 10.0])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 3.0])
def test_dp_accounting_says_the_same(rho, mean, eta):
    accountant = RdpAccountant(orders=list(ORDERS))
    accountant.compose(RepeatAndSelectDpEvent(ZCDpEvent(rho), mean, eta))
    trials = NegativeBinomialTrials.of_mean(eta, mean)
    ours = selection_epsilon(concentrated(rho), 1e-5, trials, orders=ORDERS)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-5)


def test_more_orders_are_never_worse():
    for rho, mean, eta0, *_ in VECTORS:
        found = selection_epsilon(ConcentratedLoss(rho), 1e-5, NegativeBinomialTrials.of_mean(0.0, mean))
        assert 0.95 * eta0 < found < eta0 * 1.001


@pytest.mark.parametrize(
    ("eta", "gamma", "mean"), [(0.0, 0.1, 3.908650), (1.0, 0.1, 10.0), (1.0, 0.2, 5.0), (0.5, 0.1, 6.581139)]
)
def test_means(eta, gamma, mean):
    trials = NegativeBinomialTrials(eta, gamma)
    assert trials.mean == pytest.approx(mean, rel=1e-6)
    again = NegativeBinomialTrials.of_mean(eta, mean)
    assert again.gamma == pytest.approx(gamma, rel=1e-5)


@pytest.mark.parametrize(("mean", "gamma"), [(5, 0.0699203), (10, 0.0269183), (30, 0.00659428)])
def test_gammas_of_eta_0(mean, gamma):
    assert NegativeBinomialTrials.of_mean(0.0, mean).gamma == pytest.approx(gamma, rel=1e-5)


@pytest.mark.parametrize("eta", [-0.5, 0.0, 0.5, 1.0, 2.5])
def test_probabilities_sum_to_one_and_have_the_mean(eta):
    trials = NegativeBinomialTrials(eta, 0.1)
    found = np.array([trials.probability(k) for k in range(1, 2000)])
    assert found.sum() == pytest.approx(1.0, abs=1e-9)
    assert found @ np.arange(1, 2000) == pytest.approx(trials.mean, rel=1e-9)
    # the recursion of the definition, P(k + 1) / P(k)
    ratios = [(1 - 0.1) * (k + eta) / (k + 1) for k in range(1, 50)]
    assert (found[1:50] / found[:49]) == pytest.approx(ratios)
    assert trials.probability(0) == 0.0


@pytest.mark.parametrize("eta", [-0.5, 0.0, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("most", [4, 30, 100, 2000])
def test_the_chance_that_a_law_is_cut_off_is_stated_and_hardly_more(eta, most):
    """What the probabilities of all larger numbers add up to, of which 60,000 are added."""
    trials = NegativeBinomialTrials.of_mean(eta, 10.0, most)
    exact = sum(trials.probability(k) for k in range(most + 1, 60_000))
    assert exact * (1.0 - 1e-9) <= trials.beyond
    assert trials.beyond <= (1.3 if most * trials.gamma > 5.0 else 10.0) * exact or trials.beyond == 1.0


def test_a_law_that_is_cut_off_draws_no_more():
    trials, stream = NegativeBinomialTrials(0.0, 0.1, 4), Stream(bytes(32))
    drawn = np.array([trials.draw(stream) for _ in range(3000)])
    assert drawn.max() == 4
    assert (drawn == 4).mean() == pytest.approx(1.0 - sum(map(trials.probability, (1, 2, 3))), abs=0.03)


def test_what_is_cut_off_is_distance():
    loss, whole = ConcentratedLoss(0.02), NegativeBinomialTrials(1.0, 0.5)
    cut = NegativeBinomialTrials(1.0, 0.5, 20)
    stated = selection_epsilon(loss, 1e-5, cut)
    assert stated == selection_epsilon(loss, 1e-5, whole, slack=Slack(cut.beyond / whole.mean, 0.0))
    assert stated > selection_epsilon(loss, 1e-5, whole)
    assert selection_epsilon(loss, 1e-5, NegativeBinomialTrials(1.0, 0.5, 3)) == math.inf


def test_draws_have_the_law():
    """3,000 draws of the number of runs: chi-square over 1, 2, 3 and more, of a fixed stream."""
    trials, stream = NegativeBinomialTrials(0.0, 0.1), Stream(bytes(32))
    drawn = np.array([trials.draw(stream) for _ in range(3000)])
    head = [trials.probability(k) for k in (1, 2, 3)]
    expected = 3000 * np.array([*head, 1.0 - sum(head)])
    counts = np.array([(drawn == 1).sum(), (drawn == 2).sum(), (drawn == 3).sum(), (drawn > 3).sum()])
    assert ((counts - expected) ** 2 / expected).sum() < 30.7


def winner(law, probability, most=400):
    """Law of the best of K runs over scores in ascending order: the maximum's, weighted by P(K)."""
    upto = np.cumsum(law)
    best = sum(probability(k) * upto**k for k in range(1, most))
    return np.diff(np.concatenate([[0.0], best]))


def renyi(p, q, order):
    return float(special.logsumexp(order * np.log(p) + (1 - order) * np.log(q))) / (order - 1)


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("order", [1.5, 2.0, 4.0, 16.0])
def test_the_exact_winner_of_two_candidates_is_below_the_bound(eta, order):
    """Two scores, a randomised response: the good one is more likely in one world."""
    level = 0.4
    high = 1.0 / (1.0 + math.exp(-level))
    one, other = np.array([1 - high, high]), np.array([high, 1 - high])
    trials = NegativeBinomialTrials.of_mean(eta, 6.0)
    divergences = tuple(max(renyi(one, other, a), renyi(other, one, a)) for a in ORDERS)
    bound = selected(RenyiLoss(ORDERS, divergences), trials, ORDERS).divergence(order)
    for p, q in ((one, other), (other, one)):
        assert renyi(winner(p, trials.probability), winner(q, trials.probability), order) <= bound


def test_a_fixed_number_of_runs_breaks_the_bound():
    """The plant: K = 60 in place of a random number with mean 60."""
    bad = 0.1  # every run fails in one world a little more often
    one, other = np.array([bad, 1 - bad]), np.array([bad * math.exp(-0.1), 1 - bad * math.exp(-0.1)])
    trials = NegativeBinomialTrials.of_mean(0.0, 60.0)
    divergences = tuple(max(renyi(one, other, a), renyi(other, one, a)) for a in ORDERS)
    bound = selected(RenyiLoss(ORDERS, divergences), trials, ORDERS).divergence(512.0)
    fixed = [winner(law, lambda k: float(k == 60)) for law in (one, other)]
    drawn = [winner(law, trials.probability, 60_000) for law in (one, other)]
    assert max(renyi(*drawn, 512.0), renyi(*drawn[::-1], 512.0)) <= bound
    assert max(renyi(*fixed, 512.0), renyi(*fixed[::-1], 512.0)) > bound


def test_slack_costs():
    trials, loss = NegativeBinomialTrials.of_mean(0.0, 10.0), ConcentratedLoss(0.125)
    plain = selection_epsilon(loss, 1e-5, trials)
    assert selection_epsilon(loss, 1e-5, trials, slack=Slack(0.0, 1e-3)) > plain + 1e-3
    assert selection_epsilon(loss, 1e-5, trials, slack=Slack(1e-8, 0.0)) > plain
    assert selection_epsilon(loss, 1e-5, trials, slack=Slack(1e-5, 0.0)) == math.inf


def test_a_run_s_divergences():
    assert run_loss(GaussianLoss(2.0), 8).divergence(3.0) == pytest.approx(3.0)
    assert run_loss(ConcentratedLoss(0.1), 5).divergence(2.0) == pytest.approx(1.0)
    high = 1.0 / (1.0 + math.exp(-0.2))
    coin = PmfPairs((((high, 1.0 - high), (1.0 - high, high)),))
    whole = run_loss(coin, 10)
    assert whole.divergence(4.0) == pytest.approx(10 * 4.0 * 0.02)
    exact = 10 * renyi(np.array([high, 1 - high]), np.array([1 - high, high]), 4.0)
    assert exact <= whole.divergence(4.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: NegativeBinomialTrials(-1.0, 0.5), "eta > -1"),
        (lambda: NegativeBinomialTrials(0.0, 0.5, 0), "at_most"),
        (lambda: NegativeBinomialTrials(0.0, 1.0), r"gamma in \(0, 1\)"),
        (lambda: NegativeBinomialTrials.of_mean(0.0, 1.0), "more than one run"),
        (lambda: run_loss(PmfPairs((((1.0, 0.0), (0.0, 1.0)),)), 2), "let runs compose"),
        (lambda: selection_epsilon(ConcentratedLoss(0.1), 0.0, NegativeBinomialTrials(0.0, 0.1)), "delta"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
