"""Experiments 1 to 6: what they compare, how lambda is chosen, what is judged; one real run of little."""

import pytest
import torch

from lightning_fedq.data.datasets import CIFAR10DataModule
from lightning_fedq.mechanisms import LDPQ, AugCorBin, CorBin
from reproductions.__main__ import main
from reproductions.bench import CIFAR10, ImageData, load_cifar10
from reproductions.corbin import cifar, cifar_runs
from reproductions.corbin.cifar_runs import PRESETS, Case, Setting, compare


@pytest.fixture
def images(monkeypatch):
    """4,000 images of noise, in place of CIFAR-10."""

    def load(self):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(4000) % 10
        return torch.randn(4000, 3, 32, 32, generator=generator) + labels.view(-1, 1, 1, 1), labels, 500

    monkeypatch.setattr(CIFAR10DataModule, "load", load)
    load_cifar10.cache_clear()
    yield
    load_cifar10.cache_clear()


@pytest.fixture
def trained(images, monkeypatch):
    """Trainings are listed and not done: CorBin is two points better, lambda 0.5 the best of every grid."""
    done = []

    def train(setting, case, norm, smoothing, seed, rounds, batch_size):
        done.append((case, norm, smoothing, seed, batch_size))
        better = isinstance(case.mechanism, CorBin) and not case.dropout
        value = 50.0 + 2.0 * better - abs(smoothing - 0.5)
        return {"best_val": value, "test": value + seed, "val_by_round": "10 20"}

    monkeypatch.setattr(cifar_runs, "_train", train)
    monkeypatch.setattr(cifar, "save_figure", lambda *_: None)  # the real run draws
    return done


def methods(trained):
    return list(dict.fromkeys(case.method for case, *_ in trained))


def test_lambda_is_chosen_on_the_first_seed_and_kept_for_the_others(tmp_path, trained):
    setting = Setting(seeds=(5, 6, 7), smoothing=(1.0, 0.5, 0.1))
    table = compare("one", setting, [Case("LDP-FL", LDPQ(1.0))], str(tmp_path / "out"))
    assert [(value, seed) for _, _, value, seed, _ in trained] == [
        *((1.0, 5), (0.5, 5), (0.1, 5)),
        *((0.5, 6), (0.5, 7)),
    ]
    assert [row["seed"] for row in table.chosen["group", "LDP-FL"]] == [5, 6, 7]
    assert len((tmp_path / "out" / "table.csv").read_text().splitlines()) == 1 + 5


def test_experiment_1_has_the_mechanisms_of_the_paper_and_judges(tmp_path, trained):
    found = cifar.corbin_exp1(str(tmp_path / "1"))
    assert methods(trained) == [
        *("vanilla", "correlated quantisation", "CorBin-FL", "AugCorBin-FL", "LDP-FL", "Laplace", "Gaussian")
    ]
    assert all(case.num_clients == 50 and size == 64 for case, _, _, _, size in trained)
    by_name = {case.method: case.mechanism for case, *_ in trained}
    assert by_name["CorBin-FL"] == CorBin(5.0, 5) and by_name["AugCorBin-FL"] == AugCorBin(5.0, 5, 0.2)
    # a gap of exactly two points; test images alone scatter by 0.37 over three seeds
    assert found["verdicts"][1].startswith("group norm: held: statement (i), figure 1: ")
    gap = "CorBin-FL minus LDP-FL +2.00 (standard error 0.37, first above)"
    assert gap in found["verdicts"][1]


def test_the_other_experiments_vary_what_the_paper_varies(tmp_path, trained):
    cifar.corbin_exp2(str(tmp_path / "2"), seeds=[0])
    assert {case.mechanism for case, *_ in trained} == {CorBin(1.0, d) for d in (3, 5, 7)}
    trained.clear()
    found = cifar.corbin_exp3(str(tmp_path / "3"), seeds=[0])
    assert sorted({case.dropout for case, *_ in trained}) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert found["verdicts"][-1].startswith("group norm: not settled: statement (iii)")
    assert "dropout 0.5 minus dropout 0 -2.00 (standard error 0.65, one seed)" in found["verdicts"][-1]
    trained.clear()
    cifar.corbin_exp4(str(tmp_path / "4"), seeds=[0], clients=[50, 500])
    assert {(case.num_clients, size) for case, _, _, _, size in trained} == {(50, 32), (500, 32)}
    trained.clear()
    cifar.corbin_exp5(str(tmp_path / "5"), seeds=[0], smoothing=[0.1])
    assert {value for _, _, value, *_ in trained} == {1.0}
    assert {LDPQ(10.0), LDPQ(50.0), CorBin(10.0, 5)} < {case.mechanism for case, *_ in trained}
    trained.clear()
    cifar.corbin_exp6(str(tmp_path / "6"), seeds=[0])
    assert len(methods(trained)) == 9 and LDPQ(3.0) in {case.mechanism for case, *_ in trained}


def test_no_gap_is_not_called_one(tmp_path, trained):
    found = cifar.corbin_exp2(str(tmp_path / "2"))
    assert found["verdicts"][0].startswith("held: statement (ii), theorem 1")  # needs no training
    last = found["verdicts"][-1]
    assert last.startswith("group norm: not settled") and "not told apart" in last


def test_small_trains_with_either_norm(tmp_path, images):
    options = {"rounds": 1, "seeds": [0], "smoothing": [1.0], "norms": ["group", "batch"]}
    table = cifar.corbin_exp2(str(tmp_path / "2"), **options)["table"]
    assert len(table) == 6
    assert (tmp_path / "2" / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    assert all(0 <= row["test"] <= 100 and len(row["val_by_round"].split()) == 1 for row in table)
    again = cifar.corbin_exp2(str(tmp_path / "2"), **options, resume=True)["table"]
    assert [row["cpu_seconds"] for row in again] == [row["cpu_seconds"] for row in table]  # nothing was run


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, trained, monkeypatch):
    train = cifar_runs._train

    def stopped(*arguments):
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(*arguments)

    out, options = str(tmp_path / "2"), {"seeds": [0], "smoothing": [1.0, 0.5]}
    with monkeypatch.context() as patch:
        patch.setattr(cifar_runs, "_train", stopped)
        with pytest.raises(KeyboardInterrupt):
            cifar.corbin_exp2(out, **options)
    assert len((tmp_path / "2" / "table.csv").read_text().splitlines()) == 1 + 2
    assert len(cifar.corbin_exp2(out, **options, resume=True)["table"]) == 6
    different = {case.method + str(value) for case, _, value, *_ in trained}
    assert len(trained) == len(different) == 6


def test_the_papers_preset_is_the_papers(images):
    preset = PRESETS["paper"]
    assert preset.smoothing == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert (preset.adam, preset.learning_rate, preset.rounds, preset.local_epochs) == (True, 1e-3, 100, 1)
    assert preset.norms == ("batch", "group") and (preset.num_train, preset.num_val) == (None, None)
    for norm in preset.norms:
        assert preset.network(norm=norm)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    data = CIFAR10(ImageData(), 64, preset.num_train, preset.num_val, seed=0)
    data.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [2560, 640, 800]


def test_without_data_it_says_so_before_anything_else(tmp_path, capsys):
    out = tmp_path / "out"
    assert main("corbin-exp1", "--data.root", str(tmp_path), "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert "no cifar-10-batches-py in" in error and "download" in error and "train/<class>" in error
    assert not out.exists()
