"""A name ends in a row or in a sentence, in every command that takes mechanisms."""

import pytest

from lightning_fedq.cli import main
from lightning_fedq.commands.resolver import candidates, resolved
from lightning_fedq.mechanisms import RotatedCoins

PLAN = ["plan", "--epsilon", "8", "--clients", "479", "--params", "500", "--rounds", "2", "--mechanisms"]


MORE = ["RotatedCoins, paired", "RotatedCoins, share 1/2", "RotatedCoins, share 1/8"]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("RotatedCoins, share 1/8", ["RotatedCoins, share 1/8"]),
        ("RotatedCoins", ["RotatedCoins"]),
        ("lightning_fedq.mechanisms.RotatedCoins", ["RotatedCoins", *MORE]),
        ("tests.commands.test_resolver.LDPQ", ["LDPQ"]),
    ],
)
def test_a_row_a_class_and_a_class_path(name, rows):
    found = resolved([name], 100)
    assert list(found.rows) == rows and not found.left_out


class LDPQ(RotatedCoins):
    """One of one's own, by a name that is taken."""


def test_two_classes_of_one_name_are_two_rows():
    found = resolved(["LDPQ", "tests.commands.test_resolver.LDPQ"], 100)
    assert list(found.rows) == ["LDPQ", "tests.commands.test_resolver.LDPQ"]


def test_none_is_all():
    assert list(resolved([], 100).rows) == list(candidates(100)) and not resolved([], 100).left_out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nonsense", "there is no mechanism Nonsense"),
        ("RotatedCoin", "Did you mean 'RotatedCoins'?"),
        ("RotatedCoins, share 1/9", "Did you mean 'RotatedCoins, share 1/8'?"),
        ("no.such.module.Class", "can't be imported"),
        ("..LDPQ", "relative import"),
        ("os.path", "must be a subclass of Mechanism"),
        ("FedAvg", "no target can set it"),
        ("DRIVE", "no target can set it"),
        ("", "there is no mechanism"),
    ],
)
def test_a_name_without_a_row_has_a_sentence(name, words):
    found = resolved([name], 100)
    assert not found.rows and words in found.left_out[name]
    with pytest.raises(ValueError, match="No mechanism is left"):
        found.some()


@pytest.mark.parametrize("command", [PLAN, ["mechanisms"], ["audit", "--draws", "1e4"]])
def test_every_command_says_the_same_and_its_status_tells(command, capsys):
    """1 where a name was left out, 2 where none was left, 0 where each has a row."""
    start, rest = (command, []) if command is PLAN else (command[:1], command[1:])
    assert main([*start, "GaussianNoise", "Nonsense", *rest]) == 1
    assert "Nonsense" in (said := " ".join(capsys.readouterr().out.split()))
    assert "there is no mechanism Nonsense" in said and "GaussianNoise" in said
    assert main([*start, "Nonsense", *rest]) == 2
    assert "No mechanism is left. Nonsense is left out: there is no" in capsys.readouterr().err
    assert main([*start, "RotatedCoins, share 1/8", *rest]) == 0
    assert "RotatedCoins" in capsys.readouterr().out


def test_a_plan_of_names_says_why_one_is_not_possible(capsys):
    assert main([*PLAN, "GaussianNoise", "CPA"]) == 1
    assert "not possible: CPA: CPA is not homomorphic" in " ".join(capsys.readouterr().out.split())
    assert main([*PLAN, "CPA"]) == 2
    assert "No mechanism is left. CPA: CPA is not homomorphic" in " ".join(capsys.readouterr().err.split())
