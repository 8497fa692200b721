"""Parameters that join or leave in mid-run."""

import logging

import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, PrivacyBudget, ReloadBest
from lightning_fedq.mechanisms import LDPQ, FedAvg, RotatedAxes
from tests.by_hand import data_order, federated_averaging, plans_of
from tests.callbacks.silent import Silent
from tests.callbacks.steps import Saves
from tests.digits_run import Classifier, Digits, digits, make_trainer, weights_of

BATCH, CLIENTS = 10, 4


class TwoLayers(Classifier):
    """A first layer that is frozen at first, or later; the optimiser holds all parameters from the start."""

    def __init__(self, frozen: bool = True, change_at: int = 1) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)))
        self.frozen, self.change_at = frozen, change_at
        self.backbone[0].requires_grad_(not frozen)

    def on_train_epoch_start(self):
        if self.current_epoch == self.change_at:
            self.backbone[0].requires_grad_(self.frozen)

    @property
    def first(self):
        return weights_of(self.backbone[0])


class Tuned(Classifier):
    """A frozen backbone under `BackboneFinetuning`, and a head that alone is in the optimiser."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(64, 8), nn.Tanh()))
        self.head = nn.Linear(8, 10)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self.head(self.backbone(batch[0])).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.5)

    @property
    def first(self):
        return weights_of(self.backbone)


def federated(mechanism, **settings):
    return Federated(mechanism, CLIENTS, seed=1, **{"clients_per_step": 1, **settings})


def tuning():
    return pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.5)


def callbacks_of(way, fed):
    return {"module": [fed], "before": [tuning(), fed], "after": [fed, tuning()]}[way]


@pytest.mark.parametrize("clients_per_step", [1, 4])
@pytest.mark.parametrize("way", ["module", "before", "after"])
def test_what_unfreezes_goes_through_the_mechanism(way, clients_per_step, caplog):
    caplog.set_level(logging.INFO)
    fed = federated(Silent(), clients_per_step=clients_per_step)
    module = TwoLayers() if way == "module" else Tuned()
    before = weights_of(module).clone()
    make_trainer(*callbacks_of(way, fed), max_epochs=3).fit(module, datamodule=Digits(80))
    assert torch.equal(weights_of(module), before)
    assert fed.engine is not None and fed.engine.segments == (512, 8, 80, 10)
    assert fed.ledger.dim == 610 and fed.ledger.max_charges == 3
    assert [record.uplink_bits for record in fed.records] == [32 * 90 * 4] + [32 * 610 * 4] * 2
    assert "Round 2: backbone.0.weight, backbone.0.bias (520 coordinates) join" in caplog.text


def test_nothing_unfreezes_where_few_parameters_cost_more():
    """`RotatedAxes`, 20 rounds at 0.5: 9.17 among many axes, 9.86 among those of three parameters."""
    fed, module = federated(RotatedAxes(0.5, 1.0)), TwoLayers()
    with pytest.raises(ValueError, match=r"Round 2: .* \(520 coordinates\) join, but RotatedAxes can't be"):
        make_trainer(fed, max_epochs=3).fit(module, datamodule=Digits(80))
    assert fed.engine is not None and fed.ledger.dim == 90
    assert torch.equal(weights_of(module.backbone[2]), fed.engine.weights)


@pytest.mark.parametrize("clients_per_step", [1, 4])
@pytest.mark.parametrize("way", ["module", "before", "after"])
def test_unfreezing_is_that_of_a_loop_over_clients(way, clients_per_step):
    fed = federated(FedAvg(), clients_per_step=clients_per_step)
    module = TwoLayers() if way == "module" else Tuned()
    make_trainer(*callbacks_of(way, fed), max_epochs=3).fit(module, datamodule=Digits(80))
    fresh = Tuned()
    by_hand = TwoLayers().backbone if way == "module" else nn.Sequential(*fresh.backbone, fresh.head)
    by_hand.requires_grad_(True)
    inputs, labels = digits()

    def part_of(plan):
        return by_hand if plan.round >= 1 else by_hand[2]

    def train(client, plan):
        trained, held = list(part_of(plan).parameters()), fed.client_indices[client]
        for batch in held[torch.randperm(len(held), generator=data_order(plan, client))].split(BATCH):
            loss = nn.functional.cross_entropy(by_hand(inputs[batch]), labels[batch])
            for p, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                p.data.sub_(0.5 * gradient)

    for plan in plans_of(fed, 3):
        federated_averaging(part_of(plan), [plan], train)
    torch.testing.assert_close(weights_of(module), weights_of(by_hand), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_what_freezes_leaves_and_stays_where_it_is(clients_per_step, caplog):
    caplog.set_level(logging.INFO)
    seen = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append(pl_module.first.clone())

    fed = federated(LDPQ(epsilon_per_coordinate=0.5), clients_per_step=clients_per_step)
    module = TwoLayers(frozen=False)
    start = module.first.clone()
    make_trainer(fed, Watch(), max_epochs=4).fit(module, datamodule=Digits(80))
    assert not torch.equal(start, seen[0])
    assert all(torch.equal(later, seen[0]) for later in seen[1:])
    assert fed.engine is not None and fed.engine.segments == (80, 10)
    assert fed.ledger.dim == 610, "what was charged for the longer vector stays so"
    assert "(520 coordinates) leave" in caplog.text


def test_a_budget_that_cannot_pay_for_more_parameters_stops_before_the_round(tmp_path):
    budget = PrivacyBudget(epsilon=300.0, delta=1e-5, adversary="server")
    keep = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    fed = Federated(LDPQ(epsilon_per_coordinate=0.5), CLIENTS, clients_per_step=1)
    module = TwoLayers(change_at=2)
    trainer = make_trainer(fed, budget, keep, max_epochs=5, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match=r"The privacy budget allows .* rounds"):
        trainer.fit(module, datamodule=Digits(80))
    assert len(fed.records) == 2
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist:UserWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.parametrize("way", ["module", "before", "after"])
def test_resumed_after_an_unfreezing(tmp_path, way):
    def fit(*extra, resume=None):
        fed = federated(FedAvg(), server_optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
        module = TwoLayers() if way == "module" else Tuned()
        trainer = make_trainer(*callbacks_of(way, fed), *extra, max_epochs=3)
        trainer.fit(module, datamodule=Digits(80), ckpt_path=resume)
        return module

    whole = fit(Saves(tmp_path, "on_train_batch_end", "on_train_epoch_end"))
    # 13 files a round: of two batches and an end for each of four clients, and of the round's own end
    for number in (11, 13, 24, 26, 37):
        assert torch.equal(weights_of(fit(resume=tmp_path / f"{number}.ckpt")), weights_of(whole)), number


def test_the_best_model_of_a_shorter_vector_is_given_up():
    best = ReloadBest(patience=1)
    module = TwoLayers()
    with pytest.warns(UserWarning, match="were added or removed since the best model"):
        make_trainer(federated(Silent()), best, max_epochs=3).fit(module, datamodule=Digits(80))
    assert best.num_reloads == 0
