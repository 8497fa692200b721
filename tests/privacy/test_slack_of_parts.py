"""Sampler errors of independent parts with a pure epsilon: the bound against products of enumerated laws."""

import itertools
import math

import numpy as np
import pytest

from lightning_fedq.mechanisms import LaplaceNoise, PerCoordinateLaplace
from lightning_fedq.mechanisms.interface import Adversary, Slack
from lightning_fedq.privacy.accounting import Rounds, _with_slack_of_parts, spent, spent_together
from lightning_fedq.privacy.losses import LaplaceLoss
from lightning_fedq.privacy.planning import make_plan_context

PARTS = 3


def product(law):
    return np.array([math.prod(cell) for cell in itertools.product(law, repeat=PARTS)])


def delta_of(p, q, epsilon):
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def epsilon_at(p, q, delta):
    low, high = 0.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(p, q, middle) <= delta else (middle, high)
    return high


def near(law, distance, log_ratio, rng):
    """A law within a log-ratio of `law`, apart from an event of probability `distance`."""
    found = law * np.exp(rng.uniform(-log_ratio, log_ratio, len(law)) / 2)
    found /= found.sum()
    source, sink = rng.permutation(len(law))[:2]
    moved = min(distance, found[source])
    found[source] -= moved
    found[sink] += moved
    return found


@pytest.mark.parametrize("distance", [0.0, 1e-3, 1e-2])
@pytest.mark.parametrize("log_ratio", [0.0, 0.05])
def test_no_product_of_enumerated_laws_has_more(distance, log_ratio):
    rng, delta, bounds = np.random.default_rng(0), 0.2, []
    for _ in range(200):
        p, q = rng.dirichlet(np.ones(4), 2) * 0.9 + 0.025
        pure = float(np.abs(np.log(p / q)).max())
        slack = Slack(PARTS * distance, PARTS * log_ratio)
        exact = lambda d, p=p, q=q: epsilon_at(product(p), product(q), d)  # noqa: E731
        bound = _with_slack_of_parts(exact, delta, slack, pure)
        bounds.append(bound)
        if math.isinf(bound):
            continue
        real = [product(near(law, distance, log_ratio, rng)) for law in (p, q)]
        assert delta_of(*real, bound) <= delta + 1e-12
    assert sum(map(math.isfinite, bounds)) > 60


def claim_of(mechanism, dim):
    claims = mechanism.claims(make_plan_context(mechanism, 10, dim))
    return next(claim for claim in claims if claim.adversary is Adversary.SERVER)


@pytest.mark.parametrize(("dim", "rounds"), [(130, 1), (130, 25), (10_000, 25)])
def test_laplace_noise_per_coordinate_is_finite_where_exact_arithmetic_is(dim, rounds):
    """It was infinite from about 130 coordinates on, where exact arithmetic has 84.2."""
    claim = claim_of(PerCoordinateLaplace(1.0), dim)
    settings = {"compositions": claim.compositions, "rounds": rounds}
    exact = spent(claim.loss, 1e-5, **settings).epsilon
    stated = spent(claim.loss, 1e-5, slack=claim.slack, **settings).epsilon
    assert exact <= stated <= exact * (1 + 1e-6) + 1e-6
    if (dim, rounds) == (130, 1):
        assert stated == pytest.approx(84.2, abs=0.05)


def test_many_rounds_of_one_laplace_noise_are_finite():
    claim = claim_of(LaplaceNoise(1.0, 0.5), 1000)
    assert not claim.slack.per_loss and spent(claim.loss, 1e-5, rounds=200, slack=claim.slack).epsilon < 400


def test_two_claims_together():
    one, other = (claim_of(PerCoordinateLaplace(epsilon), 200) for epsilon in (1.0, 0.5))
    kinds = {Rounds(claim.loss, claim.compositions, claim.slack): 1 for claim in (one, other)}
    both = spent_together(kinds, 1e-5)
    alone = [spent(c.loss, 1e-5, compositions=c.compositions, slack=c.slack).epsilon for c in (one, other)]
    assert max(alone) < both < sum(alone) + 1.0


def test_a_slack_of_whole_rounds_is_not_split_over_coordinates():
    loss = LaplaceLoss(1.0)
    assert math.isinf(spent(loss, 1e-5, compositions=130, slack=Slack(1e-30)).epsilon)
    assert math.isfinite(spent(loss, 1e-5, compositions=130, slack=Slack(1e-30, per_loss=True)).epsilon)
