"""One process, ranks, real clients: a feature is the same bit for bit, or refused by name. No third kind."""

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from tests.contract.test_mechanisms import ROWS
from tests.flower.engines import in_one_process, over_flower
from tests.training.ranks_features import FEATURES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
MECHANISMS = {f"{row!r}" for row in ROWS}
_BUFFER, _LATE = "numbers that travel is", "a message of the second round fails here by its code"
_FROZEN, _STEPS = "which has been trained, and real clients keep no model", "a schedule with interval='step'"
_DROPS = "real clients drop out by themselves"
REFUSED = {
    "BackboneFinetuning, before": _LATE,
    "BackboneFinetuning, after": _LATE,
    "freezing": _FROZEN,
    "pruning": _FROZEN,
    "a buffer assigned anew": _BUFFER,
    "an average in the module": _BUFFER,
    "a variance of one's own": _BUFFER,
    "max_steps": "max_steps counts steps of clients",
    "dropouts": _DROPS,
    "dropouts, one mean": _DROPS,
    "a schedule by batch": _STEPS,
    "a cycle": _STEPS,
    "a plateau of the training": "watches 'train_loss', which clients log in training",
    "streams": "the data are a stream",
    "a data set that is dealt out to be measured on": "a real client has its own only",
    "leakage": "LeakageMonitor works on the clients of a simulation",
    "Langevin": "Langevin works on the clients of a simulation",
    "secret cohorts": "secret cohorts are for simulations",
    "liars": "ByzantineClients works on the clients of a simulation",
}
"""Features that a deployment refuses, and a part of its words."""

QUICK = ("a run folder", "best and last checkpoint", "DPSGD", "padding and pruned weights", "fixed features")
"""Averages of the tail and weights by variance: `test_same_training`."""


def row(name):
    """What the page has to say of a feature."""
    ranks, flower = FEATURES[name].refused, REFUSED.get(name, "")
    return (name, *(f"refused: {words}" if words else "same" for words in (ranks, flower)))


def test_the_page_has_every_feature_and_no_third_kind():
    page = PAGE.read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    found = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]
    expected = [row(name) for name in FEATURES if name not in MECHANISMS]
    same = [name for name, *engines in expected if engines == ["same", "same"]]
    assert found == [one for one in expected if one[0] not in same]
    assert " ".join(page.split("The same in all three:")[1].split()) == "; ".join(same) + "."
    assert REFUSED.keys() <= FEATURES.keys()
    assert f"{len(MECHANISMS)} mechanisms" in page


def check(name, folder):
    feature = FEATURES[name]
    expected = in_one_process(feature, folder / "one")
    if words := REFUSED.get(name):
        with pytest.raises(Exception, match=re.escape(words)):
            over_flower(feature, folder / "flower")
        return
    found = over_flower(feature, folder / "flower")
    assert all(received for _, _, received, *_ in found["records"])
    assert found == expected


@pytest.mark.parametrize("name", QUICK)
def test_real_clients_end_as_one_process_does(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in QUICK])
def test_each_feature_over_flower(name, tmp_path):
    check(name, tmp_path)
