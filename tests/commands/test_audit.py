"""`fedq audit` from the outside."""

import pytest

from lightning_fedq import mechanisms
from lightning_fedq.cli import main
from lightning_fedq.commands import audit as command

NOTHING_CLAIMED = {"CorrelatedQuantization", "FedAvg", "IrwinHall", "SubtractiveDither"}


def test_clean_mechanisms_pass(capsys):
    assert main(["audit", "LDPQ", "FedAvg", "GaussianNoise", "--draws", "2e4"]) == 0
    printed = capsys.readouterr().out
    assert "equal to the specification, within the claims" in printed
    assert "nothing to refute: updates are sent as they are" in " ".join(printed.split())
    assert "one message" in printed and "one coordinate" in printed


@pytest.mark.parametrize("name", mechanisms.__all__)
def test_every_mechanism_is_audited_or_claims_nothing(name):
    """False alarms: at most 0.1% per mechanism for any seed; none for this one."""
    kind = getattr(mechanisms, name)
    found = command.cases(kind)
    if name in NOTHING_CLAIMED:
        assert found == ()
    for case in found:
        findings = command.findings_of(case, 40_000, command.ALPHA / len(found))
        assert findings and [finding for finding in findings if finding.alarm] == []


def test_claims_about_vectors_are_audited_in_two_shapes():
    spread, concentrated = command.cases(mechanisms.GaussianNoise)
    assert (spread.concentrated, concentrated.concentrated) == (False, True)
    assert spread.mechanism.noise_multiplier == concentrated.mechanism.noise_multiplier / 32
    spread, concentrated = command.cases(mechanisms.LaplaceNoise)
    assert spread.mechanism.noise_multiplier == concentrated.mechanism.noise_multiplier / 1024
    assert [case.concentrated for case in command.cases(mechanisms.CSGM)] == [False]


def test_the_help_says_what_is_fast_and_what_is_long(capsys):
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    printed = capsys.readouterr().out
    assert "fast:" in printed and "10^7" in printed and "long:" in printed and "1e8" in printed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_clean_suites_raise_no_alarm(seed):
    """All mechanisms at 10^5 draws; a suite raises a false alarm with probability 0.1% at most."""
    found = [case for name in mechanisms.__all__ for case in command.cases(getattr(mechanisms, name))]
    for case in found:
        findings = command.findings_of(case, 100_000, command.ALPHA / len(found), seed=1000 + seed)
        assert not any(finding.alarm for finding in findings), (case, findings)


def test_an_alarm_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(command, "enumeration", lambda: ["P(1) at threshold 7 is 8/256"])
    assert main(["audit", "FedAvg"]) == 1
    assert "threshold 7" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["Nonsense"], ["LDPQ", "--draws", "5"]])
def test_bad_arguments_are_explained(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["audit", *arguments])
    assert "there is no mechanism Nonsense" in (error := capsys.readouterr().err) or "draws must be" in error
