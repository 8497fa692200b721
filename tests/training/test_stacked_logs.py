"""What is logged and counted in a stack, against the same clients one at a time."""

import pytest
import torch
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_fedq._lightning import pl
from tests.digits_run import Classifier, Digits, weights_of
from tests.training.test_client_parallel import fit


def assert_same_run(kind, **settings):
    """Metrics and weights of a stack of four, and of one client at a time; the stack's metrics."""
    alone, stacked = kind(), kind()
    _, expected = fit(alone, 1, Digits(117), **settings)
    fed, trainer = fit(stacked, 4, Digits(117), **settings)
    assert fed.clients_per_step_chosen == 4
    torch.testing.assert_close(weights_of(stacked), weights_of(alone), atol=2e-6, rtol=1e-5)
    rounded = {"fed/sim_snr_db"}  # of a sum without noise: there only where the last bit was rounded
    assert trainer.callback_metrics.keys() - rounded == expected.callback_metrics.keys() - rounded
    for name, value in expected.callback_metrics.items():
        if not name.endswith("_step") and name not in rounded:
            torch.testing.assert_close(trainer.callback_metrics[name], value, atol=1e-5, rtol=1e-5, msg=name)
    return dict(trainer.callback_metrics)


class Reductions(Classifier):
    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        losses = nn.functional.cross_entropy(self.backbone(inputs), labels, reduction="none")
        epoch = {"on_step": False, "on_epoch": True}
        self.log("samples", float(len(labels)), reduce_fx="sum", **epoch)
        self.log("total", losses.sum(), reduce_fx=torch.sum, **epoch)
        self.log("largest", losses.max(), reduce_fx="max", **epoch)
        self.log("smallest", losses.min(), False, False, False, True, min)
        self.log("mean", losses.mean(), **epoch)
        self.log("right", (self.backbone(inputs).argmax(1) == labels).sum().float(), reduce_fx=sum, **epoch)
        self.log("weighted", losses[0], batch_size=int(labels.shape[0]) * 3, **epoch)
        self.log_dict({"first": losses[0], "one": 1.0}, on_step=True, on_epoch=True)
        return losses.mean()


def test_the_users_own_reductions_count_all_clients():
    logged = assert_same_run(Reductions)
    assert logged["samples"] == 117.0
    assert logged["one_epoch"] == 1.0
    assert logged["smallest"] < logged["mean"] < logged["largest"]


def test_one_name_logged_twice_in_a_step_counts_twice():
    class Twice(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for part in (batch[0][:3], batch[0][3:]):
                self.log("pixels", part.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
            return loss

    assert_same_run(Twice)


class Idiom(Classifier):
    """The usual way: call the metric, log the metric."""

    def __init__(self) -> None:
        super().__init__()
        self.acc, self.loss = MulticlassAccuracy(10), MeanMetric()

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.backbone(inputs)
        loss = nn.functional.cross_entropy(scores, labels)
        self.acc(scores, labels)
        self.loss.update(loss)
        self.log("acc", self.acc, on_step=False, on_epoch=True)
        self.log("loss", self.loss, on_step=True, on_epoch=True)
        return loss


class Values(Classifier):
    """Logs what the metric returns; a ranking metric with list states, too."""

    def __init__(self) -> None:
        super().__init__()
        self.acc, self.most = MulticlassAccuracy(10, average="micro"), MaxMetric()
        self.auc = MulticlassAUROC(10)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.backbone(inputs)
        loss = nn.functional.cross_entropy(scores, labels)
        self.log("acc", self.acc(scores, labels), on_step=False, on_epoch=True)
        self.auc.update(preds=scores, target=labels)
        self.most(scores)
        self.log_dict({"auc": self.auc, "most": self.most}, on_step=False, on_epoch=True)
        return {"loss": loss, "scores": scores}


class Collection(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = MetricCollection(
            {"acc": MulticlassAccuracy(10), "f1": MulticlassF1Score(10)}, prefix="train/"
        )

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.backbone(inputs)
        values = self.metrics(scores, labels)
        self.log_dict(
            {f"{name}_batch": value for name, value in values.items()}, on_step=False, on_epoch=True
        )
        self.log_dict(self.metrics, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(scores, labels)


class ByHand(Classifier):
    """Updated in the step, computed at the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = SumMetric()

    def training_step(self, batch, batch_idx):
        self.counts.update(torch.ones(len(batch[1])))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("count", self.counts.compute())
        self.counts.reset()


@pytest.mark.filterwarnings("ignore:No positive samples:UserWarning")
@pytest.mark.parametrize("kind", [Idiom, Values, Collection])
def test_metric_objects_count_every_client(kind):
    assert_same_run(kind)


def test_a_metric_computed_by_hand_is_the_mean_of_the_clients():
    with pytest.warns(UserWarning, match="one client at a time.*ByHand overrides on_train_epoch_end"):
        fed, trainer = fit(ByHand(), 4, Digits(117))
    assert fed.clients_per_step_chosen == 1, "its hook expects one client"
    assert trainer.callback_metrics["count"] == 117.0 / 6


def test_a_step_of_a_stack_shows_the_mean_of_its_clients(tmp_path):
    steps = []

    class Steps(Idiom):
        def training_step(self, batch, batch_idx):
            inputs, labels = batch
            scores = self.backbone(inputs)
            right = (scores.argmax(1) == labels).float().mean()
            self.log("by_hand", right, on_step=True)
            self.log("acc", self.acc, on_step=True)
            self.acc(scores, labels)
            return nn.functional.cross_entropy(scores, labels)

    class Keep(pl.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            if "acc" in metrics:
                steps.append((metrics["acc"], metrics["by_hand"]))

    module = Steps()
    module.acc = MulticlassAccuracy(10, average="micro")
    fit(module, 6, logger=Keep(tmp_path), log_every_n_steps=1)
    assert len(steps) == 4
    for metric, by_hand in steps:
        assert abs(metric - by_hand) < 1e-6


class Computes(Idiom):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("so_far", self.acc.compute())
        return loss


class Adds(Idiom):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 0.0 * self.acc(self.backbone(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Computes, r"compute\(\) of MulticlassAccuracy"), (Adds, "The value of MulticlassAccuracy")],
)
def test_metrics_whose_value_is_needed_in_the_step_go_one_client_at_a_time(kind, reason):
    alone, module = kind(), kind()
    _, expected = fit(alone, 1, Digits(117))
    with pytest.warns(UserWarning, match=f"one client at a time.*{reason}"):
        fed, trainer = fit(module, 4, Digits(117))
    assert fed.clients_per_step_chosen == 1
    assert torch.equal(weights_of(module), weights_of(alone))
    assert torch.equal(trainer.callback_metrics["acc"], expected.callback_metrics["acc"])
