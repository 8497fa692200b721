import csv
import json
import math
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import Dataset

from lightning_fedq import ClientEvaluation
from lightning_fedq.callbacks import DPSGD, Federated, PrivacyBudget, RunFolder
from lightning_fedq.callbacks.run_folder import plot_title
from lightning_fedq.comparison.reported_delta import ReportedDelta
from lightning_fedq.data import LabelShards, QuantitySkew
from lightning_fedq.mechanisms import LDPQ, GaussianNoise, LayeredGaussian, RotatedCoins
from lightning_fedq.privacy.document import attack_accuracy
from lightning_fedq.privacy.report_file import from_json
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.runs import read_rows
from lightning_fedq.training.accounts import describe_noise
from tests.callbacks.runs import small_data, small_model, small_run
from tests.callbacks.steps import EndsAfter, Fails
from tests.digits_run import Classifier, Digits, digits, make_trainer

DIM = 650


@pytest.mark.pictures
def test_everything_is_written(tmp_path):
    folder = RunFolder("mine", str(tmp_path), mode="max")
    folder.config = "seed: 1\n"
    trainer = small_run(folder, rounds=3)
    path = tmp_path / "mine"
    names = {"accuracy.png", "config.yaml", "metrics.csv", "model.ckpt", "privacy.json"}
    names |= {"clients", "privacy.md", "report.md", "summary.json"}
    assert {file.name for file in path.iterdir()} == names
    rows, summary = read_rows(path / "metrics.csv"), json.loads((path / "summary.json").read_text())
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert rows[-1]["val_acc"] == pytest.approx(float(trainer.callback_metrics["val_acc"]))
    assert summary["rounds"] == 3 and summary["num_parameters"] == DIM
    assert summary["bits_per_parameter"] == 1.0
    assert summary["uplink_megabytes"] == pytest.approx(3 * 4 * DIM / 8e6)
    document = json.loads((path / "privacy.json").read_text())
    assert len(document["rows"]) == 6 and "NOTHING IS PRIVATE" in document["headline"]
    assert document["origin"]["model"] == sha256((path / "model.ckpt").read_bytes()).hexdigest()
    assert document["origin"]["config"] == sha256(b"seed: 1\n").hexdigest()
    assert (document["bits"]["update"], document["bits"]["keys"]) == (1.0, 0.0)
    assert summary["best"]["value"] == max(row["val_acc"] for row in rows)
    noise, last = summary["noise_over_signal"], rows[-1]
    assert noise["planned"] > 0 and last["charged"] == 3
    errors = sum(row["sim_mse"] for row in rows)
    signal = sum((row["sim_mse"] * 10 ** (row["sim_snr_db"] / 10)) ** 0.5 for row in rows)
    lost = 1.0 - min(last["sim_arrived"], 1.0)
    assert noise["sim_seen"] == pytest.approx(max(errors / signal**2, lost**2))
    report, page = ((path / name).read_text() for name in ("report.md", "privacy.md"))
    assert f"R = {noise['sim_seen']:.2g} measured, with the error of clipping, " in report
    assert f"{noise['planned']:.2g} planned, if clients share 0.3 of the updates' energy: " in report
    assert "R = " not in page
    assert "| mechanism | CorBin; 650 parameters |" in report and "![accuracy.png](accuracy.png)" in report
    trainer.test(small_model(), datamodule=small_data(), verbose=False)
    assert "test_acc" in json.loads((path / "summary.json").read_text())["metrics"]


def test_a_title_has_no_settings_and_a_picture_carries_its_price(tmp_path, monkeypatch):
    assert plot_title("mine", RotatedCoins(1.0, 1.015618805983572)) == "mine (RotatedCoins)"
    drawn = []
    monkeypatch.setattr("lightning_fedq.callbacks.run_folder.save_figure", lambda *_: None)
    monkeypatch.setattr(
        "lightning_fedq.callbacks.run_folder.plot_progress", lambda *given: drawn.append(given[2])
    )
    small_run(RunFolder("loud", str(tmp_path)), rounds=1, mechanism=GaussianNoise(1.0, 0.5), seed=None)
    about = from_json((tmp_path / "loud" / "privacy.json").read_text()).about
    assert drawn == [f"loud (GaussianNoise)\nε {format_epsilon(about.epsilon)}, outsider"]


def test_an_old_run_is_left_alone(tmp_path):
    small_run(RunFolder("mine", str(tmp_path)), rounds=1)
    small_run(RunFolder("mine", str(tmp_path)), rounds=2)
    assert len(read_rows(tmp_path / "mine" / "metrics.csv")) == 1
    assert len(read_rows(tmp_path / "mine-2" / "metrics.csv")) == 2


