"""`fedq tradeoff` on two short runs."""

from pathlib import Path

import pytest

from lightning_fedq.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
CONFIGS = Path(__file__).parents[3] / "configs"


def test_table_bounds_and_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configs = [str(CONFIGS / f"digits_{name}.yaml") for name in ("fedavg", "near_optimal_utility")]
    assert main(["tradeoff", *configs, "--rounds", "1", "--attempts", "20", "--candidates", "40"]) == 0
    out = tmp_path / "runs" / "tradeoff"
    table = (out / "table.csv").read_text().splitlines()
    assert len(table) == 3
    assert all(line.split(",")[-1] == "0" for line in table[1:])  # sound bounds violated
    assert "no DP guarantee" in table[1]
    assert (out / "tradeoff.png").stat().st_size > 1000
    assert "digits_near_optimal_utility" in (out / "bounds.md").read_text()
    assert "not differential privacy" in capsys.readouterr().out


def test_a_missing_configuration(capsys):
    assert main(["tradeoff", "nowhere.yaml"]) == 2
    assert "no configuration nowhere.yaml" in capsys.readouterr().err
