"""The audit finds every planted bug, and nothing in what is clean."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.mechanisms import (
    CPA,
    LDPQ,
    MVU,
    AugCorBin,
    CorBin,
    FedAvg,
    GaussianNoise,
    JoPEQ,
    PerCoordinateGaussian,
    PerCoordinateLaplace,
    SignRR,
    StratifiedCorBin,
)
from lightning_fedq.privacy.audit import audit, audit_one_run, clopper_pearson, one_run_lower_bound
from lightning_fedq.privacy.enumeration import enumerate_coin, enumerate_pair, specified_pair_law
from lightning_fedq.privacy.sgd import GridDPOptimizer
from lightning_fedq.randomness import SeededKeys, Stream
from lightning_fedq.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from tests.privacy import plants

CLEAN = [
    LDPQ(1.0),
    CorBin(1.0, 1),
    CorBin(1.0, 5),
    CorBin(2.0, None),
    AugCorBin(1.0, 3, 0.5),
    StratifiedCorBin(1.0, 3),
    SignRR(1.0),
    MVU(epsilon=2.0),
    CPA(epsilon=1.0),
    JoPEQ(1.0),
    PerCoordinateLaplace(1.0),
    PerCoordinateGaussian(1.0, 1e-5),
    GaussianNoise(clip_norm=4.0, noise_multiplier=0.5),
]

# ---- layer A --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0])
def test_every_word_of_the_coin_is_as_specified(epsilon):
    assert enumerate_coin(epsilon, 8) == []


@pytest.mark.parametrize("shared_bits", range(7))
def test_every_word_of_a_pair_is_as_specified(shared_bits):
    assert enumerate_pair(1.0, shared_bits) == []


def test_specified_law_is_the_test_vector():
    from fractions import Fraction

    law = specified_pair_law(Fraction(7, 10), Fraction(2, 5), 2)
    assert law == (Fraction(3, 25), Fraction(29, 50), Fraction(7, 25), Fraction(1, 50))


@pytest.mark.parametrize("plant", [plants.tie_break, plants.modulus_minus_one])
def test_bugs_of_one_word_in_many_are_caught(plant):
    assert enumerate_coin(1.0, 8, quantize=plant)
    assert enumerate_coin(1.0, 11, quantize=plant)


def test_a_negative_for_a_complement_is_caught():
    assert enumerate_pair(1.0, 3, splice=plants.negative_instead_of_complement)


# ---- layer B --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", plants.MECHANISMS, ids=lambda m: type(m).__name__)
def test_planted_bugs_are_caught(mechanism):
    assert any(finding.alarm for finding in audit(mechanism, 400_000))


@pytest.mark.parametrize("mechanism", CLEAN, ids=repr)
def test_clean_mechanisms_raise_no_alarm(mechanism):
    """False alarms: at most 0.1% per mechanism for any seed; none for this one."""
    findings = audit(mechanism, 200_000)
    assert [finding for finding in findings if finding.alarm] == []


def test_the_audit_is_not_vacuous():
    """With 10^6 draws, half of them to judge, the bound comes within 0.03 of the claim."""
    found = {finding.view: finding for finding in audit(LDPQ(1.0), 1_000_000)}
    for view, copies in (("one message", 1), ("two rounds", 2), ("two layers", 2), ("bits on the wire", 1)):
        assert copies - 0.06 < found[view].lower_bound <= found[view].claim + 1e-9


def test_nothing_claimed_is_nothing_audited():
    assert audit(FedAvg(), 100_000) == ()


def test_too_few_draws_are_refused():
    with pytest.raises(ValueError, match="draws must be >="):
        audit(LDPQ(1.0), 100)


def test_bounds_are_clopper_and_pearson():
    for hits, draws in [(0, 10), (3, 10), (10, 10), (500, 100_000)]:
        low, high = clopper_pearson(np.array([hits]), draws, 0.01)
        exact = stats.binomtest(hits, draws).proportion_ci(0.98, method="exact")
        assert low[0] == pytest.approx(exact.low, rel=1e-9)
        assert high[0] == pytest.approx(exact.high, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_clean_suites_raise_no_alarm(seed):
    for mechanism in CLEAN[:6]:
        assert not any(finding.alarm for finding in audit(mechanism, 200_000, seed=1000 + seed))


# ---- ledger and engine -------------------------------------------------------------------------------------


class Recorder(LDPQ):
    """Counts the streams that clients used."""

    def encode(self, update, context, rand):
        used.update((client, context.round, context.attempt) for client in rand.clients)
        return super().encode(update, context, rand)


used: Counter[tuple[int, int, int]] = Counter()


def server(kind=RoundEngine) -> RoundEngine:
    used.clear()
    return kind(Recorder(1.0), RoundPlanner(3, 0), SeededKeys(0), torch.zeros(4), [4], FixedRange(1.0))


def unpaid(engine: RoundEngine) -> bool:
    """Did a client use more streams than it was charged for, or one of them twice?"""
    streams = Counter(client for client, _, _ in used)
    return any(n > 1 for n in used.values()) or any(
        n > int(engine.ledger.charges[client]) for client, n in streams.items()
    )


def play(engine: RoundEngine) -> None:
    plan = engine.start()
    engine.receive(plan.survivors, torch.zeros(3, 4))
    engine.abandon()
    plan = engine.start()
    engine.receive(plan.survivors, torch.zeros(3, 4))
    engine.finish()


def test_every_stream_is_paid_for():
    engine = server()
    play(engine)
    assert not unpaid(engine)
    assert len(used) == 6


def test_a_failed_round_that_is_not_paid_for_is_caught():
    engine = server(plants.SkipsTheFailedRound)
    play(engine)
    assert unpaid(engine)


def test_streams_that_restart_after_resuming_are_caught():
    engine = server()
    play(engine)
    resumed = server()
    resumed.load_state_dict(plants.restart_streams(engine.state_dict()))
    with pytest.raises(RuntimeError, match="a stream serves one payload"):
        resumed.start()


def test_a_norm_of_nan_does_not_pass_the_clip():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = GridDPOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
        words=lambda: Stream(bytes(32)).words64,
    )
    samples = torch.tensor([[math.nan, 0.0, 0.0], [math.inf, 1.0, 0.0], [3.0, 4.0, 0.0]])
    parameter.grad_sample = samples.clone()
    optimizer.clip_and_accumulate()
    clipped = parameter.summed_grad.double() * optimizer.grid
    assert clipped.norm() <= 1.0
    assert torch.allclose(clipped, torch.tensor([0.6, 0.8, 0.0]).double(), atol=1e-4)
    # what the check above would say to the planted clip
    leaked = (plants.nan_passes(1.0, samples.norm(dim=1))[:, None] * samples).sum(0)
    assert not leaked.norm() <= 1.0


# ---- layer C --------------------------------------------------------------------------------------------


def test_one_run_bounds_of_the_literature():
    assert one_run_lower_bound(1000, 1000, 775, 0.0, 1e-3) == pytest.approx(1.0, abs=0.03)
    assert one_run_lower_bound(10_000, 10_000, 7450, 0.0, 1e-3) == pytest.approx(1.0, abs=0.03)
    assert one_run_lower_bound(100, 100, 50, 0.0, 1e-3) == 0.0
    pure, approximate = (one_run_lower_bound(1000, 1000, 900, delta, 1e-3) for delta in (0.0, 1e-5))
    assert 0.0 < approximate < pure
    with pytest.raises(ValueError, match="correct <= guesses <= canaries"):
        one_run_lower_bound(10, 5, 6, 0.0, 1e-3)


def through_one_round(mechanism):
    """One client's update carries a canary in every coordinate; the server reads its message."""

    def guess(signs):
        dim = len(signs)
        engine = RoundEngine(
            mechanism, RoundPlanner(2, 5), SeededKeys(6), torch.zeros(dim), [dim], FixedRange(1.0)
        )
        plan = engine.start()
        engine.receive([plan.cohort[0]], torch.from_numpy(signs).float()[None])
        return np.where(engine._symbols.numpy() > 0, 1, -1)

    return guess


@pytest.mark.parametrize("mechanism", [LDPQ(1.0), CorBin(1.0, 5), SignRR(1.0)])
def test_canaries_in_one_run_stay_within_the_claim(mechanism):
    finding = audit_one_run(through_one_round(mechanism), 20_000, 1.0)
    assert finding.alarm == ""
    assert 0.9 < finding.lower_bound <= 1.0


def test_canaries_in_one_run_catch_a_wrong_coin():
    finding = audit_one_run(through_one_round(plants.AlphaOffByOne(1.0)), 20_000, 1.0)
    assert "guesses are right" in finding.alarm
    assert finding.lower_bound > 1.1