def test_a_resumed_run_goes_on_in_its_folder(tmp_path):
    first = small_run(RunFolder("mine", str(tmp_path)), rounds=2)
    first.save_checkpoint(tmp_path / "two.ckpt")
    trainer = small_run(RunFolder("other", str(tmp_path)), rounds=3, fit=False)
    trainer.fit(small_model(), datamodule=small_data(), ckpt_path=tmp_path / "two.ckpt")
    assert [row["round"] for row in read_rows(tmp_path / "mine" / "metrics.csv")] == [1, 2, 3]
    assert not (tmp_path / "other").exists()


def test_a_run_that_goes_on_elsewhere_says_that_its_lengths_are_lost(tmp_path):
    """Checkpoints of a private run keep no lengths of codes."""
    run = {"seed": None, "mechanism": LayeredGaussian(1.0, 1.0)}
    small_run(RunFolder("lost", str(tmp_path)), rounds=2, **run).save_checkpoint(tmp_path / "two.ckpt")
    shutil.rmtree(tmp_path / "lost")
    trainer = small_run(folder := RunFolder("new", str(tmp_path)), rounds=3, fit=False, **run)
    with pytest.warns(UserWarning, match="with the earlier rounds that the federation"):
        trainer.fit(small_model(), datamodule=small_data(), ckpt_path=tmp_path / "two.ckpt")
    assert folder.path is not None and math.isnan(folder.summary["uplink_megabytes"])
    assert [row["round"] for row in read_rows(folder.path / "metrics.csv")] == [1, 2, 3]
    assert math.isnan(folder.summary["seconds"])
    last = folder.rows[-1]
    assert folder.summary["bits_per_parameter"] == last["uplink_bits"] / (last["num_received"] * DIM) > 0
    report = (folder.path / "report.md").read_text()
    assert "nan" not in report and "has no lengths of messages" in report


def weights_in(path):
    state = torch.load(path / "model.ckpt", weights_only=True)["state_dict"]
    return torch.cat([tensor.flatten() for tensor in state.values()])


class Weights(pl.Callback):
    """What `model.ckpt` holds in the middle of every round, and what it should."""

    is_shared_by_clients = True

    def __init__(self, path: Path) -> None:
        self.path, self.pairs = path, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        federated = trainer.home.callbacks[0]
        if federated.training_clients == (0,) and batch_idx == 1 and (self.path / "model.ckpt").exists():
            self.pairs.append((weights_in(self.path), federated.engine.weights.clone()))


def test_the_global_model_is_kept_every_round(tmp_path):
    seen = Weights(tmp_path / "mine")
    trainer = small_run(RunFolder("mine", str(tmp_path)), seen, rounds=3)
    assert len(seen.pairs) == 2
    assert all(torch.equal(kept, engine.float()) for kept, engine in seen.pairs)
    final = torch.cat([p.detach().flatten() for p in trainer.lightning_module.parameters()])
    assert torch.equal(weights_in(tmp_path / "mine"), final)


def test_the_summary_is_shown_unless_told_otherwise(tmp_path, capsys):
    small_run(RunFolder("mine", str(tmp_path)), rounds=1)
    shown = capsys.readouterr().out
    assert "Bits a parameter" in shown and "server that sees every message" in shown
    assert f"{tmp_path / 'mine'}/: report.md, privacy.md, model.ckpt" in shown
    small_run(RunFolder("quiet", str(tmp_path), show=False), rounds=1)
    assert "Bits" not in capsys.readouterr().out


@pytest.mark.pictures
def test_a_round_that_was_stopped_adds_no_row(tmp_path):
    folder = RunFolder("mine", str(tmp_path), mode="max")
    with pytest.raises(RuntimeError, match="power cut"):
        small_run(folder, Fails(RuntimeError("power cut"), 1, 1), rounds=3)
    assert [row["round"] for row in folder.rows] == [1]


def test_samples_have_a_section_of_their_own(tmp_path):
    private = DPSGD(1.0, 1.0, delta=1e-3)
    small_run(private, RunFolder("dp", str(tmp_path)), rounds=2)
    spent = private.epsilon(1e-3)
    saved = json.loads((tmp_path / "dp" / "privacy.json").read_text())["samples"]
    assert saved["epsilon"] == pytest.approx(spent) and saved["data_sets"] == 4 and saved["secure"]
    assert saved["steps"] == max(account.steps for account in private.accounts.values()) > 0
    page = (tmp_path / "dp" / "privacy.md").read_text()
    assert "against any adversary who sees messages or models: moderate" in page
    assert "One sample (DP-SGD)" in (tmp_path / "dp" / "report.md").read_text()


