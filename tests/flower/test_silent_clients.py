"""What hides a client of a deployment in a sum is counted on those that are sure to answer."""

import json

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.comparison.reported_delta import ReportedDelta
from lightning_fedq.flower.settings import deployed_mechanism, with_real_clients
from lightning_fedq.functional.one_bit.threshold_coin import coin_thresholds
from lightning_fedq.mechanisms.interface import Adversary, CoinSum
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import HiddenPair
from lightning_fedq.privacy.report import OWN_CODE
from lightning_fedq.training.accounts import describe_run
from tests.flower.loop import LoopGrid, clients, deployment, federated

DELTA, ROUNDS, CLIENTS = 1e-3, 3, 6
MASKED = fedq.SecAgg()  # of six clients four open a sum


def among(epsilon, answers, losses):
    """Epsilon of some bits of one client among those of `answers` in all, whatever the others hold."""
    low, high = coin_thresholds(epsilon).probabilities
    pair = HiddenPair((high, low), (low, high), answers - 1)
    return spent(CoinSum(low, high, (pair,)), DELTA, compositions=losses).epsilon


@pytest.mark.parametrize(
    "adversary, masks, answers",
    [("secagg_server", MASKED, 4), ("outsider", MASKED, 4), ("outsider", None, 1)],
)
def test_a_target_counts_on_those_who_are_sure_to_answer(adversary, masks, answers):
    target = fedq.PrivacyTarget(8.0, DELTA, adversary)
    settings = fedq.Federated(fedq.LDPQ(1.0), CLIENTS, privacy=target, secure_aggregation=masks, seed=None)
    module = torch.nn.Linear(4, 1)
    found = deployed_mechanism(settings, module, ROUNDS)
    assert 7.9 < among(found.epsilon_per_coordinate, answers, 5 * ROUNDS) <= 8.0


@pytest.mark.parametrize(
    "options, who, answers", [({"secure_aggregation": MASKED}, "SECAGG_SERVER", 3), ({}, "OUTSIDER", 1)]
)
def test_the_report_of_a_deployment_and_of_its_checkpoint(options, who, answers, tmp_path):
    """Four clients, of whom three open a sum; without masks nothing makes another one answer."""
    make = lambda: federated(fedq.LDPQ(0.01), **options)  # noqa: E731
    folder = fedq.RunFolder("run", str(tmp_path / "runs"), show=False)
    _, server = deployment(make(), 1, tmp_path, callbacks=[folder, ReportedDelta(DELTA)]).run(
        LoopGrid(*clients(make, tmp_path))
    )
    page = json.loads((tmp_path / "runs" / "run" / "privacy.json").read_text())
    row = next(r for r in page["with_secure_keys"] or page["rows"] if r["adversary"] == who)
    exact = among(0.01, answers, server.engine.weights.numel())
    assert row["epsilon_run"] == pytest.approx(exact, rel=1e-9)
    assert any("clients are sure to answer" in text for text in row["assumptions"])
    saved = next((tmp_path / "server").rglob("*.ckpt"))
    report = report_of_checkpoint(saved, None, DELTA, False)
    again = next(r for r in report.with_secure_keys or report.rows if r.adversary == who)
    assert again.epsilon_run == row["epsilon_run"]
    # whose code the clients run is an assumption of each row, in the folder and from the checkpoint
    assert all(OWN_CODE in one["assumptions"] for one in page["with_secure_keys"] or page["rows"])
    assert all(OWN_CODE in one.assumptions for one in report.with_secure_keys or report.rows)


def test_what_is_kept_whoever_is_silent():
    """Noise that allows for missing clients in so many words, dithers that the server adds for them."""

    def rows(mechanism, real):
        settings = fedq.Federated(mechanism, CLIENTS, seed=None)
        planner = (with_real_clients(settings) if real else settings).planner
        given = {"rounds": 1, "secure_sum": None, "plain_sum": True, "num_byzantine": 0, "secure_keys": True}
        run = describe_run(planner, mechanism, 5, **given)
        return Account(run, DELTA).claims()[Adversary.OUTSIDER].loss

    for kept in (
        fedq.RotatedCoins(1.0, 0.5, max_dropped_clients=1),
        fedq.LayeredGaussian(1.0, 1.0),
        fedq.DistributedDiscreteGaussian(1.0, 0.5, 0.1),
    ):
        assert rows(kept, True) == rows(kept, False)
    for fewer in (
        fedq.LDPQ(1.0),
        fedq.GaussianNoise(1.0, 1.0),
        fedq.PairedCoins(1.0),
        fedq.AugCorBin(1.0, 5, 0.5),
    ):
        assert rows(fewer, True) != rows(fewer, False)
