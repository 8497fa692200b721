"""Every statement says for how many colluding clients it holds."""

import math
from dataclasses import replace

import pytest

import lightning_fedq as fedq
from lightning_fedq.mechanisms.interface import ANY_NUMBER, Adversary, NonPrivate, PrivacyClaim, same_for_all
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.document import WHOLE, document
from lightning_fedq.privacy.losses import LaplaceLoss
from lightning_fedq.privacy.planning import Problem, make_plan_context
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.report_file import from_json, to_json
from lightning_fedq.privacy.report_rows import report_rows
from tests.contract.test_mechanisms import ROWS

CLIENTS, TARGET = 479, fedq.PrivacyTarget(8.0, 1e-5, "secagg_server")


def report(mechanism, max_colluding_fraction, clients=CLIENTS, rounds=25):
    masks = fedq.SecAgg(max_colluding_fraction=max_colluding_fraction)
    return privacy_report(Problem(clients, 2000, rounds, TARGET, masks).run(mechanism), 1e-5)


def text_of(report):
    _, parts = document(report, WHOLE)
    return str(parts)


@pytest.mark.parametrize("max_colluding_fraction", [0.02, 0.1])
def test_the_page_has_one_curious_client_and_all_that_may_collude(max_colluding_fraction):
    """The page said 7.92 of "a curious client", and 48 that pool their coins had 8.45."""
    made = report(fedq.RotatedCoins(0.5, 0.2), max_colluding_fraction)
    curious, behind = made.row(Adversary.CLIENT), made.row(Adversary.SECAGG_SERVER)
    count = math.floor(max_colluding_fraction * CLIENTS)
    assert curious.colluders == 1 and behind.colluders == count and behind.epsilon > curious.epsilon
    [shown] = [row.when for row in report_rows(made) if row.row.adversary == "CLIENT"]
    assert shown == "alone"
    assert f"{count} that pool what they know (max_colluding_fraction) have epsilon" in text_of(made)
    assert [row.colluders for row in from_json(to_json(made)).rows] == [row.colluders for row in made.rows]


def test_without_a_number_of_colluders_the_page_says_so():
    text = text_of(report(fedq.RotatedCoins(0.5, 0.2), 0.0))
    assert "Several that pool what they know may learn more" in text


def test_noise_of_each_client_holds_for_any_number():
    made = report(fedq.LDPQ(0.5), 0.0)
    assert made.row(Adversary.SERVER).colluders == math.inf
    made = report(fedq.MVU(1.0), 0.1)
    assert all(row.colluders == math.inf for row in made.rows)
    assert "pool what they know" not in text_of(made)


@pytest.mark.parametrize("mechanism", ROWS, ids=repr)
def test_a_claim_against_the_server_counts_the_colluders_of_the_round(mechanism):
    for count in (0, 1, 3):
        context = replace(make_plan_context(mechanism, 12, 40), num_colluding=count)
        for claim in mechanism.claims(context):
            if isinstance(claim.loss, NonPrivate):
                continue
            if claim.adversary is Adversary.SECAGG_SERVER:
                assert claim.num_colluders >= count
            if claim.adversary in (Adversary.CLIENT, Adversary.SERVER_AND_PARTNER):
                assert claim.num_colluders >= 1


def test_a_claim_that_forgets_colluders_covers_none():
    """A mechanism of one's own whose claim about the sum does not read `num_colluding`."""

    class Forgetful(fedq.LDPQ):
        def claims(self, context):
            said = {"compositions": 1, "assumptions": ("keys are secret",)}
            return tuple(PrivacyClaim(who, LaplaceLoss(0.1), **said) for who in Adversary)

    run = Problem(100, 10, 2, TARGET, fedq.SecAgg(max_colluding_fraction=0.1)).run(Forgetful(0.5))
    claim = Account(run, 1e-5).claims()[Adversary.SECAGG_SERVER]
    assert "covers 0 colluding clients, 10 may collude" in claim.loss.reason


def test_a_claim_can_not_hold_for_fewer_than_its_own_view():
    with pytest.raises(ValueError, match="colluders must be >= 1 against a curious client, got 0"):
        PrivacyClaim(Adversary.CLIENT, LaplaceLoss(1.0), 1, colluders=0)
    assert {claim.num_colluders for claim in same_for_all(LaplaceLoss(1.0), 1)} == {ANY_NUMBER}
