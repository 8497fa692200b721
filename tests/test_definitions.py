"""Arguments that affect privacy are described by one text each: in docstrings, help, glossary and page."""

import inspect
import re
from pathlib import Path

import pytest

import lightning_fedq as fedq
from lightning_fedq.commands import flower, plan, privacy, report
from lightning_fedq.comparison.commands import compare
from lightning_fedq.privacy.definitions import ARGUMENTS, PAGE

GLOSSARY = (Path(__file__).parents[1] / "docs" / "glossary.md").read_text()
OTHER = {
    "ByzantineClients.seed",  # of attacks
    "LeakageMonitor.seed",
    "PerCoordinateGaussian.delta",  # per coordinate and round
    "CPA.epsilon",  # of the bits of one message
    "RotatedAxes.clip_norm",  # the length of every update
    "Statistics.clip_norm",  # of a client's statistics
}
"""Arguments of the same name with another meaning."""


def entries(text):
    """Pairs of an argument and its description, from the `Args:` of a docstring."""
    for found in re.finditer(r"^( +)(\w+): (.*(?:\n\1 +\S.*)*)", text or "", re.MULTILINE):
        yield found[2].rstrip("_"), " ".join(found[3].split())


def described():
    """Arguments of public classes and of commands, with their descriptions."""
    for name in fedq.__all__:
        thing = getattr(fedq, name)
        if inspect.isclass(thing):
            for argument, text in entries(thing.__doc__):
                yield f"{name}.{argument}", argument, text
    for command in (compare.main, plan.main, privacy.main, report.main, flower.init, flower.client):
        module = command.__module__.rpartition(".")[2]
        for argument, text in entries(inspect.getdoc(command)):
            yield f"{module}.{argument}", {"clients": "num_clients"}.get(argument, argument), text


ENTRIES = [entry for entry in described() if entry[1] in ARGUMENTS]


@pytest.mark.parametrize(("place", "argument", "text"), ENTRIES, ids=[entry[0] for entry in ENTRIES])
def test_an_argument_begins_with_its_definition(place, argument, text):
    """Delta was described in 13 places, all of which said what corrections.md retracts."""
    assert (place in OTHER) != text.startswith(ARGUMENTS[argument]), text


def test_the_glossary_has_every_definition():
    for text in {*ARGUMENTS.values(), *PAGE.values()}:
        assert text.lower() in GLOSSARY.lower(), text


def test_all_arguments_were_found():
    assert {argument for _, argument, _ in ENTRIES} == ARGUMENTS.keys() and len(ENTRIES) > 20
    assert {place for place, _, _ in ENTRIES} >= OTHER and len(PAGE) == 10
