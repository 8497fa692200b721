"""`fedq privacy RUN RUN ...`: what all runs cost together."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from lightning_fedq.callbacks import Federated
from lightning_fedq.cli import main
from lightning_fedq.commands import run
from lightning_fedq.commands.together import RunCost, composed, plan_cost
from lightning_fedq.functional.divergences import gaussian_epsilon
from lightning_fedq.mechanisms import LDPQ, GaussianNoise, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary, PrivacyClaim, Slack, Unit
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import GaussianLoss
from lightning_fedq.privacy.planning import make_plan_context
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.accounts import planned_run
from tests.configurations import written
from tests.digits_run import Classifier, make_trainer
from tests.test_cli import configuration

NOISE = written("mechanisms.GaussianNoise", clip_norm=1.0, noise_multiplier=2.0)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def cost(loss, most=3, slack=Slack(), **about):  # noqa: B008 (frozen)
    claim = PrivacyClaim(Adversary.OUTSIDER, loss, 1, unit=Unit.MESSAGE, slack=slack, **about)
    return RunCost("M", {Adversary.OUTSIDER: claim}, most)


def test_what_stays_with_clients_costs_nothing():
    """The weight of the layer: 640 of 650 parameters."""
    federated = Federated(LDPQ(1.0), 10, personal_parameters=["*.weight"])
    found = plan_cost(federated, make_trainer(federated, max_epochs=1), Classifier(), 1e-5)
    assert found.claims[Adversary.SERVER].compositions == 10


def test_runs_compose():
    """Exact: k Gaussian runs of noise z are one of z / sqrt(k)."""
    runs = [(cost(GaussianLoss(2.0)), 3)] * 5
    found = composed(runs, Adversary.OUTSIDER, 1e-5)
    assert found == pytest.approx(gaussian_epsilon(15**0.5 / 2.0, 1e-5), rel=1e-3)
    assert found > composed(runs[:1], Adversary.OUTSIDER, 1e-5)


def test_kinds_that_no_grid_holds_together_add_up_in_epsilon_and_delta():
    """Basic composition, each kind at its share of delta: an upper bound of what a grid says where it can."""

    def of(mechanism):
        claims = mechanism.claims(make_plan_context(mechanism, 20, 4060))
        (claim,) = [claim for claim in claims if claim.adversary is Adversary.SERVER]
        return RunCost("M", {Adversary.OUTSIDER: claim}, 3)

    def together(*runs, delta=1e-5):
        return composed([(run, 3) for run in runs], Adversary.OUTSIDER, delta)

    coins, noise, wide = of(LDPQ(0.5)), of(GaussianNoise(1.0, noise_multiplier=0.3)), cost(GaussianLoss(0.15))
    apart = [together(one, delta=5e-6) for one in (coins, noise, wide)]
    assert together(coins, noise) == apart[0] + apart[1] < math.inf, "no grid"
    assert max(apart) < together(coins, wide) < apart[0] + apart[2], "a grid, which is tighter"


def of_sums(**settings):
    """A run of RotatedCoins behind masks, and its account at delta 1e-5."""
    masks = SecAgg(max_colluding_fraction=0.02, max_dropped_fraction=0.02)
    federated = Federated(RotatedCoins(1.0, epsilon_per_bit=1.0), 100, secure_aggregation=masks, **settings)
    trainer, module = make_trainer(federated, max_epochs=3, logger=False), Classifier()
    account = Account(planned_run(federated, federated.mechanism, 650, 3, 0), 1e-5)
    return plan_cost(federated, trainer, module, 1e-5), account


def test_chances_of_all_runs_are_paid_from_delta():
    """Union bound: what is left of delta is for the sum of the losses."""
    who = Adversary.SECAGG_SERVER
    run, account = of_sums(cohort=50)
    paid = 1e-5 - account.available(account.claims()[who])
    assert 0.0 < run.chances[who] == paid < 1e-6, "colluders of a drawn cohort"
    assert composed([(run, 3)], who, 1e-5) == account.epsilon(who, 3, secret=False)
    twice = composed([(run, 3), (run, 3)], who, 1e-5)
    claim = account.claims()[who]
    assert twice == spent(claim.loss, 1e-5 - 2 * paid, rounds=6, compositions=claim.compositions).epsilon
    many = int(0.5e-5 / paid) + 1
    said = "dropouts or colluders of all runs would use more than half of delta"
    assert composed([(run, 3)] * many, who, 1e-5) == said


def test_a_claim_that_is_none_is_said():
    none = RunCost("M", {Adversary.OUTSIDER: "it sends updates as they are"}, 3)
    runs = [(cost(GaussianLoss(2.0)), 1), (none, 1)]
    assert composed(runs, Adversary.OUTSIDER, 1e-5) == "it sends updates as they are"


def finished(folder, *names):
    """Runs of two rounds each."""
    path = configuration(folder, mechanism=NOISE)
    for name in names:
        run.run_config(run.resolve([str(path)]), name, Path("runs"))


def stated(page):
    """Epsilon towards an outsider on a page of runs."""
    return float(re.search(r"outsider .*\| ([0-9.]+) \|", Path(page).read_text()).group(1))


def of_rounds(count):
    """Of two clips on average and the noise of four clients in the sum."""
    return gaussian_epsilon(count**0.5 / (2.0 * 2.0), 1e-4)


def test_all_runs_of_a_search_cost_everybody_all(tmp_path, capsys):
    finished(tmp_path, "one", "two")
    assert main(["privacy", "runs/one", "runs/two", "--delta", "1e-4", "--out", "both"]) == 0
    page = Path("both/privacy.md").read_text()
    assert "2 runs" in page and "sees the best run alone" in page
    assert of_rounds(4) <= stated("both/privacy.md") <= of_rounds(4) * 1.01
    assert stated("both/privacy.md") > 1.3 * of_rounds(2)
    assert page in capsys.readouterr().out


def test_a_run_that_has_not_ended_counts_with_all_its_rounds(tmp_path):
    """One is killed in its second round, and one goes on after it had ended, is killed in its first."""
    finished(tmp_path, "whole", "killed", "on")
    table = Path("runs/killed/metrics.csv")
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:2]))
    Path("runs/killed/privacy.json").unlink()
    config = Path("runs/on/config.yaml")
    config.write_text(config.read_text().replace("max_epochs: 2", "max_epochs: 5"))
    later = Path("runs/on/privacy.json").stat().st_mtime + 1.0
    os.utime(config, (later, later))
    for name, rounds in (("killed", 2), ("on", 5)):
        assert main(["privacy", "runs/whole", f"runs/{name}", "--delta", "1e-4", "--out", name]) == 0
        assert of_rounds(2 + rounds) <= stated(f"{name}/privacy.md") <= of_rounds(2 + rounds) * 1.01


def test_a_run_that_was_stopped_counts_with_all_its_rounds(tmp_path):
    """What it released may have decided the end, and composition needs a number that was fixed before."""
    finished(tmp_path, "whole", "stopped")
    page, config = Path("runs/stopped/privacy.json"), Path("runs/stopped/config.yaml")
    config.write_text(config.read_text().replace("max_epochs: 2", "max_epochs: 5"))
    page.write_text(json.dumps({**json.loads(page.read_text()), "ended": "by a stop after round 2 of 5"}))
    assert main(["privacy", "runs/whole", "runs/stopped", "--delta", "1e-4", "--out", "both"]) == 0
    assert of_rounds(2 + 5) <= stated("both/privacy.md") <= of_rounds(2 + 5) * 1.01


def test_who_goes_by_other_words_is_refused(tmp_path, capsys):
    finished(tmp_path, "one")
    for more, said in (
        ([str(tmp_path)], "holds no config.yaml. Give folders of runs that `fedq fit` started."),
        (["runs/one", "--delta", "0.3"], "below 0.25 = 1 / 4 clients"),
        (["runs/one", "--rounds", "3"], "no options except --delta and --out"),
    ):
        assert main(["privacy", "runs/one", *more]) == 2
        assert said in capsys.readouterr().err
