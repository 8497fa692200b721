"""`fedq audit` from the outside."""

import hashlib
import re

import pytest

from lightning_fedq import mechanisms
from lightning_fedq.audit.commands import audit as command
from lightning_fedq.audit.views import Finding
from lightning_fedq.cli import main
from lightning_fedq.keys.randomness import PublicRandomness, Stream

NOTHING_CLAIMED = {"CorrelatedQuantization", "FedAvg", "IrwinHall", "SubtractiveDither"}
NOTHING_CLAIMED |= {"QSGD", "TernGrad", "DRIVE", "EDEN", "TopK", "RandomK"}


def test_clean_mechanisms_pass(capsys):
    assert main(["audit", "LDPQ", "FedAvg", "GaussianNoise", "--draws", "2e4"]) == 0
    printed = capsys.readouterr().out
    assert "no claim refuted" in printed
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
        findings = command.audit_case(case, FEW_DRAWS, command.ALPHA / len(found))
        assert findings and [finding for finding in findings if finding.alarm] == []


def test_claims_about_vectors_are_audited_in_two_shapes():
    spread, concentrated, *_ = command.cases(mechanisms.GaussianNoise)
    assert (spread.concentrated, concentrated.concentrated) == (False, True)
    assert spread.mechanism.noise_multiplier == concentrated.mechanism.noise_multiplier / 32
    spread, concentrated = command.cases(mechanisms.LaplaceNoise)
    of_one = mechanisms.LaplaceNoise(1.0, 1.0).longest_update(1024) / 32  # of an update that is spread evenly
    assert spread.mechanism.noise_multiplier == concentrated.mechanism.noise_multiplier * of_one
    assert not any(case.concentrated for case in command.cases(mechanisms.CSGM))


def test_the_help_says_what_is_fast_and_what_is_long(capsys):
    assert main(["audit", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "fast:" in printed and "10^6" in printed and "slow:" in printed and "1e8" in printed


FEW_DRAWS = 10_000
"""Of each suite: false alarms are as unlikely as with many, and a hundred suites take minutes."""


def suite(seed):
    """The first alarm of all mechanisms in all their cases, or None."""
    found = [case for name in mechanisms.__all__ for case in command.cases(getattr(mechanisms, name))]
    share = (1.0 - command.KNOWLEDGE_SHARE) * command.ALPHA / len(found)
    for case in found:
        findings = command.audit_case(case, FEW_DRAWS, share, seed=1000 + seed)
        alarms = [finding for finding in findings if finding.alarm]
        if alarms:
            return case, alarms
    return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_clean_suites_raise_no_alarm(seed):
    """A suite raises a false alarm with probability 0.1% at most, so the hundred do with 10% at most."""
    assert suite(seed) is None


def test_an_alarm_is_an_exit_status(monkeypatch, capsys):
    alarm = Finding("one message", 1.0, 0.9, 10_000, "position 3")
    monkeypatch.setattr(command, "knowledge", lambda names, alpha: [alarm])
    assert main(["audit", "FedAvg"]) == 1
    assert "position 3" in capsys.readouterr().out


def frozen(randomness, key, purpose, who):
    """A plant: the stream that round, attempt and key have no say in, also where its purpose names them."""
    return Stream(hashlib.sha256(re.sub(r"\d+", "", purpose).encode() + who).digest())


CLAIMS = [  # 6 s for its draws; less of its noise is refuted in `audit/test_handed_on.py`
    pytest.param(name, marks=[pytest.mark.slow] * (name == "HandedOnGaussian"))
    for name in mechanisms.__all__
    if name not in NOTHING_CLAIMED
]


@pytest.mark.parametrize("name", CLAIMS)
def test_without_fresh_randomness_the_command_refutes_every_family(name, monkeypatch):
    """Every stream is the same in every round and world, so that a message is a function of the update."""
    monkeypatch.setattr(PublicRandomness, "_stream", frozen)
    draws = {"CPA": 150_000, "DistributedDiscreteGaussian": 100_000, "RotatedAxes": 200_000}
    draws |= {"HandedOnGaussian": 200_000}
    verdicts = [row[6] for row in command.rows(name, draws.get(name, 20_000), command.ALPHA)]
    assert any(verdict.startswith("refuted") for verdict in verdicts), verdicts


def test_holds_is_never_said_where_the_audit_could_not_see():
    blind = Finding("one message", 1.0, 0.0, 10_000)
    assert blind.verdict == "saw nothing"
    assert Finding("one message", 1.0, 0.5, 10_000).verdict == "holds"
    assert Finding("one message", 1.0, 0.9, 10_000, "position 3").verdict == "refuted"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["Nonsense"], "there is no mechanism Nonsense"),
        (["LDPQ", "--draws", "5"], "draws must be >= 8168, got 5"),
    ],
)
def test_bad_arguments_are_explained(arguments, said, capsys):
    assert main(["audit", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""  # before the first audit


def test_the_fewest_draws_are_enough():
    case = command.cases(mechanisms.LDPQ)[0]
    assert command.audit_case(case, command.FEWEST_DRAWS, command.ALPHA)
    with pytest.raises(ValueError, match=f"draws must be >= {command.FEWEST_DRAWS}"):
        command.audit_case(case, command.FEWEST_DRAWS - 1, command.ALPHA)
