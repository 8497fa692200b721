"""Every reproduction of the CPA paper, whole, through the command, at a size of seconds."""

import csv
import json
import math
import os
from functools import partial
from pathlib import Path

import pytest

from lightning_fedq.mechanisms import CPA
from lightning_fedq.mechanisms.interface import Adversary
from reproductions.__main__ import main
from reproductions.cpa.beyond import _methods, _Setting, client_report, cpa_beyond, ideal_epsilon, solve
from reproductions.cpa.runs import Task
from reproductions.cpa.table2 import theorem_mse

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")
needs_mnist = pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
QUICK = "--rounds 1 --val_samples 200"


def reproduce(name, options, out):
    arguments = ["--data.root", FEDQ_DATA, *QUICK.split(), *options.split(), "--out", str(out)]
    assert main(name, *arguments) == 0
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in out.glob("*.png")) and list(out.glob("*.png"))
    with (out / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file)), json.loads((out / "summary.json").read_text())


@pytest.mark.slow  # the same commands' parts as table 3 and 6, 2 to 3 s
@needs_mnist
def test_table4(tmp_path):
    options = "--num_clients 10 --models [mlp] --learning_rates [1.0] --mlp_rounds 2"
    table, summary = reproduce("cpa-table4", options, tmp_path / "run")
    assert len(table) == len(summary["verdicts"]) == 11
    assert {row["rounds"] for row in table} == {"2"}
    assert all(float(row["acc_round_1"]) > 0 for row in table)
    assert all(len(row["val_acc_by_round"].split()) == 2 for row in table)
    assert (tmp_path / "run" / "convergence_mlp.png").exists()


@needs_mnist
@pytest.mark.parametrize(
    "name, rows", [("cpa-table4 --models [linear]", 6), ("cpa-table6 --fractions [0.2]", 3)]
)
def test_only_what_the_paper_ran(tmp_path, name, rows):
    """Rates or liars aside: one row for every published figure, and every row has one."""
    name, options = name.split(maxsplit=1)
    more = " --learning_rates [1.0]" if name == "cpa-table4" else ""
    options += f" --num_clients 10 --published_only true{more}"
    table, summary = reproduce(name, options, tmp_path / "run")
    assert len(table) == len(summary["verdicts"]) == rows
    assert all(float(row["published_acc"]) > 0 for row in table)


