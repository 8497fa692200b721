import csv
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.data import Dirichlet, FederatedDataModule
from lightning_fedq.mechanisms import CPA, CorBin, FedAvg
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundEngine
from tests.by_hand import data_order, federated_averaging, plans_of, sgd_step
from tests.callbacks.steps import Fails
from tests.digits_run import Classifier, Digits, digits, fitted, make_trainer, weights_of


def federated(num_clients=8, **settings):
    return Federated(**{"mechanism": FedAvg(), "num_clients": num_clients, "seed": 1, **settings})


def run(fed, module=None, data=None, **trainer):
    module, runner = module or Classifier(), make_trainer(fed, **trainer)
    runner.fit(module, datamodule=data or Digits())
    return module, runner


def by_hand(fed, rounds, lr=0.5, batch_size=10):
    """Federated averaging on the same split and order."""
    model = Classifier().backbone

    def train(client, plan):
        held = fed.client_indices[client]
        for part in held[torch.randperm(len(held), generator=data_order(plan, client))].split(batch_size):
            sgd_step(model, part, rate=lr)

    return federated_averaging(model, plans_of(fed, rounds), train)


@pytest.mark.parametrize("work", ["fit", "validate"])
def test_two_in_one_trainer_are_refused_in_our_words(work):
    """Lightning's words on keys of states do not come first; a checkpoint has the usual key."""
    words = r"has 2 Federated callbacks, with FedAvg and CorBin\. Leave all but one out, because a run has"
    trainer = make_trainer(federated(), federated(mechanism=CorBin(1.0)))
    with pytest.raises(ValueError, match=words):
        getattr(trainer, work)(Classifier(), datamodule=Digits())
    fed = federated()
    getattr(make_trainer(fed), work)(Classifier(), datamodule=Digits())
    assert fed.state_key == "Federated"


@pytest.mark.parametrize("delta", [0, 1.5, 0.2, "x", None])
def test_a_wrong_delta_is_refused_where_it_is_given(delta):
    """As a wrong epsilon is: before a Trainer or data exist. 0.2 is too much for eight clients."""
    with pytest.raises((ValueError, TypeError), match="delta"):
        federated(privacy=PrivacyTarget(8.0, delta=delta))
    with pytest.raises((ValueError, TypeError), match="delta"):
        DPSGD(1.0, 1.0, delta=2.0 if delta == 0.2 else delta)


@pytest.mark.parametrize("clients_per_step", [1, 3, "auto"])
def test_is_federated_averaging(clients_per_step):
    fed = federated(clients_per_step=clients_per_step)
    module, _ = run(fed)
    torch.testing.assert_close(weights_of(module), by_hand(fed, 2), atol=1e-6, rtol=1e-5)


def test_unequal_clients_cohorts_and_dropouts():
    fed = federated(10, cohort=6, dropout_probability=0.3, partition=Dirichlet(0.5), clients_per_step=4)
    module, trainer = run(fed, max_epochs=4)
    torch.testing.assert_close(weights_of(module), by_hand(fed, 4), atol=1e-6, rtol=1e-5)
    assert len(fed.records) == 4
    assert all(r.num_received + r.num_dropped == 6 for r in fed.records)
    assert sum(r.num_dropped for r in fed.records) > 0
    assert trainer.reload_dataloaders_every_n_epochs == 0


def test_one_bit_training_learns_and_logs():
    fed = Federated(CorBin(epsilon_per_coordinate=5.0), num_clients=20, seed=0)
    _, trainer = run(fed, data=Digits(1400), max_epochs=6)
    assert trainer.callback_metrics["val_acc"] > 0.7
    assert trainer.callback_metrics["fed/uplink_bits"] == 20 * 650
    assert trainer.callback_metrics["fed/round"] == 6
    assert fed.engine is not None and fed.engine.round == 6


