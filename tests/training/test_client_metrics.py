"""What clients log in training stays with them where the run claims privacy, whoever looks and wherever."""

import csv
import json

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_fedq.callbacks import DPSGD, Federated, RunFolder
from lightning_fedq.mechanisms import LDPQ, FedAvg, LayeredGaussian
from lightning_fedq.training.checkpoints import RecordFile
from tests.digits_run import make_trainer

CLIENTS, ROUNDS = 4, 2
SECRET = 0.8125 + 2**-20
"""A float32 that nothing else in a run can be: what the clients log, in the first round."""


class Logs(pl.LightningModule):
    """Logs the same secret everywhere a module may log in training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.metric = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        secret = SECRET + 0.0 * loss.detach() + self.current_epoch
        self.log("train_secret", secret, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"train_other": secret})
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("hook_secret", SECRET)

    def on_train_epoch_end(self):
        self.log("epoch_secret", SECRET)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=3)

    val_dataloader = train_dataloader


class InStacks(Logs):
    """A hook of its own would make it one client a step."""

    on_train_batch_end = pl.LightningModule.on_train_batch_end
    on_train_epoch_end = pl.LightningModule.on_train_epoch_end


class WithMetric(InStacks):
    """Logs a torchmetrics object, the usual idiom."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach() * 0.0 + SECRET)
        self.log("train_metric", self.metric)
        return loss


def run(folder, *callbacks, module=None, mechanism=None, rounds=ROUNDS, plugins=None, **settings):
    settings = {"clients_per_step": 1, **settings}
    fed = Federated(mechanism or LDPQ(0.1), CLIENTS, **settings)
    trainer = make_trainer(
        *callbacks,
        fed,
        RunFolder("run", str(folder), monitor="val_loss", show=False),
        max_epochs=rounds,
        logger=pl.loggers.CSVLogger(folder / "log"),
        log_every_n_steps=1,
        default_root_dir=folder,
        plugins=plugins,
        enable_checkpointing=True,
    )
    trainer.fit(module or Logs())
    trainer.save_checkpoint(folder / "last.ckpt")
    return trainer, fed


def columns(folder):
    with next((folder / "log").rglob("metrics.csv")).open() as file:
        return set(next(csv.reader(file)))


def numbers(thing):
    """Every number that is reachable in a checkpoint."""
    if isinstance(thing, torch.Tensor):
        return set(thing.double().flatten().tolist())
    if isinstance(thing, dict):
        return set().union(*(numbers(item) for item in (*thing.keys(), *thing.values())), set())
    if isinstance(thing, list | tuple):
        return set().union(*(numbers(item) for item in thing), set())
    return {float(thing)} if isinstance(thing, int | float) else set()


def outside(folder):
    """What can be read in all files of a run but those of the clients."""
    texts = []
    for path in folder.rglob("*"):
        if path.suffix == ".ckpt":
            texts.append(repr(torch.load(path, weights_only=True)))
        elif path.suffix in (".csv", ".json", ".md", ".yaml"):
            texts.append(path.read_text())
    return "\n".join(texts)


SECRETS = {"train_secret_step", "train_secret_epoch", "train_other", "hook_secret", "epoch_secret"}


@pytest.mark.parametrize("clients_per_step", [1, 4])
@pytest.mark.parametrize("choice", [None, "local", "none"])
def test_a_run_that_claims_privacy_keeps_them_from_everybody(tmp_path, choice, clients_per_step, caplog):
    keep = pl.callbacks.ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_train_steps=1)
    settings = {"client_metrics": choice, "clients_per_step": clients_per_step}
    module = InStacks() if clients_per_step > 1 else Logs()
    with caplog.at_level("INFO"):
        trainer, fed = run(tmp_path, keep, module=module, **settings)
    assert fed.clients_per_step_chosen == clients_per_step
    assert ("stay with the clients" in caplog.text) == (choice is None)
    shown = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
    seen = set().union(*shown, columns(tmp_path))
    assert not seen & SECRETS and "val_loss" in seen and "fed/round" in seen
    assert str(SECRET)[:8] not in outside(tmp_path)
    for path in tmp_path.rglob("*.ckpt"):
        assert SECRET not in numbers(torch.load(path, weights_only=True)), path
    files = sorted((tmp_path / "run").glob("clients/*.jsonl"))
    assert [file.stem for file in files] == ([] if choice == "none" else list("0123"))
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["round"] for line in lines] == [1, 2]
        assert [line["train_secret"] for line in lines] == [SECRET, SECRET + 1]
        assert [line["train_other"] for line in lines] == [SECRET, SECRET + 1]
    assert "log" not in vars(trainer.lightning_module)


