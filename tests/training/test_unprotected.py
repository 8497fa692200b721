"""The privacy page lists what the run wrote without noise: that, and nothing else."""

import json
import re
import warnings

import pytest
import pytorch_lightning as pl
import torch

from lightning_fedq.callbacks import Federated, RunFolder, WandbRounds
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.data.sampling import in_short
from lightning_fedq.leakage import LeakageMonitor
from lightning_fedq.mechanisms import LDPQ, FedAvg, LayeredGaussian, RotatedCoins
from lightning_fedq.privacy.document import NOT_COVERED
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.accounts import NoiseWarning
from tests.described import page as markdown
from tests.digits_run import Classifier, Digits, make_trainer
from tests.training.test_client_metrics import Logs, SendsNothingUseful, run

TITLE = "## What is not covered"


def section(folder):
    page = (folder / "run" / "privacy.md").read_text()
    lines = page.split(TITLE)[1].split("\n## ")[0].splitlines()
    listed = [line.removeprefix("- ") for line in lines if line]
    leaves = json.loads((folder / "run" / "privacy.json").read_text())["leaves"]
    assert [*leaves, *NOT_COVERED] == listed
    return leaves


def test_a_private_run_says_what_stayed_and_what_only_a_simulation_knows(tmp_path):
    run(tmp_path)
    stayed, exact, seconds, *more, rest = section(tmp_path)
    (holdings,) = [line for line in more if "holdings" in line]
    assert any(line.startswith("Isolation of the clients was tested") for line in more)
    assert stayed.startswith("Not released: `train_secret`, `train_other`, `hook_secret`, `epoch_secret`")
    assert "`clients/` of this folder only" in stayed and "Do not share `clients/`" in stayed
    assert "`fed/sim_mse`" in exact and "CSVLogger" in exact and exact.endswith("and in no checkpoint.")
    assert "clients/holdings.csv" in holdings
    assert "`seconds`" in seconds and "Not seen: values" in rest


def test_shared_metrics_are_named_with_their_places(tmp_path):
    run(tmp_path, client_metrics="shared", diagnostics=False)
    shared, exact, *_ = section(tmp_path)
    assert shared.startswith("Metrics that clients log in training: `train_secret`, `train_other`")
    assert "metrics.csv, callback_metrics, CSVLogger" in shared
    assert "sim_mse" not in exact and "sim_clip_rate" in exact


def test_dropped_metrics_are_named(tmp_path):
    run(tmp_path, client_metrics="none")
    assert section(tmp_path)[0].endswith("They were dropped.")


def test_clients_that_are_not_finite_lengths_and_numbers_of_samples(tmp_path):
    with pytest.warns(UserWarning, match="contain a NaN"):
        _, fed = run(tmp_path, module=SendsNothingUseful(), mechanism=FedAvg(), weighting="samples")
    bad = list(fed.records[0].non_finite_clients)
    assert any(
        f"named on the screen and in no checkpoint: {in_short(bad)}." in line for line in section(tmp_path)
    )
    assert any("its weight in the mean" in line for line in section(tmp_path))
    run(tmp_path / "codes", mechanism=LayeredGaussian(1.0, 1.0))
    assert any(line.startswith("The length of messages") for line in section(tmp_path / "codes"))
    assert not any("its weight in the mean" in line for line in section(tmp_path / "codes"))


def test_with_a_seed_checkpoints_hold_it_too(tmp_path):
    run(tmp_path, seed=0)
    assert any("fed/sim_mse" in line and line.endswith("and in checkpoints.") for line in section(tmp_path))


class Writes(pl.Callback):
    """A user's own callback that says what it writes."""

    def unprotected_outputs(self, trainer):
        return "The first label, to the screen."


def test_callbacks_say_what_they_let_out(tmp_path):
    run(tmp_path, Writes())
    assert "The first label, to the screen." in section(tmp_path)
    assert all(hasattr(kind, "unprotected_outputs") for kind in (WandbRounds, LeakageMonitor))


def test_a_checkpoint_refers_to_the_folder_of_its_run(tmp_path):
    run(tmp_path)
    report = report_of_checkpoint(tmp_path / "last.ckpt", None, 1e-5, secagg=False)
    assert "privacy.md" in report.leaves[0] and TITLE in markdown(report)


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (None, "Keys come from the operating system: they are secret, and the run is not reproducible"),
        (0, "Keys come from a seed"),
    ],
)
def test_the_start_says_once_where_keys_come_from(seed, words, caplog):
    fed = Federated(LDPQ(0.1), 4, seed=seed, clients_per_step=1)
    trainer = make_trainer(fed)
    with caplog.at_level("INFO"):
        trainer.fit(Logs())
    assert caplog.text.count(words) == 1