def test_a_logger_gets_every_round_once_at_its_last_step(tmp_path):
    fed = Federated(CorBin(epsilon_per_coordinate=5.0), num_clients=20, seed=0, clients_per_step=10)
    _, trainer = run(fed, max_epochs=2, logger=pl.loggers.CSVLogger(tmp_path), log_every_n_steps=1)
    assert trainer.logger is not None and trainer.logger.log_dir is not None
    with Path(trainer.logger.log_dir, "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["fed/uplink_bits"]]
    steps = 2  # batches of one client
    assert [(row["fed/round"], row["epoch"]) for row in rows] == [("1.0", "0"), ("2.0", "1")]
    assert [int(row["step"]) for row in rows] == [steps - 1, 2 * steps - 1]


def test_validates_the_model_that_is_saved(tmp_path):
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    seen = []

    class Watch(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            if not trainer.sanity_checking:
                seen.append(weights_of(pl_module))

    fed = federated(clients_per_step=1)
    trainer = make_trainer(fed, Watch(), checkpoint, enable_checkpointing=True)
    module = Classifier()
    trainer.fit(module, datamodule=Digits())
    for epoch in range(2):
        state = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)["state_dict"]
        assert torch.equal(torch.cat([v.reshape(-1) for v in state.values()]), seen[epoch])
        torch.testing.assert_close(seen[epoch], by_hand(fed, epoch + 1), atol=1e-6, rtol=1e-5)


def test_everything_is_taken_off_again():
    fed, data = federated(dropout_probability=0.2), Digits()
    module, trainer = run(fed, data=data)
    assert "train_dataloader" not in vars(data)
    assert not {"training_step", "backward"} & set(vars(trainer.strategy))
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)
    assert not module._state_dict_hooks
    assert trainer.test(module, datamodule=data, verbose=False)[0]["val_acc"] > 0.2


def test_fit_again_continues():
    fed, module = federated(), Classifier()
    trainer = fitted(module, fed, data=Digits(), max_epochs=1)
    trainer.validate(module, datamodule=Digits(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=Digits())
    assert [r.round for r in fed.records] == [0, 1] and trainer.current_epoch == 2
    assert fed.ledger.charges.tolist() == [2] * 8
    torch.testing.assert_close(weights_of(module), by_hand(fed, 2), atol=1e-6, rtol=1e-5)


def test_optimiser_state_does_not_leak_between_rounds():
    def momentum(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    one = run(federated(1, cohort=1, local_steps=1, clients_per_step=1), Classifier(optimizer=momentum))[0]
    plain = run(federated(1, cohort=1, local_steps=1, clients_per_step=1),
                Classifier(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)))[0]  # fmt: skip
    assert torch.equal(weights_of(one), weights_of(plain))


@pytest.mark.tried
def test_learning_rate_schedule_steps_once_a_round():
    rates = []

    class Scheduled(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        def training_step(self, batch, batch_idx):
            rates.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    fed = federated(4, clients_per_step=1)
    run(fed, Scheduled(), max_epochs=3)
    assert rates[-120:] == [0.5] * 40 + [0.25] * 40 + [0.125] * 40
    assert rates[:-120] == [], "a rehearsal, which is in a fork"


def test_parameter_groups_and_frozen_parameters():
    class Groups(Classifier):
        def configure_optimizers(self):
            first, middle, last = self.backbone[0], self.backbone[2], self.backbone[4]
            middle.requires_grad_(False)
            return torch.optim.SGD(
                [{"params": last.parameters(), "lr": 0.3}, {"params": [first.weight, first.bias]}], lr=0.1
            )

    def build():
        torch.manual_seed(0)
        return Groups(
            nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))
        )

    feds = federated(clients_per_step=1), federated(clients_per_step=8)
    alone, side_by_side = (run(fed, build())[0] for fed in feds)
    torch.testing.assert_close(weights_of(alone), weights_of(side_by_side), atol=1e-6, rtol=1e-5)
    assert not torch.equal(alone.backbone[4].weight, build().backbone[4].weight)
    assert torch.equal(alone.backbone[2].weight, build().backbone[2].weight)
    assert feds[0].engine is not None and feds[0].engine.segments == (512, 8, 80, 10)


@pytest.mark.parametrize("clients_per_step", [1, 8])
def test_a_diverged_client_counts_as_zero_and_is_named(clients_per_step):
    class Diverges(Classifier):
        def training_step(self, batch, batch_idx):
            poisoned = (batch[0][..., 0] > 100).any()
            loss = super().training_step(batch, batch_idx)
            return loss * torch.where(poisoned, torch.nan, 1.0)

    inputs, labels = (t[:80].clone() for t in digits())
    inputs[23, 0] = 1e3
    clients = [list(range(10 * c, 10 * c + 10)) for c in range(8)]
    train = TensorDataset(inputs, labels)
    data = FederatedDataModule(train, batch_size=10, clients=clients, val=train)
    fed = federated(clients_per_step=clients_per_step)
    with pytest.warns(UserWarning, match=r"clients \[2\] contain a NaN"):
        module, _ = run(fed, Diverges(), data)
    assert fed.records[0].non_finite_clients == (2,)
    assert weights_of(module).isfinite().all()
    assert not torch.equal(weights_of(module), weights_of(Classifier()))


