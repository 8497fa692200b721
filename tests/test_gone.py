"""Every name that was public before 0.3.0 says what became of it."""

import importlib

import pytest

import lightning_fedq
from lightning_fedq import cli, gone
from lightning_fedq.commands.errors import suggest


def imported(name):
    """What a full name stands for."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", [*gone.MOVED, *gone.GONE])
def test_an_import_says_what_became_of_it(name):
    with pytest.raises(ImportError) as refused:
        imported(name)
    assert str(refused.value) == gone.words(name)


@pytest.mark.parametrize("name", gone.MOVED.values())
def test_new_names_are_there(name):
    assert imported(name) is not None


def test_from_import_and_rules_of_the_contract_say_it_too():
    with pytest.raises(ImportError, match="use DistributedDiscreteGaussian"):
        from lightning_fedq import Skellam  # noqa: F401
    with pytest.raises(ImportError, match=r"RULES\[.unbiased.\] since 0\.3\.0"):
        from lightning_fedq.mechanisms.contract_suite import unbiased  # noqa: F401


def test_what_never_was_is_an_error_as_anywhere():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        lightning_fedq.Nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'lightning_fedq\.nothing'"):
        importlib.import_module("lightning_fedq.nothing")


@pytest.mark.parametrize("command", gone.COMMANDS)
def test_old_commands_name_the_line_that_does_their_work(command, capsys):
    assert cli.main([command]) == 2
    assert f"fedq {command} is gone since 0.3.0; use {gone.COMMANDS[command]}" in capsys.readouterr().err


def test_a_configuration_that_names_one_is_told():
    words = gone.words("lightning_fedq.Skellam")
    assert suggest(f"Problem with given class_path 'lightning_fedq.Skellam':\n  {words}", []) == f" {words}"
