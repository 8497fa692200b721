"""Times at which a run writes, where clients draw for themselves: worlds of few and of many a round."""

import logging
import time

import numpy as np
import pytest

from lightning_fedq import PrivacyBudget, RunFolder
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import RoundProgressBar
from lightning_fedq.rounds import RoundPlanner
from lightning_fedq.training.user_messages import describe_outcome, describe_timing
from tests.training.test_own_draws import own
from tests.training.test_privacy_target import Line, loader
from tests.training.test_secret_cohorts import NOISE, secret, trainer_of

STEP, ROUNDS, FEW, MANY = 0.02, 4, 1, 8


class Slow(Line):
    """A step takes time."""

    def training_step(self, batch, batch_idx):
        time.sleep(STEP)
        return super().training_step(batch, batch_idx)


class Stamps(pl.loggers.logger.DummyLogger):
    """A logger of one's own, which stamps what it is told."""

    def __init__(self):
        super().__init__()
        self.times = {}

    def log_metrics(self, metrics, step=None):
        self.times.setdefault(step, time.perf_counter())


class OfOnesOwn(pl.Callback):
    """Writes down when a round ended."""

    def __init__(self):
        self.times = {}

    def on_train_epoch_end(self, trainer, pl_module):
        self.times[trainer.current_epoch] = time.perf_counter()


class Files(pl.callbacks.ModelCheckpoint):
    """Files of every round, which have times."""

    def __init__(self, folder):
        super().__init__(folder, save_top_k=-1)
        self.folder = folder

    @property
    def times(self):
        found = sorted(self.folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        return {number: path.stat().st_mtime for number, path in enumerate(found)}


class Starts(pl.Callback):
    """Does something before and behind the rounds only."""

    def on_fit_start(self, trainer, pl_module):
        self.began = trainer.current_epoch

    on_train_start = on_train_end = on_fit_end = on_fit_start


def world(size, folder, monkeypatch):
    """A run in whose rounds so many clients take part, and seconds between rounds for each that stamps."""
    monkeypatch.setattr(RoundPlanner, "cohort", lambda self, round, attempt=0: list(range(size)))
    stamping = [Stamps(), OfOnesOwn(), Files(folder / "files")]
    federated = own(clients_per_step=1)
    budget = PrivacyBudget(99.0, 1e-3, "outsider")
    run = RunFolder("run", folder, show=False)
    trainer = trainer_of(
        *(federated, budget, run, RoundProgressBar(), Starts(), *stamping[1:]),
        rounds=ROUNDS,
        logger=[stamping[0], pl.loggers.TensorBoardLogger(folder), pl.loggers.CSVLogger(folder)],
        enable_checkpointing=True,
        enable_progress_bar=True,
        profiler=pl.profilers.SimpleProfiler(folder, "calls"),
        default_root_dir=folder,
    )
    trainer.fit(Slow(), loader())
    seconds = [np.median(np.diff(list(one.times.values()))) for one in stamping]
    return trainer, federated, run.path, seconds


def test_whatever_tells_few_from_many_is_named_on_the_page_and_at_the_end(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        worlds = [world(size, tmp_path / str(size), monkeypatch) for size in (FEW, MANY)]
    for few, many in zip(worlds[0][-1], worlds[1][-1], strict=True):
        assert many - few > 0.8 * STEP * (MANY - FEW)  # a time for each client: no other step sleeps
    said = [line for line in caplog.messages if line.startswith("Condition S8 does not hold against anybody")]
    assert len(said) == 4  # before the first round, and at the end
    trainer, federated, folder, _ = worlds[1]
    pages = [(folder / name).read_text() for name in ("privacy.md", "report.md")]
    for words in (*said, *pages, *describe_outcome(federated, trainer)[-1:]):
        for name in ("Stamps", "OfOnesOwn", "Files", "TensorBoardLogger", "CSVLogger", "RunFolder"):
            assert name in words
        assert "SimpleProfiler" in words and "RoundProgressBar" in words
        assert "Starts" not in said[0] and "PrivacyBudget" not in said[0]
        assert "timing can reveal their number. Against such an observer, only the outsider's row" in words


class Loud(PrivacyBudget):
    """Of a silent kind, and not silent itself."""

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        print(time.time())


def test_a_run_that_writes_nothing_names_nothing_and_a_subclass_is_not_its_parent():
    budget = {"epsilon": 9.0, "delta": 1e-3, "adversary": "outsider"}
    quiet = (own(), PrivacyBudget(**budget), Starts(), pl.callbacks.EarlyStopping("val_loss"))
    said = describe_timing(trainer_of(*quiet), quiet[0])
    assert "sees how long the run took" in said
    assert "(Loud)" in describe_timing(trainer_of(quiet[0], Loud(**budget)), quiet[0])


@pytest.mark.parametrize("federated", [secret(), secret(NOISE, cohort=4)])
def test_where_a_cohort_has_a_size_there_is_nothing_to_name(federated):
    assert describe_timing(trainer_of(federated, OfOnesOwn(), logger=Stamps()), federated) == ""
