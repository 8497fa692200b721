"""I-MVU: an exponential family, its information over the whole line, and what follows for whole updates."""

import math

import numpy as np
import pytest
import torch

from lightning_fedq.audit.enumeration_words import exact_law
from lightning_fedq.functional.private_levels import draw_tilted
from lightning_fedq.mechanisms import IMVU
from lightning_fedq.mechanisms.imvu import solve_imvu
from lightning_fedq.mechanisms.interface import Adversary
from tests.one_round import context_of, decode, encode

EVERY = [(bits, z) for bits in (1, 2, 3, 4) for z in (4.0, 1.0, 0.25)]


@pytest.mark.parametrize(("bits", "z"), EVERY)
def test_information_stays_within_the_claim_on_the_whole_line(bits, z):
    """And is used: another grid finds the bound to 1 in 10^4. Divergences follow, pair by pair."""
    family = solve_imvu(bits, z)
    assert 1.0 - 1e-4 < family.information(np.linspace(-60.0, 60.0, 70_001)).max() * 4.0 * z * z <= 1.0
    x = np.linspace(-1.0, 1.0, 21)
    law = family.law(x)
    for order in (1.1, 2.0, 16.0, 200.0):
        logs = order * np.log(law)[:, None] - (order - 1.0) * np.log(law)[None]
        divergences = np.logaddexp.reduce(logs, 2) / (order - 1.0)
        assert (divergences <= order * (x[:, None] - x) ** 2 / (8.0 * z * z) + 1e-12).all()


@pytest.mark.parametrize(("bits", "z"), EVERY)
def test_a_family_is_unbiased_at_the_ends_and_as_good_as_published(bits, z):
    """The source finds few bits as good as Gaussian noise: two within .4% of its error from z = 1/2 on, and
    within 5% at 1/4. Two of its ends are the most different inputs."""
    family, x = solve_imvu(bits, z), np.linspace(-1.0, 1.0, 401)
    law = family.law(x)
    np.testing.assert_allclose(law[[0, 200, -1]] @ family.values, [-1.0, 0.0, 1.0], atol=1e-12)
    error = float((law @ family.values**2 - 2 * x * (law @ family.values) + x**2).mean())
    if bits > 1:
        assert error < (1.004 if z >= 0.5 else 1.05) * 4.0 * z * z
    assert math.log((law.max(0) / law[[0, -1]].min(0)).max()) <= IMVU(1.0, z, bits).epsilon + 1e-12


@pytest.mark.parametrize(("bits", "z"), EVERY)
def test_a_table_of_outputs_draws_what_chances_do(bits, z):
    """Where it is sure, and that is nearly everywhere; also at its knots, and a word beside."""
    family, generator = solve_imvu(bits, z), np.random.default_rng(bits)
    knots = np.arange(-512, 513) / 512
    near = np.concatenate([knots, np.nextafter(knots, 2, dtype=np.float32), [2.0, -2.0]])
    values = np.concatenate([np.repeat(near, 64), generator.uniform(-1.0, 1.0, 300_000)]).astype(np.float32)
    words = generator.integers(0, 1 << 64, len(values), np.uint64)
    edge = generator.integers(0, 1 << 10, 30_000).astype(np.uint64) << np.uint64(54)
    words[:30_000] = edge - generator.integers(0, 2, 30_000).astype(np.uint64)  # 0 wraps to the last word

    def drawn(table):
        found = np.empty(len(values), np.uint8)
        draw_tilted(values, 1.0, words, family.weights, family.slopes, table, found)
        return found

    np.testing.assert_array_equal(drawn(family.table), drawn(np.full((1024, 1024), 255, np.uint8)))
    assert (family.table != 255).mean() > 0.94


def test_one_bit_is_the_sources():
    """s = +-epsilon / 2: epsilon^2 / 4 of information, epsilon^2 in the source's units of [0, 1]."""
    family = solve_imvu(1, 0.5)
    np.testing.assert_allclose(family.slopes, [-1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(family.values, np.array([-1.0, 1.0]) / math.tanh(1.0), rtol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("at", [-1.0, 0.3])
def test_the_law_that_is_drawn_is_the_familys(bits, at):
    """By all words: the encoder's own intervals are the chances, to the error that the claim charges."""
    mechanism = IMVU(
        clip_norm=8.0 * math.sqrt(2048), noise_multiplier=0.25 / math.sqrt(2048) + 0.25, output_bits=bits
    )
    # 2,048 coordinates of this value are at the clip: each is 1 / sqrt(2048) of it, and then held to [-1, 1]
    value = at * 8.0
    [claim] = [
        c for c in mechanism.claims(context_of(mechanism, (0,), (2048,))) if c.adversary is Adversary.SERVER
    ]
    law = exact_law(mechanism, value)
    expected = mechanism.family.law(np.array([at / math.sqrt(2048)]))[0]
    drawn = np.array([float(law.get(k, 0)) for k in range(2**bits)])
    assert np.abs(np.log(drawn / expected)).max() <= claim.slack.log_ratio + 1e-7  # float32 of the value


def test_the_sum_estimates_the_stated_mean():
    mechanism, dim = IMVU(clip_norm=300.0, noise_multiplier=0.3), 60_000
    context = context_of(mechanism, (0,), (dim,))
    update = torch.full((1, dim), 1.2)
    error = decode(mechanism, encode(mechanism, update, context).symbols, (0,), context).double()
    x = 1.2 / 300.0
    stated = 300.0 * float(mechanism.family.law(np.array([x]))[0] @ mechanism.family.values)
    # 5 standard errors: false alarm 6e-7
    assert abs(error.mean() - stated) < 5 * error.std() / math.sqrt(dim)
    assert error.var() <= mechanism.noise_variance(context, (0,)).item() * 1.03
