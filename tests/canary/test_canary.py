"""Nothing goes around the mechanism: a standing test over features of Lightning.

A mechanism double sends zeros whatever the update, and nothing else is replaced. Two runs on different
training data must then agree in every tensor that can be reached from module, trainer, callbacks, loggers and
files, except for what the privacy page lists (`reach.LISTED`).
"""

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, ReloadBest, RunFolder
from lightning_fedq.clients.evaluation import ClientEvaluation
from tests.callbacks.silent import Silent
from tests.canary.reach import differences, files, tensors
from tests.digits_run import make_trainer
from tests.training.published_optimizers import SAM, Estimates, Lookahead
from tests.tried import without_forks

CLIENTS, BATCHES, SIZE = 3, 2, 4


class Data(pl.LightningDataModule):
    """Training data of one seed, and validation data that are always the same."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def _set(self, seed, size):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(size, 6, generator=generator)
        return TensorDataset(inputs, torch.randint(3, (size,), generator=generator))

    def train_dataloader(self):
        return DataLoader(self._set(self.seed, CLIENTS * BATCHES * SIZE), batch_size=SIZE, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self._set(0, SIZE), batch_size=SIZE)


class Model(pl.LightningModule):
    """Two layers with something between; `extra` is called with module and batch in each training step."""

    def __init__(self, between: nn.Module | None = None, extra: Any = None, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(6, 5), between or nn.Identity(), nn.Tanh())
        self.head = nn.Linear(5, 3)
        self.extra, self.settings = extra or (lambda module, batch: None), settings

    def training_step(self, batch, batch_idx):
        self.extra(self, batch)
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1]))

    def configure_optimizers(self):
        wanted = self.head if self.settings.get("head_only") else self
        optimizer = self.settings.get("optimizer", torch.optim.Adam)(wanted.parameters(), lr=0.1)
        schedule = self.settings.get("schedule")
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)}


class At(pl.Callback):
    """Does something at the n-th call of one hook in the training."""

    def __init__(self, hook: str, act: Callable[[Any], None], calls: tuple[int, ...]) -> None:
        self.act, self.calls, self.count = act, calls, 0
        setattr(self, hook, self._called)

    def _called(self, trainer, *args):
        if trainer.sanity_checking:
            return
        self.count += 1
        if self.count in self.calls:
            self.act(trainer)


class Setting(NamedTuple):
    """How a feature's run is made; of a folder, so that callbacks are new in each run."""

    module: Callable[[], pl.LightningModule] = Model
    before: Callable[[Path], list[Any]] = lambda folder: []
    after: Callable[[Path], list[Any]] = lambda folder: []
    federated: dict[str, Any] = {}  # noqa: RUF012
    trainer: Callable[[Path], dict[str, Any]] = lambda folder: {}
    raises: str = ""
    then: Callable[[Path], dict[str, Any]] | None = None


def _keep(folder, **options):
    return pl.callbacks.ModelCheckpoint(folder, filename="{epoch}-{step}", **{"save_top_k": -1, **options})


def _checkpointed(**options):
    return Setting(after=lambda f: [_keep(f, **options)], trainer=lambda f: {"enable_checkpointing": True})


def _beside(build, **rest):
    def after(folder):
        return [*([] if build is None else [build()]), _keep(folder)]

    return Setting(after=after, trainer=lambda f: {"enable_checkpointing": True}, **rest)


def _saved(hook, first):
    def saves(folder):
        def act(trainer):
            trainer.save_checkpoint(folder / f"{hook}-{trainer.global_step}.ckpt")

        return [At(hook, act, (1, 2, 3, 4))]

    return Setting(before=saves) if first else Setting(after=saves)


def _interrupted(hook):
    def boom(trainer):
        raise RuntimeError("boom")

    def late(folder):
        return [pl.callbacks.OnExceptionCheckpoint(folder), At(hook, boom, (2, 3))]

    return Setting(after=late, trainer=lambda f: {"enable_checkpointing": True}, raises="boom")


def _stops(trainer):
    trainer.should_stop = True


def _with_lists():
    module = Model(extra=lambda m, batch: m.kept.append(batch[0].detach().clone()))
    module.kept = []
    return module


