"""`fedq sweep`: what all runs cost together, and what the winner of a random number of runs costs."""

import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lightning_fedq.callbacks import Federated
from lightning_fedq.cli import main
from lightning_fedq.commands import run
from lightning_fedq.comparison.commands import sweep
from lightning_fedq.comparison.experiment import RunCost, composed, cost_of, of_winner
from lightning_fedq.comparison.selection import NegativeBinomialTrials, run_profile, selection_epsilon
from lightning_fedq.functional.divergences import gaussian_epsilon
from lightning_fedq.mechanisms import LDPQ, GaussianNoise, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary, PrivacyClaim, Slack, Unit
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import ConcentratedLoss, GaussianLoss
from lightning_fedq.privacy.planning import context_of
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.accounts import run_to_come
from tests.digits_run import Classifier, make_trainer
from tests.test_cli import configuration

# Lightning's command line calls what jsonargparse has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

TRIALS = NegativeBinomialTrials(0.0, 0.1)
NOISE = {
    "class_path": "lightning_fedq.mechanisms.GaussianNoise",
    "init_args": {"clip_norm": 1.0, "noise_multiplier": 2.0},
}
SELECT = ["sweep", "select", "slow.yaml", "fast.yaml", "--mean", "4", "--delta", "1e-4"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def candidates(folder, **federated):
    """Two configurations in this folder, which differ in the server's rate."""
    for name, rate in (("slow", 0.5), ("fast", 1.0)):
        settings = {"mechanism": NOISE, "server_lr": rate, **federated}
        Path(f"{name}.yaml").write_text(configuration(folder, **settings).read_text())


def cost(loss, most=3, slack=Slack(), **about):  # noqa: B008 (frozen)
    claim = PrivacyClaim(Adversary.OUTSIDER, loss, 1, unit=Unit.MESSAGE, slack=slack, **about)
    return RunCost("M", {Adversary.OUTSIDER: claim}, most)


def test_what_stays_with_clients_costs_nothing():
    """The weight of the layer: 640 of 650 parameters."""
    federated = Federated(LDPQ(1.0), 10, local=["*.weight"])
    found = cost_of(federated, make_trainer(federated, max_epochs=1), Classifier(), 1e-5)
    assert found.claims[Adversary.SERVER].compositions == 10


def test_runs_compose():
    """Exact: k Gaussian runs of noise z are one of z / sqrt(k)."""
    runs = [cost(GaussianLoss(2.0))] * 5
    found = composed(runs, [3] * 5, Adversary.OUTSIDER, 1e-5)
    assert found == pytest.approx(gaussian_epsilon(15**0.5 / 2.0, 1e-5), rel=1e-3)
    assert found > composed(runs[:1], [3], Adversary.OUTSIDER, 1e-5)


def test_kinds_that_no_grid_holds_together_add_up_in_epsilon_and_delta():
    """Basic composition, each kind at its share of delta: an upper bound of what a grid says where it can."""

    def of(mechanism):
        claims = mechanism.claims(context_of(mechanism, 20, 4060))
        (claim,) = [claim for claim in claims if claim.adversary is Adversary.SERVER]
        return RunCost("M", {Adversary.OUTSIDER: claim}, 3)

    def together(*runs, delta=1e-5):
        return composed(runs, [3] * len(runs), Adversary.OUTSIDER, delta)

    coins, noise, wide = of(LDPQ(0.5)), of(GaussianNoise(1.0, noise_multiplier=0.3)), cost(GaussianLoss(0.15))
    apart = [together(one, delta=5e-6) for one in (coins, noise, wide)]
    assert together(coins, noise) == apart[0] + apart[1] < math.inf, "no grid"
    assert max(apart) < together(coins, wide) < apart[0] + apart[2], "a grid, which is tighter"


def of_sums(**settings):
    """A run of RotatedCoins behind masks, and its account at delta 1e-5."""
    settings = {"secure_aggregation": SecAgg(max_corrupt=0.02, max_dropout=0.02), **settings}
    federated = Federated(RotatedCoins(clip_norm=1.0, epsilon=1.0), 100, **settings)
    trainer, module = make_trainer(federated, max_epochs=3, logger=False), Classifier()
    account = Account(run_to_come(federated, federated.mechanism, 650, 3, 0), 1e-5)
    return cost_of(federated, trainer, module, 1e-5), account


def test_chances_of_all_runs_are_paid_from_delta():
    """Union bound: what is left of delta is for the sum of the losses."""
    who = Adversary.SECAGG_SERVER
    run, account = of_sums(clients_per_round=50)
    paid = 1e-5 - account.available(account.claims()[who])
    assert 0.0 < run.chances[who] == paid < 1e-6, "colluders of a drawn cohort"
    assert composed([run], [3], who, 1e-5) == account.epsilon(who, 3, secret=False)
    twice = composed([run, run], [3, 3], who, 1e-5)
    claim = account.claims()[who]
    assert twice == spent(claim.loss, 1e-5 - 2 * paid, rounds=6, compositions=claim.compositions).epsilon
    many = int(0.5e-5 / paid) + 1
    said = "more than half of delta pays for dropouts or colluders, in every run anew"
    assert composed([run] * many, [3] * many, who, 1e-5) == said
    with pytest.raises(ValueError, match="a part of delta pays for dropouts"):
        of_winner([replace(cost(GaussianLoss(2.0)), chances={Adversary.OUTSIDER: 5e-6})], TRIALS, 1e-5)


def test_a_claim_that_is_none_is_said():
    none = RunCost("M", {Adversary.OUTSIDER: "it sends updates as they are"}, 3)
    runs = [cost(GaussianLoss(2.0)), none]
    assert composed(runs, [1, 1], Adversary.OUTSIDER, 1e-5) == "it sends updates as they are"
    with pytest.raises(ValueError, match="as they are"):
        of_winner([none], NegativeBinomialTrials(0.0, 0.1), 1e-5)


def test_the_winner_is_as_costly_as_the_worst_candidate():
    trials = NegativeBinomialTrials.of_mean(0.0, 10.0)
    small, large = cost(ConcentratedLoss(0.01)), cost(ConcentratedLoss(0.05))
    profile = run_profile([(ConcentratedLoss(0.05), 3)])
    expected = selection_epsilon(ConcentratedLoss(0.15), 1e-5, trials, profile=profile)
    assert of_winner([small, large], trials, 1e-5) == pytest.approx(expected)
    assert of_winner([small], trials, 1e-5) < expected
    runs = composed([large] * 10, [3] * 10, Adversary.OUTSIDER, 1e-5)
    assert expected < 0.6 * runs


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
    assert main(["sweep", "cost", "runs/one", "runs/two", "--delta", "1e-4"]) == 0
    page = Path("runs/sweep.md").read_text()
    assert "2 runs" in page and "`fedq sweep select`" in page and "winner alone pays for all" in page
    assert of_rounds(4) <= stated("runs/sweep.md") <= of_rounds(4) * 1.01
    assert stated("runs/sweep.md") > 1.3 * of_rounds(2)
    assert page in capsys.readouterr().out


def test_a_run_that_has_not_ended_counts_with_all_its_rounds(tmp_path):
    """One is killed in its second round, and one goes on after it had ended, is killed in its first."""
    finished(tmp_path, "killed", "on")
    table = Path("runs/killed/metrics.csv")
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:2]))
    Path("runs/killed/privacy.json").unlink()
    config = Path("runs/on/config.yaml")
    config.write_text(config.read_text().replace("max_epochs: 2", "max_epochs: 5"))
    later = Path("runs/on/privacy.json").stat().st_mtime + 1.0
    os.utime(config, (later, later))
    for name, rounds in (("killed", 2), ("on", 5)):
        assert main(["sweep", "cost", f"runs/{name}", "--delta", "1e-4"]) == 0
        assert of_rounds(rounds) <= stated("runs/sweep.md") <= of_rounds(rounds) * 1.01


