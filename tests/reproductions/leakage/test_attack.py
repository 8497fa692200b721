"""`leakage-attack` writes a table and a picture, and refuses with a reason."""

import csv
import json
from pathlib import Path

import pytest
import torch

from reproductions.__main__ import main
from reproductions.leakage import attack

CONFIGS = Path(__file__).parents[3] / "configs"

SMALL = "--attempts 60 --candidates 50 --inversions 2 --model linear --attack idlg"


def attacked(out, options):
    """Exit status of the command."""
    return main("leakage-attack", *options.split(), "--out", str(out))


def test_table_and_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert attacked(tmp_path / "out", f"{SMALL} --budgets [0.6]") == 0
    with (tmp_path / "out" / "table.csv").open() as file:
        rows = {row["mechanism"]: row for row in csv.DictReader(file)}
    assert len(rows) == 7
    assert float(rows["vanilla"]["inverted"]) == float(rows["vanilla"]["matched"]) == 1.0
    assert float(rows["near-optimal tau=0.6"]["leakage"]) < float(rows["vanilla"]["leakage"])
    for row in rows.values():
        assert float(row["leakage_low"]) <= float(row["leakage"]) <= float(row["leakage_high"])
    assert (tmp_path / "out" / "grid.png").stat().st_size > 1000
    assert "not differential privacy" in json.loads((tmp_path / "out" / "table.json").read_text())["note"]
    shown = capsys.readouterr().out
    assert "table.csv" in shown
    check_table(shown.partition("inverted:")[0], ("mechanism", "inverted", "psnr", "leakage", "tpr", "error"))
    low, high = (float(rows["vanilla"][f"leakage_{end}"]) for end in ("low", "high"))
    assert f"({low:.2f}-{high:.2f})" in shown


def check_table(shown, heads):
    """A table that fits a screen of 80 columns, whose heads and numbers are whole."""
    lines = shown.splitlines()
    assert all(len(line) <= 80 for line in lines), shown
    assert any(all(head in line.split() for head in heads) for line in lines), shown


def test_the_table_of_a_trade_off_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = {"name": "digits_distributed_discrete_gaussian", "leakage": 0.7312, "leakage_low": 0.62}
    row |= {"leakage_high": 0.871, "utility_loss": 0.01234, "val_acc": 0.9127}
    row |= {"epsilon": "eps 6.52e+04 (vacuous)", "unsound_bounds_refuted": 2, "sound_bounds_violated": 0}
    attack.print_rows([row], "title")
    check_table(capsys.readouterr().out, ("leakage", "loss", "val_acc", "epsilon", "refuted", "broken"))


def test_a_budget_that_cannot_be_shown(tmp_path, capsys):
    assert attacked(tmp_path / "out", f"{SMALL} --budgets [0.05]") == 2
    assert "a budget of 0.05 can't be shown with 60 attempts" in capsys.readouterr().err


def test_the_model_data_and_mechanism_of_a_configuration(tmp_path, capsys):
    small = "--attempts 10 --candidates 30 --inversions 1 --attack idlg --budgets [] --local_steps 2"
    named = f"--configuration {CONFIGS / 'digits_corbin.yaml'}"
    assert attacked(tmp_path / "out", f"{named} {small}") == 0
    with (tmp_path / "out" / "table.csv").open() as file:
        names = [row["mechanism"] for row in csv.DictReader(file)]
    assert names[-2:] == ["as configured, one uplink", "as configured, group"]
    title = json.loads((tmp_path / "out" / "table.json").read_text())["title"]
    assert title == "digits_corbin, idlg, batch 1, 2 local steps"
    capsys.readouterr()
    assert attacked(tmp_path / "other", "--configuration nowhere.yaml") == 2
    assert "no configuration nowhere.yaml" in capsys.readouterr().err


def flat(*options, original=attack.built_in):
    setting = original(*options)
    return setting._replace(inputs=setting.inputs.flatten(1))


def test_inputs_that_are_no_pictures_give_a_table_without_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attack, "built_in", flat)
    assert attacked(tmp_path / "out", f"{SMALL} --budgets []") == 0
    assert "no pictures: inputs of shape (2, 64) have no picture form" in capsys.readouterr().out
    assert (tmp_path / "out" / "table.csv").is_file()
    assert not (tmp_path / "out" / "grid.png").exists()


class Loaders:
    """A module with loaders of its own."""

    def prepare_data(self):
        pass

    def setup(self, stage):
        self.rows = [(torch.full((3,), float(label)), label) for label in range(8)]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.rows)


def test_the_first_samples_of_a_module_with_loaders():
    inputs, labels = attack.samples(Loaders(), 5)
    assert inputs.shape == (5, 3) and labels.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="9 candidates wanted, the training set has 8 samples"):
        attack.samples(Loaders(), 9)