def _with_attribute():
    def extra(module, batch):
        module.run = 0.9 * module.run + batch[0].mean(0)

    module = Model(extra=extra)
    module.run = torch.zeros(6)
    return module


def _with_average():
    module = Model(extra=lambda m, batch: m.average.update_parameters(m.head))
    module.average = AveragedModel(module.head).requires_grad_(False)
    return module


def _with_importance():
    def extra(module, batch):
        module.head.weight.importance = batch[0].mean(0)

    return Model(extra=extra)


def _optimised_by(optimizer):
    return lambda: Model(optimizer=lambda params, lr: optimizer(params, lr=lr, momentum=0.9))


def _with_metric():
    def extra(module, batch):
        module.accuracy(module.head(module.backbone(batch[0])), batch[1])
        module.log("train_acc", module.accuracy, on_epoch=True, on_step=False)

    module = Model(extra=extra)
    module.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
    return module


class Shift(nn.Module):
    """A running mean that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, inputs):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


class Switches(Model):
    """Freezes or unfreezes its backbone in the second round."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.backbone.requires_grad_(not frozen)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.backbone.requires_grad_(self.frozen)


class OwnAverage(pl.Callback):
    def on_fit_start(self, trainer, pl_module):
        self.average = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, p in pl_module.named_parameters():
            self.average[name].lerp_(p.detach(), 0.1)


def _head_only():
    return Model(head_only=True)


def _tuning(folder):
    return [pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1)]


def _pruning():
    return pl.callbacks.ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])


def _normed():
    return Model(nn.BatchNorm1d(5))


FEATURES = {
    "nothing": Setting(),
    "stacks": Setting(federated={"clients_per_step": 3}),
    "a server optimiser (Adam)": Setting(
        federated={"server_optimizer": lambda p: torch.optim.Adam(p, lr=1e-9)}
    ),
    "checkpoints every step": _checkpointed(every_n_train_steps=1),
    "checkpoints by time": _checkpointed(train_time_interval=timedelta(seconds=0)),
    "best and last checkpoint": _checkpointed(monitor="val_loss", save_last=True, save_top_k=1),
    "save_checkpoint at batch starts, listed before Federated": _saved("on_train_batch_start", True),
    "save_checkpoint at batch ends, listed before Federated": _saved("on_train_batch_end", True),
    "save_checkpoint at batch ends, listed after Federated": _saved("on_train_batch_end", False),
    "save_checkpoint before the step": _saved("on_before_optimizer_step", False),
    "WeightAveraging": _beside(pl.callbacks.WeightAveraging),
    "WeightAveraging of BatchNorm": _beside(pl.callbacks.WeightAveraging, module=_normed),
    "EMAWeightAveraging": _beside(pl.callbacks.EMAWeightAveraging),
    "StochasticWeightAveraging": _beside(
        lambda: pl.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1)
    ),
    "a user-defined weight average": _beside(OwnAverage),
    "a moving average inside the module": _beside(None, module=_with_average),
    "BackboneFinetuning, listed before Federated": Setting(_head_only, before=_tuning),
    "BackboneFinetuning, listed after Federated": Setting(_head_only, after=_tuning),
    "unfreezing with requires_grad": Setting(lambda: Switches(True)),
    "freezing trained parameters": Setting(lambda: Switches(False)),
    "unfreezing with requires_grad in stacks": Setting(
        lambda: Switches(True), federated={"clients_per_step": 3}
    ),
    "pruning": _beside(_pruning),
    "BatchNorm, shared": _beside(None, module=_normed),
    "BatchNorm, shared, in stacks": _beside(None, module=_normed, federated={"clients_per_step": 3}),
    "BatchNorm, local": _beside(None, module=_normed, federated={"buffers": "local"}),
    "local head": _beside(None, federated={"personal_parameters": ["head.*"]}),
    "local head in stacks": _beside(
        None, federated={"personal_parameters": ["head.*"], "clients_per_step": 3}
    ),
    "per-client evaluation, results kept local": _beside(
        None, federated={"evaluate_clients": ClientEvaluation(0.25), "client_metrics": "local"}
    ),
    "BatchNorm, frozen": _beside(None, module=_normed, federated={"buffers": "frozen"}),
    "a buffer that the module replaces": _beside(None, module=lambda: Model(Shift())),
    "a tensor in an attribute": _beside(None, module=_with_attribute),
    "tensors in a list": _beside(None, module=_with_lists),
    "an attribute of a parameter": _beside(None, module=_with_importance),
    "a wrapped base optimiser (SAM)": _beside(None, module=_optimised_by(SAM)),
    "estimates in parameter groups": _beside(None, module=_optimised_by(Estimates)),
    "slow weights in an optimiser (Lookahead)": _beside(None, module=_optimised_by(Lookahead)),
    "a metric object": _beside(None, module=_with_metric),
    "EarlyStopping": _beside(lambda: pl.callbacks.EarlyStopping("val_loss", patience=1)),
    "ReloadBest": _beside(lambda: ReloadBest("val_loss", patience=1, mode="min")),
    "stopped in mid-round": _beside(lambda: At("on_train_batch_end", _stops, (9,))),
    "Timer": _beside(lambda: pl.callbacks.Timer(timedelta(hours=1))),
    "LearningRateMonitor and CSVLogger": Setting(
        after=lambda f: [pl.callbacks.LearningRateMonitor()],
        trainer=lambda f: {"logger": pl.loggers.CSVLogger(f), "log_every_n_steps": 1},
    ),
    "schedule by epoch": Setting(lambda: Model(schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))),
    "gradient clipping": Setting(trainer=lambda f: {"gradient_clip_val": 0.1}),
    "gradient accumulation": Setting(trainer=lambda f: {"accumulate_grad_batches": 2}),
    "bf16-mixed": Setting(trainer=lambda f: {"precision": "bf16-mixed"}),
    "max_steps": Setting(trainer=lambda f: {"max_steps": 3, "max_epochs": -1}),
    "RunFolder": Setting(
        after=lambda f: [RunFolder("run", str(f), monitor="val_loss", mode="min", show=False)]
    ),
    "resuming within a round": _saved("on_train_batch_end", False)._replace(
        then=lambda f: {"ckpt_path": f / "on_train_batch_end-3.ckpt"}
    ),
    **{
        f"interrupted at {hook}": _interrupted(hook)
        for hook in ("on_train_batch_start", "on_after_backward", "on_train_batch_end", "on_validation_end")
    },
}


