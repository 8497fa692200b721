"""The clip goes to its quantile, the claim is the mechanism's own at each clip, and engines have one path."""

import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.adaptive_clip import QuantileRule
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate
from lightning_fedq.mechanisms.interface.ranges import Ranges
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import GaussianLoss
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.training.accounts import make_report
from tests.flower.loop import TRAINER, Digits, LoopGrid, clients, deployment, federated, module, simulate
from tests.one_round import encode, make_context

DIM, CLIENTS = 40, 100
INSIDE = [
    fedq.GaussianNoise(1.0, 0.5),
    fedq.LayeredGaussian(1.0, 0.2),
    fedq.AggregateGaussian(1.0, 0.2),
    fedq.DistributedDiscreteGaussian(1.0, 0.2, 0.01),
    fedq.RotatedCoins(1.0, epsilon_per_bit=2.0),
    fedq.RotatedCoins(1.0, epsilon_per_bit=2.0, fraction=0.5),
    fedq.BandedGaussian(1.0, 0.2, band=1),
    fedq.HandedOnGaussian(1.0, 0.2, 0.01, num_cohorts=2),
]
names = [type(one).__name__ for one in INSIDE]
CLIPS = (1e-6, 0.1, 1.0, 37.5, 1e6)


def at(clip, clients=10, dim=DIM):
    return make_context(fedq.GaussianNoise(1.0, 1.0), range(clients), (dim - 8, 8), radius=clip)


@pytest.mark.parametrize("inside", INSIDE, ids=names)
def test_the_claim_is_the_mechanism_s_own_for_one_coordinate_more_at_every_clip(inside):
    one = fedq.AdaptiveClip(inside, fraction=0.1)
    own = inside.claims(make_context(inside, range(10), (DIM - 8, 8, 1)))
    for clip in CLIPS:
        claims = one.claims(at(clip))
        assert [claim.loss for claim in claims] == [claim.loss for claim in own]
        assert [claim.compositions for claim in claims] == [claim.compositions for claim in own]
        assert all("take 0.1 of this noise budget" in claim.assumptions[-1] for claim in claims)
    assert any(not isinstance(claim.loss, NonPrivate) for claim in own)


@pytest.mark.parametrize(
    ("z_sum", "sigma_b", "rounds", "delta", "epsilon"),
    [
        (1, 5, 1, 1e-5, 4.47777),
        (1, 5, 30, 1e-5, 38.68158),
        (4, 10, 30, 1e-5, 6.90997),
        (4, 50, 30, 1e-5, 6.34971),
        (10, 20, 100, 1e-5, 4.98331),
        (20, 50, 100, 1e-6, 2.44584),
        (0.5, 2, 1, 1e-5, 10.37824),
        (8, 8, 50, 1e-5, 5.67959),
        (100 / 3, 500, 1000, 1e-6, 4.61427),
        (2, 1e9, 10, 1e-5, 7.51128),
    ],
)
def test_noise_on_sum_and_count_is_accounted_together(z_sum, sigma_b, rounds, delta, epsilon):
    """Multipliers of the noise on sum and count; epsilon of the analytic Gaussian, for replaced updates."""
    z = (z_sum**-2 + sigma_b**-2) ** -0.5
    one = fedq.AdaptiveClip(fedq.GaussianNoise(1.0, z), fraction=min(max((z / sigma_b) ** 2, 1e-15), 0.5))
    claim = next(c for c in one.claims(at(0.3)) if c.adversary is Adversary.SERVER)
    assert spent(claim.loss, delta, rounds=rounds).epsilon == pytest.approx(epsilon, abs=6e-4)
    if sigma_b > 1e6:
        return
    # and the noise is there: on the sum z_sum, on the count sigma_b, in units of 2 clips and of a client
    context = at(0.3)
    std = one.noise_variance(context, [0]).sqrt()[0].item()
    assert std == pytest.approx(2.0 * 0.3 * z_sum, rel=2e-3)  # its grid included
    assert std / (2.0 * 0.3 * one.range_rule.weight) == pytest.approx(sigma_b, rel=2e-3)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("length", [0.0, 1e-3, 0.999, 1.001, 1e6])
