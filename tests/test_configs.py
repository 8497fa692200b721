"""Every file in `configs/` and `callbacks/` runs, on few clients and rounds."""

import inspect
import json
import os
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from lightning_fedq import mechanisms
from lightning_fedq._lightning import pl
from lightning_fedq.cli import main
from lightning_fedq.commands.options import change_setting
from lightning_fedq.commands.privacy import report_of_config
from lightning_fedq.commands.run import FedqCLI
from lightning_fedq.privacy.row import is_met
from tests.configurations import QUIET, linear_on_digits

# ten samples a client are too few for it
pytestmark = pytest.mark.filterwarnings("ignore:LeakageBudget uses the best sampling probability:UserWarning")
ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
FRAGMENTS = sorted((ROOT / "callbacks").glob("*.yaml"))
FEDQ_DATA = os.environ.get("FEDQ_DATA", "")
PLAIN = linear_on_digits(200, 1)


def fit(tmp_path, config, *more):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    parts = [part for path in (tmp_path / "config.yaml", *more) for part in ("--config", str(path))]
    return FedqCLI(["fit", *parts])


def mechanisms_in(paths):
    words = [word for path in paths for word in path.read_text().split()]
    return {word.rpartition(".")[2] for word in words if ".mechanisms." in word}


RUN = {
    *("digits_fedavg", "digits_private", "digits_secagg", "digits_byzantine", "digits_adaptive_clip"),
    *("digits_handed_on_gaussian", "digits_csgm", "digits_layered_gaussian", "mnist_corbin"),
    *("corbin", "secagg", "byzantine", "dpsgd", "leakage_monitor", "cpa_round_budget"),
    *("progress", "reload_best", "weight_averaging", "wandb"),
}
"""One of each kind of what a file sets is trained by default, and all are built. The others are slow."""


def trained(paths):
    return [pytest.param(path, marks=() if path.stem in RUN else pytest.mark.slow) for path in paths]