def test_seeded_samples_have_no_guarantee(tmp_path):
    small_run(DPSGD(1.0, 1.0, delta=1e-3, seed=0), RunFolder("seeded", str(tmp_path)), rounds=1)
    page = (tmp_path / "seeded" / "privacy.md").read_text()
    assert "no guarantee, batches and noise come from a seed" in page


def test_mode_is_checked():
    with pytest.raises(ValueError, match=r"mode must be 'max' or 'min', got 'best'"):
        RunFolder(mode="best")


@pytest.mark.parametrize("wrong", [{"show": "no"}, {"baseline": "0.9"}])
def test_what_the_end_needs_is_checked_at_the_beginning(wrong):
    with pytest.raises(TypeError, match="show must be True or False and baseline a number"):
        RunFolder(**wrong)


def test_a_metric_that_nobody_logs_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"No round has the metric val_auc, .* to one of .*val_loss"):
        small_run(RunFolder("mine", str(tmp_path), monitor="val_auc"), rounds=1)


def test_a_delta_that_no_report_can_use_is_refused_before_the_training(tmp_path):
    with pytest.raises(ValueError, match=r"below 0\.25 = 1 / 4 clients"):
        small_run(RunFolder("mine", str(tmp_path)), ReportedDelta(0.5), rounds=1)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(("error", "raised"), [(KeyboardInterrupt(), SystemExit), (OSError("gone"), OSError)])
def test_an_interrupted_run_says_what_was_spent(error, raised, tmp_path):
    with pytest.raises(raised):
        small_run(RunFolder("mine", str(tmp_path)), Fails(error, 2, 1), rounds=5, seed=None)
    path = tmp_path / "mine"
    summary = json.loads((path / "summary.json").read_text())
    privacy = json.loads((path / "privacy.json").read_text())
    assert summary["rounds"] == 2 and privacy["ended"] == f"by {type(error).__name__} after round 2"
    assert "| 4 | 3 |" in (path / "report.md").read_text(), "the round that was begun is charged"
    assert "| ended | by" in (path / "report.md").read_text()


@pytest.mark.pictures
def test_a_run_that_was_stopped_says_after_which_round_of_how_many(tmp_path):
    """It is no run of two rounds, and stays what it was when it is tested."""
    trainer = small_run(RunFolder("mine", str(tmp_path)), EndsAfter(2), rounds=5)
    path = tmp_path / "mine"
    for _ in range(2):
        privacy = json.loads((path / "privacy.json").read_text())
        assert privacy["ended"] == "by a stop after round 2 of 5"
        assert "| ended | by a stop after round 2 of 5 |" in (path / "privacy.md").read_text()
        assert ".png" in (path / "report.md").read_text()
        trainer.test(trainer.lightning_module, trainer.datamodule.val_dataloader(), verbose=False)


@pytest.mark.pictures
def test_the_page_says_who_held_the_keys_and_what_the_run_was_held_to(tmp_path):
    """Rounds of an earlier training count, and the report, whose table has fewer, says so."""
    target = PrivacyTarget(epsilon=8.0, delta=1e-3, adversary="server")
    federated = Federated(RotatedCoins(clip_norm=1.0), 4, privacy=target, clients_per_step=1)
    budget, model = PrivacyBudget(9.0, 1e-3, "server"), small_model()
    for name in ("one", "two"):
        folder = RunFolder(name, str(tmp_path), show=False)
        callbacks = [federated, folder, budget]
        make_trainer(*callbacks).fit(model, small_data())
        target_rounds = federated.ledger.rounds
        if name == "one":
            page = (tmp_path / "one" / "report.md").read_text()
            assert "This was a simulation: one program held all data, exact updates and keys" in page
            assert "Asked for epsilon 8 at delta 0.001, against the server that sees" in page
            assert (
                "of 9 spent at delta 0.001 against the server that sees every message, by the client" in page
            )
            assert "rounds charged |" not in page
            federated = Federated(federated.engine.mechanism, 4, ledger=federated.ledger, clients_per_step=1)
            budget = PrivacyBudget(99.0, 1e-3, "server")
    assert target_rounds == 4
    page = (tmp_path / "two" / "report.md").read_text()
    assert "| rounds charged | 4, with earlier" in page and "All clients, 2 rounds: " in page
    assert "4 rounds were charged, and the table of this folder has 2" in page


