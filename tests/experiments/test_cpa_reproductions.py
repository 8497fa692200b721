"""Every reproduction of the CPA paper, whole, through the command, at a size of seconds."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_fedq.commands.reproduce import main
from lightning_fedq.core import Adversary
from lightning_fedq.experiments.cpa_beyond import client_report, cpa_beyond, solve
from lightning_fedq.mechanisms import CPA

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")
needs_mnist = pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
QUICK = "--rounds 1 --val_samples 200"


def reproduce(name: str, options: str, out: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    arguments = ["--data.root", FEDQ_DATA, *QUICK.split(), *options.split(), "--out", str(out)]
    assert main([name, *arguments]) == 0
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in out.glob("*.png")) and list(out.glob("*.png"))
    with (out / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file)), json.loads((out / "summary.json").read_text())


@needs_mnist
def test_table5(tmp_path: Path) -> None:
    table, summary = reproduce("cpa-table5", "--num_clients [10] --learning_rates [1.0]", tmp_path / "run")
    assert len(table) == 10 and {row["clients"] for row in table} == {"10"}
    cpa = next(row for row in table if (row["method"], row["variant"]) == ("CPA", "authors"))
    assert float(cpa["snr_db20"]) == pytest.approx(2 * float(cpa["snr_db10"]))
    assert cpa["published_acc"] == "49"
    assert summary["verdicts"][0].startswith("CPA, K = 10: published 49 / -17.57; ours lr 1 ")
    assert any(line.startswith("repaired 1-bit CPA, K = 10") for line in summary["verdicts"])


@needs_mnist
def test_table4(tmp_path: Path) -> None:
    options = "--num_clients 10 --mlp_rounds 1"
    table, summary = reproduce("cpa-table4", options, tmp_path / "run")
    assert len(table) == len(summary["verdicts"]) == 20
    assert {row["rounds"] for row in table if row["model"] == "mlp"} == {"1"}


@needs_mnist
def test_fig6(tmp_path: Path) -> None:
    table, summary = reproduce("cpa-fig6", "--num_clients [100] --epsilons [0.5]", tmp_path / "run")
    assert len(table) == 6 and len(summary["verdicts"]) == 3
    assert summary["verdicts"][0].startswith("CPA, K = 100: published / ours -5.236 / ")


@needs_mnist
def test_fig7(tmp_path: Path) -> None:
    options = "--num_clients [10] --epsilons [2.0] --seeds [0]"
    table, summary = reproduce("cpa-fig7", options, tmp_path / "run")
    assert [row["method"] for row in table] == ["CPA, authors", "CPA, unbiased", "JoPEQ", "MVU"]
    assert "K = 10, epsilon 2" in summary["verdicts"][0]


@needs_mnist
def test_table6(tmp_path: Path) -> None:
    options = (
        "--num_clients 40 --fractions [0.2] --attacks [alie,label_flip] --rules [multi_krum] --safer [2.0]"
    )
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


@needs_mnist
def test_beyond(tmp_path: Path) -> None:
    options = "--num_clients 10 --targets [64.0] --bits_target 64.0 --delta 1e-3"
    table, _ = reproduce("cpa-beyond", options, tmp_path / "run")
    assert [row["method"] for row in table] == ["CPA", "CorBin", "aggregate Gaussian", "DDG"]
    assert all(0.9 * 64 <= float(row["epsilon_run"]) <= 64 for row in table)
    assert table[1]["claim_against"] == "EAVESDROPPER" and table[1]["epsilon_outsider"] in ("", "inf")


def test_solving_for_a_client_level_epsilon() -> None:
    def spent(mechanism: Any) -> float:
        return client_report(mechanism, 10, 3, 1e-3).row(Adversary.OUTSIDER).epsilon_run

    found = solve(CPA, 8.0, spent, 1e-4, 1.0)
    assert 0.99 * 8 <= spent(found) <= 8
    with pytest.raises(ValueError, match=r"no setting >= 0.5 spends at most 8.0; raise the target"):
        solve(CPA, 8.0, spent, 0.5, 1.0)


def test_the_target_of_the_picture_is_one_of_the_targets() -> None:
    with pytest.raises(ValueError, match=r"bits_target must be one of targets = \[2.0\], got 8.0"):
        cpa_beyond(targets=[2.0])
