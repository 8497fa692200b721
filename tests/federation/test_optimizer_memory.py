"""What optimisers of all kinds would carry from client to client beside their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, StepLR
from torch.utils.data import TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.rounds import engine
from tests.digits_run import Classifier, Digits, digits, make_trainer, weights_of


class SAM(Optimizer):
    """Sharpness-aware minimisation as it is published: the momentum is the base optimiser's."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        loss = torch.enable_grad()(closure)()
        old = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(0.05 * p.grad)
        torch.enable_grad()(closure)()
        for p, before in zip(parameters, old, strict=True):
            p.copy_(before)
        self.base_optimizer.step()
        return loss


class Lookahead(SGD):
    """Slow weights in an attribute."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.slow: Any = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.calls += 1
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=False):
            slow.data.lerp_(p.detach(), 0.5)
        return loss


class LazyLookahead(Lookahead):
    """Slow weights that appear with the first step."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.slow = None

    def step(self, closure: Any = None) -> Any:
        if self.slow is None:
            self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        return super().step(closure)


class Norms(Lookahead):
    """A list of single numbers."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.slow, self.norms = [], []

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.norms.append(float(self.param_groups[0]["params"][0].grad.norm()))
        return loss


class Estimates(SGD):
    """An estimate from gradients in the parameter groups, as in D-Adaptation and Prodigy, and one beside."""

    rates = False

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.param_groups[0]["d"], self.param_groups[0]["tensor"] = 0.0, torch.zeros(())
        self.most = 0.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss, group = super().step(closure), self.param_groups[0]
        norm = float(sum(p.grad.square().sum() for p in group["params"]))
        self.most = group["d"] = max(group["d"], norm)
        group["tensor"].fill_(norm)
        group["late"] = [torch.full((), norm)]
        if self.rates:
            group["lr"] = 0.1 / (1.0 + norm)
        return loss


class OwnRate(Estimates):
    rates = True


class Model(Classifier):
    def __init__(
        self, optimizer: Any, schedule: Any = None, interval: Any = "epoch", **settings: Any
    ) -> None:
        super().__init__()
        self.make, self.settings, self.schedule, self.interval = optimizer, settings, schedule, interval

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), **{"lr": 0.1, **self.settings})
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": self.interval}]


class Starts(pl.Callback):
    """What every client's first batch finds in the optimiser."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:  # two batches a client
            optimizer = trainer.optimizers[0]
            group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
            group["tensor"] = float(group["tensor"])
            self.found.append((group, optimizer.most))


def fit(module: Any, *callbacks: Any, **settings: Any) -> pl.Trainer:
    fed = Federated(FedAvg(), 3, **{"seed": 1, "clients_per_step": 1, **settings})
    trainer = make_trainer(fed, *callbacks, max_epochs=2)
    trainer.fit(module, datamodule=Digits(60))
    return trainer


def updates(optimizer: Any, scale: float, monkeypatch: Any) -> list[Tensor]:
    """Of each client, in the order of their turns; `scale` is of the first one's inputs."""
    found: list[Tensor] = []
    encode = engine.encode_updates

    def spy(mechanism: Any, target: Any, keys: Any, clients: Any, rows: Any, *rest: Any) -> Any:
        found.extend(row.clone() for row in rows)
        return encode(mechanism, target, keys, clients, rows, *rest)

    monkeypatch.setattr(engine, "encode_updates", spy)
    inputs, labels = digits()
    fed = Federated(FedAvg(), 2, seed=1, clients_per_step=1)
    first = fed.planner.plan(0, fed.mechanism).survivors[0]
    clients = {
        str(client): TensorDataset(inputs[rows] * (scale if client == first else 1.0), labels[rows])
        for client, rows in enumerate((slice(0, 20), slice(20, 40)))
    }
    module = Model(optimizer, momentum=0.9)
    trainer = make_trainer(fed, max_epochs=1)
    data = FederatedDataModule(clients=clients, val=TensorDataset(inputs[:9], labels[:9]), batch_size=10)
    trainer.fit(module, datamodule=data)
    return found


