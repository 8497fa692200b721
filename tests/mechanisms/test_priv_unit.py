import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import special, stats

from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import PrivUnit, PrivUnitG, ProjUnit, RotatedAxes
from lightning_fedq.mechanisms.bases.own_rotation import rotate_each
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import spent
from tests.one_round import context_of, decode, encode

DENSE = torch.randn(48, generator=torch.Generator().manual_seed(1))
SPARSE = torch.zeros(48).index_fill(0, torch.tensor([7]), -2.0)
KINDS = [PrivUnitG(4.0, 3.0, 64), PrivUnit(4.0, 3.0, 64), ProjUnit(4.0, 3.0, 64, subspace=16)]


def messages_of(mechanism, update, num_clients, round=0):
    context = context_of(mechanism, range(num_clients), (len(update),), round=round)
    return encode(mechanism, update.expand(num_clients, -1), context).symbols, context


def law_p_value(mechanism, sender, update, count=6000):
    """Chi-square of what `sender` sends over the k directions that `mechanism` prefers, and the others."""
    symbols = messages_of(sender, update, count)[0]
    rand, choice = PublicRandomness(SeededKeys(0), 0), mechanism.choice(48)
    padded = torch.nn.functional.pad(update.double(), (0, 16)).expand(count, -1)
    seen = mechanism._project(rotate_each(padded, range(count), 64, rand), rand)
    top = (seen @ mechanism._codebook(48, rand).T).topk(choice.num_top).indices
    hits = (top == symbols).sum(0).numpy()
    chances = np.append(np.full(choice.num_top, choice.top_probability / choice.num_top), 0.0)
    chances[-1] = 1.0 - choice.top_probability
    return stats.chisquare(np.append(hits, count - hits.sum()), chances * count).pvalue


@pytest.mark.parametrize(("mechanism", "update"), [*((kind, DENSE) for kind in KINDS), (KINDS[0], SPARSE)])
def test_the_law_of_a_message_given_the_directions(mechanism, update):
    """6,000 messages; false alarm once in 1e5. One of 1.3 times the epsilon is seen."""
    assert law_p_value(mechanism, mechanism, update) > 1e-5
    assert law_p_value(mechanism, replace(mechanism, epsilon=1.3 * mechanism.epsilon), update) < 1e-9


def test_zero_has_no_direction():
    """Whatever k are preferred, rotations are each client's own: nothing on average, to 5 standard errors."""
    symbols, context = messages_of(KINDS[0], torch.zeros(48), 6000)
    mean = decode(KINDS[0], symbols, range(6000), context).double() / 6000
    assert mean.abs().max().item() <= 5 * math.sqrt(KINDS[0].noise_variance(context, range(6000))[0].item())


@pytest.mark.parametrize(("mechanism", "update"), [*((kind, DENSE) for kind in KINDS), (KINDS[0], SPARSE)])
def test_the_mean_points_along_the_update_and_the_error_is_the_formula(mechanism, update):
    """400 rounds of 20 clients of one update: codebooks, projections and coins are all drawn anew."""
    direction, decoded = update.double() / update.double().norm(), []
    for round in range(400):
        symbols, context = messages_of(mechanism, update, 20, round)
        decoded.append(decode(mechanism, symbols, range(20), context).double() / 20)
    rounds = torch.stack(decoded)
    along = rounds @ direction
    assert abs(along.mean().item() - 3.0) <= 4.5 * along.std().item() / math.sqrt(400)
    mean = rounds.mean(0)
    expected = 20 * float(mechanism.noise_variance(context_of(mechanism, (0,), (48,)), (0,))[0]) / 20 / 20
    assert (mean - mean @ direction * direction).norm().item() <= 1.5 * math.sqrt(48 * expected / 400)
    assert rounds.sub(mean).square().sum(1).mean().item() == pytest.approx(48 * expected, rel=0.05)


def test_the_mean_length_of_a_projection_and_the_published_scale_that_is_biased():
    """c_64 = .24908619 and c_256 = .49963392 in 1,024 dimensions; sqrt(k / D) is 0.4% and 0.07% off."""
    for subspace, length, biased in ((64, 0.24908619, 0.996345), (256, 0.49963392, 0.999268)):
        mechanism = ProjUnit(4.0, 1.0, subspace=subspace)
        shrinks = mechanism.mean_length(1024) / mechanism.choice(1024).mean_length
        assert shrinks == pytest.approx(length, rel=1e-7)
        assert shrinks * math.sqrt(1024 / subspace) == pytest.approx(biased, abs=1e-6)


