"""docs/papers.md: one table of 140 rows; every row has a verdict, and commands that are there and parse."""

import re
import shlex
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import pytest
from jsonargparse import auto_cli, capture_parser

from lightning_fedq import mechanisms
from lightning_fedq.cli import OTHERS
from lightning_fedq.commands.configs import TRAINING
from lightning_fedq.commands.shown import read_help
from reproductions import EXPERIMENTS
from reproductions.results import rows, verdict

ROOT = Path(__file__).parents[2]
ROWS = [*rows().values()]
COMMANDS = sorted(
    {
        command
        for row in ROWS
        for cell in row[3:]
        for command in re.findall(r"`((?:fedq|pytest|python -m) [^`]+)`", cell)
    }
)


def test_every_thing_in_the_papers_has_a_row():
    assert [int(row[0]) for row in ROWS] == list(range(1, 141))
    assert {len(row) for row in ROWS} == {7}, "a bar in a cell?"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"row {row[0]}")
def test_a_row_has_a_command_or_a_reason_and_a_verdict(row):
    _, claim, where, command, ours, theirs, reason = row
    assert all((claim, where, ours, theirs))
    word = verdict(row)
    if "`" not in command:
        assert command == "nothing to run" and len(ours.split()) >= 3, "the reason stands where figures would"
    if word in ("no", "in part", "not settled", "not run"):
        assert len(reason) > len(word) + 10 or command == "nothing to run", f"{reason!r} gives no reason"


@lru_cache
def parser_of(name):
    """The parser that `python -m reproductions NAME` builds."""
    module = import_module(f"reproductions.{EXPERIMENTS[name]}")
    experiment = getattr(module, name.replace("-", "_"))
    return capture_parser(lambda: auto_cli(experiment, args=[], as_positional=False))


def accepted(words):
    """Refuse a command that is not there, or whose options are not."""
    tool, *rest = words
    if tool == "pytest":
        file, _, name = rest[0].partition("::")
        assert (ROOT / file).is_file() and f"def {name}" in (ROOT / file).read_text()
        return
    if tool == "python":
        assert rest[:2] == ["-m", "reproductions"]
        parser_of(rest[2]).parse_args(rest[3:])
        return
    command, *options = rest
    assert command in {**TRAINING, **OTHERS}
    flags = [word.partition("=")[0] for word in options if word.startswith("--")]
    text = read_help(command)
    assert all(flag in {"--set"} or flag in text for flag in flags), flags
    for word in options:
        if word.startswith("digits_"):
            assert (ROOT / "configs" / f"{word}.yaml").is_file()
        elif re.match(r"\w+\.\w+=", word):  # a change of a setting
            name, setting = word.partition("=")[0].split(".")
            if name != "Federated":
                assert setting in getattr(mechanisms, name).__dataclass_fields__


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there_and_parses(command):
    accepted(shlex.split(command))


def test_a_command_that_is_not_there_is_found():
    """What the test above is worth."""
    for broken in ("pytest tests/gone.py", "fedq gone", "fedq privacy digits_gone", "fedq audit --gone 3"):
        with pytest.raises(AssertionError):
            accepted(shlex.split(broken))
    with pytest.raises(KeyError):
        accepted(shlex.split("python -m reproductions corbin-exp9"))
    with pytest.raises((SystemExit, TypeError, ValueError)):
        accepted(shlex.split("python -m reproductions corbin-exp8 --gone 3"))
