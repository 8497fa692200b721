"""A stack of clients against the same clients one at a time."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.stack import ELEMENTWISE_OPTIMIZERS
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer, weights_of


def fit(module, clients_per_step, data=None, **settings):
    fed = Federated(FedAvg(), 6, seed=0, clients_per_step=clients_per_step)
    trainer = make_trainer(fed, **settings)
    trainer.fit(module, datamodule=data or Digits(120))
    return fed, trainer


@pytest.mark.parametrize("kind", ELEMENTWISE_OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_elementwise_optimiser_gives_the_same_weights(kind):
    def build():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
        return Classifier(backbone, lambda params: kind(params, lr=0.05, weight_decay=1e-3) if kind
                          is not torch.optim.Rprop else kind(params, lr=0.05))  # fmt: skip

    alone, side_by_side = build(), build()
    fit(alone, 1)
    fit(side_by_side, 4)
    torch.testing.assert_close(weights_of(alone), weights_of(side_by_side), atol=2e-5, rtol=1e-3)
    assert not torch.equal(weights_of(alone), weights_of(build()))


class Logs(Classifier):
    """Logs all there is to log, and returns a dictionary."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.backbone(inputs)
        loss = nn.functional.cross_entropy(scores, labels)
        self.log("epoch_loss", loss, False, on_step=False, on_epoch=True)
        self.log_dict(
            {"acc": (scores.argmax(1) == labels).float().mean(), "one": 1.0}, on_step=False, on_epoch=True
        )
        return {"loss": loss, "scores": scores, "name": "x"}


class Outputs(pl.Callback):
    """A callback of the package, as far as anybody can tell: it is handed what a stack's step returns."""

    knows_clients = True
    is_shared_by_clients = True

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, *rest):
        self.seen.append(outputs)


def test_outputs_of_training_step_reach_callbacks():
    fed, outputs = Federated(FedAvg(), 6, seed=0, clients_per_step=6), Outputs()
    make_trainer(fed, outputs, max_epochs=1).fit(Logs(), datamodule=Digits(120))
    seen = outputs.seen
    assert seen[0]["scores"].shape == (6, 10, 10)
    assert seen[0]["name"] == "x"
    assert seen[0]["loss"].dim() == 0


class TwoBiases(Classifier):
    """A scalar parameter, and two biases that get one and the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.first, self.second = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.gain * self.backbone(inputs) + (self.first + self.second)
        return nn.functional.cross_entropy(scores, labels)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_scalar_parameters_and_shared_gradients(clip):
    torch.manual_seed(0)
    alone, side_by_side = TwoBiases(), TwoBiases()
    side_by_side.load_state_dict(alone.state_dict())
    fit(alone, 1, gradient_clip_val=clip)
    fit(side_by_side, 4, gradient_clip_val=clip)
    torch.testing.assert_close(weights_of(alone), weights_of(side_by_side), atol=2e-6, rtol=1e-4)
    assert side_by_side.gain != 1.5


def test_dropout_masks_differ_between_the_clients_of_a_stack():
    class Masks(Classifier):
        def training_step(self, batch, batch_idx):
            mask = nn.functional.dropout(torch.ones(50), 0.5)
            return {"loss": super().training_step(batch, batch_idx), "mask": mask}

    fed, outputs = Federated(FedAvg(), 3, seed=0, clients_per_step=3), Outputs()
    make_trainer(fed, outputs, max_epochs=1).fit(Masks(), datamodule=Digits(30))
    assert len({tuple(row) for row in outputs.seen[0]["mask"].tolist()}) == 3


class Remembers(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.remembered = [loss.detach()]
        return loss


class Branches(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 1 else 2 * loss


class Unused(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Hooks(Classifier):
    def on_after_backward(self):
        self.touched = True


class ScalesByNumPy(Classifier):
    """Draws a coefficient by NumPy, as MixUp's authors do."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002 (as tutorials have it)
        return super().training_step((share * inputs, labels), batch_idx)


class Counts(Classifier):
    """Warms up by a counter of its own, beside dropout, whose first step in a stack runs twice."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10)))
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx) * min(1.0, self.steps / 3)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Remembers, "training_step keeps tensors in remembered"),
        (Branches, "data-dependent control flow"),
        (Unused, r"parameters \['unused.weight', 'unused.bias'\] get no gradient"),
        (Hooks, "Hooks overrides on_after_backward"),
        (ScalesByNumPy, "from Python or NumPy"),
        (Counts, r"changes numbers of Python \(steps\)"),
    ],
)
@pytest.mark.parametrize("clients_per_step", [3, "auto"])
def test_what_cannot_be_stacked_trains_one_at_a_time_with_one_warning(module, reason, clients_per_step):
    torch.manual_seed(0)
    stacked, alone = module(), module()
    alone.load_state_dict(stacked.state_dict())
    with pytest.warns(UserWarning) as caught:
        fed, _ = fit(stacked, clients_per_step, max_epochs=1)
    said = [str(w.message) for w in caught if "one client at a time" in str(w.message)]
    assert len(said) == 1
    assert re.search(reason, said[0]), said[0]
    assert fed.clients_per_step_chosen == 1
    assert fed.records[0].num_received == 6
    fit(alone, 1, max_epochs=1)
    assert torch.equal(weights_of(stacked), weights_of(alone))


class Skips(Classifier):
    """Returns no loss for every second batch, which skips it."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_is_skipped_in_a_stack_too():
    def build():
        return Skips(optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))

    alone, side_by_side = build(), build()
    fit(alone, 1)
    fed, _ = fit(side_by_side, 3)
    assert fed.clients_per_step_chosen == 3
    torch.testing.assert_close(weights_of(alone), weights_of(side_by_side), atol=1e-6, rtol=1e-5)
