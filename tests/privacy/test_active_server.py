"""Claims behind secure aggregation against a server that lies about who dropped out, and the attack."""

import math
from dataclasses import replace
from math import comb

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.mechanisms import (
    LDPQ,
    AggregateGaussian,
    AugCorBin,
    DistributedDiscreteGaussian,
    GaussianNoise,
    HandedOnGaussian,
    PairedCoins,
    RotatedCoins,
)
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy import report
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.collusion import CHANCE, Colluders
from lightning_fedq.privacy.losses import ConcentratedLoss, NonPrivate
from lightning_fedq.privacy.planning import make_plan_context
from lightning_fedq.secagg import SecAgg, Stage
from lightning_fedq.secagg.layout import sum_layout
from tests.described import Setting, privacy_report
from tests.one_round import encode
from tests.privacy.test_setting import context
from tests.secagg.play import Round, make_terms

SIZE, DIM = 20, 2_000
FEWEST = SecAgg(active=True).guarantee(SIZE, SIZE, 1).min_survivors


def behind(mechanism, clients, dim=1, **settings):
    setting = Setting(context(mechanism, clients, dim), 1, 1e-5, secure_aggregation=True, **settings)
    return setting.claims(mechanism)[Adversary.SECAGG_SERVER]


def liar(clients):
    return {"min_survivors": SecAgg(active=True).guarantee(clients, clients, 1).min_survivors}


def test_the_sum_of_the_pairs_opens_when_the_lone_clients_are_declared_dropped():
    """The attack, through the protocol's own clients: the claim must cover what it shows.

    The victim is in a pair, at one end of the range or at the other, its partner at the low end; every other
    pair adds exactly one. With the victim at the high end its pair adds one too; at the low end it adds zero
    with chance t = hi - lo, which proves where the victim is. Lone coins would hide it.
    """
    mechanism = AugCorBin(1.0, None, 0.2)
    ctx = context(mechanism, SIZE, DIM)
    lone = [group[0] for group in ctx.groups if len(group) == 1]
    pairs = [group for group in ctx.groups if len(group) == 2]
    assert len(lone) == 4 and SIZE - len(lone) >= FEWEST
    updates = torch.zeros(SIZE, DIM)
    for first, second in pairs:
        updates[first], updates[second] = 1.0, -1.0
    updates[pairs[0][0]] = -1.0  # the victim
    symbols = encode(mechanism, updates, ctx).symbols.numpy().astype(np.int64)

    terms = make_terms(SIZE, active=True, layout=sum_layout(DIM, 0, 1, SIZE))
    played = Round(terms).run(dict(enumerate(symbols)), silent=dict.fromkeys(lone, Stage.MASK))
    opened = played.server.total
    everybody = sum(symbols[client] for pair in pairs for client in pair)
    assert (opened == everybody).all()  # all confirmed, all opened

    proofs = int((opened == len(pairs) - 1).sum())
    assert set(np.unique(opened)) == {len(pairs) - 1, len(pairs)}
    at_least = stats.beta.ppf(1e-9, proofs, DIM - proofs + 1)
    trusting, wary = behind(mechanism, SIZE), behind(mechanism, SIZE, min_survivors=FEWEST)
    assert spent(trusting.loss, 1e-5).infinite_mass < at_least  # what was claimed is refuted
    assert spent(wary.loss, 1e-5).infinite_mass >= at_least


@pytest.mark.parametrize("clients", [20, 21, 50])
def test_clients_insist_on_so_many_survivors(clients):
    assert liar(clients)["min_survivors"] == SecAgg(active=True).rules(clients, clients)[2]
    assert SecAgg().guarantee(clients, clients, 1).min_survivors is None


