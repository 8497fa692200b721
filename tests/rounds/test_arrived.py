"""R of a run: a decoder that returns nothing of the updates is never better than "poor"."""

from dataclasses import dataclass

import pytest
import torch

from lightning_fedq import FixedRange
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import FedAvg, GaussianNoise
from lightning_fedq.privacy.planning import verdict_on
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.rounds.engine import ArrivedShare, clip_rows
from lightning_fedq.training.accounts import describe_noise, measured_noise
from tests.one_round import make_context

DIM = 64


@dataclass(frozen=True)
class Deaf(FedAvg):
    """A mechanism whose decoder returns noise of this standard deviation, and nothing of the updates."""

    std: float = 0.0

    def decode(self, symbols, clients, context, rand):
        draw = torch.Generator().manual_seed(context.round)
        return self.std * len(clients) * torch.randn(context.dim, generator=draw)


def play(mechanism, rounds, update):
    """Rows of a simulation in which every client's update in round t is `update(t)`."""
    planner, keys = RoundPlanner(4, seed=0), SeededKeys(0)
    engine = RoundEngine(mechanism, planner, keys, torch.zeros(DIM), [DIM], FixedRange(1.0))
    rows = []
    for number in range(rounds):
        engine.receive(engine.start().survivors, update(number).expand(4, -1))
        rows.append(engine.finish().metrics())
    return engine, rows


def same(_):
    return torch.full((DIM,), 0.1)


def changing(number):
    return torch.full((DIM,), 0.1) + torch.randn(DIM, generator=torch.Generator().manual_seed(10**6 + number))


@pytest.mark.parametrize("std", [0.0, 1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("rounds", [1, 3, 30])
@pytest.mark.parametrize("update", [same, changing])
def test_a_decoder_of_noise_or_zeros_is_never_better_than_poor(std, rounds, update):
    ratio = measured_noise(play(Deaf(std), rounds, update)[1])
    assert ratio > 0.7 and verdict_on(ratio) in ("poor", "do not")
    assert "no visible loss" not in describe_noise({"planned": 0.01, "sim_seen": ratio})
    assert "costs points" not in describe_noise({"planned": 0.01, "sim_seen": ratio})


def test_a_thousand_rounds_of_zeros_are_poor():
    assert measured_noise(play(Deaf(), 1000, same)[1]) >= 1.0


def test_unbiased_noise_averages_out_over_rounds():
    ratios = [measured_noise(play(GaussianNoise(1.0, 0.5), rounds, same)[1]) for rounds in (1, 100)]
    assert ratios[0] / ratios[1] == pytest.approx(100, rel=0.5)


def test_a_clip_is_no_loss():
    """Updates of norm 8 that a clip shortens to 1 arrive, if seven eighths of each were cut off."""
    [row] = play(GaussianNoise(1.0, 1e-3), 1, lambda _: torch.ones(DIM))[1]
    assert row["sim_arrived"] == pytest.approx(1.0, abs=0.01)


def test_rows_as_the_clip_leaves_them():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    noise = GaussianNoise(1.0, 1.0)
    found = clip_rows(noise, rows, make_context(noise, range(2), (2,)))
    assert found.flatten().tolist() == pytest.approx([0.6, 0.8, 0.3, 0.4])


def test_parameters_that_join_never_make_zeros_look_better():
    arrived = ArrivedShare()
    for size in (3, 3, 5):
        arrived.add(torch.zeros(size), torch.ones(size))
        assert arrived.share <= 0.0


def test_no_checkpoint_holds_anything_of_exact_updates():
    engine, _ = play(GaussianNoise(1.0, 0.5), 3, same)
    assert "arrived" not in engine.state_dict()
