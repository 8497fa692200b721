"""Cures that `DPSGD` and the privacy code name."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import LDPQ, CorBin
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.planning import make_plan_context
from lightning_fedq.privacy.target import PrivacyTarget
from tests.callbacks.test_dpsgd_guards import NoisyBackward, Writes
from tests.callbacks.test_privacy import trainer
from tests.cures.rows import Tunable, dpsgd, fed, fit, row
from tests.cures.rows_data import part
from tests.described import Setting, calibrate
from tests.digits_run import Classifier, Digits, ManualSteps


def backbone(*layers):
    return Classifier(nn.Sequential(*layers, nn.Linear(64, 10)))


class ByHand(ManualSteps, Classifier):
    """Steps on its own."""


class Twice(Classifier):
    """Goes backward twice in a step, or adds the losses up."""

    def __init__(self, added: bool) -> None:
        super().__init__()
        self.added = added

    def training_step(self, batch, batch_idx):
        self.batch = batch
        loss = super().training_step(batch, batch_idx)
        return loss + super().training_step(batch, batch_idx) if self.added else loss

    def backward(self, loss):
        loss.backward()
        if not self.added:
            self.training_step(self.batch, 0).backward()


class Counts(nn.Module):
    """A counter that training changes: a buffer, or a plain attribute."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("seen", torch.zeros(()))
        else:
            self.seen = 0.0

    def forward(self, inputs):
        if self.training:
            self.seen = self.seen + 1.0
        return inputs


def frozen_norm():
    norm = nn.BatchNorm1d(64).eval().requires_grad_(False)
    norm.train = lambda mode=True: norm
    return backbone(norm)


def fixed():
    from opacus.validators import ModuleValidator

    module = Classifier(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    )
    module.backbone = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *ModuleValidator.fix(module.backbone))
    return module


class Zero(Classifier):
    """Its loss is 0 until it is not."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def training_step(self, batch, batch_idx):
        return self.factor * super().training_step(batch, batch_idx)


class Opens(Classifier):
    """Opens a file in its constructor, or in setup and not for a copy."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.file = open(__file__) if at_once else None  # noqa: SIM115

    def setup(self, stage):
        if self.file is None:
            self.path = __file__


