"""Two worlds in which one client's held-out data differ: nobody else's measurement moves."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from lightning_fedq import ClientEvaluation
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Digits, digits, make_trainer
from tests.training.test_client_evaluation import BATCH, CLIENTS, SAMPLES, Measured


class ClearedAtTheEnd(Measured):
    """Averages a list that the last hook clears."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append(batch[0].mean())
        self.log("val", torch.stack(self.seen).mean())

    def on_validation_end(self):
        self.seen.clear()


class MetricInADict(Measured):
    """A metric that no module has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"mean": MeanMetric()}

    def validation_step(self, batch, batch_idx):
        self.metrics["mean"].update(batch[0].mean())
        self.log("val", self.metrics["mean"].compute())


class NormInTrainingMode(Measured):
    """Validation updates statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64, affine=False)

    def validation_step(self, batch, batch_idx):
        self.norm.train()
        self.norm(batch[0])
        self.log("val", self.norm.running_mean.mean())


class Draws(Measured):
    """Draws once a sample, from the process's generator."""

    def validation_step(self, batch, batch_idx):
        self.log("val", torch.rand(len(batch[0])).mean() + 0.01 * batch[0].mean())


class BatchHooks(Measured):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def validation_step(self, batch, batch_idx):
        return batch[0].mean()

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.total += float(outputs)

    def on_validation_epoch_end(self):
        self.log("val", self.total)


SHAPES = (ClearedAtTheEnd, MetricInADict, NormInTrainingMode, Draws, BatchHooks)


def world(shape, is_other, **settings):
    """Everything equal but what client 0 holds out: other values, and two batches more."""
    inputs, labels = digits()
    held_out = []
    for client in range(CLIENTS):
        own = range(10 * client, 10 * client + 10)
        samples = inputs[list(own)]
        if client == 0 and is_other:
            samples = torch.cat([5.0 * samples + 1.0, samples])
        held_out.append(TensorDataset(samples, labels[: len(samples)]))
    evaluation = ClientEvaluation(held_out)
    fed = Federated(FedAvg(), CLIENTS, seed=1, evaluate_clients=evaluation, **settings)
    make_trainer(fed, max_epochs=2).fit(shape(), datamodule=Digits(SAMPLES, BATCH))
    return fed.client_evaluations


@pytest.mark.parametrize(
    "settings", [{}, {"clients_per_step": 3}, {"personal_parameters": ["backbone.3.*"]}], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_other_client_s_value_moves(shape, settings):
    one, other = world(shape, False, **settings), world(shape, True, **settings)
    for here, there in zip(one, other, strict=True):
        assert here.values.keys() == there.values.keys()
        for model, found in here.values.items():
            moved = (found["val"] != there.values[model]["val"]).nonzero().flatten().tolist()
            assert moved == [0], (model, moved)


def test_each_client_draws_by_a_seed_of_its_own():
    """Else clients with equal data have equal noise, and a value hangs on what was drawn before."""

    class OnlyDraws(Measured):
        def validation_step(self, batch, batch_idx):
            self.log("val", torch.rand(()))

    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        runs.append([one.values["global"]["val"] for one in world(OnlyDraws, False)])
    assert len(torch.cat(runs[0]).unique()) == sum(map(len, runs[0]))
    assert all(map(torch.equal, *runs))


def test_the_hooks_of_a_validation_run_in_its_order():
    called = []

    class Says(Measured):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            called.append("step")

    def hook(name):
        return lambda self, *args, **kwargs: called.append(name)

    names = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
    for name in names:
        setattr(Says, f"on_validation_{name}", hook(name))
    fed = Federated(FedAvg(), CLIENTS, seed=1, evaluate_clients=ClientEvaluation(0.25))
    trainer = make_trainer(fed, max_epochs=1, limit_val_batches=0, num_sanity_val_steps=0)
    trainer.fit(Says(), datamodule=Digits(SAMPLES, BATCH))
    assert called == [*names[:3], "step", *names[3:]] * CLIENTS
