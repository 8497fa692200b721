import pytest
import pytorch_lightning as pl
import torch

from lightning_fedq.callbacks import Federated, ReloadBest
from lightning_fedq.functional.flatten import flatten
from tests.callbacks.runs import small_data, small_model, small_run

SCORES = [0.1, 0.5, 0.4, 0.3, 0.2, 0.6]


class Scores(pl.Callback):
    """Log given scores instead of accuracies, and keep the global model at the end of each round."""

    def __init__(self, *scores: float) -> None:
        self.scores, self.validated, self.kept = scores, [], []

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.log("score", self.scores[trainer.current_epoch])
            self.validated.append(flatten(list(pl_module.parameters())))

    def on_train_epoch_end(self, trainer, pl_module):
        self.kept.append(flatten(list(pl_module.parameters())))


def engine_weights(trainer):
    federated = next(c for c in trainer.callbacks if isinstance(c, Federated))
    return federated.engine.weights


def test_the_best_model_comes_back_after_patience_rounds():
    reload_best, scores = ReloadBest("score", patience=3), Scores(*SCORES)
    trainer = small_run(reload_best, scores, rounds=5)
    assert reload_best.num_reloads == 1 and reload_best.best_value == 0.5
    best = scores.validated[1]
    assert torch.equal(scores.kept[3], scores.validated[3])  # three rounds without improvement end here ...
    assert torch.equal(scores.kept[4], best)  # ... with this one
    assert torch.equal(engine_weights(trainer), best)
    assert not torch.equal(scores.validated[4], best)


def test_smaller_can_be_better():
    reload_best = ReloadBest("score", patience=2, mode="min")
    small_run(reload_best, Scores(0.5, 0.2, float("nan"), 0.3), rounds=4)
    assert reload_best.best_value == pytest.approx(0.2) and reload_best.num_reloads == 1


def test_the_count_survives_a_checkpoint(tmp_path):
    whole = ReloadBest("score", patience=3)
    reference = small_run(whole, Scores(*SCORES), rounds=6)
    small_run(ReloadBest("score", patience=3), Scores(*SCORES), rounds=4).save_checkpoint(
        tmp_path / "four.ckpt"
    )
    resumed = ReloadBest("score", patience=3)
    trainer = small_run(resumed, Scores(*SCORES), rounds=6, fit=False)
    trainer.fit(small_model(), datamodule=small_data(), ckpt_path=tmp_path / "four.ckpt")
    assert resumed.num_reloads == whole.num_reloads == 1
    assert torch.equal(engine_weights(trainer), engine_weights(reference))


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"patience must be >= 1 round, got 0"):
        ReloadBest(patience=0)
    with pytest.raises(ValueError, match=r"mode must be 'max' or 'min', got 'best'"):
        ReloadBest(mode="best")