class Random(Classifier):
    """A loss that is random even in eval mode, or only in training."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 + torch.rand(())) if self.always or self.training else loss


class Noisy(nn.Module):
    def forward(self, inputs):
        return NoisyBackward.apply(inputs)


def noisy(*first):
    return Classifier(nn.Sequential(nn.Linear(64, 64), *first, nn.Linear(64, 10)))


def held(*clients, **settings):
    return fit(
        fed(num_clients=2),
        dpsgd(**settings),
        data=FederatedDataModule(part(), clients=list(clients), batch_size=5),
    )


def copied(**settings):
    (inputs, labels), again = part(10).tensors, [0, *range(10)]
    data = TensorDataset(inputs[again], labels[again])
    return fit(dpsgd(**settings), data=FederatedDataModule(data, batch_size=5))


def writes(how):
    trainer(dpsgd(), epochs=1).fit(Writes(how))


def noisy_clients():
    return fed(fedq.GaussianNoise(1.0, 1.0), seed=None)


def budgeted(epsilon):
    """A run of one round, and one that goes on with a budget."""
    fit(noisy_clients()).save_checkpoint("one.ckpt")
    fit(noisy_clients(), fedq.PrivacyBudget(epsilon, 1e-3, "outsider"), ckpt_path="one.ckpt", max_epochs=2)


def calibrated(mechanism, epsilon, rounds=10, clients=20):
    """A target for twenty clients a round against a server that sees every message."""
    context = make_plan_context(mechanism, 20, 100)
    wanted = PrivacyTarget(epsilon, 1e-5, "server")
    return calibrate(wanted, mechanism, Setting(context, rounds, 1e-5, num_clients=clients), rounds)


row("delta is missing. Choose one below 1 / {},", lambda: check_delta(None), lambda: check_delta(1e-5))
row(
    "DPSGD runs on one device, got {} on {}. Use Trainer(strategy='auto', devices=1).",
    lambda: fit(dpsgd(), strategy="ddp", devices=1),
    lambda: fit(dpsgd(), strategy="auto", devices=1),
)
row(
    "DPSGD needs automatic optimisation. Return the loss, and leave the steps to Lightning.",
    lambda: fit(dpsgd(), module=ByHand()),
    lambda: fit(dpsgd(), module=Classifier()),
)
row("gradient_clip_val clips", lambda: fit(dpsgd(), gradient_clip_val=1.0), lambda: fit(dpsgd()))
row(
    "DPSGD needs full precision, got {}. Use Trainer(precision=32).",
    lambda: fit(dpsgd(), precision="bf16-mixed"),
    lambda: fit(dpsgd(), precision=32),
)
row(
    "overfit_batches would replace the Poisson sampling. Use a small dataset instead.",
    lambda: fit(dpsgd(), overfit_batches=2),
    lambda: fit(dpsgd(), data=Digits(40)),
)
row(
    "DPSGD needs accumulate_grad_batches=1, got {}. Use a larger batch_size, and leave",
    lambda: fit(dpsgd(), accumulate_grad_batches=2),
    lambda: fit(dpsgd(), data=Digits(80, 20)),
)
row(
    "trains without clipping and noise, so its choice is not private. Leave it out, and find the setting on",
    lambda: fit(dpsgd(), pl.callbacks.LearningRateFinder(num_training_steps=5), module=Tunable()),
    lambda: fit(pl.callbacks.LearningRateFinder(num_training_steps=5), module=Tunable(), data=Digits(400)),
    lambda: fit(dpsgd(), module=Tunable()),
)
row(
    "Layers {} mix the samples of a batch. Use GroupNorm, e.g. by",
    lambda: fit(dpsgd(), module=backbone(nn.BatchNorm1d(64))),
    lambda: fit(dpsgd(), module=backbone(nn.GroupNorm(8, 64))),
    lambda: fit(dpsgd(), module=fixed()),
    lambda: fit(dpsgd(), module=frozen_norm()),
)
row(
    "Training changed the buffers {}, which the model releases without noise. Freeze the layer, leave it",
    lambda: fit(dpsgd(), module=backbone(Counts(True))),
    lambda: fit(dpsgd(), module=backbone()),
    lambda: fit(dpsgd(), module=backbone(Counts(True).eval())),
    lambda: fit(dpsgd(), module=backbone(Counts(False))),
)
row(
    "There were several backward passes in one step. Add the losses in training_step, and leave backward to",
    lambda: fit(dpsgd(), module=Twice(False)),
    lambda: fit(dpsgd(), module=Twice(True)),
    error=RuntimeError,
)
row(
    "DPSGD can't find the loss reduction, because the loss of the first samples is {}. Start from weights at",
    lambda: fit(dpsgd(), module=Zero(0.0)),
    lambda: fit(dpsgd(), module=Zero(1.0)),
)
row(
    "DPSGD tries the loss on a copy, but the module can't be copied ({}: {}). Make it copyable, e.g. open",
    lambda: fit(dpsgd(), module=Opens(True)),
    lambda: fit(dpsgd(), module=Opens(False)),
)
row(
    "The loss of one batch is random even in eval mode. Make training_step deterministic when",
    lambda: fit(dpsgd(), module=Random(True)),
    lambda: fit(dpsgd(), module=Random(False)),
)
row(
    "Gradients of one sample are random, though its loss is not. Draw no random numbers in backward.",
    lambda: fit(dpsgd(), module=noisy(Noisy())),
    lambda: fit(dpsgd(), module=noisy()),
)
row(
    "DPSGD charges {} row{} per person, and one row appears in {} samples{}. Remove repeated indices from",
    lambda: held([0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9]),
    lambda: held([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]),
    lambda: held([0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9], rows_per_person=2),
)
row(
    "DPSGD charges {} row{} per person, and one row appears in {} samples{} of equal content. Use",
    lambda: copied(),
    lambda: copied(rows_per_person=2),
    lambda: copied(count_equal_rows=False),
)
row(
    "training_step changed the parameters {} without noise, as Embedding(max_norm=...) does. Leave the",
    lambda: writes("data"),
    lambda: fit(dpsgd()),
    lambda: writes("between steps"),
)
row(
    "The budget of epsilon {} at delta {} is spent: {} rounds fit into it, and {} are done. Raise the",
    lambda: budgeted(0.5),
    lambda: budgeted(50.0),
    lambda: fit(noisy_clients()),
    error=RuntimeError,
)
row(
    "rounds of a client still {}. Use fewer rounds, more clients, or a larger epsilon",
    lambda: calibrated(LDPQ(1.0), 4e-6),
    lambda: calibrated(LDPQ(1.0), 4e-6, rounds=4),
    lambda: calibrated(LDPQ(1.0), 4e-6, clients=1000),
    lambda: calibrated(LDPQ(1.0), 8e-6),
)
row(
    ". No number of rounds or clients changes that. Use a mechanism that protects every message",
    lambda: calibrated(CorBin(1.0), 8.0),
    lambda: calibrated(LDPQ(1.0), 8.0),
)
row(
    "stated has no entry {}. Choose from {}",
    lambda: fedq.RunFolder(stated={"clients": "hospitals"}),
    lambda: fedq.RunFolder(stated={"client": "a hospital"}),
)
row(
    "must be one line of text, got {}. Write it in quotes",
    lambda: fedq.RunFolder(stated={"client": 7}),
    lambda: fedq.RunFolder(stated={"client": "7"}),
)
