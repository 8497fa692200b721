"""The report says what holds, says "no guarantee" where nothing does, and never guesses."""

import json
import math
import time

import pytest

from lightning_fedq.mechanisms import LDPQ, AugCorBin, CorBin, DistributedDiscreteGaussian, FedAvg
from lightning_fedq.mechanisms.interface import Adversary, GaussianLoss, PrivacyClaim
from lightning_fedq.privacy.report_file import to_json
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS
from tests.described import page as markdown, privacy_report
from tests.one_round import make_context


def context(mechanism, clients, dim=10):
    return make_context(mechanism, range(clients), (dim,))


def report(mechanism, clients=50, dim=10, **settings):
    settings = {"rounds": 1, "delta": 1e-5, **settings}
    return privacy_report(mechanism, context(mechanism, clients, dim), **settings)


def test_every_adversary_has_a_row():
    rows = report(LDPQ(0.1)).rows
    assert [row.adversary for row in rows] == [adversary.name for adversary in Adversary]
    assert all(row.neighbours == "one client's update is replaced by any other" for row in rows)


def test_one_bit_alone_is_randomised_response():
    row = report(LDPQ(0.1), dim=100).row(Adversary.EAVESDROPPER)
    assert row.epsilon_unit == pytest.approx(0.1, rel=1e-8)
    assert row.epsilon_round == pytest.approx(4.30679137252, rel=1e-6)
    assert row.epsilon_run == row.epsilon_round
    assert (row.infinite_mass, row.method) == (0.0, "exact binomial composition")


def test_shared_bits_have_no_guarantee_worth_the_name_against_the_server():
    row = report(CorBin(1.0, 1)).row(Adversary.SERVER)
    assert row.verdict == VACUOUS
    assert row.epsilon_run == math.inf
    assert row.epsilon_unit == math.inf
    assert row.infinite_mass == pytest.approx(1 - (1 - 0.23105857863) ** 10, rel=1e-6)
    assert "excludes one of two updates" in row.reason
    assert "shared_bits=0" in row.advice


def test_without_secure_aggregation_its_claim_is_not_made():
    row = report(LDPQ(0.1)).row(Adversary.SECAGG_SERVER)
    assert (row.verdict, row.epsilon_run) == (NO_GUARANTEE, math.inf)
    assert "secure aggregation is off" in row.reason


def test_reproducible_keys_protect_nothing():
    result = report(LDPQ(0.1), secure_keys=False)
    assert all(row.verdict == NO_GUARANTEE and row.epsilon_run == math.inf for row in result.rows)
    assert result.with_secure_keys[0].epsilon_run < 10
    assert "NOTHING IS PRIVATE: the keys come from a seed" in markdown(result)


def test_fedavg_has_no_guarantee_and_says_why():
    result = report(FedAvg())
    assert all(row.verdict == NO_GUARANTEE for row in result.rows)
    assert "updates are sent as they are" in result.row(Adversary.SERVER).reason


def test_weighted_means_fall_back_on_all_messages():
    result = report(LDPQ(0.1), equal_weights=False)
    outsider, server = result.row(Adversary.OUTSIDER), result.row(Adversary.SERVER)
    assert outsider.epsilon_run == server.epsilon_run
    assert any("weighted" in text for text in outsider.assumptions)


def test_dropouts_weaken_the_aggregate_and_only_it():
    settings = {"clients": 300, "dim": 1000, "secure_aggregation": True}
    sure = report(LDPQ(0.3), **settings)
    unsure = report(LDPQ(0.3), dropout_probability=0.3, **settings)
    assert unsure.row(Adversary.SECAGG_SERVER).epsilon_round > sure.row(Adversary.SECAGG_SERVER).epsilon_round
    assert unsure.row(Adversary.SERVER).epsilon_round == sure.row(Adversary.SERVER).epsilon_round


class SumOfGaussians(LDPQ):
    """Claims noise that only the whole cohort adds up to."""

    def claims(self, context):
        losses = {a: GaussianLoss(1.0) for a in Adversary}
        losses |= {a: GaussianLoss(9.0) for a in (Adversary.SECAGG_SERVER, Adversary.OUTSIDER)}
        return tuple(PrivacyClaim(a, loss, 1) for a, loss in losses.items())