def _run(setting, folder, seed):
    folder.mkdir()
    resume = {}
    for _ in range(1 if setting.then is None else 2):
        module = setting.module()
        fed = Federated(Silent(), CLIENTS, **{"seed": 1, "clients_per_step": 1, **setting.federated})
        callbacks = [*setting.before(folder), fed, *setting.after(folder)]
        trainer = make_trainer(*callbacks, **setting.trainer(folder))
        if setting.raises:
            with pytest.raises((ValueError, RuntimeError), match=setting.raises):
                trainer.fit(module, datamodule=Data(seed))
        else:
            trainer.fit(module, datamodule=Data(seed), **resume)
        resume = {} if setting.then is None else setting.then(folder)
    return {**tensors(module=module, trainer=trainer, callbacks=callbacks), **files(folder)}


TRIED = ("nothing", "stacks", "resuming within a round")
"""The trial before the first round is a part of these runs; others rehearse in this process."""


@pytest.mark.parametrize("name", FEATURES)
def test_nothing_differs_but_what_is_listed(name, tmp_path, monkeypatch):
    if name not in TRIED:
        without_forks(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each feature has its own test of what it says
        one, other = (_run(FEATURES[name], tmp_path / str(seed), seed) for seed in (1, 2))
    assert any(path.startswith("module") for path in one)
    assert differences(one, other) == []


def test_a_door_shows(tmp_path):
    """The test is able to fail: a tensor in a closure, out of every check's sight, is found."""

    class Door(pl.Callback):
        is_shared_by_clients = True

        def on_train_batch_end(self, trainer, pl_module, *args):
            bias = pl_module.head.bias.detach().clone()
            self.hidden = lambda: bias

    setting = Setting(before=lambda folder: [Door()])
    one, other = (_run(setting, tmp_path / str(seed), seed) for seed in (1, 2))
    assert [path.rpartition(".")[0] for path in differences(one, other)] == ["callbacks.0.hidden"]
