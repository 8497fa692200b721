"""Callbacks that look at one client's batch, gradients or weights: the same run, whatever the stack."""

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, RoundProgressBar
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer, weights_of


class Scales(pl.Callback):
    """Scales the gradients."""

    def on_after_backward(self, trainer, module):
        for parameter in module.parameters():
            parameter.grad.mul_(0.01)


class Clamps(pl.Callback):
    """Keeps the weights small."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.05, 0.05)


class MixUp(pl.Callback):
    """Mixes the samples of a batch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        batch[0].copy_(0.7 * batch[0] + 0.3 * batch[0].flip(0))


class GradientNorm(pl.Callback):
    """Logs the gradient's norm."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        norm = torch.cat([p.grad.reshape(-1) for p in module.parameters()]).norm()
        module.log("gradient_norm", norm, on_step=False, on_epoch=True)


class Counts(pl.Callback):
    """Counts samples, and how many the outputs get right."""

    is_shared_by_clients = True

    def __init__(self) -> None:
        self.samples, self.losses = 0, 0.0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.samples += len(batch[1])
        self.losses += float(outputs["loss"])


def fit(clients_per_step, *callbacks, **settings):
    fed, module = Federated(FedAvg(), 4, seed=0, clients_per_step=clients_per_step), Classifier()
    trainer = make_trainer(fed, *callbacks, **settings)
    trainer.fit(module, datamodule=Digits(120))
    return fed, trainer, weights_of(module)


@pytest.mark.parametrize("clients_per_step", [4, "auto"])
@pytest.mark.parametrize(
    ("callback", "hook"),
    [
        (Scales, "on_after_backward"),
        (Clamps, "on_train_batch_end"),
        (MixUp, "on_train_batch_start"),
        (GradientNorm, "on_before_optimizer_step"),
        (Counts, "on_train_batch_end"),
    ],
)
def test_callbacks_see_one_client_at_a_time(callback, hook, clients_per_step):
    alone, ours = callback(), callback()
    _, expected, weights = fit(1, alone)
    with pytest.warns(UserWarning, match=f"one client at a time.*{callback.__name__}.*{hook}") as caught:
        fed, trainer, found = fit(clients_per_step, ours)
    assert sum("one client at a time" in str(w.message) for w in caught) == 1
    assert fed.clients_per_step_chosen == 1
    assert torch.equal(found, weights)
    assert not torch.equal(found, fit(1)[2]) or callback in (GradientNorm, Counts)
    assert trainer.callback_metrics.keys() == expected.callback_metrics.keys()
    for name, value in expected.callback_metrics.items():
        assert torch.equal(trainer.callback_metrics[name], value), name
    assert {k: v for k, v in vars(ours).items() if k in ("samples", "losses")} == {
        k: v for k, v in vars(alone).items() if k in ("samples", "losses")
    }
    if callback is Counts:
        assert ours.samples == 240


NORMS = []


def test_hooks_on_parameters_see_one_client_at_a_time():
    """What `wandb.watch` registers."""

    def run(clients_per_step):
        module, fed = Classifier(), Federated(FedAvg(), 4, seed=0, clients_per_step=clients_per_step)
        NORMS.clear()
        module.backbone.weight.register_hook(lambda gradient: NORMS.append(gradient.norm().item()))
        make_trainer(fed, max_epochs=1).fit(module, datamodule=Digits(120))
        return fed.clients_per_step_chosen, weights_of(module), list(NORMS)

    _, expected, alone = run(1)
    with pytest.warns(UserWarning, match="backbone.weight has a gradient hook"):
        chosen, found, norms = run(4)
    assert chosen == 1
    assert torch.equal(found, expected)
    assert norms == alone and len(norms) >= 4 * 3


def test_known_callbacks_keep_the_stack(tmp_path):
    class Best(pl.callbacks.ModelCheckpoint):
        """A subclass that leaves the hooks alone."""

    known = [
        Best(tmp_path / "models"),
        pl.callbacks.Timer(),
        pl.callbacks.LearningRateMonitor(),
        pl.callbacks.DeviceStatsMonitor(),
        pl.callbacks.EarlyStopping("val_acc", mode="max"),
        pl.callbacks.TQDMProgressBar(),
    ]
    settings = {"enable_checkpointing": True, "enable_progress_bar": True, "log_every_n_steps": 1}
    logger = pl.loggers.CSVLogger(tmp_path)
    fed, _, found = fit(4, *known, logger=logger, **settings)
    assert fed.clients_per_step_chosen == 4
    torch.testing.assert_close(found, fit(1)[2], atol=1e-6, rtol=1e-5)
    assert fit(4, RoundProgressBar(), enable_progress_bar=True)[0].clients_per_step_chosen == 4
