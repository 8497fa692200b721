"""`fed/*` in TensorBoard, MLflow and CSV, with the real packages, offline: the same names and numbers."""

import csv
from pathlib import Path

import pytest
import yaml

from lightning_fedq import FixedSize
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, PrivacyBudget, RunFolder, WandbRounds
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.mechanisms import LDPQ, GaussianNoise
from tests.callbacks.runs import small_run
from tests.described import privacy_report
from tests.digits_run import Classifier, Digits, make_trainer

ROUNDS = 3


def tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [event.value for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def table(folder):
    values = {}
    for row in csv.DictReader((folder / "metrics.csv").read_text().splitlines()):
        for name, value in row.items():
            if value:
                values.setdefault(name, []).append(float(value))
    return values


def mlflow_logger(folder):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    return pl.loggers.MLFlowLogger(
        "tests", tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_location=str(folder / "artifacts")
    )


def mlflow_values(logger):
    run = logger.experiment.get_run(logger.run_id)
    return {
        name: [one.value for one in logger.experiment.get_metric_history(logger.run_id, name)]
        for name in run.data.metrics
    }


def run(folder, *loggers, **settings):
    made = RunFolder("mine", str(folder), show=False)
    budget = PrivacyBudget(epsilon=1e3, delta=1e-5, adversary="server")
    return made, small_run(made, budget, rounds=ROUNDS, logger=list(loggers), seed=None, **settings)


def expected(folder, trainer):
    """Of the run folder's own table: what every tracker must have, round by round."""
    names = ("uplink_bits", "downlink_bits", "sim_mse")
    spent = [privacy_of(trainer, round + 1) for round in range(ROUNDS)]
    return {f"fed/{name}": [row[name] for row in folder.rows] for name in names} | {"fed/epsilon": spent}


def privacy_of(trainer, rounds):
    """Epsilon of so many rounds by the report."""
    engine = find_federated(trainer, "the test").started_engine
    report = privacy_report(engine.mechanism, engine.context(engine.next_plan()), rounds=rounds, delta=1e-5)
    return next(row.epsilon_run for row in report.rows if row.adversary == "SERVER")


def check(tracked, folder, trainer, csv_folder):
    """A tracker has the numbers of the table, and no other names than the CSV file, which has them too."""
    columns = table(csv_folder)
    for name, values in expected(folder, trainer).items():
        for found in (tracked, columns):
            assert found[name] == pytest.approx(values, rel=1e-6), name
    ours, theirs = ({name for name in found if name.startswith("fed/")} for found in (tracked, columns))
    assert ours == theirs


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_the_same_in_tensorboard_and_csv(tmp_path):
    board = pl.loggers.TensorBoardLogger(tmp_path, "board", version="one")
    plain = pl.loggers.CSVLogger(tmp_path, "csv", version="one")
    folder, trainer = run(tmp_path, board, plain, mechanism=LDPQ(epsilon_per_coordinate=0.01))
    check(tensorboard(Path(board.log_dir)), folder, trainer, Path(plain.log_dir))
    hyper = yaml.safe_load((Path(plain.log_dir) / "hparams.yaml").read_text())
    assert hyper["federation"]["mechanism"] == "LDPQ(epsilon_per_coordinate=0.01)"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # MLflow's own
def test_the_same_in_mlflow(tmp_path):
    logger = mlflow_logger(tmp_path)
    plain = pl.loggers.CSVLogger(tmp_path, "csv", version="one")
    folder, trainer = run(tmp_path, logger, plain, mechanism=LDPQ(epsilon_per_coordinate=0.01))
    check(mlflow_values(logger), folder, trainer, Path(plain.log_dir))
    parameters = logger.experiment.get_run(logger.run_id).data.params
    assert parameters["federation/mechanism"] == "LDPQ(epsilon_per_coordinate=0.01)"
    run(
        tmp_path, logger, mechanism=LDPQ(epsilon_per_coordinate=0.02)
    )  # a parameter of MLflow is written once
    again = logger.experiment.get_run(logger.run_id).data.params
    assert again["federation/mechanism"] == "LDPQ(epsilon_per_coordinate=0.01)"


def test_a_table_of_whose_updates_were_not_finite_tells_who_was_drawn(tmp_path):
    settings = {"diagnostics": False, "local_steps": 2}
    mechanism = GaussianNoise(clip_norm=0.5, noise_multiplier=1.0)
    fed = Federated(mechanism, 8, cohort=FixedSize(4, secret=True), clients_per_step=1, **settings)
    logger = pl.loggers.WandbLogger(project="tests", save_dir=str(tmp_path), offline=True)
    with pytest.raises(ValueError, match="WandbRounds writes values computed from the drawn clients' data"):
        make_trainer(fed, WandbRounds(), max_epochs=1, logger=logger).fit(Classifier(), datamodule=Digits(80))
    logger.experiment.finish()  # Lightning had opened it, and the next test would go on in it
    make_trainer(fed, max_epochs=1).fit(Classifier(), datamodule=Digits(80))
