"""What depends on time, against the same thing written out for one client after the other."""

import csv
import math
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import Dirichlet
from lightning_fedq.mechanisms import FedAvg
from tests.by_hand import data_order, federated_averaging, plans_of, sgd_step
from tests.callbacks.steps import Saves
from tests.digits_run import Classifier, Digits, ManualSteps, fitted, make_trainer, weights_of

SAMPLES, BATCH = 120, 10


def federated(num_clients=5, **settings):
    return Federated(
        **{"mechanism": FedAvg(), "num_clients": num_clients, "seed": 1, "clients_per_step": 1, **settings}
    )


def run(fed, module, *callbacks, **trainer):
    runner = fitted(module, fed, *callbacks, data=Digits(SAMPLES, BATCH), **trainer)
    return weights_of(module), runner


def by_hand(fed, rounds, rate, k=1, longest=None, max_steps=None, shuffle=True, most_batches=None):
    """Federated averaging with the rate of one client's step, of k batches each."""
    model = Classifier().backbone
    batches = max(-(-len(held) // BATCH) for held in fed.client_indices)
    longest = longest or -(-min(batches, most_batches or batches) // k)

    def train(client, plan):
        held = fed.client_indices[client]
        if shuffle and len(held) > BATCH:
            held = held[torch.randperm(len(held), generator=data_order(plan, client))]
        parts = held.split(BATCH)[:most_batches]
        for step, start in enumerate(range(0, len(parts), k), plan.round * longest):
            if max_steps is None or step < max_steps:
                group = parts[start : start + k]
                sgd_step(model, *group, rate=rate(step) * len(group) / k)

    return federated_averaging(model, plans_of(fed, rounds), train)


def falling(step):
    return 0.5 / (1 + step)


class Falling(Classifier):
    """A rate that falls with every step."""

    seen: list[float] = []  # noqa: RUF012

    def __init__(self, frequency: int = 1) -> None:
        super().__init__()
        self.frequency = frequency

    def on_train_start(self):
        self.seen.clear()  # of what the rehearsal's steps have seen

    def training_step(self, batch, batch_idx):
        self.seen.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        config = {"scheduler": schedule, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


def same(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


# ---- rates that a module sets by hand ---------------------------------------------------------------


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
def test_a_rate_that_follows_from_a_client_s_data_goes_with_the_client(interval, tmp_path):
    """Else the last client's number is in every checkpoint, and is where the next round begins."""

    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            group = self.optimizers().param_groups[0]
            rates.append(group["lr"])
            group["lr"] = 1e-3 * float(batch[0].detach().double().abs().mean())
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            if interval is None:
                return optimizer
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # from the rate that it finds
            return [optimizer], [{"scheduler": schedule, "interval": interval}]

    rates = []
    _, trainer = run(federated(), Own(), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    found = torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"][0]
    factor = {None: 1.0, "step": 0.5**3, "epoch": 0.5}[interval]
    assert found["lr"] == pytest.approx(0.5 * factor**2)
    assert rates[-15] == pytest.approx(0.5 * factor), "the first of the second round"


# ---- schedules that step with every batch -----------------------------------------------------------


@pytest.mark.parametrize("clients_per_step", [1, 3])
@pytest.mark.parametrize("partition", [{}, {"partition": Dirichlet(0.5), "cohort": 3}])
def test_a_schedule_by_step_is_every_client_s_own(clients_per_step, partition):
    fed = federated(clients_per_step=clients_per_step, **partition)
    weights, _ = run(fed, Falling(), max_epochs=4)
    same(weights, by_hand(fed, 4, falling))


def test_a_frequency_counts_one_client_s_batches():
    fed, module = federated(4), Falling(frequency=2)  # 4 clients of 3 batches
    weights, _ = run(fed, module, max_epochs=3)
    same(weights, by_hand(fed, 3, lambda step: 0.5 / (1 + step // 3 + (step % 3 == 2))))
    assert module.seen[:6] == [0.5, 0.5, 0.25] * 2


def test_the_rates_that_a_monitor_logs_are_one_client_s(tmp_path):
    for order in (0, 1):
        monitor = pl.callbacks.LearningRateMonitor(logging_interval="step")
        fed, module = federated(), Falling()
        callbacks = [monitor, fed] if order else [fed, monitor]
        logger = pl.loggers.CSVLogger(tmp_path / str(order))
        fitted(module, *callbacks, data=Digits(SAMPLES, BATCH), logger=logger, log_every_n_steps=1)
        with Path(logger.log_dir, "metrics.csv").open() as file:
            rates = [float(row["lr-SGD"]) for row in csv.DictReader(file) if row["lr-SGD"]]
        assert rates == pytest.approx([falling(0), falling(3)]), "once a round, as it begins"
        client = [[falling(3 * r + s) for s in range(3)] for r in range(2)]
        assert module.seen == pytest.approx(client[0] * 5 + client[1] * 5)


def test_a_recipe_may_ask_how_many_steps_there_will_be():
    class OneCycle(Classifier):
        def configure_optimizers(self):
            self.steps = self.trainer.estimated_stepping_batches
            self.batches = len(self.trainer.datamodule.train_dataloader())
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = OneCycleLR(optimizer, 0.5, total_steps=self.steps, cycle_momentum=False)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    fed, module = federated(cohort=3, partition=Dirichlet(0.5)), OneCycle()
    weights, trainer = run(fed, module, max_epochs=4, accumulate_grad_batches=2)
    assert module.batches == max(-(-len(held) // BATCH) for held in fed.client_indices)
    steps = -(-module.batches // 2)
    assert module.steps == 4 * steps
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    schedule = OneCycleLR(optimizer, 0.5, total_steps=module.steps, cycle_momentum=False)
    rates = []
    for _ in range(module.steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    same(weights, by_hand(fed, 4, rates.__getitem__, 2))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == module.steps


def test_a_module_may_ask_its_own_loader_and_leave_the_batch_number_out():
    class Own(Falling):
        def train_dataloader(self):
            return Digits(SAMPLES, BATCH).train_dataloader()

        def val_dataloader(self):
            return Digits().val_dataloader()

        def training_step(self, batch):
            return super().training_step(batch, 0)

        def configure_optimizers(self):
            self.batches = len(self.train_dataloader())
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    fed, module = federated(), Own()
    make_trainer(fed).fit(module)
    assert (module.batches, module.steps) == (3, 6)
    same(weights_of(module), by_hand(fed, 2, falling))


def test_a_warm_up_that_reads_the_global_step_warms_every_client_up():
    class WarmUp(Classifier):
        seen: list[int] = []  # noqa: RUF012

        def on_train_start(self):
            self.seen.clear()

        def training_step(self, batch, batch_idx):
            self.seen.append(self.global_step)
            return super().training_step(batch, batch_idx)

        def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
            optimizer.param_groups[0]["lr"] = falling(self.trainer.global_step)
            optimizer.step(closure=closure)

    fed, module = federated(), WarmUp()
    weights, trainer = run(fed, module)
    same(weights, by_hand(fed, 2, falling))
    assert module.seen == [0, 1, 2] * 5 + [3, 4, 5] * 5
    assert trainer.global_step == 2 * 3


def test_a_rate_that_is_set_at_the_start_of_an_epoch_holds_for_all_of_its_clients():
    class Hand(Classifier):
        def on_train_epoch_start(self):
            self.optimizers().param_groups[0]["lr"] = falling(self.current_epoch)

    class Callback(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.optimizers[0].param_groups[0]["lr"] = falling(trainer.current_epoch)

    for clients_per_step in (1, 5):
        for module, before, behind in (
            (Hand, [], []),
            (Classifier, [Callback()], []),
            (Classifier, [], [Callback()]),
        ):
            fed, trained = federated(clients_per_step=clients_per_step), module()
            fitted(trained, *before, fed, *behind, data=Digits(SAMPLES, BATCH), max_epochs=3)
            same(weights_of(trained), by_hand(fed, 3, lambda step: falling(step // 3)))


def test_a_schedule_by_round_beside_one_by_step_keeps_its_own_time():
    class Both(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            by_round = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.5)
            by_step = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9)
            return [optimizer], [
                {"scheduler": by_step, "interval": "step"},
                {"scheduler": by_round, "interval": "epoch"},
            ]

    fed = federated(partition=Dirichlet(0.5))
    weights, _ = run(fed, Both(), max_epochs=3)
    longest = max(-(-len(held) // BATCH) for held in fed.client_indices)
    assert len(fed.client_indices[-1]) < max(map(len, fed.client_indices)), "choose another seed"
    same(weights, by_hand(fed, 3, lambda step: 0.5 * 0.9**step * 0.5 ** (step // longest)))


def test_a_schedule_that_is_stepped_by_hand_is_every_client_s_own():
    class Manual(ManualSteps, Falling):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()

    for partition in ({}, {"partition": Dirichlet(0.5)}):
        fed = federated(**partition)
        weights, trainer = run(fed, Manual(), max_epochs=3)
        same(weights, by_hand(fed, 3, falling))
        longest = max(math.ceil(len(held) / BATCH) for held in fed.client_indices)
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3 * longest


def test_a_plateau_of_batches_is_no_plateau():
    class Plateau(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            config = {"scheduler": schedule, "interval": "step", "monitor": "loss"}
            return {"optimizer": optimizer, "lr_scheduler": config}

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True)
            return loss

    module = Plateau()
    with pytest.warns(UserWarning, match="stepped with a client's metric, so its change ends with the round"):
        _, trainer = run(federated(), module)
    assert trainer.lr_scheduler_configs[0].scheduler.best == math.inf, "it has seen no client's loss"


# ---- accumulation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients_per_step", [1, 5])
@pytest.mark.parametrize("k", [2, 3, 7])
def test_accumulates_the_batches_of_one_client(clients_per_step, k):
    fed = federated(3 if k == 3 else 5, clients_per_step=clients_per_step)  # 4, or 3, batches a client
    module = Falling()
    weights, trainer = run(fed, module, accumulate_grad_batches=k)
    same(weights, by_hand(fed, 2, falling, k))
    assert type(trainer.accumulate_grad_batches) is int and trainer.accumulate_grad_batches == k
    longest = max(math.ceil(len(held) / BATCH) for held in fed.client_indices)
    assert trainer.global_step == 2 * math.ceil(longest / k)


@pytest.mark.parametrize("clients_per_step", [1, 3])
def test_accumulation_with_clients_of_one_batch_and_of_several(clients_per_step):
    fed = federated(6, partition=Dirichlet(0.6), clients_per_step=clients_per_step, seed=0)
    weights, _ = run(fed, Falling(), accumulate_grad_batches=2, gradient_clip_val=100.0)
    assert {1, 3} <= {-(-len(held) // BATCH) for held in fed.client_indices}, "choose another seed"
    same(weights, by_hand(fed, 2, falling, 2))


# ---- the end of the run, and what else cuts it ----------------------------------------------------------


@pytest.mark.parametrize(("max_steps", "rounds"), [(6, 2), (7, 3), (1, 1)])
@pytest.mark.parametrize("clients_per_step", [1, 5])
def test_max_steps_are_one_client_s(max_steps, rounds, clients_per_step):
    fed = federated(clients_per_step=clients_per_step)
    weights, trainer = run(fed, Falling(), max_steps=max_steps, max_epochs=-1)
    assert len(fed.records) == rounds
    same(weights, by_hand(fed, rounds, falling, max_steps=max_steps))
    assert trainer.max_steps == max_steps
    assert "val_acc" in trainer.callback_metrics


def test_max_steps_with_accumulation_and_a_schedule_over_them():
    fed, module = federated(3), Falling()  # 4 batches, 2 steps a round
    weights, _ = run(fed, module, max_steps=5, max_epochs=-1, accumulate_grad_batches=2)
    assert len(fed.records) == 3
    same(weights, by_hand(fed, 3, falling, 2, max_steps=5))


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
@pytest.mark.parametrize("num_clients", [3, 12])  # of four batches, and of one
def test_a_plateau_stepped_by_hand_on_batches_keeps_no_client_s_metric(where, num_clients):
    fed, module = federated(num_clients), ByHand(where)
    with pytest.warns(UserWarning, match="change ends with the round.*Step it with a validation metric"):
        run(fed, module)
    assert module.lr_schedulers().best == math.inf
    assert len(fed.records) == 2


def test_a_plateau_stepped_by_hand_once_a_round_is_welcome():
    module = ByHand("on_validation_epoch_end")
    run(federated(3), module, max_epochs=4, num_sanity_val_steps=0)
    assert module.lr_schedulers().last_epoch == 4


class ByHand(ManualSteps, Classifier):
    """Manual optimisation, and a plateau that is stepped at a place of one's choice."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _plateau(self, where, metric):
        if where == self.where:
            self.lr_schedulers().step(metric)

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self._plateau("training_step", float(self.backbone.weight.detach().norm()))

    def on_train_batch_end(self, *args):
        self._plateau("on_train_batch_end", float(self.backbone.weight.detach().norm()))

    def on_validation_epoch_end(self):
        self._plateau("on_validation_epoch_end", 1.0)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)]


def test_overfits_each_client_s_first_batches():
    fed = federated()
    weights, _ = run(fed, Classifier(), overfit_batches=2)
    same(weights, by_hand(fed, 2, lambda step: 0.5, shuffle=False, most_batches=2))


def test_validates_after_whole_rounds():
    class Count(pl.Callback):
        epochs: list[int]

        def on_validation_start(self, trainer, pl_module):
            self.epochs.append(trainer.current_epoch)

    flags = [
        ({"val_check_interval": 6, "check_val_every_n_epoch": None}, [1, 3]),
        ({"val_check_interval": 3}, [0, 1, 2, 3]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": 2}, [1, 3]),
    ]
    for settings, wanted in flags:
        count = Count()
        count.epochs = []
        trainer = run(federated(), Classifier(), count, max_epochs=4, num_sanity_val_steps=0, **settings)[1]
        assert count.epochs == wanted
        assert trainer.val_check_interval == settings["val_check_interval"]


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        ({"val_check_interval": 0.5}, "Use check_val_every_n_epoch=1 to"),
        ({"val_check_interval": 2}, "Use check_val_every_n_epoch=1 to"),
        ({"val_check_interval": 8, "check_val_every_n_epoch": None}, "Use check_val_every_n_epoch=3 to"),
    ],
)
def test_validation_in_mid_round_is_told_the_equivalent(flags, cure):
    with pytest.raises(ValueError, match=f"would validate during a round of 3 batches a client, .*{cure}"):
        run(federated(), Classifier(), **flags)


def test_reloads_the_loader_on_the_same_split():
    class Reloaded(Digits):
        asked: list[int]

        def train_dataloader(self):
            self.asked.append(self.trainer.current_epoch)
            return super().train_dataloader()

    data, fed, module = Reloaded(SAMPLES, BATCH), federated(), Classifier()
    data.asked = []
    make_trainer(fed, max_epochs=5, reload_dataloaders_every_n_epochs=2).fit(module, datamodule=data)
    assert data.asked == [0, 2, 4]
    same(weights_of(module), by_hand(fed, 5, lambda step: 0.5))

    class Growing(Reloaded):
        def train_set(self):
            self.num_train += 10
            return super().train_set()

    data = Growing(SAMPLES, BATCH)
    data.asked = []
    with pytest.raises(ValueError, match=r"has 140 samples .* but the partition has 130"):
        make_trainer(federated(), reload_dataloaders_every_n_epochs=1).fit(Classifier(), datamodule=data)


# ---- resume ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients_per_step", "stop"), [(1, {"max_epochs": -1, "max_steps": 5}), (5, {"max_epochs": 3})]
)
def test_resumes_bit_for_bit(tmp_path, clients_per_step, stop):
    def fit(folder, resume=None):
        keep = Saves(tmp_path / folder, "on_train_batch_end", "on_train_epoch_end")
        fed, module = federated(clients_per_step=clients_per_step), Falling()
        trainer = make_trainer(fed, keep, accumulate_grad_batches=2, **stop)
        trainer.fit(module, datamodule=Digits(SAMPLES, BATCH), ckpt_path=resume)
        return weights_of(module), fed

    whole, _ = fit("whole")
    paths = sorted((tmp_path / "whole").glob("*.ckpt"), key=lambda p: int(p.stem))
    assert len(paths) > 9
    for path in paths[:: 2 if clients_per_step == 5 else 9] + paths[-2:]:
        again, fed = fit(f"again-{path.stem}", path)
        assert torch.equal(again, whole), path.stem
        assert [r.round for r in fed.records] == [0, 1, 2]


# ---- a loss scale -----------------------------------------------------------------------------------------


def test_every_client_starts_with_the_round_s_loss_scale_and_the_smallest_is_left():
    """On a CPU with the plugin and a GradScaler of its own; Lightning's flag would make it bf16-mixed."""

    class Watch(pl.Callback):
        is_shared_by_clients = True

        def __init__(self) -> None:
            self.scales = []

        def on_train_batch_start(self, trainer, *args):
            self.scales.append(trainer.precision_plugin.scaler.get_scale())

    class Overflows(Classifier):
        """The batch with a given sample has an infinite gradient, once."""

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            own = fed.planner.plan(0, fed.mechanism).survivors[1]
            second = fed.training_clients == (own,) and batch_idx == 1
            return loss * torch.inf if self.current_epoch == 0 and second else loss

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    watch, fed = Watch(), federated(clients_per_step=2)
    trainer = make_trainer(fed, watch, plugins=[plugin])
    with pytest.warns(
        UserWarning, match="16-mixed precision scales one client's loss; precision='bf16-mixed'"
    ):
        trainer.fit(Overflows(), datamodule=Digits(SAMPLES, BATCH))
    ordinary = [1024.0, 1024.0, 2048.0]
    diverged = [1024.0, 1024.0, 512.0]  # the second client's second batch; its scale ends at 512
    first, second = watch.scales[:15], watch.scales[15:]
    assert first == ordinary + diverged + ordinary * 3
    assert second[0] == 512.0 and second[::3] == [512.0] * 5
    assert "val_acc" in trainer.callback_metrics
    assert fed.records[0].non_finite_clients == ()


def test_a_checkpoint_in_mid_round_holds_the_round_s_loss_scale(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    saves = Saves(tmp_path, "on_train_batch_end", "on_train_epoch_end")
    fitted(Classifier(), federated(), saves, data=Digits(SAMPLES, BATCH), plugins=[plugin], max_epochs=1)
    scales = [
        torch.load(tmp_path / f"{count}.ckpt", weights_only=True)["MixedPrecision"]["scale"]
        for count in (1, 2, 3, 20, 21)  # three batches and an epoch's end for each of five clients
    ]
    assert scales == [1024.0] * 4 + [8 * 1024.0]
