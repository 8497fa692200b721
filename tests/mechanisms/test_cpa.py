import math
import tracemalloc
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from lightning_fedq.functional.blocks.lattice import lattice
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.cpa import CPA
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PmfPairs, Unit
from reproductions.cpa.theorems import anonymity
from tests.described import privacy_report
from tests.functional.blocks import oracle
from tests.one_round import encode, make_context

EVERY = [
    {},
    {"levels": 4},
    {"levels": 5},
    {"levels": 4, "words": "balanced"},
    {"levels": 3, "words": "near_balanced"},
    {"levels": 4, "words": "iid"},
    {"levels": 4, "dither": "plain"},
    {"stages": 2, "nesting": 8},
    {"stages": 3, "nesting": 3},
    {"lattice": "A2"},
    {"lattice": "A2", "codebook_radius": 2.0, "stages": 3, "nesting": 2},
    {"lattice": "A2", "stages": 2, "nesting": 3},
    {"blocks_per_round": 400},
    {"lattice": "A2", "stages": 2, "blocks_per_round": 400},
]


def context(clients, dim, radius=1.0, round=0, center=0.0):
    return make_context(CPA(1.0, epsilon_scope="bit"), range(clients), (dim,), radius, center, round)


def decoded(mechanism, updates, ctx, seed=0):
    """Decoded sum of the rows of `updates`."""
    keys, clients = SeededKeys(seed), range(len(updates))
    message = mechanism.encode(updates, ctx, ClientRandomness(keys, clients, ctx.round))
    return mechanism.decode(message.symbols, clients, ctx, PublicRandomness(keys, ctx.round))


# ---- unbiased, with the specified variance -------------------------------------------------------

VECTORS = {  # cpa.md section 16, vector 7: (words, dither) by (N, epsilon)
    (2, 0.5): (0.80020628, 0.81703962, 1.63374590, 1.65057924),
    (2, 2.0): (0.05286975, 0.06970308, 0.13907283, 0.15590617),
    (4, 0.5): (3.10344023, 3.10927357, 4.14536476, 4.15119809),
    (4, 2.0): (0.30092823, 0.30676156, 0.40868208, 0.41451542),
    (8, 0.5): (7.64056191, 7.64164524, 8.73458265, 8.73566599),
    (8, 2.0): (0.77440749, 0.77549083, 0.88754904, 0.88863237),
}
INPUTS = (-0.4, -0.1, 0.0, 0.2, 0.45)