def test_who_goes_by_other_words_is_refused(tmp_path, capsys):
    finished(tmp_path, "one")
    assert main(["sweep", "cost", str(tmp_path)]) == 2
    assert "holds no config.yaml, since `fedq fit` did not start its run" in capsys.readouterr().err
    assert main(["sweep", "cost", "runs/one", "--delta", "0.3"]) == 2
    assert "below 0.25 = 1 / 4 clients" in capsys.readouterr().err


def drawn(monkeypatch, count):
    monkeypatch.setattr(sweep.NegativeBinomialTrials, "draw", lambda self, stream: count)


def published(folder):
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_winner_is_exported_alone_and_says_the_same_for_any_number_of_runs(tmp_path, monkeypatch):
    candidates(tmp_path)
    arguments = [*SELECT, "--monitor", "val_loss"]
    pages = []
    for count in (1, 3):
        drawn(monkeypatch, count)
        assert main([*arguments, "--out", f"of{count}"]) == 0
        winner = Path(f"of{count}/winner")
        assert set(published(winner)) == {"model.ckpt", "settings.yaml", "privacy.md"}
        pages.append((winner / "privacy.md").read_text())
        chosen = yaml.safe_load((winner / "settings.yaml").read_text())
        scores = [
            sweep.read_rows(run / "metrics.csv")[-1]["val_loss"]
            for run in Path(f"of{count}/private").glob("run*")
        ]
        assert len(scores) == count and set(chosen) == {"settings", "val_loss"}
        assert chosen["val_loss"] == min(scores), "the best run wins"
        assert not re.search(rb"run-?[0-9]|private", (winner / "model.ckpt").read_bytes())
        assert f"{count} runs" in Path(f"of{count}/private/all_runs.md").read_text()
        assert {p.name for p in Path(f"of{count}").iterdir()} == {"winner", "private"}
    assert pages[0] == pages[1]
    trials = NegativeBinomialTrials.of_mean(0.0, 4.0)
    loss, profile = ConcentratedLoss(2 * 0.5 / 16.0), run_profile([(GaussianLoss(4.0), 2)])
    expected = selection_epsilon(loss, 1e-4, trials, profile=profile)
    assert expected < 0.8 * selection_epsilon(loss, 1e-4, trials)
    stated = float(re.search(r"Epsilon ([0-9.]+) at", pages[0]).group(1))
    assert expected <= stated <= expected * 1.02
    assert "Clients and the server see every run and pay for all" in pages[0]