@pytest.mark.parametrize("path", [*CONFIGS, *FRAGMENTS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_everything_that_is_named_can_be_built(path):
    """Class paths and arguments of every callback, as the command line builds them."""
    read = yaml.safe_load(path.read_text())["trainer"]
    callbacks = read.get("callbacks") or read["callbacks+"]
    parser = ArgumentParser()
    parser.add_argument("--callbacks", type=list[pl.Callback])
    built = parser.instantiate_classes(parser.parse_object({"callbacks": callbacks})).callbacks
    names = [one["class_path"].rpartition(".")[2] for one in callbacks]
    assert [type(one).__name__ for one in built] == names


@pytest.mark.parametrize("path", trained(CONFIGS), ids=lambda path: path.stem)
def test_configuration_runs(path, tmp_path, monkeypatch):
    config = yaml.safe_load(path.read_text())
    if "Digits" not in config["data"]["class_path"]:
        if not FEDQ_DATA:
            pytest.skip("FEDQ_DATA is not set: no MNIST and no CIFAR-10 here")
        config["data"]["init_args"].update(root=FEDQ_DATA, num_train=500, num_val=100)
    else:
        config["data"]["init_args"].update(num_train=300)
    monkeypatch.chdir(tmp_path)
    config["trainer"].update(max_epochs=1, limit_test_batches=1, **QUIET)
    federated = config["trainer"]["callbacks"][0]["init_args"]
    alone = any("LeakageBudget" in callback["class_path"] for callback in config["trainer"]["callbacks"])
    clients = 10
    if law := federated.get("cohort"):  # as many cohorts, of fewer clients; masks need four
        cohorts = federated["num_clients"] // law["init_args"]["size"]
        clients = 4 * cohorts if "secure_aggregation" in federated else 10
        law["init_args"]["size"] = clients // cohorts
    federated.update(num_clients=clients, local_epochs=1, clients_per_step=1 if alone else 10)
    cli = fit(tmp_path, config)
    assert cli.run_folder.summary["rounds"] == 1
    assert (tmp_path / "runs" / path.stem / "report.md").is_file()  # the run is called as its file


@pytest.mark.slow
@pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
@pytest.mark.parametrize(("name", "least"), [("mnist_private", 0.865), ("mnist_useful", 0.97)])
def test_a_configuration_gives_what_the_documentation_says(name, least, tmp_path, monkeypatch):
    """87.4 to 87.9% of the test images in three runs, 97.6 on features, with keys from the system."""
    monkeypatch.chdir(tmp_path)
    assert main(["fit", name, "--data.root", FEDQ_DATA]) == 0
    run = Path("runs", name)
    assert json.loads((run / "summary.json").read_text())["metrics"]["test_acc"] > least
    asked = json.loads((run / "privacy.json").read_text())["asked"]
    assert asked["spent"] <= 8.0 and asked["met"]


@pytest.mark.parametrize("path", trained(FRAGMENTS), ids=lambda path: path.stem)
def test_fragment_joins_an_existing_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    is_federation = ".mechanisms." in path.read_text()
    before = [] if is_federation else [ROOT / "callbacks" / "fedavg.yaml"]
    trainer = {**PLAIN["trainer"], "enable_progress_bar": path.stem == "progress"}
    stop = "pytorch_lightning.callbacks.EarlyStopping"
    trainer["callbacks"] = [{"class_path": stop, "init_args": {"monitor": "val_acc"}}]
    cli = fit(tmp_path, {**PLAIN, "trainer": trainer}, *before, path)
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    added = yaml.safe_load(path.read_text())["trainer"]["callbacks+"]
    assert names.count("Federated") == 1
    assert {entry["class_path"].rpartition(".")[2] for entry in added} <= set(names)
    assert "EarlyStopping" in names  # the run's own callback stays
    if path.stem == "wandb":
        cli.trainer.logger.experiment.finish()


@pytest.mark.parametrize("paths", [CONFIGS, FRAGMENTS], ids=["configs", "callbacks"])
def test_every_mechanism_has_one(paths):
    missing = set(mechanisms.__all__) - mechanisms_in(paths)
    assert not missing, f"no YAML for {sorted(missing)}"


def test_fragments_say_how_to_use_them():
    for path in FRAGMENTS:
        assert f"--config callbacks/{path.name}" in path.read_text(), path


def target_of(path):
    """Privacy target of a file, {} without one; None where it federates nothing."""
    trainer = yaml.safe_load(path.read_text())["trainer"]
    for callback in trainer.get("callbacks") or trainer.get("callbacks+") or ():
        if callback["class_path"].endswith(".Federated"):
            settings = callback["init_args"]
            target = dict(settings.get("privacy") or {})
            if target.get("adversary") == "secagg_server":
                masks = settings["secure_aggregation"]
                masks = masks.get("init_args", masks)
                assert masks.get("simulation", "masked") == "masked"  # else nobody meets it
            return target
    return None


@pytest.mark.parametrize("path", [*CONFIGS, *FRAGMENTS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_is_shipped_protects_or_says_in_its_first_line_that_it_does_not(path):
    first, target = path.read_text().partition("\n")[0], target_of(path)
    if target is not None:
        assert ("protects nothing" in first) == (not target)
        assert float(target.get("epsilon", 0.0)) <= 8.0


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_is_said_of_a_configuration_is_what_its_report_says(path):
    """Towards whom it is met as it runs: epsilon 8 at most, or more than 20, which is as good as none."""
    report = report_of_config(str(path), None, 1e-5, False)
    rows = [row for row in report.rows if is_met(row, report.masked)]
    best = min(row.epsilon for row in rows)
    assert best <= 8.0 if target_of(path) else best > 20.0


def test_settings_of_a_fragment_can_be_changed():
    config = yaml.safe_load((ROOT / "configs" / "digits_corbin.yaml").read_text())
    change_setting(config, "CorBin.epsilon_per_coordinate", 2.0)
    mechanism = config["trainer"]["callbacks"][0]["init_args"]["mechanism"]
    assert mechanism["init_args"]["epsilon_per_coordinate"] == 2.0
    assert set(mechanism["init_args"]) <= set(inspect.signature(mechanisms.CorBin).parameters)