def test_the_numbers_of_the_worst_cohort():
    """500 clients, 166 of which may be declared dropped."""
    assert liar(500) == {"min_survivors": 334}
    ldpq = [spent(behind(LDPQ(0.1), 500, 7850, **s).loss, 1e-5, compositions=7850) for s in ({}, liar(500))]
    assert [s.epsilon for s in ldpq] == pytest.approx([1.542, 1.930], abs=2e-3)
    smaller = behind(LDPQ(0.1), 334, 7850)
    assert ldpq[1].epsilon >= spent(smaller.loss, 1e-5, compositions=7850).epsilon * (1 - 1e-9)
    paired = AugCorBin(0.1, 5, 0.2)
    before = spent(behind(paired, 500, 1000).loss, 1e-5, compositions=1000)
    after = spent(behind(paired, 500, 1000, **liar(500)).loss, 1e-5, compositions=1000)
    assert before.epsilon == pytest.approx(1.318, abs=2e-3)
    assert (after.epsilon, after.infinite_mass) == (math.inf, pytest.approx(1.0))


def test_discrete_noise_counts_on_no_client_that_may_be_left_out():
    plain, ready = (DistributedDiscreteGaussian(1.0, 0.2, 0.005, max_dropped_clients=m) for m in (0, 166))
    refused = behind(plain, 500, 10, **liar(500))
    assert isinstance(refused.loss, NonPrivate) and "166 of 500 clients dropped" in refused.loss.reason
    assert "max_dropped_clients" in refused.loss.reason
    fine = behind(ready, 500, 10, **liar(500)).loss
    assert isinstance(fine, ConcentratedLoss)
    assert fine.rho == behind(DistributedDiscreteGaussian(1.0, 0.2, 0.005), 334, 10).loss.rho


def test_messages_that_protect_themselves_need_no_survivors():
    claim = behind(GaussianNoise(1.0, 3.0), 20, min_survivors=14)
    assert not isinstance(claim.loss, NonPrivate)


def test_colluding_clients_and_lies_take_coins_together():
    coins = [
        min(v.num_coins for v in behind(LDPQ(1.0), 20, max_colluding_fraction=c, **s).loss.victims)
        for c, s in ((0.0, {}), (0.2, {}), (0.2, liar(20)))
    ]
    assert coins == [19, 15, 9]


def test_survivors_that_clients_insist_on_cover_dropouts_of_any_cause():
    """Nothing is random any more: no share of delta, no independence."""
    claim = behind(LDPQ(1.0), 20, dropout_probability=0.1, **liar(20))
    assert claim.loss == behind(LDPQ(1.0), 20, **liar(20)).loss
    assert not any("independently" in text for text in claim.assumptions)
    setting = Setting(context(LDPQ(1.0), 20), 1, 1e-5, 0.1, True, min_survivors=14)
    assert setting.available(setting.claims(LDPQ(1.0))[Adversary.SECAGG_SERVER]) == 1e-5
    assert setting.available(setting.claims(LDPQ(1.0))[Adversary.OUTSIDER]) == 1e-5


@pytest.mark.parametrize(
    ("mechanism", "dim"),
    [(LDPQ(0.1), 7850), (AugCorBin(0.1, 5, 0.2), 1000), (DistributedDiscreteGaussian(1.0, 0.2, 0.005), 1000)],
    ids=lambda value: type(value).__name__,
)
def test_what_a_lying_server_releases_hides_no_more_than_what_it_sees(mechanism, dim):
    """The outsider's row counted the coins of 500 clients, 166 of whom a lying server may leave out."""
    setting = Setting(context(mechanism, 500, dim), 1, 1e-5, secure_aggregation=True, **liar(500))
    claims = setting.claims(mechanism)
    server, others = claims[Adversary.SECAGG_SERVER], [claims[Adversary.OUTSIDER], claims[Adversary.CLIENT]]
    if isinstance(server.loss, NonPrivate):
        assert all(isinstance(claim.loss, NonPrivate) for claim in others)
        return
    seen, *released = (spent(claim.loss, 1e-5, compositions=dim).epsilon for claim in [server, *others])
    assert all(epsilon >= seen for epsilon in released)


