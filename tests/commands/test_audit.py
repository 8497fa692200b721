"""`fedq audit` and `fedq privacy plan` from the outside."""

import pytest

from lightning_fedq.cli import main
from lightning_fedq.commands import audit as command

ASKED = ["--target-epsilon", "4", "--clients", "100", "--params", "1000", "--rounds", "10"]


def test_clean_mechanisms_pass(capsys):
    assert main(["audit", "LDPQ", "FedAvg", "--draws", "2e5"]) == 0
    printed = capsys.readouterr().out
    assert "equal to the specification" in printed
    assert "no claim on one message" in printed.replace("\n", " ") or "not simulated" in printed
    assert "one message" in printed


def test_an_alarm_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(command, "enumeration", lambda: ["P(1) at threshold 7 is 8/256"])
    assert main(["audit", "FedAvg"]) == 1
    assert "threshold 7" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["Nonsense"], ["LDPQ", "--draws", "5"]])
def test_bad_arguments_are_explained(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["audit", *arguments])
    assert "there is no mechanism Nonsense" in (error := capsys.readouterr().err) or "draws must be" in error


def test_a_plan_orders_what_is_possible(capsys):
    assert main(["privacy", "plan", *ASKED]) == 0
    printed = capsys.readouterr().out
    assert "the curious server that sees every message" in printed
    assert "not possible" in printed
    assert printed.index("LDPQ") < printed.index("CorBin(")


def test_a_bad_plan_is_explained(capsys):
    asked = [
        "--target-epsilon",
        "4",
        "--clients",
        "100",
        "--params",
        "1000",
        "--rounds",
        "10",
        "--delta",
        "0.5",
    ]
    with pytest.raises(SystemExit):
        main(["privacy", "plan", *asked])
    assert "delta must be > 0" in capsys.readouterr().err
