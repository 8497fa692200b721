"""`examples/train.py` knows nothing of us; a fragment federates it."""

from pathlib import Path

import pytest
from pytorch_lightning.cli import LightningCLI

from lightning_fedq._lightning import pl
from tests.loaded import loaded

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(
        pl.__name__ != "pytorch_lightning", reason="the example imports pytorch_lightning, not this package"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Lightning's CLI uses jsonargparse the old way
]


@pytest.fixture(autouse=True)
def _as_from_a_shell(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    example = loaded("examples/train.py")
    plain = str(ROOT / "examples" / "plain.yaml")
    args = ["fit", "--config", plain, *arguments, "--trainer.enable_model_summary", "false"]
    return LightningCLI(example.DigitClassifier, example.DigitsData, args=args).trainer


def test_does_not_know_us():
    assert "fedq" not in (ROOT / "examples" / "train.py").read_text().split('"""', 2)[2]


def test_trains_centrally_without_the_fragment():
    trainer = run("--trainer.max_epochs", "2")
    assert "fed/round" not in trainer.callback_metrics
    assert trainer.callback_metrics["val_acc"] > 0.7


def test_the_fragment_federates_it(capsys):
    trainer = run("--config", str(ROOT / "callbacks" / "corbin.yaml"), "--trainer.max_epochs", "5")
    assert trainer.callback_metrics["fed/round"] == 5
    assert trainer.callback_metrics["fed/uplink_bits"] == 20 * 4810
    assert trainer.callback_metrics["val_acc"] > 0.2
    shown = capsys.readouterr().out
    for what in ("val_acc", "server that sees every message", "MB up", "runs/corbin/: report.md"):
        assert what in shown