def test_a_client_that_counts_as_zeros_takes_no_noise_along():
    mechanism = AggregateGaussian(1.0, 1.0)
    ctx = context(mechanism, 20, 4)
    honest = Setting(ctx, 1, 1e-5, secure_aggregation=True)
    losses = (run.claims(mechanism)[Adversary.OUTSIDER].loss for run in (honest, replace(honest, **liar(20))))
    assert len(set(losses)) == 1


# ---- everybody who reports -----------------------------------------------------------------------------


def test_a_server_that_could_force_clients_out_is_mentioned_always():
    one = context(LDPQ(1.0), 20)
    shared = {"rounds": 1, "delta": 1e-5, "secure_aggregation": True}
    trusting = privacy_report(LDPQ(1.0), one, **shared).notes
    assert any("can force clients out voids" in note for note in trusting)
    wary = privacy_report(LDPQ(1.0), one, min_survivors=14, **shared).notes
    assert not any("can force clients out voids" in note for note in wary)


# ---- colluders of a drawn cohort: none is never counted where a fraction of the clients may collude ----
DELTA = 1e-5


def drawn(mechanism, clients=1000, cohort=40, fraction=0.02, **settings):
    settings |= {"max_colluding_fraction": fraction, "num_clients": clients}
    return Setting(make_plan_context(mechanism, cohort, 50), 10, DELTA, secure_aggregation=True, **settings)


def beyond(clients, colluders, cohort, counted):
    """Chance that a cohort with a given honest client has more colluders than are counted, in integers."""
    others = range(counted + 1, min(colluders, cohort - 1) + 1)
    ways = sum(comb(colluders, k) * comb(clients - 1 - colluders, cohort - 1 - k) for k in others)
    return ways / comb(clients - 1, cohort - 1)


@pytest.mark.parametrize(
    ("clients", "cohort", "fraction"), [(1000, 40, 0.02), (200, 50, 0.1), (1000, 10, 0.001)]
)
def test_a_quantile_of_the_draw_is_counted_and_no_more(clients, cohort, fraction):
    counted = drawn(LDPQ(1.0), clients, cohort, fraction).num_colluding
    colluders = max(int(fraction * clients), 1)
    assert counted >= 1
    assert beyond(clients, colluders, cohort, counted) <= CHANCE * DELTA
    assert counted == 1 or beyond(clients, colluders, cohort, counted - 1) > CHANCE * DELTA


def test_the_quantile_holds_for_chances_that_one_minus_them_forgets():
    """Of 10,000 clients 4,000 collude: beyond 79 of 99 stood for 6e-17, and it is more."""
    counted = Colluders(0.4, 10000, 100, chosen=False).max_in_cohort(CHANCE * 1e-9)
    assert beyond(10000, 4000, 100, counted) <= CHANCE * 1e-9 < beyond(10000, 4000, 100, counted - 1)
    assert counted == 80


def test_delta_pays_for_cohorts_with_more():
    setting = drawn(LDPQ(1.0))
    claim = setting.claims(LDPQ(1.0))[Adversary.SECAGG_SERVER]
    assert setting.available(claim, 1000) == pytest.approx(DELTA * (1 - 1000 * CHANCE), rel=1e-12)
    everybody = replace(setting, num_clients=None)
    assert everybody.available(claim, 1000) == DELTA


@pytest.mark.parametrize(
    ("mechanism", "paid"),
    [(GaussianNoise(1.0, 1.0), 5), (HandedOnGaussian(1.0, 1.0, 0.01, num_cohorts=25), 50)],
)
def test_delta_pays_for_the_rounds_whose_noise_hides_a_client(mechanism, paid):
    """Where noise is handed on, five rounds of 50 are hidden by that of the rounds after them, too."""
    setting = replace(drawn(LDPQ(1.0)), rounds=50, charges=[5] * 1000)
    claim = setting.claims(LDPQ(1.0))[Adversary.SECAGG_SERVER]
    run = setting.run(mechanism)
    assert Account(run, DELTA).available(claim, 5) == pytest.approx(DELTA * (1 - paid * CHANCE), rel=1e-12)