def test_a_run_that_fails_publishes_nothing_and_is_paid_for(tmp_path, monkeypatch):
    """The second of three runs fails, in its last round say: it counts with all of its rounds."""
    candidates(tmp_path)
    calls, real = [], run.run_config

    def fails(config, name, root):
        calls.append(name)
        if len(calls) == 2:
            raise ArithmeticError("a client's")
        return real(config, name, root)

    drawn(monkeypatch, 3)
    monkeypatch.setattr(run, "run_config", fails)
    with pytest.raises(ArithmeticError):
        main([*SELECT, "--out", "bad"])
    assert not Path("bad/winner").exists() and len(calls) == 2
    page = "bad/private/all_runs.md"
    assert "2 runs" in Path(page).read_text() and of_rounds(4) <= stated(page) <= 1.01 * of_rounds(4)


def scores(monkeypatch, values):
    """Runs that have trained nothing and have these scores."""
    left = list(values)

    def scored(config, name, root):
        folder = Path(root) / f"{name}-{len(left)}"
        folder.mkdir(parents=True)
        (folder / "model.ckpt").write_text(str(len(left)))
        (folder / "metrics.csv").write_text(f"round,charged,val_acc\n2,2,{left.pop(0)}\n")
        return folder

    drawn(monkeypatch, len(left))
    monkeypatch.setattr(run, "run_config", scored)


@pytest.mark.parametrize(
    ("values", "best"), [(["nan", "0.25", "0.5"], 0.5), (["0.5", "nan", "0.25"], 0.5), (["nan"], None)]
)
def test_a_score_that_is_no_number_never_wins(tmp_path, monkeypatch, values, best):
    candidates(tmp_path)
    scores(monkeypatch, values)
    assert main([*SELECT, "--out", "scored"]) == 0
    found = yaml.safe_load(Path("scored/winner/settings.yaml").read_text())["val_acc"]
    assert found == (best if best is not None else -float("inf"))


