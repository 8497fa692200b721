"""What a checkpoint of an open round holds."""

import pytest
import torch
from torch import Tensor, nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from tests.callbacks.silent import Silent
from tests.callbacks.steps import Saves
from tests.digits_run import Classifier, Digits, make_trainer, weights_of

HOOKS = [
    "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_end", "on_train_epoch_end",
]  # fmt: skip


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
    saves, start = Saves(tmp_path, hook), weights_of(Classifier())
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

    whole = fit(Saves(tmp_path, "on_train_epoch_end"))
    assert whole == 2 and fit(resume=tmp_path / "4.ckpt") == whole, "saved after the first round"
