"""Claims fitted to a run: clients that collude with the server, and what the sampler's law costs."""

import math
import re
from dataclasses import replace

import pytest

from lightning_fedq.functional.divergences import gaussian_delta, randomized_response_epsilon
from lightning_fedq.mechanisms import (
    CSGM,
    LDPQ,
    SIGM,
    AggregateGaussian,
    AugCorBin,
    CorBin,
    DistributedDiscreteGaussian,
    GaussianNoise,
    LayeredGaussian,
    PerCoordinateLaplace,
)
from lightning_fedq.mechanisms.bases.calibration import gaussian_noise_multiplier
from lightning_fedq.mechanisms.interface import Adversary, CoinSum, ConcentratedLoss, NonPrivate
from lightning_fedq.privacy.accounting import spent
from tests.described import Setting, privacy_report
from tests.privacy.test_report import context


def behind(mechanism, clients=20, max_colluding_fraction=0.0, dim=10, **settings):
    settings |= {"secure_aggregation": True, "max_colluding_fraction": max_colluding_fraction}
    setting = Setting(context(mechanism, clients, dim), 1, 1e-5, **settings)
    return setting.claims(mechanism)[Adversary.SECAGG_SERVER]


# ---- colluding clients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", [LDPQ(1.0), DistributedDiscreteGaussian(1.0, 1.0, 0.05)])
@pytest.mark.parametrize("corrupt", [1, 5, 19])
def test_colluding_clients_hide_nobody(mechanism, corrupt):
    """What is left is the claim of a cohort of the honest ones."""
    claim = behind(mechanism, 20, corrupt / 20 + 1e-9)
    smaller = behind(mechanism, 20 - corrupt)
    ours, theirs = (replace(c.loss, note="") for c in (claim, smaller))
    assert ours == theirs
    assert any(f"colludes with {corrupt} clients at most" in text for text in claim.assumptions)


def test_a_client_whose_others_all_collude_has_its_own_coin_only():
    claim = behind(LDPQ(0.1), 20, 0.95 + 1e-9, dim=100)
    exact = randomized_response_epsilon(0.1, 100, 1e-5)
    found = spent(claim.loss, 1e-5, compositions=100).epsilon
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-3)


@pytest.mark.parametrize("corrupt", [0, 1, 3, 4, 10])
def test_in_pairs_a_colluding_partner_counts(corrupt):
    """Of a pair's sum t hi^N a coordinate is certain, N the honest clients that work alone."""
    mechanism = AugCorBin(1.0, 5, 0.2)
    claim = behind(mechanism, 20, corrupt / 20)
    low, high = mechanism.coin.probabilities
    assert isinstance(claim.loss, CoinSum)
    assert len(claim.loss.victims) == len(behind(mechanism).loss.victims) + (corrupt > 0)
    mass = spent(claim.loss, 1e-5).infinite_mass
    assert mass == pytest.approx((high - low) * high ** max(4 - corrupt, 0), rel=1e-9)


@pytest.mark.parametrize("mechanism", [AugCorBin(1.0, 5, 0.4), CorBin(1.0, 3), LDPQ(1.0)])
def test_one_colluding_client_makes_the_server_a_curious_client(mechanism):
    settings = {"secure_aggregation": True, "max_colluding_fraction": 0.05 + 1e-9}
    claims = Setting(context(mechanism, 20), 1, 1e-5, **settings).claims(mechanism)
    server, client = claims[Adversary.SECAGG_SERVER].loss, claims[Adversary.CLIENT].loss
    assert replace(server, note="") == replace(client, note="")


def test_only_the_row_behind_secure_aggregation_changes():
    honest = Setting(context(AugCorBin(1.0), 20), 1, 1e-5, secure_aggregation=True)
    before = honest.claims(AugCorBin(1.0))
    after = replace(honest, max_colluding_fraction=0.3).claims(AugCorBin(1.0))
    assert {who for who in Adversary if before[who].loss != after[who].loss} == {Adversary.SECAGG_SERVER}


def test_collusion_and_dropouts_take_coins_together():
    pairs, shares = AugCorBin(1.0, 5, 0.5), (0.0, 0.1, 0.2)
    losses = [behind(pairs, 60, corrupt, dropout_probability=0.2).loss for corrupt in shares]
    fewest = [min(victim.num_coins for victim in loss.victims) for loss in losses]
    assert fewest[0] > fewest[1] > fewest[2]


def test_a_fixed_discrete_noise_keeps_the_victims_own():
    loss = behind(DistributedDiscreteGaussian(1.0, 1.0, 0.05, max_dropped_clients=15), 20, 0.5).loss
    alone = behind(DistributedDiscreteGaussian(1.0, 1.0, 0.05), 1).loss
    assert isinstance(loss, ConcentratedLoss) and isinstance(alone, ConcentratedLoss)
    assert loss.rho == alone.rho


