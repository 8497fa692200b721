"""What a checkpoint of an open round holds, and what a setting of the epoch's start is worth."""

from pathlib import Path

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
    """Saves a checkpoint at every call of one hook, in the fit or in the middle of a client."""

    is_shared_by_clients = True

    def __init__(self, hook: str, folder: Path) -> None:
        self.hook, self.folder, self.count = hook, folder, 0
        setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        if not trainer.sanity_checking:
            self.count += 1
            trainer.save_checkpoint(self.folder / f"{self.count}.ckpt")


def tensors(value):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def adam(params):
    return torch.optim.Adam(params, lr=0.1)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("after", [False, True])
def test_no_checkpoint_holds_what_a_client_has_learned(tmp_path, hook, after):
    fed = Federated(Silent(), 3, seed=1, clients_per_step=1, local_epochs=2)
    saves, start = Saves(hook, tmp_path), weights_of(Classifier())
    order = (fed, saves) if after else (saves, fed)
    make_trainer(*order, max_epochs=2).fit(Classifier(optimizer=adam), datamodule=Digits(30))
    files = sorted(tmp_path.glob("*.ckpt"))
    once, in_both = "epoch_start" in hook or "validation" in hook, hook == "on_train_epoch_end"
    assert len(files) == (2 if once else 2 * (3 + 1) if in_both else 12)
    for file in files:
        state = torch.load(file, weights_only=True)
        assert torch.equal(torch.cat([v.reshape(-1) for v in state["state_dict"].values()]), start), file
        assert not list(tensors(state["optimizer_states"])), file
        assert state["global_step"] % 2 == 0, file


def test_checkpoints_every_n_steps_hold_the_global_model(tmp_path):
    """Steps are one client's, three a round, and between two rounds there is one model to save."""
    fed = Federated(Silent(), 3, seed=1, clients_per_step=1, local_steps=3)
    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    make_trainer(fed, keep, max_epochs=2, enable_checkpointing=True).fit(
        Classifier(optimizer=adam), datamodule=Digits(30)
    )
    assert sorted(file.name for file in tmp_path.glob("*.ckpt")) == ["step=3.ckpt", "step=6.ckpt"]
    for file in tmp_path.glob("*.ckpt"):
        state = torch.load(file, weights_only=True)
        saved = torch.cat([v.reshape(-1) for v in state["state_dict"].values()])
        assert torch.equal(saved, weights_of(Classifier())), file


class Tied(Classifier):
    """One layer under two names, and one weight in two layers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)))
        self.backbone[2].weight = self.backbone[0].weight
        self.norm = self.backbone[1]


@pytest.mark.parametrize("weights_only", [False, True])
def test_second_names_of_tied_weights_and_buffers_are_global_too(tmp_path, weights_only):
    class Keeps(pl.Callback):
        is_shared_by_clients = True

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, i):
            clients = fed.training_clients[0]
            trainer.save_checkpoint(tmp_path / f"{clients}-{i}.ckpt", weights_only=weights_only)

    fed = Federated(Silent(), 3, seed=1, clients_per_step=1, local_epochs=2)
    make_trainer(fed, Keeps(), max_epochs=1).fit(Tied(), datamodule=Digits(30))
    start, files = Tied().state_dict(), list(tmp_path.glob("*.ckpt"))
    assert len(files) == 6
    for file in files:
        saved = torch.load(file, weights_only=True)["state_dict"]
        assert {name for name in start if not torch.equal(saved[name], start[name])} == set(), file


def test_the_user_s_module_is_the_global_model_while_clients_train():
    class Watch(pl.Callback):
        is_shared_by_clients = True
        far: list[tuple[bool, bool]] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer, pl_module, *args):
            pair = [weights_of(one) for one in (pl_module, module)]
            self.far.append(tuple(bool((w != weights_of(Classifier())).any()) for w in pair))

    fed, watch = Federated(Silent(), 3, seed=1, clients_per_step=1, local_steps=2), Watch()
    module = Classifier(optimizer=adam)
    make_trainer(fed, watch, max_epochs=2).fit(module, datamodule=Digits(30))
    assert watch.far == [(True, False)] * 12
    assert all(parameter.grad is None for parameter in module.parameters())


class Counts(pl.Callback):
    """Counts rounds, and says so in its state."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_epoch_start(self, *args):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_other_callbacks_go_on_where_a_round_ended(tmp_path):
    def fit(*callbacks, resume=None):
        counts = Counts()
        fed = Federated(Silent(), 3, seed=1, clients_per_step=1)
        trainer = make_trainer(fed, counts, *callbacks, max_epochs=2)
        trainer.fit(Classifier(), datamodule=Digits(60), ckpt_path=resume)
        return counts.count

    whole = fit(Saves("on_train_epoch_end", tmp_path))
    assert whole == 2 and fit(resume=tmp_path / "4.ckpt") == whole, "saved after the first round"


class Halves(Classifier):
    """Sets its own learning rate at the start of every epoch."""

    rates: list[float] = []  # noqa: RUF012

    def on_train_epoch_start(self):
        self.optimizers().param_groups[0]["lr"] = 0.5 * 0.5**self.current_epoch

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class HalvesBeside(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        trainer.optimizers[0].param_groups[0]["lr"] = 0.5 * 0.5**trainer.current_epoch


class Watched(Halves):
    def on_train_epoch_start(self):
        pass


@pytest.mark.parametrize("by", ["module", "callback before", "callback after"])
def test_a_learning_rate_set_at_the_start_of_the_epoch_holds(by):
    fed = Federated(Silent(), 2, seed=1, clients_per_step=1, local_steps=1)
    callbacks = {"module": [fed], "callback before": [HalvesBeside(), fed]}.get(by, [fed, HalvesBeside()])
    module = Halves() if by == "module" else Watched()
    Halves.rates.clear()
    make_trainer(*callbacks, max_epochs=3).fit(module, datamodule=Digits(40))
    assert Halves.rates[-6:] == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125], "those before are a rehearsal's"
