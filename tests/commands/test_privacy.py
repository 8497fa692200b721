"""`fedq privacy` knows from a configuration or a checkpoint whether masks really ran."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq import Available, cli
from lightning_fedq._lightning import pl
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.callbacks import DPSGD, Federated, RunFolder
from lightning_fedq.commands.privacy import report_of_checkpoint, report_of_config
from lightning_fedq.comparison.reported_delta import ReportedDelta
from lightning_fedq.data.models import MLP, Classifier as ClassifierOf
from lightning_fedq.mechanisms import LDPQ, FedAvg
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.document import headline
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.run import ASSUMED
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.accounts import make_report, planned_run
from tests.changed import changed
from tests.commands.federations import FEDERATIONS, federation
from tests.configurations import written
from tests.described import page as markdown
from tests.digits_run import Classifier, Digits, make_trainer

CONFIGS = Path(__file__).parents[2] / "configs"


def fit(folder, secagg):
    federated = Federated(LDPQ(1.0), 6, clients_per_step=6, secure_aggregation=secagg)
    trainer = make_trainer(federated, RunFolder("run", str(folder)), max_epochs=1)
    trainer.fit(Classifier(), datamodule=Digits(60))
    trainer.save_checkpoint(folder / "one.ckpt")
    return folder / "one.ckpt"


def main(words):
    return cli.main(["privacy", *words])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder with a checkpoint and the run's folder; nothing is masked."""
    return fit(tmp_path_factory.mktemp("plain"), None).parent


@pytest.mark.parametrize(
    ("secagg", "words"),
    [(SecAgg(), "ran"), (SecAgg(active=True), "ran"), (SecAgg(simulation="counted"), "counted")],
)
def test_folder_and_checkpoint_say_what_ran(tmp_path, secagg, words):
    report = report_of_checkpoint(fit(tmp_path, secagg), None, 1e-5, secagg=False)
    assert report.masks == words and report.state == "running"
    saved = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert saved["server"] == report.server == secagg.statement and saved["state"] == "ended"
    assert saved["masks"] == words
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["masks"] == words and summary["aborted_rounds"] == 0
    server, behind = (next(x for x in saved["rows"] if x["name"] == a.name) for a in SERVERS)
    masked = secagg.simulation == "masked"
    counted = "behind secure aggregation, which was only counted"
    groups = ("as it was run", "if an assumption fails") if masked else (counted, "as it was run")
    assert (behind["group"], server["group"]) == groups
    assert not behind["when"] and (server["when"] == "masks are broken") == masked


SERVERS = (Adversary.SERVER, Adversary.SECAGG_SERVER)


def test_without_it_nothing_is_claimed_unless_assumed(plain):
    path = plain / "one.ckpt"
    report, assumed = (report_of_checkpoint(path, None, 1e-5, secagg=flag) for flag in (False, True))
    assert "secure aggregation is off" in report.row(Adversary.SECAGG_SERVER).reason
    assert assumed.masks == "assumed" and assumed.server == ASSUMED.statement
    assert report.samples is None and "One sample" not in markdown(report), "without DP-SGD"
    summary = json.loads((plain / "run" / "summary.json").read_text())
    assert summary["masks"] == "none"


