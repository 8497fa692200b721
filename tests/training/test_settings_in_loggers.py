"""What a stock logger of Lightning's keeps of a federation, without another callback."""

from pathlib import Path

import pytest
import yaml

from lightning_fedq import __version__
from lightning_fedq._lightning import pl
from lightning_fedq.data.models import Classifier, Linear
from lightning_fedq.mechanisms import GaussianNoise
from lightning_fedq.privacy.target import PrivacyTarget
from tests.callbacks.runs import small_data, small_run

TARGET = PrivacyTarget(epsilon=8.0, delta=1e-5, adversary="server")


class Module(Classifier):
    """It keeps hyperparameters of its own, as many do."""

    def __init__(self, of_the_module=3):
        super().__init__(Linear(64))
        self.save_hyperparameters()


def run(*loggers):
    noise = GaussianNoise(clip_norm=0.5, noise_multiplier=0.1)  # the target sets another one
    trainer = small_run(rounds=2, logger=list(loggers), seed=None, mechanism=noise, privacy=TARGET, fit=False)
    trainer.fit(Module(), datamodule=small_data())


def check(found):
    assert found["mechanism"].startswith("GaussianNoise(clip_norm=0.5, noise_multiplier=")
    assert found["mechanism_name"] == "GaussianNoise"
    assert float(found["mechanism_settings"]["clip_norm"]) == 0.5
    assert float(found["mechanism_settings"]["noise_multiplier"]) > 0.5, "as the target has set it"
    assert (int(found["num_clients"]), int(found["clients_per_round"]), int(found["rounds"])) == (4, 4, 2)
    assert (float(found["epsilon"]), found["adversary"], found["version"]) == (8.0, "server", __version__)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_csv_and_tensorboard(tmp_path):
    loggers = pl.loggers.CSVLogger(tmp_path, "csv"), pl.loggers.TensorBoardLogger(tmp_path, "board")
    run(*loggers)
    for logger in loggers:
        kept = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
        check(kept["federation"])
        assert kept["of_the_module"] == 3


def test_a_logger_of_ones_own(tmp_path):
    class Own(pl.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.kept = {}

        def log_hyperparams(self, params):
            self.kept |= params

    run(own := Own())
    check(own.kept["federation"])