# ---- the sampler's share of delta ------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 40])
def test_the_distance_of_the_noise_from_its_law_is_paid_for(rounds):
    """10,000 coordinates: delta is the Gaussian's + (1 + e^epsilon) (1 - (1 - slack)^rounds)."""
    mechanism = GaussianNoise(clip_norm=1.0, noise_multiplier=3.0 * math.sqrt(rounds))
    setting = Setting(context(mechanism, 20, 10_000), rounds, 1e-5)
    claim = setting.claims(mechanism)[Adversary.SERVER]
    assert claim.slack.distance == 10_000 * mechanism.noise.total_variation < 10_000 * 2.0**-56
    assert claim.slack.log_ratio == 10_000 * 2.0**-41
    found = setting.spent(claim, rounds)
    distance, ratio = 1 - (1 - claim.slack.distance) ** rounds, rounds * claim.slack.log_ratio
    total = math.exp(ratio) * gaussian_delta(1.0 / 3.0, found.epsilon - 2 * ratio)
    total += (1 + math.exp(found.epsilon)) * distance
    assert total == pytest.approx(1e-5, rel=1e-5) and total <= 1e-5 * (1 + 1e-9)
    assert found.epsilon > spent(claim.loss, 1e-5, rounds=rounds).epsilon
    assert "cover the sampler's error" in found.method


@pytest.mark.parametrize(("dim", "rounds", "epsilon"), [(7850, 50, 8.0), (11_200_000, 100, 4.0)])
def test_a_calibrated_budget_is_kept(dim, rounds, epsilon):
    """What a budget asks for is what the report finds, sampler included."""
    mechanism = GaussianNoise(1.0, gaussian_noise_multiplier(epsilon, 1e-5, rounds))
    setting = Setting(context(mechanism, 50, dim), rounds, 1e-5)
    found = setting.spent(setting.claims(mechanism)[Adversary.SERVER], rounds).epsilon
    assert 0.99 * epsilon < found < epsilon


def test_where_the_distance_is_all_of_delta_there_is_no_epsilon():
    mechanism = AggregateGaussian(clip_norm=1.0, noise_multiplier=1000.0)
    setting = Setting(context(mechanism, 20, 10_000_000), 5, 1e-12)
    found = setting.spent(setting.claims(mechanism)[Adversary.OUTSIDER], 5)
    assert found.epsilon == math.inf
    assert re.search(r"known up to a distance of \S+ only, too much for this delta", found.method)


def test_noise_whose_law_is_known_to_a_distance_has_no_pure_epsilon():
    mechanism = PerCoordinateLaplace(1.0)
    row = privacy_report(mechanism, context(mechanism, 20), rounds=1, delta=1e-5).row(Adversary.SERVER)
    assert row.epsilon_unit == math.inf and row.epsilon_round < 10.1


# ---- clients that lie --------------------------------------------------------------------------------------


def among_liars(mechanism, liars, clients=20, **settings):
    settings = {"secure_aggregation": True, **settings}
    return Setting(context(mechanism, clients), 1, 1e-5, num_byzantine=liars, **settings).claims(mechanism)


@pytest.mark.parametrize("mechanism", [LDPQ(0.5), DistributedDiscreteGaussian(1.0, 1.0, 0.05)])
def test_liars_hide_nobody(mechanism):
    """An outsider's claim is that of a cohort of the honest ones, a curious liar's of one less."""
    claims, honest = among_liars(mechanism, 18), among_liars(mechanism, 0, 2)
    for who in (Adversary.OUTSIDER, Adversary.SECAGG_SERVER):
        ours, theirs = (replace(c[who].loss, note="") for c in (claims, honest))
        assert ours == theirs
        assert any("18 clients lie and count as known" in text for text in claims[who].assumptions)
    alone = among_liars(mechanism, 0, 1)[Adversary.OUTSIDER]
    assert replace(claims[Adversary.CLIENT].loss, note="") == replace(alone.loss, note="")


def test_noise_that_is_shared_out_over_liars_is_no_guarantee():
    claims = among_liars(AggregateGaussian(1.0, 1.0), 3)
    assert isinstance(claims[Adversary.OUTSIDER].loss, NonPrivate)
    assert not isinstance(among_liars(AggregateGaussian(1.0, 1.0), 0)[Adversary.OUTSIDER].loss, NonPrivate)


def test_liars_cost_nothing_where_claims_rest_on_nobody_else():
    claims, honest = among_liars(PerCoordinateLaplace(1.0), 10), among_liars(PerCoordinateLaplace(1.0), 0)
    assert claims == honest


def test_liars_and_dropouts_come_together():
    both = among_liars(LDPQ(0.5), 10, dropout_probability=0.1)[Adversary.OUTSIDER]
    drops = among_liars(LDPQ(0.5), 0, dropout_probability=0.1)[Adversary.OUTSIDER]
    assert both.loss.victims[-1].num_coins < 10 and both.loss != drops.loss


def test_what_others_do_is_assumed_in_words():
    claims = among_liars(LDPQ(0.5), 0)
    words = "every other client runs its coins"
    resting = {who for who, claim in claims.items() if words in claim.assumptions}
    assert resting == {Adversary.CLIENT, Adversary.SECAGG_SERVER, Adversary.OUTSIDER}


@pytest.mark.parametrize(
    "mechanism", [AggregateGaussian(1.0, 3.0), LayeredGaussian(1.0, 3.0), SIGM(1.0, 3.0), CSGM(1.0, 3.0)]
)
def test_a_client_that_counts_as_zeros_changes_no_law(mechanism):
    """The cohort's noise is complete whoever drops out, so dropouts cost the exact-error family nothing."""
    sure, unsure = (
        Setting(context(mechanism, 20), 5, 1e-5, dropout_probability=p).claims(mechanism) for p in (0.0, 0.01)
    )
    for who in (Adversary.OUTSIDER, Adversary.CLIENT):
        assert unsure[who].loss == sure[who].loss
    outsider = unsure[Adversary.OUTSIDER]
    assert not isinstance(outsider.loss, NonPrivate)
    assert any("counts as one that sent zeros" in text for text in outsider.assumptions)