def test_every_run_draws_a_candidate_of_its_own(tmp_path, monkeypatch):
    """Forty runs of two candidates: one of them is left out with chance 2^-39."""
    candidates(tmp_path)
    drawn_settings = []
    scores(monkeypatch, ["0.5"] * 40)
    scored = run.run_config

    def noted(config, name, root):
        callbacks = config["trainer"]["callbacks"]
        (federated,) = [c for c in callbacks if c["class_path"].endswith("Federated")]
        drawn_settings.append(federated["init_args"]["server_lr"])
        return scored(config, name, root)

    monkeypatch.setattr(run, "run_config", noted)
    assert main([*SELECT, "--out", "many"]) == 0
    assert len(drawn_settings) == 40 and set(drawn_settings) == {0.5, 1.0}


WAITS = [*SELECT[:4], "--mean", "1.05", "--eta", "1", "--delta", "1e-2", "--at-most", "3"]


class Clock:
    """A hundredth of a second passes with every look at it."""

    def __init__(self):
        self.now = float(round(time.time()))

    def monotonic(self):
        self.now += 0.01
        return self.now

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_the_time_of_the_winner_tells_nothing_of_the_number_of_runs(tmp_path, monkeypatch):
    candidates(tmp_path)
    pages, clock = [], Clock()
    monkeypatch.setattr(sweep, "time", clock)
    for values in (["0.5"], ["0.5", "0.25", "0.1"]):
        scores(monkeypatch, values)
        begun, out = clock.now, f"of{len(values)}"
        arguments = ["--publish-after", "0.02", "--out", out]
        assert main([*WAITS, *arguments]) == 0
        assert clock.now == pytest.approx(begun + 1.2, abs=0.05)
        files = [Path(out, "winner"), *published(Path(out, "winner")).values()]
        (stamp,) = {file.stat().st_mtime for file in files}
        assert stamp == pytest.approx(begun, abs=1e-3)
        pages.append(Path(out, "winner/privacy.md").read_text())
    assert pages[0] == pages[1] and "0.02 minutes after the start" in pages[0] and "3 at most" in pages[0]
    assert "how long the runs took" not in pages[0]


def test_runs_that_take_longer_than_the_winner_waits_export_nothing(tmp_path, monkeypatch, capsys):
    candidates(tmp_path)
    scores(monkeypatch, ["0.5"])
    assert main([*WAITS, "--publish-after", "1e-9", "--out", "late"]) != 0
    assert "Give more minutes, or fewer runs with --at-most" in capsys.readouterr().err
    assert not Path("late/winner").exists() and "1 runs" in Path("late/private/all_runs.md").read_text()


def test_a_largest_number_of_runs_is_counted_in_delta(tmp_path, capsys):
    small = cost(ConcentratedLoss(0.01))
    free, cut = (NegativeBinomialTrials.of_mean(1.0, 3.0, *most) for most in ((), (40,)))
    plain, counted = of_winner([small], free, 1e-3), of_winner([small], cut, 1e-3)
    left = 1e-3 - (1.0 + math.exp(counted)) * cut.beyond
    assert plain < counted == pytest.approx(of_winner([small], free, left), rel=1e-6)
    candidates(tmp_path)
    assert main([*SELECT[:6], "--at-most", "5"]) == 2
    assert "let --at-most be larger" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("federated", "more", "words"),
    [
        ({}, ["--mean", "1"], "more than one run"),
        ({}, ["--eta", "-1"], "eta > -1"),
        ({}, ["--monitor", "train_loss"], "only validation data count as public"),
        ({}, ["--delta", "0.3"], "below 0.25 = 1 / 4 clients"),
        ({"seed": 3}, [], "seed=None"),
        ({"mechanism": {"class_path": "lightning_fedq.mechanisms.FedAvg"}}, [], "as they are"),
    ],
)
def test_what_nothing_is_known_of_is_refused_before_anything_is_trained(
    tmp_path, capsys, federated, more, words
):
    candidates(tmp_path, **federated)
    assert main([*SELECT, *more, "--out", "bad"]) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))
    assert not Path("bad").exists()