def test_distributed_noise_is_not_claimed_when_clients_drop_out():
    result = report(SumOfGaussians(1.0), dropout_probability=0.1, secure_aggregation=True)
    behind, server = result.row(Adversary.SECAGG_SERVER), result.row(Adversary.SERVER)
    assert behind.epsilon_run == server.epsilon_run
    assert any("needs every client to answer" in text for text in behind.assumptions)
    assert (behind.unit, behind.epsilon_unit) == ("message", math.inf)


def test_sampling_means_fewer_rounds_and_no_amplification():
    all_rounds = report(LDPQ(0.05), clients=10, rounds=40)
    sampled = report(LDPQ(0.05), clients=10, rounds=40, num_clients=100)
    row, full = sampled.row(Adversary.SERVER), all_rounds.row(Adversary.SERVER)
    assert row.epsilon_round == full.epsilon_round
    assert row.epsilon_run < full.epsilon_run
    assert any("no amplification" in note for note in sampled.notes)


@pytest.mark.parametrize("delta", [None, 0.0, 0.02, 1.0])
def test_delta_missing_zero_or_too_large_is_refused(delta):
    with pytest.raises(ValueError, match="delta"):
        report(LDPQ(1.0), delta=delta)


def test_json_is_strict_and_complete():
    loaded = json.loads(to_json(report(CorBin(1.0))))
    assert {row["name"]: row for row in loaded["rows"]}["SERVER"]["epsilon_run"] == "inf"
    assert loaded["rows"][0]["delta"] == 1e-5
    assert loaded["mechanism"] == "CorBin(epsilon_per_coordinate=1.0, shared_bits=5)"


@pytest.mark.parametrize("mechanism", [LDPQ(0.01), CorBin(5.0, 5), AugCorBin(5.0, 5)])
def test_a_large_model_is_reported_within_a_minute(mechanism):
    """1.1e7 parameters, 100 rounds, 50 clients; takes about a second, the limit is the requirement."""
    start = time.perf_counter()
    result = report(mechanism, clients=50, dim=11_200_000, rounds=100, secure_aggregation=True)
    assert result.row(Adversary.EAVESDROPPER).verdict == VACUOUS
    assert time.perf_counter() - start < 60.0


def test_behind_secure_aggregation_the_server_row_counts_on_masks_that_run():
    """What may be done to them is a condition, in the present tense; whether they ran is a fact."""
    protocol = "for a server that follows the protocol (semi-honest)"
    result = report(LDPQ(0.1), secure_aggregation=True, protocol=protocol)
    server, behind = result.row(Adversary.SERVER), result.row(Adversary.SECAGG_SERVER)
    assert any(text.startswith("masks run") and protocol in text for text in behind.assumptions)
    assert not any("masks run" in text for text in server.assumptions)
    assert behind.epsilon_run < server.epsilon_run == report(LDPQ(0.1)).row(Adversary.SERVER).epsilon_run
    assert result.server == protocol and protocol in markdown(result)
    plain = report(LDPQ(0.1))
    assert (plain.masks, plain.server) == ("none", "")


def test_noise_of_all_clients_is_claimed_where_rounds_with_too_few_are_aborted():
    """The distributed discrete Gaussian counts on all but `max_dropped_clients`; the engine enforces it."""
    settings = {"clients": 50, "secure_aggregation": True}
    mechanism = DistributedDiscreteGaussian(1.0, 1.0, 0.05, max_dropped_clients=10)
    sure, unsure = (report(mechanism, dropout_probability=p, **settings) for p in (0.0, 0.1))
    for who in (Adversary.SECAGG_SERVER, Adversary.OUTSIDER):
        row = unsure.row(who)
        assert row.epsilon_round == sure.row(who).epsilon_round < unsure.row(Adversary.SERVER).epsilon_round
        assert "a round with more than 10 dropouts is aborted" in row.assumptions