def test_what_the_mechanism_is_given_is_never_longer_than_its_norm(clip, length, monkeypatch):
    """Update and bit together; their shares are 1 - f and f where the clip is met."""
    seen = []
    inner, f = fedq.GaussianNoise(3.0, 0.5), 0.1
    recorded = lambda self, rows, *rest: seen.append(rows) or _encode(self, rows, *rest)  # noqa: E731
    monkeypatch.setattr(fedq.GaussianNoise, "encode", recorded)
    update = torch.randn(2, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    update *= length * clip / update.norm(dim=1, keepdim=True)
    encode(fedq.AdaptiveClip(inner, fraction=f), update, at(clip, 2))
    (rows,) = seen
    norms = rows.double().norm(dim=1)
    assert (norms <= 3.0 * (1 + 1e-6)).all()
    bit = 3.0 * math.sqrt(f) * (1.0 if length <= 1.0 else -1.0)
    torch.testing.assert_close(rows[:, -1].double(), torch.full((2,), bit).double(), rtol=1e-6, atol=0)
    expected = min(length, 1.0) * 3.0 * math.sqrt(1 - f)
    torch.testing.assert_close(rows[:, :-1].double().norm(dim=1), torch.full((2,), expected).double())


_encode = fedq.GaussianNoise.encode


def engine_of(mechanism, norms, seed=3, secure=None, **options):
    """A round's engine, and one that runs rounds with updates of these norms."""
    count = len(norms)
    planner = options.pop("planner", None) or RoundPlanner(count, seed)
    start = torch.zeros(DIM), (DIM - 8, 8), None
    engine = RoundEngine(mechanism, planner, SeededKeys(seed), *start, **options)

    def rounds(number):
        records = []
        for _ in range(number):
            plan = engine.start()
            generator = torch.Generator().manual_seed(plan.round)
            rows = torch.randn(count, DIM, generator=generator)
            rows *= (norms / rows.norm(dim=1))[:, None]
            chosen = list(plan.survivors)
            engine.receive(chosen, rows[chosen])
            records.append(engine.finish())
        return records

    return engine, rounds


def lognormal(count=CLIENTS, median=1.0):
    generator = torch.Generator().manual_seed(1)
    return median * torch.randn(count, generator=generator).mul(0.5).exp()


@pytest.mark.parametrize("inside", INSIDE, ids=names)
@pytest.mark.parametrize("first", [0.1, 10.0])
def test_the_clip_goes_to_the_quantile_from_ten_times_off(inside, first):
    scaled = replace(inside, clip_norm=first)
    options = {"planner": RoundPlanner(2 * CLIENTS, 3, fedq.Cyclic(CLIENTS))}
    norms = lognormal(2 * CLIENTS)
    _, rounds = engine_of(fedq.AdaptiveClip(scaled, quantile=0.5), norms, **options)
    clips = [record.radius_min for record in rounds(40)]  # a noisy share may cross by chance, half-way
    assert clips[0] == first
    # the law of the linearised rule, its bias aside: std .13 of the logarithm at counts as noisy as n / 5
    assert 0.55 < sum(clips[-6:]) / 6 / norms.median() < 1.8


def rounds_until_right(rate, first, fast):
    """Rounds to within a fifth of the median; the logarithm of norms is normal with std 1/2, counts exact."""
    norms = NormalDist(0.0, 0.5)
    rule = QuantileRule(first, quantile=0.5, rate=rate, weight=0.1, floor=1e-6, ceiling=1e6)
    ranges, count = rule.first(torch.zeros(1), [1]), 0
    while abs(math.log(ranges.radius.item())) > math.log(1.2):
        clip = ranges.radius.item()
        bits = torch.tensor([rule.weight * clip * (2.0 * norms.cdf(math.log(clip)) - 1.0)])
        ranges = ranges if fast else ranges._replace(center=torch.zeros(1))
        ranges, count = rule.following(ranges, torch.zeros(1), bits, None, [1]), count + 1
    return count


@pytest.mark.parametrize("first", [10.0, 0.1])
@pytest.mark.parametrize(("rate", "slow"), [(0.2, 26), (0.5, 10), (1.0, 5)])
def test_the_first_rate_saves_rounds_from_ten_times_off(rate, slow, first):
    """The specification's figures for one rate, and those of rate 1 before any crossing."""
    assert rounds_until_right(rate, first, fast=False) == slow
    assert rounds_until_right(rate, first, fast=True) == 5


def test_the_rate_falls_when_the_share_first_crosses_the_quantile():
    """And stays: by released shares alone, through a checkpoint, and in what was saved with one rate."""
    rule = QuantileRule(1.0, quantile=0.5, rate=0.25, weight=0.1, floor=1e-6, ceiling=1e6)
    ranges, moves = rule.first(torch.zeros(4), [2, 2]), []
    for share in (0.8, 0.9, 0.4, 0.9, 0.2):
        clip = ranges.radius[0].item()
        bits = torch.tensor([rule.weight * clip * (2.0 * share - 1.0)], dtype=torch.float64)
        ranges = rule.following(ranges, torch.zeros(4), bits, None, [2, 2])
        moves.append(math.log(ranges.radius[0].item() / clip) / (0.5 - share))
    assert moves == pytest.approx([1.0, 1.0, 0.25, 0.25, 0.25])
    saved = Ranges(torch.zeros(2), torch.ones(2))  # no side, as the center was before
    after = rule.following(saved, torch.zeros(4), torch.tensor([0.1]), None, [2, 2])
    assert after.radius.tolist() == pytest.approx([math.exp(-0.25 * 0.5)] * 2)


def test_the_share_that_comes_back_is_that_of_short_updates():
    norms = torch.tensor([0.5] * 30 + [2.0] * 70)
    one = fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 1e-3), rate=1.0, quantile=0.5)
    engine, rounds = engine_of(one, norms)
    rounds(1)
    assert engine.ranges.radius.tolist() == pytest.approx(2 * [math.exp(-(0.3 - 0.5))], rel=2e-3)
    rows = torch.randn(100, DIM, generator=torch.Generator().manual_seed(0))
    exact = (rows * (norms.clamp(max=1.0) / rows.norm(dim=1))[:, None]).mean(0)
    torch.testing.assert_close(engine.weights, exact, atol=2e-3, rtol=0)


