"""`DPSGD` reads the backward pass of the training step, and no other one."""

import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer, weights_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))


class InputGradients(Classifier):
    """Gradients with respect to inputs, in validation or in training."""

    where = "validation"

    def __init__(self):
        super().__init__(net())

    def saliency(self, batch):
        with torch.inference_mode(False), torch.enable_grad():
            inputs = batch[0].clone().requires_grad_()
            [gradient] = torch.autograd.grad(self.backbone(inputs).sum(), inputs)
        return gradient

    def training_step(self, batch, batch_idx):
        if self.where == "training":
            self.saliency(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.where == "validation":
            self.backbone.train(batch_idx % 2 == 0)
            self.log("saliency", self.saliency(batch).norm())
        return super().validation_step(batch, batch_idx)


class InTraining(InputGradients):
    where = "training"


class Nowhere(InputGradients):
    where = "nowhere"


class InPlace(Classifier):
    def __init__(self):
        super().__init__(net())
        self.backbone[0].compile()


class Wrapped(Classifier):
    def __init__(self):
        super().__init__(net())
        self.backbone[2] = torch.compile(self.backbone[2])


class Complex(Classifier):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class ReturnsNone(Classifier):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


def fit(module, clients, epochs=2):
    private = DPSGD(1.0, 1.0, delta=1e-4, seed=1)
    own = [Federated(FedAvg(), clients, seed=1, clients_per_step=1)] if clients else []
    trainer = make_trainer(*own, private, max_epochs=epochs, inference_mode=False)
    trainer.fit(module, datamodule=Digits(80))
    return weights_of(module)


@pytest.mark.parametrize("clients", [0, 2])
def test_input_gradients_in_validation_change_nothing(clients):
    assert torch.equal(fit(InputGradients(), clients), fit(Nowhere(), clients))


@pytest.mark.parametrize("clients", [0, 2])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            InTraining,
            r"a backward pass of its own through backbone\.\d \(Linear\), e\.g\. for input gradients",
        ),
        (InPlace, r"backbone\.0 \(Linear\).* are compiled"),
        (Wrapped, r"backbone\.2 \(OptimizedModule\).* are compiled"),
        (Complex, "phase are complex"),
        (ReturnsNone, "training_step must return a loss for every batch, got NoneType"),
    ],
)
def test_what_can_not_be_read_is_refused_before_the_first_step(kind, words, clients):
    module = kind()
    before = weights_of(module)
    with pytest.raises((ValueError, RuntimeError), match=words):
        fit(module, clients)
    assert torch.equal(weights_of(module), before)
    assert isinstance(module, pl.LightningModule)
