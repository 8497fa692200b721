"""The experiment whole, through the command, at a size of seconds; tuned, drawn, resumed."""

import csv
import json
import math
import os

import pytest

from lightning_fedq.commands.mechanism_text import parse_mechanism
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.secagg import SecAgg
from reproductions.__main__ import main
from reproductions.useful import privacy
from tests.described import privacy_report
from tests.one_round import make_context

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")
needs_mnist = pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
pytestmark = [
    # seeded runs, whose masks are counted: the experiment says so
    pytest.mark.filterwarnings("ignore:the keys come from a seed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Masking is accounted for only:UserWarning"),
]


def reproduce(out, *options):
    size = ["--num_clients", "60", "--rounds", "3", "--delta", "1e-3", "--epsilons", "[8.0]"]
    what = ["--kinds", "[linear]", "--seeds", "[0]", *options]
    arguments = ["useful-privacy", "--data.root", FEDQ_DATA, *size, *what, "--out", str(out)]
    assert main(*arguments) == 0
    assert (out / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    with (out / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file)), json.loads((out / "summary.json").read_text())


@needs_mnist
@pytest.mark.slow
def test_the_table_tunes_calibrates_and_says_what_was_spent(tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(privacy, "_RATES", {clips: rates[1:3] for clips, rates in privacy._RATES.items()})
    names = '[RotatedCoins,RotatedAxes,"FedAvg, no privacy"]'
    table, summary = reproduce(out, "--methods", names, "--views", "[secagg,once]")
    results = {row["method"]: row for row in table if row["what"] == "result"}
    assert set(results) == {"RotatedCoins", "RotatedAxes", privacy.PLAIN}
    tuning = [row for row in table if row["what"] == "tuning"]
    assert {row["seed"] for row in tuning} == {str(privacy.TUNING_SEED)}
    assert {row["method"] for row in tuning} == {"RotatedCoins", "RotatedAxes", privacy.PLAIN}
    best = max((r for r in tuning if r["method"] == "RotatedAxes"), key=lambda r: float(r["val_acc"]))
    assert results["RotatedAxes"]["lr"] == best["lr"]
    assert results[privacy.PLAIN]["epsilon"] == "inf" and float(results[privacy.PLAIN]["acc"]) > 40.0
    # what the row says was spent is what the report says
    coins = parse_mechanism(results["RotatedCoins"]["mechanism"])
    context, run = make_context(coins, tuple(range(60)), (7850,)), {"rounds": 3, "delta": 1e-3}
    report = privacy_report(coins, context, **run, secure_aggregation=True, max_colluding_fraction=0.02)
    spent = float(results["RotatedCoins"]["epsilon"])
    assert spent == pytest.approx(report.row(Adversary.SECAGG_SERVER).epsilon_run, rel=1e-3)
    assert 7.9 < spent <= 8.0
    assert float(results["RotatedAxes"]["update_bits"]) == pytest.approx(14 / 7850)
    bits = 8 * SecAgg(simulation="counted").layout(coins, context, None).num_bytes / 7850
    assert float(results["RotatedCoins"]["update_bits"]) == pytest.approx(bits, rel=0.01)
    assert any(line.startswith("linear, 60, once, RotatedAxes: epsilon 8: ") for line in summary["verdicts"])
    # nothing is computed twice
    monkeypatch.setattr(privacy, "train", lambda *arguments: pytest.fail("a row was computed anew"))
    again, _ = reproduce(out, "--methods", names, "--views", "[secagg,once]", "--resume", "true")
    assert sorted(map(str, again)) == sorted(map(str, table))


def test_every_view_tunes_what_it_runs():
    for view in privacy._VIEWS.values():
        for name in view.methods:
            clips = privacy._METHODS[name].clips
            assert not view.tuned or privacy._METHODS[view.tuned[clips]].clips == clips
    for name, method in privacy._METHODS.items():
        mechanism = method.make(0.5, 100)
        assert name == privacy.PLAIN or getattr(mechanism, "clip_norm", 0.5) >= 0.5


def test_laplace_noise_clips_in_l1_what_others_clip_in_l2():
    """The l1 norm of an evenly spread vector of l2 norm 1 and 100 coordinates: sqrt(2 / pi) 10."""
    noise = privacy._METHODS["LaplaceNoise"].make(1.0, 100)
    assert noise.clip_norm == pytest.approx(10 * math.sqrt(2 / math.pi))


def test_an_unknown_mechanism_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"methods must be among .*RotatedAxes.*, got Nothing"):
        privacy.useful_privacy(methods=["Nothing"], out=str(tmp_path / "run"))