@pytest.mark.parametrize("norm", [0.0, 1e30])
def test_floor_and_ceiling_stop_a_clip_that_runs_away(norm):
    one = fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 1e-3), rate=1.0, floor=0.5, ceiling=2.0)
    engine, rounds = engine_of(one, torch.full((4,), norm))
    rounds(10)
    assert engine.ranges.radius.tolist() == [0.5 if norm == 0.0 else 2.0] * 2
    assert torch.isfinite(engine.weights).all()


def test_a_checkpoint_goes_on_with_the_clip():
    whole, rounds = engine_of(fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 0.05)), lognormal())
    rounds(3)
    state = whole.state_dict()
    rounds(3)
    assert state["center"].tolist() in ([1.0, 1.0], [0.0, 0.0])
    other, further = engine_of(fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 0.05)), lognormal())
    other.load_state_dict(state)
    further(3)
    assert torch.equal(other.weights, whole.weights)
    assert torch.equal(other.ranges.radius, whole.ranges.radius)


@pytest.mark.parametrize(
    "mechanism", [fedq.CorBin(1.0), fedq.LaplaceNoise(1.0, 1.0), fedq.RotatedAxes(8.0, 1.0), "no mechanism"]
)
def test_what_has_no_norm_to_move_is_refused(mechanism):
    with pytest.raises(TypeError, match="AdaptiveClip"):
        fedq.AdaptiveClip(mechanism)
    with pytest.raises(TypeError, match="AdaptiveClip needs a mechanism that clips in l2, got AdaptiveClip"):
        fedq.AdaptiveClip(fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 1.0)))


