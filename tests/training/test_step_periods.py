"""Periods in steps: a round reaches one if its steps pass a multiple of it, as in plain training."""

import logging

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer

STEPS, ROUNDS = 6, 4


class Logged(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss_of_step", loss, on_step=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 4}]


def run(*callbacks, clients=3, rounds=ROUNDS, module=None, **trainer):
    """Six steps a client and round. With clients=0 a plain training of six steps an epoch."""
    own = [Federated(FedAvg(), clients, seed=1, clients_per_step=1)] if clients else []
    made = make_trainer(*own, *callbacks, **{"max_epochs": rounds, "enable_checkpointing": True, **trainer})
    made.fit(module or Logged(), datamodule=Digits(60 * max(clients, 1)))
    return made


def keep(folder, n, **settings):
    return pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=n, save_top_k=-1, **settings)


@pytest.mark.parametrize("monitor", [None, "loss_of_step", "val_acc"])
@pytest.mark.parametrize("n", [1, 4, 5, 6, 7, 10, 12, 23, 24, 25])
def test_a_checkpoint_is_written_in_each_round_that_passes_its_period(n, monitor, tmp_path):
    run(keep(tmp_path, n, monitor=monitor))
    rounds = [range(STEPS * r + 1, STEPS * (r + 1) + 1) for r in range(ROUNDS)]
    due = [steps[-1] for steps in rounds if any(step % n == 0 for step in steps)]
    if monitor == "val_acc" and due[:1] == [STEPS]:
        due = due[1:]  # as in plain training: the metric is first there after the first validation
    found = sorted(int(path.stem.partition("step=")[2]) for path in tmp_path.glob("*.ckpt"))
    assert found == due, "one at most for each round, since a round has one global model"
    if n >= STEPS and monitor is None:
        run(keep(tmp_path / "plain", n), clients=0)
        assert len(list((tmp_path / "plain").glob("*.ckpt"))) == len(due)


def test_with_accumulated_gradients_and_steps_by_number(tmp_path):
    run(keep(tmp_path, 5), accumulate_grad_batches=2, max_epochs=-1, max_steps=11)  # rounds of 3 steps
    steps = sorted(int(path.stem.partition("step=")[2]) for path in tmp_path.glob("*.ckpt"))
    assert steps == [6, 11]


def test_a_resumed_run_goes_on_with_the_same_state_of_its_checkpoint(tmp_path):
    """The period is no part of the checkpoint: a run resumes under the same key of the callback."""
    run(keep(tmp_path, 10, save_last=True))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]
    [key] = [name for name in saved if name.startswith("ModelCheckpoint")]
    assert key == keep(tmp_path, 10).state_key


class Rates(pl.loggers.logger.DummyLogger):
    """Keeps what it is given, in order."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


@pytest.mark.parametrize("n", [1, 4, 6, 9, 13])
def test_rates_are_logged_in_each_round_that_passes_the_interval(n):
    logger = Rates()
    run(pl.callbacks.LearningRateMonitor("step"), logger=logger, log_every_n_steps=n, clients=1)
    steps = [step for step, values in logger.rows if "lr-SGD" in values]
    starts = [1 + STEPS * r for r in range(ROUNDS)]
    passed = zip([0, *starts], starts, strict=False)
    assert steps == [b - 1 for a, b in passed if any(s % n == 0 for s in range(a + 1, b + 1))]


def test_a_schedule_with_a_frequency_goes_on_as_in_plain_training():
    for frequency in (1, 4, 6, 7):

        class Own(Logged):
            def configure_optimizers(self, frequency=frequency):
                [optimizer], [schedule] = super().configure_optimizers()
                return [optimizer], [{**schedule, "frequency": frequency}]

        one, plain = (run(clients=n, module=Own(), enable_checkpointing=False) for n in (3, 0))
        assert one.optimizers[0].param_groups[0]["lr"] == plain.optimizers[0].param_groups[0]["lr"]


class OnceARound(pl.Callback):
    def on_validation_end(self, trainer, pl_module):
        if self.is_due(trainer):
            pass

    def is_due(self, trainer):
        return trainer.global_step % 10 == 0


class EachStep(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        return trainer.global_step % 10


class OfTheRun(EachStep):
    knows_clients = True


class InValidation(Logged):
    def on_validation_epoch_end(self):
        step = self.global_step
        return step % 3


@pytest.mark.parametrize(
    ("callbacks", "module", "words"),
    [
        ([OnceARound()], Logged(), "OnceARound.on_validation_end"),
        ([OfTheRun()], Logged(), "OfTheRun.on_train_batch_end"),
        ([], InValidation(), "InValidation.on_validation_epoch_end"),
        ([EachStep()], Logged(), ""),
        ([pl.callbacks.ModelSummary()], Logged(), ""),
    ],
)
def test_a_hook_that_runs_once_a_round_gets_one_line(callbacks, module, words, caplog):
    with caplog.at_level(logging.INFO):
        run(*callbacks, rounds=1, module=module, enable_checkpointing=False)
    lines = [line for line in caplog.messages if "global_step % n" in line]
    assert len(lines) == bool(words) and all(line.startswith(words) for line in lines)