def test_a_run_is_judged_by_the_worse_ratio_and_a_clip_that_is_too_long_is_named(tmp_path):
    """Runs at an accuracy of 0.18 had R 71 planned and 0.063 seen: "no visible loss"."""
    for known in ({"planned": 7.9, "sim_seen": 0.48}, {"planned": 0.48, "sim_seen": 7.9}):
        assert describe_noise(known).endswith("of the updates' energy: this run could hardly learn")
    assert describe_noise({"planned": 7.9, "sim_seen": None}).endswith("could hardly learn")
    assert describe_noise({"planned": 0.02, "sim_seen": 0.48}).endswith("costs points")
    clips = []
    for name, clip in (("long", 50.0), ("fits", 0.1)):
        small_run(RunFolder(name, str(tmp_path)), rounds=2, mechanism=GaussianNoise(clip, 1.0), seed=None)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        clips.append(summary["noise_over_signal"].get("clip"))
        assert ("clip_norm" in summary["noise_over_signal"]["words"]) == (name == "long")
    long, fits = clips
    assert fits is None and long["enough"] == pytest.approx(1.5 * long["sim_update_norm"])
    assert 0.0 < long["enough"] < 10.0
    page = (tmp_path / "long" / "report.md").read_text()
    assert f"clip_norm {long['enough']:.2g} is enough instead of 50" in page
    assert long["less"] == pytest.approx((long["enough"] / 50.0) ** 2)


def test_epsilon_by_round_grows_to_the_epsilon_of_the_report(tmp_path):
    small_run(RunFolder("many", str(tmp_path)), rounds=15, mechanism=LayeredGaussian(1.0, 20.0), seed=None)
    report = from_json((tmp_path / "many" / "privacy.json").read_text())
    rounds, epsilons = zip(*report.by_round, strict=True)
    assert rounds == (1, 3, 5, 7, 9, 11, 13, 15) and list(epsilons) == sorted(set(epsilons))
    assert epsilons[-1] == report.about.epsilon == min(row.epsilon for row in report.rows)


def test_a_run_that_fails_in_its_first_round_has_no_report(tmp_path):
    with pytest.raises(OSError, match="gone"):
        small_run(RunFolder("mine", str(tmp_path)), Fails(OSError("gone"), 0, 1), rounds=2)
    assert not (tmp_path / "mine" / "summary.json").exists()


@pytest.mark.pictures
def test_a_full_disk_costs_pictures_first(tmp_path, monkeypatch):
    """The pages are written before the pictures, and no half of a file stays."""
    write_bytes = Path.write_bytes

    def full(path, content):
        if len(content) > 20_000:
            write_bytes(path, content[:10])
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        small_run(RunFolder("mine", str(tmp_path)), rounds=1)
    names = {file.name for file in (tmp_path / "mine").iterdir()}
    pages = {"metrics.csv", "model.ckpt", "summary.json", "privacy.json", "privacy.md", "report.md"}
    assert names == pages | {"clients"}


def files_in(folder):
    found = {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}
    return found if folder.exists() else None


def test_a_checkpoint_that_names_another_run_does_not_write_there(tmp_path):
    """Below root or not: whoever copies a checkpoint, or writes one, names a folder."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for place in (ours, theirs):
        small_run(RunFolder("mine", str(place)), rounds=2)
    small_run(RunFolder("second", str(ours)), rounds=2)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "note").write_text("mine")
    for victim in (theirs / "mine", ours / "second", tmp_path / "letters", tmp_path / "nothing"):
        kept = files_in(victim)
        first = small_run(RunFolder("from", str(ours)), rounds=2)
        first.save_checkpoint(tmp_path / "two.ckpt")
        saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
        state = next(state for name, state in saved["callbacks"].items() if "RunFolder" in name)
        state["path"] = str(victim)
        torch.save(saved, tmp_path / "two.ckpt")
        trainer = small_run(folder := RunFolder("on", str(ours)), rounds=3, fit=False)
        with pytest.warns(UserWarning, match="does not have its rounds"):
            trainer.fit(small_model(), datamodule=small_data(), ckpt_path=tmp_path / "two.ckpt")
        assert files_in(victim) == kept
        assert folder.path is not None and folder.path.parent == ours and folder.path.name.startswith("on")
        assert [row["round"] for row in read_rows(folder.path / "metrics.csv")] == [1, 2, 3]


@pytest.mark.parametrize("name", ["../up", "a/../../b", "/tmp/x", "", "."])
def test_names_that_are_no_folder_below_root_are_refused(name):
    with pytest.raises(ValueError, match="The name of a run must be a folder below root"):
        RunFolder(name)


def test_rows_are_appended_and_a_new_column_rewrites_the_table(tmp_path):
    from lightning_fedq.reports.runs import append_row

    rows, path = [{"round": 1.0, "a,b": 0.1}], tmp_path / "metrics.csv"
    append_row(path, rows)
    before = path.stat().st_ino
    rows.append({"round": 2.0})
    append_row(path, rows)
    assert path.stat().st_ino == before and read_rows(path) == rows
    rows.append({"round": 3.0, "c": float("inf")})
    append_row(path, rows)
    assert path.stat().st_ino != before and read_rows(path) == rows


# ---- who holds what, as a table and a picture in the folder of a run -----------------------------------
class Plain(Dataset[Any]):
    """Labels are in the samples only."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        inputs, labels = digits()
        return inputs[index], int(labels[index])


