"""Colluders of a drawn cohort: none is never counted where a fraction of the clients may collude."""

from dataclasses import replace
from math import comb

import pytest

from lightning_fedq.mechanisms import LDPQ, PairedCoins, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.collusion import CHANCE, Colluders
from lightning_fedq.privacy.planning import context_of
from lightning_fedq.secagg import SecAgg
from tests.described import Setting, privacy_report

DELTA = 1e-5


def drawn(mechanism, clients=1000, cohort=40, fraction=0.02, **settings):
    context = context_of(mechanism, cohort, 50)
    return Setting(
        context, 10, DELTA, secure_aggregation=True, max_corrupt=fraction, num_clients=clients, **settings
    )


def beyond(clients, colluders, cohort, counted):
    """Chance that a cohort with a given honest client has more colluders than are counted, in integers."""
    others = range(counted + 1, min(colluders, cohort - 1) + 1)
    ways = sum(comb(colluders, k) * comb(clients - 1 - colluders, cohort - 1 - k) for k in others)
    return ways / comb(clients - 1, cohort - 1)


@pytest.mark.parametrize(
    ("clients", "cohort", "fraction"), [(1000, 40, 0.02), (200, 50, 0.1), (1000, 10, 0.001)]
)
def test_a_quantile_of_the_draw_is_counted_and_no_more(clients, cohort, fraction):
    counted = drawn(LDPQ(1.0), clients, cohort, fraction).num_corrupt
    colluders = max(int(fraction * clients), 1)
    assert counted >= 1
    assert beyond(clients, colluders, cohort, counted) <= CHANCE * DELTA
    assert counted == 1 or beyond(clients, colluders, cohort, counted - 1) > CHANCE * DELTA


def test_the_quantile_holds_for_chances_that_one_minus_them_forgets():
    """Of 10,000 clients 4,000 collude: beyond 79 of 99 stood for 6e-17, and it is more."""
    counted = Colluders(0.4, 10000, 100, chosen=False).most(CHANCE * 1e-9)
    assert beyond(10000, 4000, 100, counted) <= CHANCE * 1e-9 < beyond(10000, 4000, 100, counted - 1)
    assert counted == 80


def test_delta_pays_for_cohorts_with_more():
    setting = drawn(LDPQ(1.0))
    claim = setting.claims(LDPQ(1.0))[Adversary.SECAGG_SERVER]
    assert setting.available(claim, 1000) == pytest.approx(DELTA * (1 - 1000 * CHANCE), rel=1e-12)
    everybody = replace(setting, num_clients=None)
    assert everybody.available(claim, 1000) == DELTA


@pytest.mark.parametrize(
    "mechanism", [PairedCoins(0.2), RotatedCoins(1.0, 0.2), RotatedCoins(1.0, 0.2, paired=True)]
)
def test_a_drawn_cohort_claims_no_more_than_one_with_as_many_colluders(mechanism):
    setting = drawn(mechanism)
    count = setting.num_corrupt
    claim = setting.claims(mechanism)[Adversary.SECAGG_SERVER]
    known = replace(setting, num_clients=None, max_corrupt=count / 40)
    assert claim.loss == known.claims(mechanism)[Adversary.SECAGG_SERVER].loss
    nobody = replace(setting, max_corrupt=0.0)
    honest = nobody.claims(mechanism)[Adversary.SECAGG_SERVER]
    assert setting.spent(claim, 1).epsilon > nobody.spent(honest, 1).epsilon


def test_a_lying_server_may_ask_all_colluders_at_once():
    assert drawn(LDPQ(1.0), min_survivors=30).num_corrupt == 20


def test_one_colludes_at_least_where_a_fraction_may():
    assert drawn(LDPQ(1.0), 40, 40, 0.001).num_corrupt == 1
    few, one = (SecAgg(degree="auto", max_corrupt=share, max_dropout=0.1) for share in (0.001, 0.01))
    assert few.rules(100, 100) == one.rules(100, 100)


def test_the_report_says_how_many_count():
    mechanism = LDPQ(0.2)
    context = context_of(mechanism, 40, 50)
    report = privacy_report(
        mechanism,
        context,
        rounds=10,
        delta=DELTA,
        num_clients=1000,
        secure_aggregation=True,
        max_corrupt=0.02,
    )
    row = next(row for row in report.rows if row.adversary == "SECAGG_SERVER")
    counted = drawn(mechanism).num_corrupt
    assert any(
        f"20 of 1000 clients may collude; {counted} count in a cohort of 40" in a for a in row.assumptions
    )


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
    context = context_of(mechanism, 40, 20)
    given = {"colluders": {"max_corrupt": 0.05}, "liars": {"num_byzantine": 2}, "nobody": {}}[who]
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
