"""`DPSGD` reads the backward pass of the training step, and no other one."""

import warnings
from functools import partial

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


class ReturnsLater(Classifier):
    """Returns no loss for some batches: by their number, or where a loss is not finite."""

    how = "number"

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.how == "number":
            return self.unless(batch_idx == 5, loss)
        if not torch.isfinite(loss):
            return None
        return loss

    def unless(self, skips, loss):
        return None if skips else loss


class ReturnsIfFinite(ReturnsLater):
    how = "finite"


class Layers(Classifier):
    """Layers that compute outputs in one of several ways."""

    def __init__(self):
        super().__init__(net())

    def outputs(self, inputs):
        return self.backbone(inputs)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.outputs(batch[0]), batch[1])


class Functional(Layers):
    """Input gradients by `torch.func`, for each sample."""

    def outputs(self, inputs):
        def total(one):
            return self.backbone(one).sum()

        return self.backbone(inputs + 0.1 * torch.func.vmap(torch.func.grad(total))(inputs))


class Mapped(Layers):
    """Calls its layers under `vmap`, which runs no hooks of modules."""

    def outputs(self, inputs):
        return torch.func.vmap(self.backbone)(inputs)


class Direct(Layers):
    """Uses a layer's weight without its call."""

    def outputs(self, inputs):
        return nn.functional.linear(self.backbone[:2](inputs), self.backbone[2].weight)


@partial(torch.compile, backend="eager")
def call(layers, inputs):
    return layers(inputs)


class CompiledCall(Layers):
    """Calls its layers in a compiled function."""

    def outputs(self, inputs):
        return call(self.backbone, inputs)


class ChangesOutputs(Layers):
    """An in-place layer behind a trained one."""

    def __init__(self):
        super().__init__()
        self.backbone[1] = nn.ReLU(inplace=True)


class ChangesByHand(Layers):
    def outputs(self, inputs):
        hidden = self.backbone[0](inputs)
        hidden += 1
        return self.backbone[2](hidden)


class Scripted(Layers):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.backbone[2] = torch.jit.script(self.backbone[2])


class NotReduced(Layers):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.outputs(batch[0]), batch[1], reduction="none")


class Constant(Layers):
    """A loss that skips every third batch in fact."""

    def training_step(self, batch, batch_idx):
        skips = batch_idx % 3 == 2
        return torch.zeros((), requires_grad=True) if skips else super().training_step(batch, batch_idx)


class Unused(Layers):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 3)


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
        (ReturnsNone, "training_step must return a loss for every batch, got NoneType at batch 0"),
        (ReturnsLater, "training_step must return a loss for every batch, got NoneType at batch 5"),
        (ReturnsIfFinite, "training_step must return a loss for every batch, but its code can return None"),
        (Functional, r"backbone\.\d \(Linear\) can't give per-sample gradients .*torch\.func"),
        (Mapped, r"backbone\.0\.weight, .* get gradients that hooks do not see.*torch\.func"),
        (Direct, r"backbone\.2\.weight get gradients that hooks do not see"),
        (CompiledCall, r"backbone\.0\.weight, .* get gradients that hooks do not see.*torch\.compile"),
        (ChangesOutputs, r"backbone\.1 \(ReLU\) can't give per-sample gradients .*in-place"),
        (ChangesByHand, r"training_step can't give per-sample gradients .*in-place"),
        (Scripted, r"backbone\.2 \(RecursiveScriptModule\).* are compiled"),
        (NotReduced, r"must return one number, got a loss of shape \(8,\)"),
        (Constant, "The loss at batch 2 depends on no parameter"),
        (Unused, r"spare\.weight, spare\.bias have no gradient of a batch"),
    ],
)
def test_what_can_not_be_read_is_refused_before_the_first_step(kind, words, clients):
    module = kind()
    before = weights_of(module)
    with pytest.raises((ValueError, RuntimeError), match=words):
        fit(module, clients)
    assert torch.equal(weights_of(module), before)
    assert isinstance(module, pl.LightningModule)