def test_a_robust_rule_does_not_go_with_it():
    clip, rule = fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 1.0)), fedq.RobustAggregation("median", 1)
    with pytest.raises(ValueError, match="adapts its range to the unweighted mean"):
        fedq.Federated(clip, num_clients=8, aggregator=rule)


@pytest.mark.filterwarnings("ignore:.*keys come|.*noise:UserWarning")
def test_a_run_meets_its_target_behind_masks_with_a_clip_that_moves():
    target = fedq.PrivacyTarget(8.0, 1e-5, "secagg_server")
    options = {"privacy": target, "secure_aggregation": fedq.SecAgg(), "num_clients": 20}
    inner = fedq.DistributedDiscreteGaussian(0.5, 0.05, 0.001)
    fed = fedq.Federated(fedq.AdaptiveClip(inner), **options)
    trainer = pl.Trainer(**TRAINER, max_epochs=3, callbacks=[fed], enable_checkpointing=False)
    trainer.fit(module(), datamodule=Digits(batch_size=16))
    assert 7.9 < make_report(fed, trainer, 1e-5).row(Adversary.SECAGG_SERVER).epsilon_run <= 8.0
    assert fed.mechanism.mechanism.local_sigma != inner.local_sigma
    assert fed.engine.ranges.radius[0] != 0.5


@pytest.mark.filterwarnings("ignore:node |register|round .* client|the keys come:UserWarning")
def test_real_clients_and_a_simulation_have_one_clip_and_one_model(tmp_path):
    make = lambda: federated(fedq.AdaptiveClip(fedq.GaussianNoise(0.05, 0.01)))  # noqa: E731
    expected = simulate(make(), 3)
    server = deployment(make(), 3, tmp_path).run(LoopGrid(*clients(make, tmp_path)))[1]
    assert torch.equal(server.engine.weights, expected.engine.weights)
    assert torch.equal(server.engine.ranges.radius, expected.engine.ranges.radius)
    assert server.engine.ranges.radius[0] != 0.05


def test_the_figures_beside_flower():
    """docs/guides/adaptive_clip.md: one split of the noise, and what noise of a moved clip is worth."""
    theirs = pytest.importorskip("flwr.supercore.differential_privacy")
    clients, rounds, z0 = 100, 30, 4.0
    count_std, noise = theirs.compute_adaptive_noise_params(z0, clients, None)
    share = (z0 / (2.0 * count_std)) ** 2
    one = fedq.AdaptiveClip(fedq.GaussianNoise(1.0, z0 / 2.0), fraction=share)
    context = make_context(one, (0, 1, 2))
    [claim] = [c for c in one.claims(context) if c.adversary is Adversary.SERVER]
    std = 1.0 * one._scale(context) * math.sqrt(one.mechanism.noise.variance)
    assert std == pytest.approx(noise, rel=2e-3)  # the grid's variance

    def epsilon(*mus):
        return GaussianLoss(1.0 / math.sqrt(rounds * sum(mu * mu for mu in mus)), "").epsilon(1e-5, 1)

    exact = pytest.approx(epsilon(2 / z0))
    assert claim.loss.epsilon(1e-5, rounds) == exact == pytest.approx(14.83, abs=5e-3)
    moved = noise * math.exp(-0.2 * 0.5)
    figures = epsilon(1 / z0), epsilon(1 / moved, 0.5 / count_std), epsilon(2 / moved, 1 / count_std)
    assert figures == pytest.approx((6.33, 7.00, 16.55), abs=5e-3)
