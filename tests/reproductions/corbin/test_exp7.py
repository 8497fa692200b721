import json
import os
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from lightning_fedq.data.datasets import DigitsDataModule, TensorDataModule
from reproductions.__main__ import main
from reproductions.corbin.authors import LOG, AdamClassifier, logged
from reproductions.corbin.exp7 import PRESETS, Setting, corbin_exp7

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")
QUICK = "--images 90 --num_clients 4 --rounds 1 --smoothing [1.0] --targets [updates] --seeds [0]"


class LargeDigits(TensorDataModule):
    """scikit-learn's digits in MNIST's size, in place of MNIST."""

    def __init__(self, data, batch_size, num_train, num_val, seed, side) -> None:
        self.side = side
        super().__init__(batch_size, True, num_train, None, seed)

    def load(self):
        images, labels, _ = DigitsDataModule().load()
        return interpolate(images, (self.side, self.side)), labels, 0


def check_the_command(root, out):
    assert main("corbin-exp7", "--data.root", root, *QUICK.split(), "--out", str(out)) == 0
    methods = [line.split(",")[0] for line in (out / "table.csv").read_text().splitlines()]
    assert methods == ["method", "vanilla", "LDP-FL", "CorBin-FL", "AugCorBin-FL"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["settings"]["training_samples"] == 90
    assert ", one seed)" in summary["verdicts"][2] and "not settled" in summary["verdicts"][2]
    assert (out / "accuracy.png").read_bytes()[:4] == b"\x89PNG"


def test_settings_table_picture_and_verdict_are_left_behind(tmp_path, capsys, monkeypatch):
    # the function of the same name hides the module from a dotted path
    monkeypatch.setattr(import_module("reproductions.corbin.exp7"), "MNIST", LargeDigits)
    check_the_command("unused", tmp_path / "exp7")
    assert "updates, epsilon 0.5: vanilla" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
def test_the_command_on_a_little_mnist(tmp_path):
    check_the_command(FEDQ_DATA, tmp_path / "exp7")


def test_without_data_it_says_so_before_anything_else(tmp_path, capsys):
    out = tmp_path / "out"
    assert main("corbin-exp7", "--data.root", str(tmp_path), "--out", str(out)) == 2
    assert "no MNIST/raw in" in capsys.readouterr().err and not out.exists()


def test_the_number_of_images_is_checked():
    with pytest.raises(ValueError, match="images must be 1 to 44800, got 50000"):
        corbin_exp7(images=50_000)


def test_methods_are_checked():
    words = r"some of vanilla, LDP-FL, CorBin-FL, AugCorBin-FL, got \['CorBin'\]"
    with pytest.raises(ValueError, match=words):
        corbin_exp7(methods=["CorBin"])


def test_one_method_stands_beside_the_authors_log(tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("reproductions.corbin.exp7"), "MNIST", LargeDigits)
    small = PRESETS["authors"]._replace(network=PRESETS["small"].network, side=14)
    monkeypatch.setitem(PRESETS, "authors", small)
    few = {"images": 90, "num_clients": 4, "rounds": 1, "batch_size": 64, "seeds": [0]}
    few |= {"methods": ["LDP-FL"], "smoothing": [0.1, 0.25], "targets": ["weights"]}
    summary = corbin_exp7(str(tmp_path / "exp7"), preset="authors", **few)
    beside = [line for line in summary["verdicts"] if "in the authors' log" in line]
    assert len(beside) == 1  # lambda = 0.25 is not in it
    assert beside[0].startswith("LDP-FL, epsilon 0.5, lambda 0.1, seed 0: ")
    assert beside[0].endswith(" after 1 rounds, in the authors' log 93.44 after 100")
    assert not any("vanilla" in line for line in summary["verdicts"][:1])


def test_the_authors_log_is_ordered_as_its_epsilons_are():
    """The best lambda of every method: more epsilon, more accuracy."""
    assert all(len(row) == 10 for rows in LOG.values() for row in rows.values())
    for rows in LOG.values():
        for method in {name for name, _ in rows}:
            best = [max(row) for (name, _), row in sorted(rows.items()) if name == method]
            assert best == sorted(best)
    assert logged("MNIST", "CorBin-FL", 1.0, 0.2) == 97.52
    assert logged("MNIST", "CorBin-FL", 0.5, 0.1) is None


def test_authors_is_the_network_and_the_law_of_their_code():
    preset = PRESETS["authors"]
    model = preset.network(0)
    assert sum(p.numel() for p in model.parameters()) == 421_642
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    torch.manual_seed(0)
    own = nn.Conv2d(32, 64, 3)  # torch's own draw of the second layer: the same uniform law, to 1%
    ours = next(m for m in model.modules() if isinstance(m, nn.Conv2d) and m.in_channels == 32)
    assert own.weight.std().item() == pytest.approx(ours.weight.std().item(), rel=0.02)
    assert own.weight.abs().max().item() == pytest.approx(ours.weight.abs().max().item(), rel=0.01)
    assert (preset.num_clients, preset.images, preset.rounds, preset.batch_size) == (50, 44_800, 100, 64)


def test_what_is_asked_for_takes_the_place_of_the_presets():
    asked = Setting(preset="sgd", rounds=60, smoothing=[0.2]).complete
    assert (asked.rounds, asked.smoothing, asked.num_clients, asked.margin) == (60, [0.2], 100, 1.1)
    assert PRESETS["sgd"].rounds == 10


def test_the_clients_of_the_authors_reading_run_adam():
    model = AdamClassifier(PRESETS["small"].network(0), 1e-3, weight_decay=3e-3)
    optimizer = model.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (1e-3, 3e-3)
