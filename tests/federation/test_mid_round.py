"""What a checkpoint of an open round holds, and what a setting of the epoch's start is worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from tests.callbacks.silent import Silent
from tests.digits_run import Classifier, Digits, make_trainer, weights_of

HOOKS = [
    "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_end", "on_train_epoch_end",
]  # fmt: skip


class Saves(pl.Callback):
    """Saves a checkpoint at every call of one hook, and remembers the gradients it leaves behind."""

    def __init__(self, hook: str, folder: Path) -> None:
        self.hook, self.folder, self.count = hook, folder, 0
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.count += 1
            trainer.save_checkpoint(self.folder / f"{self.count}.ckpt")


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.1)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("after", [False, True])
def test_no_checkpoint_holds_what_a_client_has_learned(tmp_path: Path, hook: str, after: bool) -> None:
    fed = Federated(Silent(), 3, seed=1, clients_per_step=1, local_epochs=2)
    saves, start = Saves(hook, tmp_path), weights_of(Classifier())
    order = (fed, saves) if after else (saves, fed)
    make_trainer(*order, max_epochs=2).fit(Classifier(optimizer=adam), datamodule=Digits(30))
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == (2 if "epoch" in hook or "validation" in hook else 12)
    for file in files:
        state = torch.load(file, weights_only=True)
        assert torch.equal(torch.cat([v.reshape(-1) for v in state["state_dict"].values()]), start), file
        assert not list(tensors(state["optimizer_states"])), file
        assert state["global_step"] % 6 == 0, file


def test_checkpoints_every_n_steps_hold_the_global_model(tmp_path: Path) -> None:
    """Three batches a client: steps 3, 6 and 9 are last batches, where the next client has not begun."""
    fed = Federated(Silent(), 3, seed=1, clients_per_step=1, local_steps=3)
    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    make_trainer(fed, keep, max_epochs=1, enable_checkpointing=True).fit(
        Classifier(optimizer=adam), datamodule=Digits(30)
    )
    for step in range(1, 10):
        state = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        saved = torch.cat([v.reshape(-1) for v in state["state_dict"].values()])
        assert torch.equal(saved, weights_of(Classifier())), step


class Tied(Classifier):
    """One layer under two names, and one weight in two layers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)))
        self.backbone[2].weight = self.backbone[0].weight
        self.norm = self.backbone[1]


@pytest.mark.parametrize("weights_only", [False, True])
def test_second_names_of_tied_weights_and_buffers_are_global_too(tmp_path: Path, weights_only: bool) -> None:
    fed = Federated(Silent(), 3, seed=1, clients_per_step=1, local_epochs=2)
    keep = pl.callbacks.ModelCheckpoint(
        tmp_path,
        filename="{step}",
        save_top_k=-1,
        every_n_train_steps=1,
        save_weights_only=weights_only,
    )
    make_trainer(fed, keep, max_epochs=1, enable_checkpointing=True).fit(Tied(), datamodule=Digits(30))
    start = Tied().state_dict()
    for step in range(1, 6):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        assert {name for name in start if not torch.equal(saved[name], start[name])} == set(), step


def test_between_clients_the_module_is_the_global_model() -> None:
    class Watch(pl.Callback):
        far: list[float] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.far.append(float((weights_of(pl_module) - weights_of(Classifier())).abs().max()))

    fed, watch = Federated(Silent(), 3, seed=1, clients_per_step=1, local_steps=2), Watch()
    module = Classifier(optimizer=adam)
    make_trainer(fed, watch, max_epochs=2).fit(module, datamodule=Digits(30))
    assert [distance > 0 for distance in watch.far] == [True, False] * 6
    assert all(parameter.grad is None for parameter in module.parameters())


class Counts(pl.Callback):
    """Counts batches, and says so in its state."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_other_callbacks_go_back_to_the_start_of_the_round(tmp_path: Path) -> None:
    def fit(*callbacks: Any, resume: Any = None) -> int:
        counts = Counts()
        fed = Federated(Silent(), 3, seed=1, clients_per_step=1)
        trainer = make_trainer(fed, counts, *callbacks, max_epochs=2)
        trainer.fit(Classifier(), datamodule=Digits(60), ckpt_path=resume)
        return counts.count

    whole = fit(Saves("on_train_batch_end", tmp_path))
    assert torch.load(tmp_path / "8.ckpt", weights_only=True)["callbacks"]["Counts"] == {"count": 6}
    assert fit(resume=tmp_path / "8.ckpt") == whole == 12


class Halves(Classifier):
    """Sets its own learning rate at the start of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.optimizers().param_groups[0]["lr"] = 0.5 * 0.5**self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class HalvesBeside(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.5 * 0.5**trainer.current_epoch


class Watched(Halves):
    def on_train_epoch_start(self) -> None:
        pass


@pytest.mark.parametrize("by", ["module", "callback before", "callback after"])
def test_a_learning_rate_set_at_the_start_of_the_epoch_holds(by: str) -> None:
    fed = Federated(Silent(), 2, seed=1, clients_per_step=1, local_steps=1)
    callbacks = {"module": [fed], "callback before": [HalvesBeside(), fed]}.get(by, [fed, HalvesBeside()])
    module = Halves() if by == "module" else Watched()
    make_trainer(*callbacks, max_epochs=3).fit(module, datamodule=Digits(40))
    assert module.rates == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
