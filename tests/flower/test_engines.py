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
_BUFFER, _LATE = "numbers that travel is", "A second-round message fails here, whatever the data are"
_FROZEN, _STEPS = "which was trained and then no longer travels", "A schedule has interval='step'"
_DROPS = "Real clients drop out by themselves"
REFUSED = {
    "BackboneFinetuning, listed before Federated": _LATE,
    "BackboneFinetuning, listed after Federated": _LATE,
    "freezing trained parameters": _FROZEN,
    "pruning": _FROZEN,
    "a buffer that the module replaces": _BUFFER,
    "a moving average inside the module": _BUFFER,
    "a variance of one's own": _BUFFER,
    "max_steps": "max_steps counts client steps",
    "checkpoints every step": "counts steps, which are unknown over a network",
    "dropouts": _DROPS,
    "dropouts, one mean": _DROPS,
    "a schedule by batch": _STEPS,
    "a cycle": _STEPS,
    "a plateau of the training": "watches 'train_loss', which clients log only in training",
    "streams": "must be a map-style Dataset, got a stream",
    "a data set that is dealt out to be measured on": "A real client has only its own data",
    "leakage": "LeakageMonitor needs simulated clients",
    "Langevin": "Langevin needs simulated clients",
    "secret cohorts": "Secret cohorts are for simulations",
    "liars": "ByzantineClients needs simulated clients",
}
"""Features that a deployment refuses, and a part of its words."""

TITLES = {
    "nothing": "plain training",
    "a metric object": "a metric object updated in training",
    "stopped in mid-round": "stopping within a round",
    "a variance of one's own": "a user-defined running variance",
    "a model that is sent in few bits": "broadcast compression",
    "dropouts": "simulated dropouts",
    "dropouts, one mean": "simulated dropouts with FedAvg",
    "weights by samples": "weighting by samples",
    "inverse variances": "weighting by inverse variance",
    "a median": "robust aggregation by median",
    "a server optimiser": "a server optimiser with a larger rate",
    "a server that draws": "a server optimiser that draws random numbers",
    "two passes in stacks": "two local epochs in stacks",
    "dropped rests": "drop_last",
    "loaders of their own": "a data loader for each client",
    "data opened by turn": "client data opened on demand",
    "streams": "streams (IterableDataset)",
    "a schedule by batch": "a learning-rate schedule by step",
    "a cycle": "OneCycleLR by step",
    "a plateau of the validation": "ReduceLROnPlateau on a validation metric",
    "a plateau of the training": "ReduceLROnPlateau on a training metric",
    "optimised by hand": "manual optimisation",
    "random numbers": "random numbers in the steps",
    "a run folder": "RunFolder that follows a metric",
    "metrics that stay with clients": "local client metrics",
    "metrics that nobody sees": "dropped client metrics",
    "resumed": "resuming",
    "a budget": "PrivacyBudget",
    "a privacy target": "PrivacyTarget",
    "a moving average": "EMAWeightAveraging with a decay of 0.8",
    "back to the best": "ReloadBest on a validation loss",
    "leakage": "LeakageMonitor",
    "a layer of their own": "a personalised layer",
    "a layer of their own, in stacks": "a personalised layer in stacks",
    "SCAFFOLD, some": "SCAFFOLD with sampled cohorts",
    "what clients measure": "per-client evaluation, results shared",
    "clients that are available": "client availability",
    "the client's number": "the client's number in the loss",
    "pictures in channels_last": "channels_last images",
    "memory of its own": "client memory in local buffers",
    "statistics of drawn cohorts behind masks, twice": "two rounds of statistics with secure aggregation",
    "statistics to a target, of quantised weights": "statistics with a privacy target and quantised weights",
    "statistics, and a clip that adapts": "statistics with adaptive clipping",
    "statistics before SCAFFOLD": "statistics with SCAFFOLD",
    "statistics, resumed": "statistics in a resumed run",
    "what some clients measure": "per-client evaluation with missing values",
    "a data set that is dealt out to be measured on": "per-client evaluation on a partitioned data set",
    "liars": "ByzantineClients",
    "CPA over rounds": "CPA with sampled cohorts",
    "noise over rounds": "BandedGaussian",
    "noise that is handed on": "HandedOnGaussian",
    "noise that is handed on, behind masks": "HandedOnGaussian with secure aggregation",
}
"""Words of the page for features whose names are short for tests."""

QUICK = (
    *("a run folder", "best and last checkpoint", "DPSGD", "padding and pruned weights", "fixed features"),
    "inverse variances",
)


def row(name):
    """Return a feature's words on the page, and what ranks and real clients do with it."""
    ranks, flower = FEATURES[name].refused, REFUSED.get(name, "")
    return (TITLES.get(name, name), *(f"refused: {words}" if words else "same" for words in (ranks, flower)))


def test_the_page_has_every_feature_and_no_third_kind():
    page = PAGE.read_text()
    refused, same = page.split("## Refused features")[1].split("## Features that are the same everywhere")
    lines = [line for line in refused.splitlines() if line.startswith("| ")][2:]
    found = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    expected = [row(name) for name in FEATURES if name not in MECHANISMS]
    rows = [one for one in expected if one[1:] != ("same", "same")]
    assert [one[:3] for one in found] == rows and all(len(one) == 4 and one[3] for one in found)
    listed = re.findall("`([^`]+)`", same.split("## ")[0])
    assert sorted(listed) == sorted(one[0] for one in expected if one not in rows)
    assert REFUSED.keys() | TITLES.keys() <= FEATURES.keys()
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