@pytest.mark.parametrize(
    "mechanism", [PairedCoins(0.2), RotatedCoins(1.0, 0.2), RotatedCoins(1.0, 0.2, paired=True)]
)
def test_a_drawn_cohort_claims_no_more_than_one_with_as_many_colluders(mechanism):
    setting = drawn(mechanism)
    count = setting.num_colluding
    claim = setting.claims(mechanism)[Adversary.SECAGG_SERVER]
    known = replace(setting, num_clients=None, max_colluding_fraction=count / 40)
    assert claim.loss == known.claims(mechanism)[Adversary.SECAGG_SERVER].loss
    nobody = replace(setting, max_colluding_fraction=0.0)
    honest = nobody.claims(mechanism)[Adversary.SECAGG_SERVER]
    assert setting.spent(claim, 1).epsilon > nobody.spent(honest, 1).epsilon


def test_a_lying_server_may_ask_all_colluders_at_once():
    assert drawn(LDPQ(1.0), min_survivors=30).num_colluding == 20


def test_one_colludes_at_least_where_a_fraction_may():
    assert drawn(LDPQ(1.0), 40, 40, 0.001).num_colluding == 1
    few, one = (
        SecAgg(degree="auto", max_colluding_fraction=share, max_dropped_fraction=0.1)
        for share in (0.001, 0.01)
    )
    assert few.rules(100, 100) == one.rules(100, 100)


def test_the_report_says_how_many_count():
    mechanism, setting = LDPQ(0.2), drawn(LDPQ(0.2))
    row = report.privacy_report(setting.run(mechanism), DELTA).row(Adversary.SECAGG_SERVER)
    words = f"20 of 1000 clients may collude: {setting.num_colluding} are counted in a cohort of 40"
    assert any(words in a for a in row.assumptions)


WIDER = [
    {"equal_weights": False},
    {"opened_log2": -3.0},
    {"dropout_probability": 0.1},
    {"fewest_answers": 30},
    {"min_survivors": 30},
    {"equal_weights": False, "num_clients": 1000},
]


@pytest.mark.parametrize("settings", WIDER)
@pytest.mark.parametrize("who", ["colluders", "liars", "nobody"])
def test_who_colludes_may_be_the_partner_in_a_view_of_all_messages(monkeypatch, settings, who):
    """`PairedCoins(0.5)`, 20 coordinates, one round: 9.86 to the server alone, 13.8 with the partner."""
    mechanism = PairedCoins(0.5)
    context = make_plan_context(mechanism, 40, 20)
    given = {"colluders": {"max_colluding_fraction": 0.05}, "liars": {"num_byzantine": 2}, "nobody": {}}[who]
    setting = Setting(context, 1, DELTA, secure_aggregation=True, **given, **settings)
    for loss in {type(claim.loss) for claim in mechanism.claims(context)}:  # as one that knows no smaller sum
        for name in ("left_out", "after_dropouts"):
            monkeypatch.setattr(loss, name, lambda self, *given: None)
    claims = setting.claims(mechanism)
    alone, partner = (claims[who].loss for who in (Adversary.SERVER, Adversary.SERVER_AND_PARTNER))
    honest = Setting(context, 1, DELTA)
    for row, epsilon in ((Adversary.SERVER, 9.86), (Adversary.SERVER_AND_PARTNER, 13.8)):
        assert honest.spent(claims[row], 1).epsilon == pytest.approx(epsilon, abs=0.01)
    assert claims[Adversary.SECAGG_SERVER].loss == (alone if who == "nobody" else partner)
    if "opened_log2" not in settings:
        assert claims[Adversary.OUTSIDER].loss == (partner if who == "liars" else alone)
        assert claims[Adversary.CLIENT].loss == partner