class LogsThroughTheBase(Logs):
    """Overrides `log`, as one does to put a prefix before names, and calls that of the base class."""

    def log(self, name, value, *args, **kwargs):
        super().log(f"my/{name}", value, *args, **kwargs)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        super().log("train_based", loss.detach() * 0.0 + SECRET)
        pl.LightningModule.log(self, "train_named", loss.detach() * 0.0 + SECRET)
        return loss


def test_the_base_class_s_log_is_no_way_round(tmp_path):
    original = pl.LightningModule.log
    with pytest.warns(UserWarning, match="No round has the metric val_loss"):
        trainer, _ = run(tmp_path, module=LogsThroughTheBase())
    seen = set().union(trainer.callback_metrics, trainer.logged_metrics, columns(tmp_path))
    assert "my/val_loss" in seen and any(name.endswith("fed/round") for name in seen)
    assert not [name for name in seen if "train_" in name]
    assert str(SECRET)[:8] not in outside(tmp_path)
    assert pl.LightningModule.log is original


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_a_metric_object_is_kept_and_begins_every_round_anew(tmp_path, clients_per_step):
    module = WithMetric()
    trainer, _ = run(tmp_path, module=module, clients_per_step=clients_per_step)
    assert not any("metric" in name for name in (*trainer.callback_metrics, *columns(tmp_path)))
    assert module.metric._update_count == 0


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [(FedAvg(), {}), (LDPQ(0.1), {"seed": 0}), (LDPQ(0.1), {"client_metrics": "shared"})],
)
def test_where_nothing_is_claimed_or_it_is_asked_for_they_are_logged_as_usual(tmp_path, mechanism, settings):
    trainer, fed = run(tmp_path, mechanism=mechanism, **settings)
    assert columns(tmp_path) >= SECRETS and "train_other" in trainer.callback_metrics
    assert not list((tmp_path / "run").glob("clients/*.jsonl"))
    assert set(fed.client_log.names) == {"train_secret", "train_other", "hook_secret", "epoch_secret"}


def test_samples_that_are_protected_inside_the_clients_count_as_a_claim(tmp_path):
    class Module(Logs):
        on_train_batch_end = pl.LightningModule.on_train_batch_end

    trainer, fed = run(tmp_path, DPSGD(1.0, 1.0, delta=1e-3), mechanism=FedAvg(), seed=0, module=Module())
    assert fed.client_log.choice == "local" and not set(trainer.callback_metrics) & SECRETS
    assert "dp/epsilon" in trainer.callback_metrics


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="client_metrics must be one of local, shared, none or None"):
        Federated(LDPQ(0.1), 4, client_metrics="public")


# ---- who watches -----------------------------------------------------------------------------------------


WATCHES = "watches 'train_.*Watch a metric of the validation"
EXACTLY = "'fed/sim_mse', which is computed from"
SHARED = {"client_metrics": "shared"}


def checkpoint(folder, **settings):
    return pl.callbacks.ModelCheckpoint(folder, **settings)


@pytest.mark.parametrize(
    ("make", "words", "private", "welcome"),
    [
        (lambda folder: pl.callbacks.EarlyStopping("train_other"), f"EarlyStopping {WATCHES}", {}, SHARED),
        (lambda f: checkpoint(f, monitor="train_secret_epoch"), f"ModelCheckpoint {WATCHES}", {}, SHARED),
        (
            lambda f: checkpoint(f, monitor="fed/sim_mse"),
            f"ModelCheckpoint watches {EXACTLY}",
            {},
            {"seed": 0},
        ),
        (
            lambda folder: checkpoint(folder, filename="{fed/uplink_bits}"),
            "ModelCheckpoint names its files by 'fed/uplink_bits'",
            {"mechanism": LayeredGaussian(1.0, 1.0)},
            {},
        ),
    ],
)
def test_nothing_that_stays_with_clients_chooses_or_names_a_model(tmp_path, make, words, private, welcome):
    with pytest.raises(ValueError, match=words):
        run(tmp_path, make(tmp_path / "best"), **private)
    run(tmp_path / "welcome", make(tmp_path / "welcome" / "best"), **welcome)


def test_a_schedule_that_watches_is_named(tmp_path):
    class Plateau(Logs):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_other"}}

    with pytest.raises(ValueError, match="ReduceLROnPlateau watches 'train_other'"):
        run(tmp_path, module=Plateau())


# ---- what only a simulation knows ------------------------------------------------------------------------

EXACT = {"sim_mse", "sim_snr_db", "sim_cosine", "sim_clip_rate", "sim_num_non_finite"}