@pytest.mark.parametrize(
    "epsilon, subspace, error", [(1.0, 64, 6544.7), (4.0, 64, 464.10), (4.0, 256, 449.42)]
)
def test_the_published_error_of_projunit(epsilon, subspace, error):
    mechanism = ProjUnit(epsilon, 1.0, directions=2**16, subspace=subspace)
    square = mechanism.choice(1024).mean_square / mechanism.mean_length(1024) ** 2
    assert square - 1 == pytest.approx(error, rel=5e-4)


def test_a_subspace_is_uniform_and_orthonormal():
    """W of normals sees ones / sqrt(D) as any other direction: |W u|^2 is Beta(k/2, (D-k)/2); 300 rounds."""
    mechanism, seen = ProjUnit(1.0, 1.0, subspace=8), []
    for round in range(300):
        w = mechanism._subspace(64, PublicRandomness(SeededKeys(0), round))
        assert torch.allclose(w @ w.T, torch.eye(8, dtype=torch.float64), atol=1e-12)
        seen.append(float((w @ torch.full((64,), 0.125, dtype=torch.float64)).square().sum()))
    assert stats.kstest(seen, stats.beta(4, 28).cdf).pvalue > 1e-5


def test_normal_and_unit_directions():
    rand = PublicRandomness(SeededKeys(0), 0)
    normal, unit = PrivUnitG(1.0, 1.0)._codebook(64, rand), PrivUnit(1.0, 1.0)._codebook(64, rand)
    assert stats.kstest(normal.flatten().numpy(), special.ndtr).pvalue > 1e-5
    assert np.allclose(unit.norm(dim=1), 1.0)
    assert torch.allclose(normal / normal.norm(dim=1, keepdim=True), unit)


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_every_view_has_the_message_s_epsilon_once(mechanism):
    claims = mechanism.claims(context_of(mechanism, range(5), (785,)))
    assert {claim.adversary for claim in claims} == set(Adversary)
    for claim in claims:
        assert claim.compositions == 1
        assert 3.99 <= spent(claim.loss, 1e-12, compositions=1, rounds=1).epsilon <= 4.0 * (1 + 1e-6)


@pytest.mark.parametrize("kind", [PrivUnitG, PrivUnit, ProjUnit, RotatedAxes])
@pytest.mark.parametrize("epsilon", [20.0, 36.0, 40.0, 50.0])
def test_a_large_epsilon_is_finite_and_that_of_the_integers(kind, epsilon):
    """The chance of any other direction is a number of 2^-64, where one less the rest is 0 in floats."""
    mechanism = kind(epsilon=epsilon, clip_norm=1.0)
    context = context_of(mechanism, range(5), (785,))
    choice = mechanism.choice(785)
    options = choice.num_directions if hasattr(choice, "num_directions") else 2 * choice.size
    odds = Fraction(choice.threshold * (options - choice.num_top), choice.num_top)
    exact = math.log(odds / (2**64 - choice.threshold))
    found = max(claim.loss.pure_epsilon for claim in mechanism.claims(context))
    assert found == pytest.approx(exact, rel=1e-12)
    assert 0.9 * epsilon < found <= epsilon * (1.0 + 1e-12)


def test_the_worst_pair_prefers_the_same_disjoint_directions_in_every_round():
    for mechanism in KINDS:
        few = mechanism.audit_cases(64)[0].mechanism
        sure, k = few.without_noise(context_of(few, (0,), (64,))), few.choice(64).num_top
        for round in range(3):
            context = context_of(few, (0,), (64,), round=round)
            pair = few.worst_pair(0, context, PublicRandomness(SeededKeys(0), round))
            sent = [int(encode(sure, x.float(), context).symbols) for x in pair]
            assert sent[0] < k and sent[1] >= few.directions - k


@pytest.mark.parametrize(
    "symbols", [torch.tensor([[64]]), torch.tensor([[-1]]), torch.tensor([[1, 2]]), torch.ones(1, 1)]
)
def test_a_message_that_names_no_direction_is_refused(symbols):
    context = context_of(KINDS[0], (0,), (48,))
    with pytest.raises(ValueError, match="one integer in"):
        decode(KINDS[0], symbols, (0,), context)