def test_the_clients_own_files_are_no_part_of_what_is_sent(tmp_path, monkeypatch):
    """The artifact of a run holds its files, and not the folder of what stays with the clients."""
    from pytorch_lightning.loggers import WandbLogger

    from tests.callbacks.test_wandb_rounds import finished_records_of

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="tests", save_dir=str(tmp_path), offline=True)
    fed = Federated(LDPQ(0.1), 4, clients_per_step=1)
    folder = RunFolder("run", str(tmp_path), monitor="val_loss", show=False)
    trainer = make_trainer(fed, folder, WandbRounds(), max_epochs=1, logger=logger)
    trainer.fit(Logs())
    logger.experiment.finish()
    records = finished_records_of(tmp_path)
    sent = [e.path for r in records if r.HasField("artifact") for e in r.artifact.manifest.contents]
    assert "metrics.csv" in sent and "model.ckpt" in sent
    assert (tmp_path / "run" / "clients" / "0.jsonl").is_file() and not any(".jsonl" in path for path in sent)
    logged = {item.key or "/".join(item.nested_key) for r in records for item in r.history.item}
    assert "fed/round" in logged and not any("secret" in name or "train_other" in name for name in logged)
    assert any("W&B gets each client's number of samples" in line for line in section(tmp_path))
    assert torch.isfinite(fed.engine.weights).all()


class ByHand(Logs):
    """Leaves out steps by what it sees."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if loss < 1.0:
            optimizer.step()


@pytest.mark.filterwarnings("ignore:nothing trains:UserWarning")  # where the first losses are above 1
def test_a_loss_scale_and_steps_by_hand_are_listed(tmp_path):
    run(tmp_path)
    assert not any("loss scale" in line or "`global_step`" in line for line in section(tmp_path))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run(tmp_path / "scaled", plugins=[pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)])
    assert any(line.startswith("The loss scale of 16-mixed") for line in section(tmp_path / "scaled"))
    run(tmp_path / "by hand", module=ByHand())
    told = "The number of steps that clients took: `global_step`"
    assert any(told in line for line in section(tmp_path / "by hand"))


# ---- A run whose noise swamps its updates is warned about before its first round, with what would do ----
TARGET = PrivacyTarget(8.0, 1e-5, "secagg_server")


class Stops(Classifier):
    """Whoever warns has warned before anybody trains."""

    def training_step(self, batch, batch_idx):
        raise KeyError("the first step")


def warned(mechanism, clients, target, **settings):
    federated = Federated(mechanism, clients, privacy=target, check_isolation=False, **settings)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(KeyError, match="the first step"):
            make_trainer(federated, max_epochs=5).fit(Stops(), datamodule=Digits(1400, 4))
    return [str(one.message) for one in found if one.category is NoiseWarning]


def test_a_run_that_can_t_learn_says_how_many_clients_it_takes():
    [said] = warned(RotatedCoins(clip_norm=1.0), 20, TARGET, secure_aggregation=SecAgg())
    (wanted,) = re.findall(r"about ([\d,]+) clients a round", said)
    assert "epsilon 8" in said and 100 < int(wanted.replace(",", "")) < 2000


@pytest.mark.slow
def test_the_clients_that_it_names_are_not_warned_about():
    """The cure that is named, tried."""
    [said] = warned(RotatedCoins(clip_norm=1.0), 20, TARGET, secure_aggregation=SecAgg())
    wanted = int(re.findall(r"about ([\d,]+) clients", said)[0].replace(",", ""))
    assert warned(RotatedCoins(clip_norm=1.0), min(wanted, 700), TARGET, secure_aggregation=SecAgg()) == []


def test_single_messages():
    [said] = warned(LDPQ(1.0), 20, PrivacyTarget(4.0, 1e-5, "server"))
    assert "against the server that sees every message" in said


def after_a_round(mechanism, clients, **settings):
    federated = Federated(mechanism, clients, check_isolation=False, **settings)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_trainer(federated, max_epochs=2).fit(Classifier(), datamodule=Digits(400, 4))
    return [str(one.message) for one in found if one.category is NoiseWarning]


def test_without_a_target_the_first_round_says_so():
    """One bit a coordinate of an update of a thousandth of its range, and two clients."""
    [said] = after_a_round(LDPQ(0.05), 4)
    assert "round 1 has a noise-to-signal ratio of" in said and "over 2 rounds" in said
    assert after_a_round(FedAvg(), 4) == []
    assert after_a_round(LDPQ(8.0), 100) == []
    assert after_a_round(LDPQ(0.05), 4, diagnostics=False) == []