def test_a_base_optimizer_is_fresh_for_every_client(monkeypatch: Any) -> None:
    one, other = updates(SAM, 1.0, monkeypatch), updates(SAM, 3.0, monkeypatch)
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def test_nothing_is_left_in_a_base_optimizer() -> None:
    trainer = fit(Model(SAM, momentum=0.9))
    assert not trainer.optimizers[0].base_optimizer.state  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", [Lookahead, LazyLookahead, Norms])
def test_what_an_optimizer_keeps_in_attributes_is_refused_and_put_back(optimizer: Any) -> None:
    module = Model(optimizer)
    before = weights_of(module).clone()
    fed = Federated(FedAvg(), 3, seed=1, clients_per_step=1)
    trainer = make_trainer(fed)
    with pytest.raises(ValueError, match=r"training changed \w+\.(slow|norms)\.0.* every client begins with"):
        trainer.fit(module, datamodule=Digits(60))
    left = trainer.optimizers[0]
    assert fed.records == [] and left.calls == 0  # type: ignore[attr-defined]
    if optimizer is Lookahead:
        assert torch.equal(torch.cat([slow.flatten() for slow in left.slow]), before)  # type: ignore[attr-defined]
    assert not getattr(left, "norms", None)


def test_estimates_in_groups_and_attributes_go_with_the_client() -> None:
    starts = Starts()
    with pytest.warns(UserWarning, match="training changed d, late, tensor in the optimiser's"):
        trainer = fit(Model(Estimates), starts)
    assert len(starts.found) == 6 and all(found == starts.found[0] for found in starts.found)
    left: Any = trainer.optimizers[0]
    group = left.param_groups[0]
    assert (group["d"], float(group["tensor"]), left.most) == (0.0, 0.0, 0.0) and "late" not in group


def test_an_estimate_as_a_tensor_is_in_no_checkpoint_of_an_open_round(tmp_path: Any) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    with pytest.warns(UserWarning, match="training changed d"):
        fit(Model(Estimates), Saves())
    for path in tmp_path.glob("*.ckpt"):
        group = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"][0]
        assert group["d"] == 0.0 and float(group["tensor"]) == 0.0


@pytest.mark.parametrize("schedule", [None, lambda optimizer: StepLR(optimizer, 1)])
def test_an_optimizer_that_sets_its_own_rate_is_refused(schedule: Any) -> None:
    with pytest.raises(ValueError, match=r"a step of OwnRate changed lr in its parameter groups, "):
        fit(Model(OwnRate, schedule))


def test_attributes_of_parameters_are_scratch_of_one_client() -> None:
    class Importance(Classifier):
        def on_after_backward(self) -> None:
            for p in self.parameters():
                assert isinstance(p.grad, Tensor)
                if p.dim() == 2:
                    p.importance = p.grad.clone() ** 2  # type: ignore[attr-defined]

    module = Importance()
    with pytest.warns(UserWarning, match=r"tensors in the attribute backbone.weight.importance"):
        fit(module)
    assert not any(vars(p) for p in module.parameters())


class Rates(pl.Callback):
    """Rates and momenta that every batch begins with."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        group = trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], group.get("momentum"), group.get("betas")))


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        (lambda p, lr: SGD(p, lr, momentum=0.9), lambda o: OneCycleLR(o, 0.5, total_steps=20)),
        (lambda p, lr: Adam(p, lr), lambda o: OneCycleLR(o, 0.5, total_steps=20)),
        (lambda p, lr: SGD(p, lr, momentum=0.9), lambda o: CyclicLR(o, 0.1, 0.5, step_size_up=3)),
    ],
)
def test_schedules_that_cycle_momenta_are_left_alone(optimizer: Any, schedule: Any) -> None:
    rates = Rates()
    fit(Model(optimizer, schedule, "step"), rates)
    wanted, double = [], Model(optimizer).configure_optimizers()
    clock = schedule(double)
    for _ in range(4):
        group = double.param_groups[0]
        wanted.append((group["lr"], group.get("momentum"), group.get("betas")))
        double.step()
        clock.step()
    assert rates.seen == wanted[:2] * 3 + wanted[2:] * 3


def test_torch_s_own_optimizers_hold_nothing_else() -> None:
    for optimizer in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.NAdam, torch.optim.Adagrad):
        fit(Model(optimizer))