def test_table6_looks_for_cifar_before_it_trains(tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--data.root", str(tmp_path), "--model", "cnn2", *QUICK.split()]
    assert main("cpa-table6", *options, "--out", str(out)) == 2
    assert "no cifar-10-batches-py in" in capsys.readouterr().err and not out.exists()


@needs_mnist
def test_table4_without_cifar_says_so_before_the_columns_of_mnist(tmp_path, capsys):
    (tmp_path / "MNIST").symlink_to(Path(FEDQ_DATA).resolve() / "MNIST")
    options = ["--models", "[linear,cnn2]", "--num_clients", "10", *QUICK.split()]
    out = tmp_path / "run"
    assert main("cpa-table4", "--data.root", str(tmp_path), *options, "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert "no cifar-10-batches-py in" in error and "download" in error and not out.exists()


@needs_mnist
def test_fig8(tmp_path):
    options = "--num_clients 10 --learning_rates [0.1]"
    table, summary = reproduce("cpa-fig8", options, tmp_path / "run")
    assert len(table) == 10 and len(table[0]["val_acc_by_round"].split()) == 1
    assert summary["verdicts"][0].startswith("lr 0.1, rounds until ")


@needs_mnist
def test_table3(tmp_path):
    options = "--epsilons [0.1] --num_clients 10"
    table, summary = reproduce("cpa-table3", options, tmp_path / "run")
    assert [row["method"] for row in table] == ["FedAvg", "CPA, authors", "CPA, unbiased"]
    assert table[1]["published_mse"] == "0.0068" and float(table[0]["distance_from_fedavg"]) == 0
    assert "published 87, ours " in summary["verdicts"][1]
    ratio = float(table[2]["theorem_mse"]) / float(table[1]["theorem_mse"])
    assert ratio == pytest.approx((1 / 2) / (8 / 9), rel=0.01)  # 2 levels hold 9/16 of the energy of 3


def test_the_theorem_falls_with_clients_and_with_epsilon():
    """Two levels at -0.025 and 0.025, a cell of 0.05: (0.00125 / c^2 + 0.05^2 / 12) / K."""
    c = 0.244919  # tanh(0.25)
    assert theorem_mse(0.5, 100, 2) == pytest.approx((0.00125 / c**2 + 0.05**2 / 12) / 100, rel=1e-5)
    assert theorem_mse(0.5, 50) == 2 * theorem_mse(0.5, 100) > theorem_mse(0.6, 50)


@needs_mnist
def test_fig6(tmp_path):
    table, summary = reproduce("cpa-fig6", "--num_clients [100] --epsilons [0.5]", tmp_path / "run")
    assert len(table) == 6 and len(summary["verdicts"]) == 3
    assert summary["verdicts"][0].startswith("CPA, K = 100: published / ours -5.236 / ")


@needs_mnist
def test_fig7(tmp_path):
    options = "--num_clients [10] --epsilons [2.0] --seeds [0]"
    table, summary = reproduce("cpa-fig7", options, tmp_path / "run")
    assert [row["method"] for row in table] == [
        *("CPA, authors", "CPA, unbiased", "JoPEQ, authors", "JoPEQ", "MVU")
    ]
    assert "K = 10, epsilon 2" in summary["verdicts"][0]


@needs_mnist
def test_table6(tmp_path):
    options = "--num_clients 20 --fractions [0.2] --rules [multi_krum] --safer [2.0]"
    options += " --attacks [alie,label_flip]"
    table, summary = reproduce("cpa-table6", options, tmp_path / "run")
    attacked = [(row["setting"], row["attack"]) for row in table if float(row["fraction"]) > 0]
    breaking = "inverted_without_coin"
    assert attacked == [
        *(("authors", attack) for attack in ("ones", "flip", breaking)),
        *(("repaired", attack) for attack in ("alie", "label_flip", breaking)),
        ("repaired, epsilon 2", breaking),
        ("repaired", breaking),
    ]
    assert {row["rule"] for row in table} == {"mean", "multi_krum, buckets of 1"}
    assert any("break-even share of inverted bits without a coin: 0.197" in v for v in summary["verdicts"])


@pytest.mark.slow  # the same commands' parts as table 3 and 6, 2 to 3 s
@needs_mnist
def test_beyond(tmp_path):
    options = "--num_clients 10 --targets [64.0] --bits_target 64.0 --delta 1e-3"
    (plain, *table), summary = reproduce("cpa-beyond", options, tmp_path / "run")
    assert plain["method"] == "FedAvg, no privacy" and plain["claim_against"] == "nobody"
    methods = ["CPA", "CPA, some blocks", "CorBin", "aggregate Gaussian", "DDG"]
    assert [row["method"] for row in table] == methods
    assert all(0.9 * 64 <= float(row["epsilon_run"]) <= 64 for row in table)
    assert table[2]["claim_against"] == "EAVESDROPPER" and table[2]["epsilon_outsider"] in ("", "inf")
    assert table[3]["claim_against"] == "OUTSIDER, ideal law"
    assert any("is the epsilon of the exact law; of the sampler" in line for line in summary["verdicts"])
    assert float(table[1]["bits_per_parameter"]) < 0.1 < float(table[0]["bits_per_parameter"])
    for words in ("CPA, some blocks ", "FedAvg, no privacy none (0 rounds)"):
        assert words in summary["verdicts"][1]


def test_solving_for_a_client_level_epsilon():
    def spent(mechanism):
        return client_report(mechanism, 10, 3, 1e-3).row(Adversary.OUTSIDER).epsilon_run

    per_bit = partial(CPA, epsilon_scope="bit")
    found = solve(per_bit, 8.0, spent, 1e-4, 1.0)
    assert 0.99 * 8 <= spent(found) <= 8
    with pytest.raises(ValueError, match=r"no setting >= 0.5 spends at most 8.0; raise the target"):
        solve(per_bit, 8.0, spent, 0.5, 1.0)


def test_the_aggregate_gaussian_is_solved_for_its_own_claim_where_it_has_one():
    setting = _Setting(Task("", False, 30, 0, 0, 0.5), 1000, 0.1, 1.0, 1e-5)
    method = _methods(0.5, 1000)["aggregate Gaussian"]
    for level, proven in ((0.3, True), (3.0, False)):
        mechanism = method.knob(level)
        real = setting.report(mechanism).row(Adversary.OUTSIDER).epsilon_run
        exact = ideal_epsilon(mechanism, 1000, 30, 1e-5)
        assert (exact < real < exact + 0.01) if proven else real == math.inf
        assert setting.epsilon(mechanism, method) == (real if proven else exact)


def test_the_target_of_the_picture_is_one_of_the_targets():
    with pytest.raises(ValueError, match=r"bits_target must be one of targets = \[2.0\], got 8.0"):
        cpa_beyond(targets=[2.0])
