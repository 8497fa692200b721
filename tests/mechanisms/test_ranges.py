import math

import pytest
import torch

from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange, FixedRange, PreviousMinMax
from lightning_fedq.rounds import RoundEngine, RoundPlanner

SEGMENTS = (3, 2)
WEIGHTS = torch.tensor([-1.0, 0.0, 3.0, 0.0, 0.0])


def test_min_and_max_of_the_previous_model_with_margin_and_floor():
    ranges = PreviousMinMax(margin=1.5, floor=0.01).first(WEIGHTS, SEGMENTS)
    assert ranges.center.tolist() == [1.0, 0.0]
    assert ranges.radius.tolist() == pytest.approx([3.0, 0.03])


def test_an_all_zero_model_still_has_a_range():
    for rule in (PreviousMinMax(), AdaptiveRange()):
        assert bool((rule.first(torch.zeros(5), SEGMENTS).radius > 0).all())


def test_a_fixed_range_is_fixed():
    rule = FixedRange(radius=0.5, center=0.25)
    ranges = rule.first(WEIGHTS, SEGMENTS)
    assert ranges.radius.tolist() == [0.5, 0.5]
    assert ranges.center.tolist() == [0.25, 0.25]
    assert rule.following(ranges, WEIGHTS, WEIGHTS, None, SEGMENTS) is ranges


def test_the_adaptive_range_follows_the_signal_within_its_factors():
    rule = AdaptiveRange(initial=0.1, multiple=4.0, growth=1.5, shrink=0.8)
    ranges = rule.first(torch.ones(5), SEGMENTS)
    assert ranges.radius.tolist() == pytest.approx([0.1, 0.1])
    mean = torch.tensor([0.03, 0.03, 0.03, 5.0, 5.0])
    following = rule.following(ranges, WEIGHTS, mean, torch.zeros(2, dtype=torch.float64), SEGMENTS)
    assert following.radius.tolist() == pytest.approx([0.12, 0.15], rel=1e-6)
    nothing = rule.following(ranges, WEIGHTS, 0 * mean, None, SEGMENTS)
    assert nothing.radius.tolist() == pytest.approx([0.08, 0.08])


def test_noise_within_its_bound_cannot_push_the_adaptive_range_up():
    rule = AdaptiveRange()
    ranges = rule.first(torch.ones(5), SEGMENTS)
    mean = torch.tensor([1.0, -1.0, 1.0, 2.0, -2.0])
    following = rule.following(ranges, WEIGHTS, mean, torch.tensor([1.0, 4.0], dtype=torch.float64), SEGMENTS)
    assert following.radius.tolist() == pytest.approx((rule.shrink * ranges.radius).tolist())


def test_noise_of_few_coordinates_rarely_pushes_the_adaptive_range_up():
    """A segment of 10 normal values of the bound's variance; false alarm below 2e-3 a draw, 0.04 in all."""
    rule, sizes = AdaptiveRange(), (10,)
    ranges = rule.first(torch.ones(10), sizes)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        noise = torch.randn(10, generator=generator)
        following = rule.following(ranges, torch.ones(10), noise, torch.ones(1, dtype=torch.float64), sizes)
        assert following.radius.item() < ranges.radius.item()


def test_the_adaptive_range_stops_at_its_floor():
    rule = AdaptiveRange(initial=0.1, floor=0.05)
    ranges = rule.first(torch.ones(5), SEGMENTS)
    for _ in range(20):
        ranges = rule.following(ranges, WEIGHTS, torch.zeros(5), None, SEGMENTS)
    assert ranges.radius.tolist() == [0.05, 0.05]


def _growth(rule, target, epsilon, rounds=6, dim=20_000, num_clients=50):
    """Geometric mean growth of the radius per round when every client returns the model unchanged."""
    weights = 0.05 * torch.randn(dim, generator=torch.Generator().manual_seed(0))
    engine = RoundEngine(
        LDPQ(epsilon), RoundPlanner(num_clients, 1), SeededKeys(1), weights, (dim,), rule, target=target
    )
    first = engine.ranges.radius.item()
    for _ in range(rounds):
        for client in engine.start().survivors:
            engine.receive([client], torch.zeros(1, dim))
        engine.finish()
    return (engine.ranges.radius.item() / first) ** (1 / rounds)


@pytest.mark.parametrize("epsilon", [0.5, 1.0])
def test_the_papers_rule_explodes_and_the_adaptive_one_survives(epsilon):
    """Spec, section 1: about alpha sqrt(2 ln m / n) a round; 2.6 and 1.6 at m = 1e5, here m = 2e4."""
    alpha = 1 / math.tanh(epsilon / 2)
    predicted = alpha * math.sqrt(2 * math.log(20_000) / 50)
    paper = _growth(PreviousMinMax(margin=1.0), "weights", epsilon)
    assert paper > 1.3
    assert 0.75 * predicted < paper < 1.25 * predicted
    assert _growth(AdaptiveRange(), "updates", epsilon) <= 1.0