def test_a_round_of_nobody_changes_nothing_and_is_recorded():
    fed = federated(2, dropout_probability=0.7)
    nobody = [r for r in range(8) if not fed.planner.plan(r, fed.mechanism).survivors]
    assert nobody, "choose another seed"
    run(fed, max_epochs=8)
    assert [r.round for r in fed.records if r.num_received == 0] == nobody
    assert len(fed.records) == 8
    assert all(fed.records[r].update_norm == 0 for r in nobody)


def test_weighted_by_noise():
    """Four of five clients say almost nothing: the mean is the fifth client's, and the exact mean says so."""
    epsilons = (1e-3, 1e-3, 30.0, 1e-3, 1e-3)
    settings = {"weighting": "inverse_variance", "ranges": FixedRange(0.05), "clients_per_step": 1}
    fed = Federated(CPA(epsilons, epsilon_scope="bit"), 5, seed=0, **settings)
    run(fed, max_epochs=1)
    assert fed.engine is not None and fed.engine.client_weights is not None
    assert fed.engine.client_weights.argmax() == 2 and fed.engine.client_weights.max() > 0.99
    assert fed.records[0].cosine > 0.3


def test_data_module_and_callback_alone_are_the_same_road():
    alone = run(federated(partition=Dirichlet(0.5), clients_per_step=1))[0]
    wrapped = run(
        federated(clients_per_step=1), data=FederatedDataModule(Digits(), partition=Dirichlet(0.5))
    )[0]
    assert torch.equal(weights_of(alone), weights_of(wrapped))


def test_gradient_clipping_is_per_client():
    for algorithm in ("norm", "value"):
        clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
        alone, side_by_side = (run(federated(clients_per_step=n), **clip)[0] for n in (1, 4))
        torch.testing.assert_close(weights_of(alone), weights_of(side_by_side), atol=1e-6, rtol=1e-5)
        assert not torch.allclose(weights_of(alone), weights_of(run(federated())[0]), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_epochs": 0}, "local_epochs must be >= 1, got 0"),
        ({"local_steps": 0}, "local_steps must be >= 1 or None, got 0"),
        ({"clients_per_step": 0}, "clients_per_step must be >= 1 or 'auto', got 0"),
        ({"weighting": "size"}, "weighting must be one of uniform, samples, inverse_variance, got 'size'"),
        ({"sends": "weight"}, "sends must be one of updates, weights, got 'weight'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        federated(**settings)


def test_an_exception_while_the_first_round_opens_is_the_one_that_shows(monkeypatch):
    whole = RoundEngine.start

    def start(engine):
        whole(engine)
        raise RuntimeError("the roster is gone")

    monkeypatch.setattr(RoundEngine, "start", start)
    module = Classifier()
    before = weights_of(module).clone()
    with pytest.raises(RuntimeError, match="the roster is gone"):
        run(federated(clients_per_step=1), module)
    assert torch.equal(weights_of(module), before)


def test_a_round_that_is_cut_short_says_that_it_is_dropped(caplog):
    fed, module = federated(clients_per_step=1), Classifier()
    before = weights_of(module).clone()
    with caplog.at_level("INFO"), pytest.raises(RuntimeError, match="boom"):
        make_trainer(fed, Fails(RuntimeError("boom"), 0, 2)).fit(module, datamodule=Digits())
    assert "Stopped in round 1" in caplog.text and "after 0 finished rounds" in caplog.text
    assert torch.equal(weights_of(module), before) and fed.records == []


class StopsByALoss(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = True


def test_a_client_that_stops_the_run_is_heard_where_clients_are():
    fed = federated(clients_per_step=1)
    make_trainer(fed, StopsByALoss(), max_epochs=3).fit(Classifier(), datamodule=Digits())
    assert len(fed.records) == 1, "the round is finished"


def test_no_private_run_ends_by_what_one_client_s_data_say():
    fed = Federated(CorBin(epsilon_per_coordinate=5.0), num_clients=4, clients_per_step=1)
    with pytest.warns(UserWarning, match=r"Client \d+ set trainer.should_stop, which is ignored"):
        make_trainer(fed, StopsByALoss(), max_epochs=3).fit(Classifier(), datamodule=Digits())
    assert len(fed.records) == 3


def test_unequal_clients_say_why_they_train_one_at_a_time(caplog):
    fed = federated(num_clients=3, clients_per_step=3, partition=Dirichlet(0.3))
    with caplog.at_level("INFO"):
        run(fed)
    assert fed.clients_per_step_chosen == 1
    assert "because no two clients of the first round have batches of the same sizes" in caplog.text
