"""The direction of a metric: told by a callback or an argument, and never guessed from a name."""

import json

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.clients.evaluation import ClientEvaluation
from lightning_fedq.comparison.table import compare
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer

NAMES = ["val_wer", "val_ece", "val_acc", "val_loss", "val_lossless_ratio", "val_error_free", "val_rank"]


class Ranked(Classifier):
    """Each client's metrics are 1 to 10 times its number, and go up by one a round."""

    def validation_step(self, batch, batch_idx):
        client = getattr(self.trainer, "client", None) or 0
        for name in NAMES:
            self.log(name, float(client + 1 + self.trainer.current_epoch))


def is_checkpoint(callback):
    return isinstance(callback, pl.callbacks.ModelCheckpoint)


def run(*callbacks, rounds=1, module=None, **evaluation):
    evaluated = ClientEvaluation(0.25, **evaluation)
    federated = Federated(FedAvg(), 10, seed=1, clients_per_step=1, evaluate_clients=evaluated)
    trainer = make_trainer(
        federated, *callbacks, max_epochs=rounds, enable_checkpointing=any(map(is_checkpoint, callbacks))
    )
    trainer.fit(module or Ranked(), datamodule=Digits(100))
    return federated.client_evaluations[-1], trainer


def test_both_ends_are_released_and_none_is_called_the_worst():
    measured, trainer = run()
    for name in NAMES:
        spread = measured.spread(name)
        assert (spread.lowest_decile, spread.highest_decile, spread.worst_decile) == (1.0, 10.0, None)
        assert float(trainer.callback_metrics[f"clients/{name}_highest_decile"]) == 10.0
    assert not [name for name in trainer.callback_metrics if "worst" in name]


@pytest.mark.parametrize("watched", ["val_wer", "clients/val_wer_mean", "clients/val_wer_highest_decile"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_callback_that_watches_a_metric_tells_its_direction(watched, mode, tmp_path):
    keep = pl.callbacks.ModelCheckpoint(tmp_path, monitor=watched, mode=mode)
    spread = run(keep)[0].spread("val_wer")
    assert spread.worst_decile == (10.0 if mode == "min" else 1.0)
    stop = pl.callbacks.EarlyStopping(watched, mode=mode, patience=9)
    measured, trainer = run(stop)
    assert measured.spread("val_wer") == spread and measured.spread("val_ece").worst_decile is None
    assert float(trainer.callback_metrics["clients/val_wer_worst_decile"]) == spread.worst_decile


class Plateau(Ranked):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_wer"}}


def test_an_argument_or_a_schedule_tells_it_and_two_that_contradict_do_not(tmp_path):
    measured, _ = run(modes={"val_wer": "min", "val_rank": "max"})
    assert (measured.spread("val_wer").worst_decile, measured.spread("val_rank").worst_decile) == (10.0, 1.0)
    assert run(module=Plateau())[0].spread("val_wer").worst_decile == 10.0
    both = [pl.callbacks.EarlyStopping("val_wer", mode=mode, patience=9) for mode in ("min", "max")]
    assert run(*both)[0].spread("val_wer").worst_decile is None
    with pytest.raises(ValueError, match=r"modes must be .* got \{'val_wer': 'low'\}"):
        ClientEvaluation(modes={"val_wer": "low"})


def finished(root, name, *callbacks, **settings):
    run(RunFolder(name, root=root, monitor="val_wer", show=False, **settings), *callbacks, rounds=2)
    return root / name


def test_the_best_round_of_a_folder_and_of_a_comparison(tmp_path):
    """The word error rate is 1 and then 2, so the first round is the best."""
    silent = finished(tmp_path, "silent")
    told = finished(tmp_path, "told", mode="min")
    watched = finished(tmp_path, "watched", pl.callbacks.EarlyStopping("val_wer", mode="min", patience=9))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (silent, told, watched)]
    assert summaries[0]["best"] == {} and summaries[0]["last"]["round"] == 2
    assert "last | val_wer = 2 after round 2" in (silent / "report.md").read_text()
    for folder, summary in zip((told, watched), summaries[1:], strict=True):
        assert summary["best"] == {"monitor": "val_wer", "value": 1.0, "round": 1.0}
        assert "best | val_wer = 1 after round 1" in (folder / "report.md").read_text()
    rows = compare({"told": told, "watched": watched}, "val_wer", tmp_path / "known")
    assert [row["best"] for row in rows] == [1.0, 1.0]
    rows = compare({"told": told, "silent": silent}, "val_wer", tmp_path / "unknown")
    assert [(row["best"], row["final"]) for row in rows] == [("-", 2.0), ("-", 2.0)]
    assert [row["best"] for row in compare({"silent": silent}, "val_wer", tmp_path / "asked", "max")] == [2.0]