class SendsNothingUseful(Logs):
    """One label is a NaN, so one client's update is."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        loader.dataset.tensors[1][:1] = torch.nan
        return loader


@pytest.mark.parametrize("seed", [None, 0])
def test_what_only_a_simulation_knows_is_in_no_checkpoint_of_a_private_run(tmp_path, seed):
    with pytest.warns(UserWarning, match="contain a NaN"):
        _, fed = run(tmp_path, module=SendsNothingUseful(), seed=seed)
    assert {f"fed/{name}" for name in EXACT} <= columns(tmp_path)
    assert not {"fed/mse", "fed/cosine", "fed/clip_rate", "fed/num_non_finite"} & columns(tmp_path)
    assert fed.records[0].non_finite_clients
    known = {fed.records[0].mse, fed.records[0].cosine}
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    state = next(state for state in saved["callbacks"].values() if "records" in state)
    records = RecordFile().records(state["records"], tmp_path / "last.ckpt")
    kept = numbers((saved, [vars(record) for record in records]))  # in the checkpoint, and beside it
    assert (known <= kept) == (seed == 0)
    assert not known & kept or seed == 0
    text = repr(saved)
    assert ("sim_mse" in text) == (seed == 0)
    assert [bool(record.non_finite_clients) for record in records] == [seed == 0] * ROUNDS


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_private_run_keeps_its_table_whole(tmp_path):
    run(tmp_path)
    fed = Federated(LDPQ(0.1), CLIENTS, clients_per_step=1)
    folder = RunFolder("run", str(tmp_path), monitor="val_loss", show=False)
    trainer = make_trainer(
        fed, folder, max_epochs=ROUNDS + 1, default_root_dir=tmp_path / "again", enable_checkpointing=True
    )
    trainer.fit(Logs(), ckpt_path=tmp_path / "last.ckpt")
    assert len(folder.rows) == ROUNDS + 1 and all("sim_mse" in row for row in folder.rows)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    "mechanism, seed, kept",
    [
        (LayeredGaussian(1.0, 1.0, entropy_code="elias"), None, False),
        (LayeredGaussian(1.0, 1.0, entropy_code="elias"), 0, True),
        (LDPQ(0.1), None, True),
    ],
)
def test_lengths_that_tell_of_updates_are_in_no_checkpoint_of_a_private_run(mechanism, seed, kept, tmp_path):
    """A checkpoint is what is released, and how long a code is follows from the updates."""
    _, fed = run(tmp_path, mechanism=mechanism, seed=seed)
    sent = [record.uplink_bits for record in fed.records]
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    federation = next(state for state in saved["callbacks"].values() if "records" in state)
    records = [r.uplink_bits for r in RecordFile().records(federation["records"], tmp_path / "last.ckpt")]
    assert (records == sent) == kept and (federation["engine"]["total_uplink_bits"] == sum(sent)) == kept
    state = next(state for state in saved["callbacks"].values() if "last" in state)
    assert ("uplink_bits" in state["last"]) == kept
    assert "fed/uplink_bits" in columns(tmp_path)  # who runs it knows, as its page says
    folder = RunFolder("run", str(tmp_path), show=False)
    folder.load_state_dict(state)
    assert [row["uplink_bits"] for row in folder.rows] == sent[:-1] or [
        row["uplink_bits"] for row in folder.rows
    ] == sent


@pytest.mark.parametrize("auto_insert_metric_name", [True, False])
@pytest.mark.parametrize("name", ["{epoch}-{fed/sim_mse:.9g}", "mse={fed/sim_mse}", "{epoch:{fed/sim_mse}d}"])
def test_no_file_of_a_private_run_is_named_by_exact_updates(tmp_path, name, auto_insert_metric_name):
    def named(folder):
        return pl.callbacks.ModelCheckpoint(
            folder / "best", filename=name, auto_insert_metric_name=auto_insert_metric_name
        )

    with pytest.raises(ValueError, match=f"ModelCheckpoint names its files by {EXACTLY}"):
        run(tmp_path, named(tmp_path))
    assert not list((tmp_path / "best").glob("**/*.ckpt"))
    last = pl.callbacks.ModelCheckpoint(tmp_path / "last", save_last=True)
    last.CHECKPOINT_NAME_LAST = name
    with pytest.raises(ValueError, match="names its files by 'fed/sim_mse'"):
        run(tmp_path, last)


def test_other_figures_may_be_in_names_and_withheld_ones_are_not(tmp_path):
    name = "{epoch}-{val_loss:.4f}-{train_other}-{fed/sim_mse:.9g}"
    files = pl.callbacks.ModelCheckpoint(tmp_path / "seeded", filename=name)
    run(tmp_path, files, seed=0)
    assert "train_other=1.8125" in files.best_model_path and "sim_mse=" in files.best_model_path
    files = pl.callbacks.ModelCheckpoint(tmp_path / "private", filename=name.rpartition("-")[0])
    trainer, _ = run(tmp_path, files)
    assert files.best_model_path.endswith("train_other=0.ckpt")
    assert f"val_loss={trainer.callback_metrics['val_loss']:.4f}" in files.best_model_path