class WithoutLabels(Digits):
    def train_set(self):
        return Plain()


def run(folder, data, **settings):
    fed = Federated(LDPQ(epsilon_per_coordinate=1.0), 4, **settings)
    made = RunFolder("run", str(folder), show=False)
    make_trainer(fed, made, max_epochs=1).fit(Classifier(), datamodule=data)
    return fed, folder / "run"


def rows(folder):
    return list(csv.DictReader((folder / "clients" / "holdings.csv").read_text().splitlines()))


def test_who_holds_which_labels_and_what_is_held_out(tmp_path):
    settings = {"partition": LabelShards(2), "evaluate_clients": ClientEvaluation(0.2)}
    fed, folder = run(tmp_path, Digits(80, 5), **settings)
    table = rows(folder)
    assert len(table) == 4 and len(table[0]) == 3 + 10
    for client, row in enumerate(table):
        held = digits()[1][fed.client_indices[client]]
        assert int(row["client"]) == client and int(row["samples"]) == 16 and int(row["held_out"]) == 4
        counts = [int(row[f"label_{label}"]) for label in range(10)]
        assert counts == torch.bincount(held, minlength=10).tolist()
    assert "clients/holdings.csv" in (folder / "privacy.md").read_text()
    assert not list(folder.glob("holdings*")), "apart from what a server would have"


def test_without_labels_at_hand(tmp_path):
    fed, folder = run(
        tmp_path, WithoutLabels(batch_size=5), partition=QuantitySkew(0.5, min_partition_size=2)
    )
    table = rows(folder)
    assert [list(row) for row in table] == [["client", "samples"]] * 4
    assert [int(row["samples"]) for row in table] == [len(part) for part in fed.client_indices]
    assert "Each client's number of samples is in clients/holdings.csv" in " ".join(
        (folder / "privacy.md").read_text().split()
    )


def test_the_privacy_page_stands_alone(tmp_path):
    """For a reader who has this page only: unit, adjacency, 1/n, an attack, and what nobody stated."""
    stated = {"client": "a hospital", "tuning": "yes, of the learning rate"}
    folder = RunFolder("mine", str(tmp_path), stated=stated)
    small_run(folder, rounds=2, mechanism=GaussianNoise(0.1, 4.0), seed=None)
    page = (tmp_path / "mine" / "privacy.md").read_text()
    report = from_json((tmp_path / "mine" / "privacy.json").read_text())
    for words in (
        f"For one client with all its data, epsilon is {format_epsilon(report.about.epsilon)} at delta "
        f"{report.delta:g} (1/n is 0.25 for n = 4 clients) under replace-one adjacency, against an outsider",
        "over 2 rounds and the model that each of them releases.",
        f"At the smaller delta {report.smaller_delta[0]:g}, it is {format_epsilon(report.smaller_delta[1])}.",
        f"right at most {attack_accuracy(report.about.epsilon, report.delta)} of the time at even odds",
        "Accountant: lightning_fedq",
        "Not audited by an outside party.",
        "What a client is: a hospital.",
        "Responsible party: not stated.",
        "Purpose: not stated.",
        "Data: not stated.",
        "Tuned on the same data: yes, of the learning rate.",
        "Earlier runs with the same data that are not counted: unknown.",
    ):
        assert words in page, words


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 8.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.1])
def test_no_guess_is_right_more_often_than_the_page_says(epsilon, delta):
    """The worst pair of laws for epsilon and delta, guessed by the likelier one."""
    high = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    p, q = (delta, high, 1 - delta - high, 0.0), (0.0, 1 - delta - high, high, delta)
    right = sum(map(max, p, q)) / 2
    assert right <= float(attack_accuracy(epsilon, delta)[:-1]) / 100 <= right + 1e-3