def exact_mse(levels, epsilon, words, dither):
    """Section 5's closed form with gamma = 1, for INPUTS, written for the test."""
    step, c = 2 / levels, math.tanh(epsilon / 2)
    energy = step**2 * levels * (levels**2 - 1) / 12
    kappa = 1.0 if words == "iid" else (levels - 1) / levels
    total = 0.0
    for h in INPUTS:
        y = h / step + levels / 2 - 0.5
        f, q0 = y - math.floor(y), (math.floor(y) - (levels - 1) / 2) * step
        square = (1 - f) * q0**2 + f * (q0 + step) ** 2
        error = step**2 / 12 if dither == "subtractive" else step**2 * f * (1 - f)
        total += kappa * energy / c**2 - square + error
    return total / len(INPUTS) ** 2


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize(("levels", "epsilon"), VECTORS)
def test_scalar_error_is_the_closed_form(levels, epsilon, case):
    words, dither = ("hadamard", "iid")[case // 2], ("subtractive", "plain")[case % 2]
    expected = VECTORS[levels, epsilon][case]
    assert exact_mse(levels, epsilon, words, dither) == pytest.approx(expected, abs=1e-8)
    mechanism, dim = CPA(epsilon, levels=levels, dither=dither, words=words, epsilon_scope="bit"), 20_000
    updates = torch.tensor(INPUTS)[:, None].repeat(1, dim)
    ctx = context(5, dim, radius=(levels - 1) / levels)
    error = decoded(mechanism, updates, ctx).double() / 5 - np.mean(INPUTS)
    squared = error.square()
    # 24 cases, two comparisons each at 5 standard errors: false alarm 3e-5 in all.
    assert abs(error.mean()) < 5 * error.std() / math.sqrt(dim)
    assert abs(squared.mean() - expected) < 5 * squared.std() / math.sqrt(dim)
    assert mechanism.noise_variance(ctx, range(5)).item() >= expected * (1 - 1e-7)


@pytest.mark.parametrize("kwargs", [k for k in EVERY if "lattice" in k and "blocks_per_round" not in k])
def test_lattice_error_is_the_closed_form(kwargs):
    """Zero input: MSE = sum of stages kappa E_q / c^2 - E |points|^2 + L g det^(2/L) scale^2, per block."""
    mechanism, epsilon, dim = CPA(epsilon=1.0, epsilon_scope="bit", **kwargs), 1.0, 32_000
    design, size = mechanism._design, lattice(kwargs["lattice"]).dim
    error = decoded(mechanism, torch.zeros(1, dim), context(1, dim)).double().reshape(-1, size)
    c = math.tanh(epsilon / 2)
    expected = design.step**2 * lattice(kwargs["lattice"]).second_moment
    # With zero input the fine point is always zero, so every stage sends its point nearest to zero.
    for table in design.tables:
        padded, center = table.num_rows + 1, table.points.sum(0) / (table.num_rows + 1)
        energy = np.square(table.points).sum() - padded * center @ center
        expected += (padded - 1) / padded * energy / c**2 - center @ center
    squared = error.square().sum(1)
    # 6 cases at 5 standard errors: false alarm 4e-6.
    assert abs(squared.mean() - expected) < 5 * squared.std() / math.sqrt(len(squared))


def test_end_to_end_vector_of_the_specification(monkeypatch):
    monkeypatch.setattr(CPA, "_seed", staticmethod(lambda rand: 99))
    updates = torch.tensor([[0.9, -0.3, 0.2, -0.8], [0.1, 0.6, -0.7, 0.3], [-0.4, -0.9, 0.8, 0.2]])
    ctx = context(3, 4, radius=0.75, round=5)
    keys, clients = SeededKeys(0), (0, 1, 2)
    exact = CPA(epsilon=math.inf, levels=4, dither="none", epsilon_scope="bit")
    message = exact.encode(updates, ctx, ClientRandomness(keys, clients, 5))
    assert message.symbols.tolist() == [[0, 0, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0]]
    assert (message.num_bits, message.num_clipped) == (12, 4)
    public = PublicRandomness(keys, 5)
    mean = exact.decode(message.symbols, clients, ctx, public) / 3
    torch.testing.assert_close(mean, torch.tensor([-0.5, 0.0, 0.25, 0.0]))
    coins = CPA(epsilon=0.5, levels=4, dither="none", epsilon_scope="bit")
    private = coins.decode(message.symbols, clients, ctx, public) / 3
    torch.testing.assert_close(private, torch.tensor([-2.041494, 0, 1.020747, 0]), atol=1e-6, rtol=0)
    # The histogram without a threshold is the same decoder.
    cut = "lightning_fedq.functional.blocks.block_messages.threshold_frequencies"
    monkeypatch.setattr(cut, lambda values: values)
    histogram = CPA(epsilon=math.inf, levels=4, dither="none", threshold=True, epsilon_scope="bit")
    torch.testing.assert_close(histogram.decode(message.symbols, clients, ctx, public) / 3, mean)


# ---- the compiled loops, against a few lines of tensor code -------------------------------------------


@pytest.mark.parametrize("kwargs", [*EVERY, {"dither": "none", "levels": 4}])
def test_the_bits_are_those_of_the_formula(kwargs):
    """Dithered nearest points, digits, the words' signs there and the coins, one block after the other."""
    mechanism, ctx = CPA(epsilon=1.0, epsilon_scope="bit", **kwargs), context(3, 1003, radius=0.3)
    updates = 0.2 * torch.randn(3, 1003, generator=torch.Generator().manual_seed(0))
    keys, clients = SeededKeys(1), (2, 0, 1)
    rand = ClientRandomness(keys, clients, 0)
    message = mechanism.encode(updates, ctx, rand)
    chosen = mechanism.chosen_blocks(clients, ctx, rand)
    expected, outside = oracle.bits_of(
        mechanism._design,
        updates.double() / ctx.radius,
        chosen,
        mechanism._keys(clients, ctx, rand),
        [rand.private(client, "cpa coins") for client in clients],
        mechanism._flips(clients, ctx),
    )
    assert torch.equal(message.symbols, expected)
    assert message.num_clipped == min(outside * mechanism.block_dim, updates.numel()) > 0


# ---- a budget for a whole message -----------------------------------------------------------------


def test_a_round_s_budget_is_shared_by_as_many_bits_as_make_least_noise():
    """Section 6's example: epsilon 8 a round and 7,850 parameters are 4 bits of epsilon 2."""
    mechanism, ctx = CPA(epsilon=8.0, epsilon_scope="round"), context(3, 7850)
    message = mechanism.encode(torch.zeros(3, 7850), ctx, ClientRandomness(SeededKeys(0), range(3), 0))
    assert message.symbols.shape == (3, 4) and message.num_bits == 12
    assert [c.compositions for c in mechanism.claims(ctx)] == [4] * len(Adversary)
    assert 2 - 1e-8 < mechanism.coin(0, ctx).epsilon <= 2
    assert CPA(epsilon=8.0, epsilon_scope="round", stages=2).blocks_sent(ctx) == 2
    assert CPA(epsilon=0.5, epsilon_scope="round").blocks_sent(ctx) == 1
    assert CPA(epsilon=1e6, epsilon_scope="round").blocks_sent(ctx) == 7850
    assert CPA(epsilon=8.0, epsilon_scope="round", lattice="A2").blocks_sent(context(1, 4)) == 2
    total = CPA(epsilon=240.0, epsilon_scope="total", rounds=30)
    assert total.blocks_sent(ctx) == 4 and total.coin(0, ctx) == mechanism.coin(0, ctx)
    several = CPA(epsilon=(4.0, 8.0, 16.0), epsilon_scope="round")
    assert several.blocks_sent(ctx) == 3  # the client with the smallest budget makes most of the noise
    assert 16 / 3 - 1e-6 < several.coin(2, ctx).epsilon <= 16 / 3


@pytest.mark.parametrize(
    "kwargs",
    [
        {"epsilon": 8.0, "epsilon_scope": "round"},
        {"epsilon": 3.0, "epsilon_scope": "round", "blocks_per_round": 7},
        {"epsilon": 5.0, "epsilon_scope": "round", "stages": 3, "lattice": "A2"},
        {"epsilon": 0.1, "epsilon_scope": "round"},
        {"epsilon": 300.0, "epsilon_scope": "round"},
        {"epsilon": 50.0, "epsilon_scope": "total", "rounds": 9},
    ],
)
def test_what_the_claims_compose_to_is_the_budget_and_never_more(kwargs):
    """In exact arithmetic: the ratio of the integer thresholds, to the power of the number of bits."""
    mechanism, ctx = CPA(**kwargs), context(2, 200)
    budget = kwargs["epsilon"] / kwargs.get("rounds", 1)
    coin = mechanism.coin(0, ctx)
    for claim in mechanism.claims(ctx):
        assert claim.compositions == mechanism.stages * mechanism.blocks_sent(ctx)
        assert claim.loss.pairs[0][0] == pytest.approx((coin.high / 2**32, coin.low / 2**32))
        with localcontext() as precise:
            precise.prec = 50
            level = claim.compositions * (Decimal(coin.high) / Decimal(coin.low)).ln()
            assert level <= Decimal(budget)
        assert float(level) == pytest.approx(budget, rel=1e-6)


@pytest.mark.parametrize("dither", ["plain", "subtractive"])
@pytest.mark.parametrize("value", [0.0, 0.6, -1.0])
def test_the_variance_of_some_blocks_is_the_closed_form(dither, value):
    """(M / m) E[b^2] - x^2, with E[b^2] = A^2 / c^2, less e_ns - e_s where the dither is subtracted."""
    blocks, sent, epsilon = 4000, 50, 2.0 * 50
    mechanism = CPA(epsilon, epsilon_scope="round", blocks_per_round=sent, dither=dither)
    ctx = context(100, blocks, radius=0.5)
    rows = torch.full((100, blocks), 0.5 * value)
    keys = SeededKeys(7)
    symbols = mechanism.encode(rows, ctx, ClientRandomness(keys, range(100), 0)).symbols
    public = PublicRandomness(keys, 0)
    estimates = [mechanism.decode(symbols[i : i + 1], [i], ctx, public) for i in range(100)]
    error = torch.stack(estimates).double() - 0.5 * value
    fraction = (value + 1) / 2  # between the two levels
    moment = 1 / math.tanh(1.0) ** 2
    if dither == "subtractive":
        moment += 1 / 3 - 4 * fraction * (1 - fraction)
    expected = 0.25 * (blocks / sent * moment - value**2)
    # 6 cases, 5 standard errors over 100 clients, each a sum over 4,000 blocks: false alarm 1e-5.
    means, squares = error.mean(1), error.square().mean(1)
    assert abs(means.mean()) < 5 * means.std() / 10 + 1e-9
    # float32 output: 1e-6 of the size, where a plain dither at zero leaves no spread at all
    assert abs(squares.mean() - expected) < 5 * squares.std() / 10 + 1e-6 * expected
    bound = mechanism.noise_variance(ctx, [0]).item()
    assert expected <= bound and (dither == "plain" or value != -1.0 or expected > 0.99 * bound)


def test_the_best_variance_is_the_specification_s():
    """3.433 M A^2 / epsilon where epsilon / m is exactly the best, in the noise bound with a plain dither."""
    blocks, sent = 7850, 30
    epsilon = sent * 2.1773189849653067
    mechanism = CPA(epsilon, epsilon_scope="round", dither="plain")
    ctx = context(1, blocks, radius=0.02)
    assert mechanism.blocks_sent(ctx) == sent
    bound = mechanism.noise_variance(ctx, [0]).item()
    assert bound == pytest.approx(3.4329877708 * blocks * 0.02**2 / epsilon, rel=1e-7)


def test_the_choice_of_blocks_is_public_fresh_and_each_client_s_own():
    mechanism, ctx, keys = CPA(2.0, blocks_per_round=10, epsilon_scope="bit"), context(4, 1000), SeededKeys(2)
    client = mechanism.chosen_blocks(range(4), ctx, ClientRandomness(keys, range(4), 0))
    server = mechanism.chosen_blocks(range(4), ctx, PublicRandomness(keys, 0))
    assert np.array_equal(client, server) and len({tuple(row) for row in client.tolist()}) == 4
    later = mechanism.chosen_blocks(range(4), context(4, 1000, round=1), PublicRandomness(keys, 1))
    again = mechanism.chosen_blocks(range(4), ctx, PublicRandomness(keys, 0, attempt=1))
    assert not np.array_equal(client, later) and not np.array_equal(client, again)
    # The rest of the model hears nothing: without coin and dither exactly 10 coordinates move.
    exact = CPA(math.inf, blocks_per_round=10, dither="none", epsilon_scope="bit")
    estimate = decoded(exact, torch.ones(1, 1000), context(1, 1000))
    assert (estimate != 0).sum() == 10 and estimate.sum() == pytest.approx(1000)


def test_all_blocks_asked_for_are_all_blocks():
    ctx, updates = context(2, 50), 0.1 * torch.ones(2, 50)
    rand = ClientRandomness(SeededKeys(0), range(2), 0)
    asked = (CPA(1.0, blocks_per_round=count, epsilon_scope="bit") for count in (None, 80))
    assert torch.equal(*(mechanism.encode(updates, ctx, rand).symbols for mechanism in asked))


# ---- randomness ----------------------------------------------------------------------------------


def test_rounds_clients_and_stages_use_different_words():
    mechanism = CPA(epsilon=math.inf, levels=4, dither="none", stages=2, nesting=4, epsilon_scope="bit")
    updates = torch.full((2, 300), 0.1)

    def bits(round):
        rand = ClientRandomness(SeededKeys(0), (0, 1), round)
        return mechanism.encode(updates, context(2, 300, round=round), rand).symbols

    first, second = bits(0), bits(1)
    assert not torch.equal(first, second) and not torch.equal(first[0], first[1])
    assert not torch.equal(first[0, :300], first[0, 300:])


# ---- options -------------------------------------------------------------------------------------


def test_every_client_can_have_its_own_epsilon():
    mechanism, dim = CPA(epsilon=(0.5, 2.0), epsilon_scope="bit"), 30_000
    ctx = context(2, dim)
    assert mechanism.coin(1, ctx).low < mechanism.coin(0, ctx).low
    error = decoded(mechanism, torch.full((2, dim), 0.3), ctx).double() / 2 - 0.3
    assert abs(error.mean()) < 4.9 * error.std() / math.sqrt(dim)  # false alarm 1e-6
    pair = mechanism.claims(ctx)[0].loss.pairs[0]
    assert math.log(pair[0][0] / pair[1][0]) == pytest.approx(2.0, abs=1e-8)  # the least protected
    with pytest.raises(ValueError, match="epsilon has 2 entries, none for client 2"):
        mechanism.coin(2, ctx)


def test_the_range_decays():
    mechanism, dim = CPA(epsilon=50.0, dither="plain", decay_rounds=5.0, epsilon_scope="bit"), 200
    for round, radius in ((0, 1.0), (5, 0.5), (15, 0.25)):
        ctx = context(1, dim, round=round)
        keys = SeededKeys(0)
        message = mechanism.encode(torch.ones(1, dim), ctx, ClientRandomness(keys, [0], round))
        estimate = mechanism.decode(message.symbols, [0], ctx, PublicRandomness(keys, round))
        torch.testing.assert_close(estimate, torch.full((dim,), radius))
        assert message.num_clipped == (0 if round == 0 else dim)


def test_a_threshold_lowers_the_error_and_is_said_to_be_biased():
    dim, generator = 4000, torch.Generator().manual_seed(1)
    updates = 0.1 * torch.randn(50, dim, generator=generator)
    ctx, errors = context(50, dim), {}
    for threshold in (False, True):
        mechanism = CPA(epsilon=1.0, levels=8, threshold=threshold, epsilon_scope="bit")
        error = decoded(mechanism, updates, ctx) / 50 - updates.mean(0)
        errors[threshold] = error.square().mean().item()
        assert mechanism.joint is threshold
    assert errors[True] < 0.8 * errors[False]
    assert mechanism.noise_variance(ctx, range(50)) is None


@pytest.mark.parametrize(("decoder", "factor"), [("paper", 4 / 3), ("authors_code", 4 / 3 * math.tanh(0.5))])
def test_published_decoders_have_their_bias(decoder, factor):
    """N = 3 levels, one extra +1, no dither, epsilon = 1: exactly 4/3, and 4/3 tanh(epsilon / 2)."""
    dim = 100_000
    settings = {"levels": 3, "words": "near_balanced", "dither": "none", "decoder": decoder}
    mechanism = CPA(epsilon=1.0, epsilon_scope="bit", **settings)
    estimate = decoded(mechanism, torch.ones(1, dim), context(1, dim)).double()
    assert abs(estimate.mean() - factor) < 4.9 * estimate.std() / math.sqrt(dim)  # false alarm 1e-6


def test_no_tensor_of_clients_by_codewords_by_parameters():
    """200 clients, 151 points, 20,000 parameters: clients x points x blocks would be 302 MB of bits."""
    mechanism = CPA(epsilon=1.0, lattice="A2", codebook_radius=6.5, epsilon_scope="bit")
    ctx, updates = context(200, 20_000), torch.zeros(200, 20_000)
    rand = ClientRandomness(SeededKeys(0), range(200), 0)
    mechanism.encode(updates[:2], ctx, ClientRandomness(SeededKeys(0), range(2), 0))
    tracemalloc.start()
    message = mechanism.encode(updates, ctx, rand)
    mechanism.decode(message.symbols, range(200), ctx, PublicRandomness(SeededKeys(0), 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6


# ---- privacy -------------------------------------------------------------------------------------


def test_claims_are_per_bit_and_compose_all_bits_of_a_message():
    mechanism, ctx = CPA(epsilon=0.5, stages=2, epsilon_scope="bit"), context(3, 7850)
    claims = mechanism.claims(ctx)
    assert [claim.adversary for claim in claims] == list(Adversary)
    for claim in claims:
        assert isinstance(claim.loss, PmfPairs) and claim.compositions == 2 * 7850
        (high, low), (low_too, high_too) = claim.loss.pairs[0]
        assert (high, low) == (high_too, low_too)
        assert 0.5 - 1e-6 < math.log(high / low) <= 0.5
    naked = CPA(epsilon=math.inf, epsilon_scope="bit").claims(ctx)
    assert [claim.adversary for claim in naked] == list(Adversary)
    assert all(isinstance(claim.loss, NonPrivate) for claim in naked)


def test_one_coordinate_is_in_all_bits_of_its_block():
    """A2 with two stages sends dim bits, and each coordinate is in two of them."""
    mechanism, ctx = CPA(epsilon=0.5, lattice="A2", stages=2, epsilon_scope="bit"), context(3, 100)
    for claim in mechanism.claims(ctx):
        assert (claim.compositions, claim.unit_losses, claim.unit) == (100, 2, Unit.BLOCK)
    report = privacy_report(mechanism, ctx, rounds=1, delta=1e-5)
    assert report.row(Adversary.SERVER).epsilon_unit == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "size"),
    [
        ({}, 1),
        ({"levels": 8}, 4),
        ({"levels": 7}, 3),
        ({"levels": 3, "words": "near_balanced"}, 1),
        ({"stages": 2, "nesting": 8}, 4),
        ({"stages": 3, "levels": 4, "nesting": 4}, 8),
        ({"lattice": "A2"}, 3),
        ({"levels": 4, "words": "iid"}, 1),
    ],
)
def test_anonymity_is_a_reported_number(kwargs, size):
    assert CPA(epsilon=1.0, epsilon_scope="bit", **kwargs).anonymity_set_size == size
    if "levels" in kwargs and kwargs["levels"] == 8:
        assert anonymity(8, 1) == size
    if "lattice" in kwargs:
        return
    # counted: without dither inputs of one point agree in every block, and those of two differ in some
    mechanism, blocks = CPA(epsilon=math.inf, epsilon_scope="bit", dither="none", **kwargs), 2_000
    context = make_context(mechanism, (0,), (blocks,), radius=1.0)
    points = math.prod(of for _, of in mechanism.anonymity_by_stage)
    inside = torch.linspace(-1.0, 1.0, 4 * points + 1)[:, None].expand(-1, blocks)
    bits = torch.stack([encode(mechanism, row[None], context).symbols[0].long() for row in inside])
    bits = bits.reshape(len(inside), -1, blocks)
    words = torch.unique((bits << torch.arange(bits.shape[1])[:, None]).sum(1), dim=0)
    assert len(words) == points
    assert min(int(torch.unique(block, return_counts=True)[1].min()) for block in words.T) == size


def test_lever_of_one_liar():
    """N = 2: a free bit is worth 1/c of an honest extreme, 4.08 at epsilon .5, and half a step of dither."""
    ctx = context(1, 10)
    bit = 1 / math.tanh(0.25)
    levers = [({"dither": "plain"}, bit), ({}, 1 + bit), ({"blocks_per_round": 2}, 5 * (1 + bit))]
    for settings, lever in levers:
        mechanism = CPA(epsilon=0.5, epsilon_scope="bit", **settings)
        assert mechanism.influence(0, ctx) == pytest.approx(lever, rel=1e-6)


# ---- bad input -----------------------------------------------------------------------------------


def test_messages_are_checked():
    mechanism, ctx = CPA(epsilon=1.0, epsilon_scope="bit"), context(2, 10)
    public = PublicRandomness(SeededKeys(0), 0)
    with pytest.raises(ValueError, match=r"shape \(2, 10\), got \(2, 9\)"):
        mechanism.decode(torch.zeros(2, 9, dtype=torch.uint8), (0, 1), ctx, public)
    for wrong in (torch.full((2, 10), 3), torch.full((2, 10), -1), torch.full((2, 10), 0.5)):
        with pytest.raises(ValueError, match="must contain bits, 0 or 1"):
            mechanism.decode(wrong, (0, 1), ctx, public)
