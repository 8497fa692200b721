"""The table of fixed features, through the command, on features of nothing: tuned, calibrated, resumed."""

import csv

import pytest
import torch

from lightning_fedq.commands.mechanism_text import parse_mechanism
from reproductions.__main__ import main
from reproductions.useful import features

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # seeded keys, counted masks: it says so


def kept(kind, root, download):
    """Samples whose class is, as a rule, the largest of their first ten numbers."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (60_000,), generator=generator)
    size = features.TASKS[kind].features["size"]
    noise = torch.randn(60_000, size, generator=generator)
    rows = torch.nn.functional.normalize(noise + 8 * torch.eye(size)[labels])
    return rows, labels, 10_000


def reproduce(out, *options):
    size = "--num_clients 60 --rounds 3 --delta 1e-3 --epsilons [8.0] --seeds [0]"
    assert main("useful-features", *size.split(), "--out", str(out), "--resume", "true", *options) == 0
    with (out / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_best_of_the_grid_is_what_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(features, "_kept", kept)
    monkeypatch.setitem(features.TASKS["strokes"].grid, 8.0, features._grid(5.0, 20.0))
    rows = reproduce(tmp_path, "--features", "[strokes]", "--methods", "[GaussianNoise]")
    tuning, [result] = rows[:-1], rows[-1:]
    assert len(tuning) == 4 * 2 and {row["seed"] for row in tuning} == {"1000", "1001"}
    found = {}
    for row in tuning:
        for name in ("val_last", "val_averaged"):
            found.setdefault((row["lr"], row["clip"], name), []).append(float(row[name]))
    lr, clip, name = max(found, key=lambda key: sum(found[key]))
    assert (result["lr"], result["clip"]) == (lr, clip) and result["acc"] == result[f"acc_{name[4:]}"]
    assert parse_mechanism(result["mechanism"]).clip_norm == pytest.approx(float(lr) * float(clip))
    assert 7.9 < float(result["epsilon"]) <= 8.0 and float(result["acc"]) > 50.0
    told = capsys.readouterr().out
    assert f"strokes, GaussianNoise: {float(result['acc']):.1f} (1) at 8" in told
    monkeypatch.setattr(features, "train", None)  # nothing is trained again
    assert reproduce(tmp_path, "--features", "[strokes]", "--methods", "[GaussianNoise]") == rows


def test_where_clients_hold_all_images_none_is_held_out(monkeypatch):
    monkeypatch.setattr(features, "_kept", kept)
    data, fewer = (
        features.OnFeatures("", False, "linear", clients, 5, 100, "cifar").data(0)
        for clients in (10_000, 8_000)
    )
    data.setup("fit")
    fewer.setup("fit")
    assert [len(data.train_set), len(data.test_set)] == [50_000, 10_000]
    assert [len(fewer.train_set), len(fewer.val_set)] == [40_000, 10_000]


def test_a_method_that_is_not_there(tmp_path, capsys):
    assert main("useful-features", "--methods", "[Nothing]", "--out", str(tmp_path)) == 2
    assert "methods must be among RotatedCoins" in capsys.readouterr().err
