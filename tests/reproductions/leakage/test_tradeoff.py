"""`leakage-tradeoff` on two short runs."""

from pathlib import Path

import yaml

from reproductions.__main__ import main

CONFIGS = Path(__file__).parents[3] / "configs"


def test_table_bounds_and_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = ",".join(str(CONFIGS / f"digits_{name}.yaml") for name in ("fedavg", "near_optimal_utility"))
    few = ("--rounds", "1", "--attempts", "20", "--candidates", "40")
    assert main("leakage-tradeoff", "--configurations", f"[{files}]", *few) == 0
    out = tmp_path / "runs" / "leakage-tradeoff"
    table = (out / "table.csv").read_text().splitlines()
    assert len(table) == 3
    assert all(line.split(",")[-1] == "0" for line in table[1:])  # sound bounds violated
    assert "no DP guarantee" in table[1]
    assert (out / "tradeoff.png").stat().st_size > 1000
    assert "digits_near_optimal_utility" in (out / "bounds.md").read_text()
    assert "not differential privacy" in capsys.readouterr().out


def test_a_missing_configuration(capsys):
    assert main("leakage-tradeoff", "--configurations", "[nowhere.yaml]") == 2
    assert "no configuration nowhere.yaml" in capsys.readouterr().err


def test_a_training_without_a_federation_is_refused(tmp_path, capsys):
    config = yaml.safe_load((CONFIGS / "digits_fedavg.yaml").read_text())
    config["trainer"]["callbacks"] = []
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(config))
    options = "--configurations", f"[{tmp_path / 'plain.yaml'}]", "--candidates", "8"
    assert main("leakage-tradeoff", *options) == 2
    assert "plain.yaml has no Federated callback; add one" in capsys.readouterr().err