def test_the_folder_of_a_run_is_read(plain, tmp_path, capsys):
    run = plain / "run"
    assert main([str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "What was protected, and from whom" in shown  # older Rich draws a box around headings
    assert "epsilon_per_coordinate=1.0" in shown
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, message in [
        ([str(run), "--rounds", "3"], "A finished run has its own settings. Give"),
        ([str(run / "model.ckpt")], "holds only weights, as a RunFolder's model.ckpt"),
        ([str(run / "model.ckpt")], f"See {run / 'privacy.md'}."),
        ([str(empty)], "holds no privacy.json"),
    ]:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_a_page_older_than_its_run_is_not_shown(plain, tmp_path, capsys):
    """A run that was resumed and killed has a page of before: it says less than was spent."""
    copytree(plain / "run", tmp_path / "run")
    table = tmp_path / "run" / "metrics.csv"
    table.write_text(table.read_text() + table.read_text().splitlines()[-1] + "\n")
    assert main([str(tmp_path / "run")]) == 2
    assert "covers 1 rounds, but the run went on to 2. Give its last checkpoint." in capsys.readouterr().err


def test_a_configuration_is_read(capsys):
    report = report_of_config(str(CONFIGS / "digits_secagg.yaml"), 1, 1e-5, secagg=False)
    assert (report.masks, report.server) == ("asked", SecAgg().statement)
    assert report_of_config(str(CONFIGS / "digits_byzantine.yaml"), 1, 1e-5, secagg=False).masks == "none"
    assert main([str(CONFIGS / "digits_secagg.yaml"), "--rounds", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "asked for, and will run" in shown and "was " not in shown.partition("How to read")[0]
    for rounds in ("0", "-3"):
        assert main([str(CONFIGS / "digits_secagg.yaml"), "--rounds", rounds]) == 2
        assert f"--rounds must be >= 1, got {rounds}" in capsys.readouterr().err


def test_a_configuration_with_an_active_server_counts_on_its_survivors(tmp_path):
    text = (CONFIGS / "digits_secagg.yaml").read_text()
    rows = []
    for run in ("{simulation: masked}", "{simulation: masked, active: true}"):
        path = tmp_path / "config.yaml"
        path.write_text(changed(text, ("{simulation: masked}", run), ("0.05", "0.0")))
        report = report_of_config(str(path), 1, 1e-5, secagg=False, params=100)
        rows.append(report.row(Adversary.SECAGG_SERVER))
    assert rows[1].epsilon_run > 1.1 * rows[0].epsilon_run
    assert any("at least 14 of 20 clients confirm" in text for text in rows[1].assumptions)
    assert any("for a server that follows the protocol" in text for text in rows[0].assumptions)


def test_the_question_may_be_asked_for_other_settings():
    """The specification's 3.54 of 2,000 clients, 1,000 parameters and one round, section 6.3."""
    changes = {"AugCorBin.epsilon_per_coordinate": 0.5, "Federated.num_clients": 2000}
    config = str(CONFIGS / "digits_augcorbin.yaml")
    report = report_of_config(config, 1, 1e-5, secagg=True, params=1000, changes=changes)
    assert (report.dim, report.cohort_size) == (1000, 2000)
    assert report.row(Adversary.SECAGG_SERVER).epsilon_run == pytest.approx(3.54, rel=0.01)


def test_settings_that_are_none_are_refused(tmp_path, capsys):
    config = str(CONFIGS / "digits_ldpq.yaml")
    (tmp_path / "one.ckpt").touch()
    name = "LDPQ.epsilon_per_coordinate"
    for arguments, message in [
        ([config, "--set", name], f"a setting is name=value such as {name}=0.1"),
        ([config, "--set", "LDPQ.epsilon_per_coordinat=1"], "did you mean 'epsilon_per_coordinate'"),
        ([str(tmp_path / "one.ckpt"), "--params", "7"], "a checkpoint has its own settings"),
    ]:
        assert main(arguments) == 2
        assert message.lower() in capsys.readouterr().err.lower()


def test_a_checkpoint_counts_what_its_journal_has_seen_since(tmp_path):
    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    federated = Federated(LDPQ(1.0), 6, clients_per_step=6)
    trainer = make_trainer(federated, keep, max_epochs=3, enable_checkpointing=True)
    trainer.fit(Classifier(), datamodule=Digits(60))
    assert report_of_checkpoint(tmp_path / "epoch=0.ckpt", None, 1e-5, secagg=False).rounds == 3
    next(tmp_path.glob("ledger-*.jsonl")).unlink()
    with pytest.warns(UserWarning, match="so this report does not count later rounds"):
        assert report_of_checkpoint(tmp_path / "epoch=0.ckpt", None, 1e-5, secagg=False).rounds == 1


def trained(folder, delta=1e-5, rounds=1, **settings):
    """A checkpoint of six clients, and the folder of its run."""
    federated = Federated(LDPQ(1.0), 6, clients_per_step=1, **settings)
    target = settings.get("privacy")
    run = RunFolder("run", str(folder))
    deltas = [] if target is not None else [ReportedDelta(delta)]
    trainer = make_trainer(federated, run, *deltas, max_epochs=rounds)
    trainer.fit(Classifier(), datamodule=Digits(60))
    trainer.save_checkpoint(folder / "one.ckpt")
    return folder / "one.ckpt", json.loads((folder / "run" / "privacy.json").read_text())


@pytest.mark.filterwarnings("ignore:round . was aborted")  # which is charged like any other
@pytest.mark.parametrize(
    "name", [name for name in FEDERATIONS if name not in ("cohort, secret", "statistics")]
)
def test_a_checkpoint_says_what_its_run_says_so_far_and_of_rounds_to_come(name, tmp_path):
    """Where a rule names who is there, a checkpoint does not know whom: everybody in every round."""
    federated, trainer = federation(name, 2, check_isolation=False)
    samples = TensorDataset(torch.randn(120, 8), torch.arange(120) % 3)
    trainer.fit(ClassifierOf(MLP(8, [4], 3)), DataLoader(samples, 2), DataLoader(samples, 120))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    another, liars = federation(name, 2)[0], count_byzantine(trainer, federated.planner)
    whole = planned_run(another, another.mechanism, federated.engine.weights.numel(), 7, liars)
    if whole.max_rounds is None:  # a lottery, on top of what each client has paid
        whole = replace(whole, charges=federated.ledger.charges, to_come=5)
    for rounds, wanted in (
        (None, make_report(federated, trainer, 1e-5, "running")),
        (7, privacy_report(whole, 1e-5, "planned", None)),
    ):
        found = report_of_checkpoint(tmp_path / "one.ckpt", rounds, None, secagg=False)
        assert (found.rounds, found.masks, found.simulated) == (wanted.rounds, wanted.masks, True)
        for one, other in zip(found.all_rows, wanted.all_rows, strict=True):
            assert (one.name, one.verdict, one.assumptions) == (other.name, other.verdict, other.assumptions)
            assert one.epsilon == pytest.approx(other.epsilon, rel=1e-9), one.name


def test_rounds_to_come_add_to_those_that_were_charged(tmp_path):
    """A client that was drawn in all rounds so far has paid for them, whatever a lottery would say."""
    path, page = trained(tmp_path, rounds=2, cohort=Available(lambda round: range(3), 3))
    said = float(page["rows"][0]["epsilon"])
    of = {rounds: report_of_checkpoint(path, rounds, 1e-5, secagg=False) for rounds in (2, 3)}
    assert of[2].rows[0].epsilon == pytest.approx(said) and of[3].rows[0].epsilon > 1.2 * said
    with pytest.raises(ValueError, match=r"was charged for 2 rounds, got --rounds 1. Omit --rounds"):
        report_of_checkpoint(path, 1, 1e-5, secagg=False)


@pytest.mark.parametrize("over", ["run", "round"])
@pytest.mark.parametrize("adversary", ["outsider", Adversary.SERVER])
def test_a_checkpoint_knows_what_its_run_was_asked_for(tmp_path, adversary, over):
    path, page = trained(tmp_path, privacy=PrivacyTarget(50.0, 1e-3, adversary, over))
    found = report_of_checkpoint(path, None, None, secagg=False)
    assert found.delta == 1e-3 == page["delta"] and found.asked is not None
    assert headline(found).replace("met so far", "met") == page["headline"]
    assert ": met so far, " in headline(found)
    assert [row.epsilon for row in found.rows] == [float(row["epsilon"]) for row in page["rows"]]
    with pytest.raises(ValueError, match=r"has delta 0.001, got --delta 1e-05"):
        report_of_checkpoint(path, None, 1e-5, secagg=False)


# ---- DP-SGD inside the clients ------------------------------------------------------------------------


def fit_private(folder, seed, *extra, rounds=2):
    """Three clients of 20 samples, two steps a round each."""
    federated, private = Federated(FedAvg(), 3), DPSGD(1.0, 0.5, delta=1e-5, seed=seed)
    callbacks = (federated, private, RunFolder("run", str(folder)), *extra)
    trainer = make_trainer(*callbacks, max_epochs=rounds, enable_checkpointing=bool(extra))
    trainer.fit(Classifier(), datamodule=Digits(60))
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


@pytest.mark.parametrize("seed", [None, 5])
def test_a_checkpoint_says_of_samples_what_the_run_folder_says(tmp_path, capsys, seed):
    """All figures but what the checkpoint does not hold; without the seed nothing is guaranteed."""
    path = fit_private(tmp_path, seed)
    saved = json.loads((tmp_path / "run" / "privacy.json").read_text())["samples"]
    found = report_of_checkpoint(path, None, 1e-5, secagg=False).samples
    assert found is not None and (found.data_sets, found.steps) == (3, 4) and found.epsilon > 1.0
    for name in ("data_sets", "steps", "epsilon", "delta", "noise_multiplier", "sample_rate"):
        assert getattr(found, name) == saved[name], name
    assert found.max_grad_norm is None and found.secure is None and found.verdict == "no guarantee"
    assert main([str(path)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "One sample (DP-SGD), against any adversary who sees messages or models: no guarantee" in page
    assert "if batches and noise did not come from a seed, which is unknown" in page
    missing = "does not hold DPSGD's gradient norm, seed and delta, or the number of samples."
    assert f"A checkpoint {missing}" in page
    assert "NOT in these figures" not in page


def test_the_figures_on_samples_count_what_the_journal_knows_and_say_what_they_leave_out(tmp_path):
    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit_private(tmp_path, None, keep)
    first, last = tmp_path / "epoch=0.ckpt", tmp_path / "epoch=1.ckpt"
    of = [report_of_checkpoint(path, None, 1e-5, secagg=False).samples for path in (first, last)]
    assert of[0].steps == of[1].steps == 4 and of[0].epsilon == pytest.approx(of[1].epsilon, rel=1e-4)
    asked = report_of_checkpoint(last, 9, 1e-5, secagg=False)
    assert asked.rounds == 9 and asked.samples is not None and asked.samples.steps == 4
    assert "those of the checkpoint, not of the requested rounds" in markdown(asked)


def test_a_configuration_with_secret_cohorts_has_their_row(capsys):
    changes = {
        "Federated.num_clients": 200,
        "Federated.cohort": written("FixedSize", size=10, secret=True),
        "GaussianNoise.noise_multiplier": 2.0,
        "Federated.diagnostics": False,
        "Federated.seed": None,
    }
    config = str(CONFIGS / "digits_gaussian.yaml")
    report = report_of_config(config, 20, 1e-4, secagg=False, params=1000, changes=changes)
    assert report.secret is not None and report.secret.cohorts == "secret"
    known = report.row(Adversary.OUTSIDER)
    assert 0.0 < report.secret.epsilon_run < known.epsilon_any_two / 2
    assert "outsider, cohorts secret" in markdown(report)
    known_cohorts = report_of_config(config, 20, 1e-4, secagg=False, params=1000)
    assert known_cohorts.secret is None
    settings = [f"{name}={'null' if value is None else value}" for name, value in changes.items()]
    numbers = ["--rounds", "20", "--delta", "1e-4", "--params", "1000"]
    assert main([config, *numbers, "--set", *settings]) == 0
    assert "cohorts secret" in " ".join(capsys.readouterr().out.split())
