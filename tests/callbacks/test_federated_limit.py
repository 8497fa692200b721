"""`Trainer(limit_train_batches=...)` shortens every pass of every client; the round keeps all its clients."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import LDPQ, CorBin, FedAvg
from tests.by_hand import data_order, federated_averaging, plans_of, sgd_step
from tests.digits_run import Classifier, digits, make_trainer, parts_of, weights_of

SIZES = (35, 20, 7, 80, 40, 15)
"""Samples of each client; batches of 10, so 4, 2, 1, 8, 4 and 2 batches a pass."""


def parts():
    return parts_of(SIZES)


def federated(**settings):
    return Federated(**{"mechanism": FedAvg(), "num_clients": len(SIZES), "seed": 1, **settings})


def run(fed, *more, module=None, ckpt=None, **trainer):
    module, runner = module or Classifier(), make_trainer(fed, *more, **trainer)
    inputs, labels = digits()
    train = TensorDataset(inputs[: sum(SIZES)], labels[: sum(SIZES)])
    val = TensorDataset(inputs[1500:], labels[1500:])
    data = FederatedDataModule(train, batch_size=10, clients=parts(), val=val)
    runner.fit(module, datamodule=data, ckpt_path=ckpt)
    return module, runner


def batches_of(size, limit):
    whole = -(-size // 10)
    return min(limit, whole) if isinstance(limit, int) else int(whole * limit)


def by_hand(fed, limit, rounds=2, weights=None):
    """Federated averaging on the first batches of every pass."""
    model, shares = Classifier().backbone, weights or [1.0] * len(SIZES)

    def train(client, plan):
        held, order = torch.tensor(parts()[client]), data_order(plan, client)
        for _ in range(fed.local.local_epochs):
            shuffled = held[torch.randperm(len(held), generator=order)] if len(held) > 10 else held
            for batch in shuffled.split(10)[: batches_of(len(held), limit)]:
                sgd_step(model, batch)

    return federated_averaging(model, plans_of(fed, rounds), train, shares.__getitem__)


@pytest.mark.parametrize("limit", [1, 3, 100, 1.0, 0.999])
@pytest.mark.parametrize("clients_per_step", [1, 4, "auto"])
def test_is_federated_averaging_over_the_first_batches_of_every_client(clients_per_step, limit):
    fed = federated(clients_per_step=clients_per_step, local_epochs=2)
    if limit == 0.999:  # int(1 * 0.999) == 0
        with pytest.raises(ValueError, match=r"limit_train_batches = 0.999 leaves clients 2 without a batch"):
            run(fed, limit_train_batches=limit)
        return
    module, trainer = run(fed, limit_train_batches=limit)
    torch.testing.assert_close(weights_of(module), by_hand(fed, limit), atol=1e-6, rtol=1e-5)
    assert [record.num_received for record in fed.records] == [len(SIZES)] * 2
    assert trainer.limit_train_batches == limit
    assert type(trainer.limit_train_batches) is type(limit)
    assert trainer.global_step == 2 * 2 * max(batches_of(size, limit) for size in SIZES)


@pytest.mark.parametrize("clients_per_step", [1, 3])
def test_a_fraction_is_of_each_clients_own_batches(clients_per_step):
    inputs, labels = digits()
    sizes, limit = (40, 20, 80, 30), 0.5
    held = parts_of(sizes)
    train = TensorDataset(inputs[:170], labels[:170])
    seen = {}

    class Watch(pl.Callback):
        is_shared_by_clients = True

        def on_train_batch_start(self, trainer, module, batch, index):
            stack, _ = fed.fit.present_batch(index)
            for client in stack.clients:
                seen.setdefault(client, []).append(batch[0].shape[-2])

    Watch.knows_clients = True  # known to leave stacks alone
    fed = federated(num_clients=4, clients_per_step=clients_per_step)
    trainer = make_trainer(fed, Watch(), max_epochs=1, limit_train_batches=limit)
    trainer.fit(Classifier(), datamodule=FederatedDataModule(train, batch_size=10, clients=held, val=train))
    assert seen == {0: [10] * 2, 1: [10], 2: [10] * 4, 3: [10]}
    assert fed.records[0].num_received == 4


class Exact(pl.LightningModule):
    """Every number of its training is a small dyadic fraction, so no order of summation rounds anything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def training_step(self, batch, batch_idx):
        return (batch[0] * self.weight).sum(-1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("local", [{"local_epochs": 1}, {"local_epochs": 3}, {"local_steps": 5}])
@pytest.mark.parametrize("limit", [1, 2, 0.5])
def test_all_stack_sizes_train_on_the_very_same_batches(limit, local):
    """Bit for bit: 8 clients, batches of 4, digits in sixteenths: sums of at most 24 bits."""
    inputs, labels = digits()
    sizes = (4, 8, 12, 16, 8, 4, 20, 24) if isinstance(limit, int) else (8, 8, 12, 16, 8, 12, 20, 24)
    held = parts_of(sizes)
    train = TensorDataset(inputs[: sum(sizes)], labels[: sum(sizes)])
    found = []
    for clients_per_step in (1, 2, 3, 8):
        fed, module = federated(num_clients=8, clients_per_step=clients_per_step, **local), Exact()
        data = FederatedDataModule(train, batch_size=4, clients=held)
        make_trainer(fed, max_epochs=2, limit_train_batches=limit).fit(module, datamodule=data)
        assert fed.clients_per_step_chosen == clients_per_step
        found.append(weights_of(module))
    assert all(torch.equal(found[0], other) for other in found[1:])
    fed, module = federated(num_clients=8, clients_per_step=1, **local), Exact()
    data = FederatedDataModule(train, batch_size=4, clients=held)
    make_trainer(fed, max_epochs=2).fit(module, datamodule=data)
    assert not torch.equal(found[0], weights_of(module))


def test_weights_follow_what_a_client_holds_and_not_what_the_limit_lets_it_use():
    fed = federated(weighting="samples", clients_per_step=4)
    module, _ = run(fed, limit_train_batches=1)
    expected = by_hand(fed, 1, weights=[float(size) for size in SIZES])
    torch.testing.assert_close(weights_of(module), expected, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(expected, by_hand(fed, 1), atol=1e-3)


def test_cohorts_and_dropouts_under_a_limit_validate_once_after_every_round():
    """Clients of one batch and of more have batches of one shape, and yet rounds of different length."""
    validated = []

    class Count(pl.Callback):
        def on_validation_start(self, trainer, module):
            validated.append(len(fed.records))

    for settings in ({"cohort": 4}, {"dropout_probability": 0.4}):
        fed = federated(clients_per_step=2, **settings)
        validated.clear()
        module, _ = run(fed, Count(), max_epochs=6, limit_train_batches=1, num_sanity_val_steps=0)
        torch.testing.assert_close(weights_of(module), by_hand(fed, 1, rounds=6), atol=1e-5, rtol=1e-4)
        assert validated == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("clients_per_step", [1, len(SIZES)])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_fast_dev_run_takes_the_place_of_the_limit(num_steps, clients_per_step):
    """Lightning forgets the limit under fast_dev_run, and the round is cut after so many steps as ever."""
    found = []
    for limit in (1, 0.01, None):
        fed = federated(clients_per_step=clients_per_step, seed=0)
        module, trainer = run(fed, fast_dev_run=num_steps, limit_train_batches=limit)
        assert trainer.limit_train_batches == num_steps
        found.append((fed.records[0].num_received, trainer.global_step, weights_of(module)))
        assert len(fed.records) == 1
    received, steps, weights = found[-1]
    passes = [batches_of(SIZES[c], 100) for c in fed.planner.plan(0, fed.mechanism).survivors]
    # no two clients have batches of the same shapes; whole passes of the first ones, or a part of one
    whole = sum(sum(passes[: n + 1]) <= num_steps for n in range(len(passes)))
    assert received == max(whole, 1) and steps == min(sum(passes[:received]), num_steps)
    for other in found[:-1]:
        assert other[:2] == (received, steps) and torch.equal(other[2], weights)


@pytest.mark.parametrize("num_steps", [1, 5])
def test_fast_dev_run_releases_no_sum_of_fewer_clients_than_are_claimed(num_steps):
    """Behind eight coins an outsider was said to learn little; the model held the one that had answered."""
    fed = federated(mechanism=LDPQ(epsilon_per_coordinate=0.5), clients_per_step=1, seed=None)
    torch.manual_seed(0)
    module = Classifier()
    before = weights_of(module).clone()
    with pytest.warns(UserWarning, match=f"fast_dev_run={num_steps} cuts the round after"):
        run(fed, module=module, fast_dev_run=num_steps)
    assert torch.equal(weights_of(module), before)
    assert fed.records[0].uplink_bits == 0 and "of 6 clients" in fed.records[0].aborted


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_resumed_under_a_limit_is_bit_identical(tmp_path, clients_per_step):
    def fit(*more, ckpt=None):
        fed = federated(mechanism=CorBin(5.0), clients_per_step=clients_per_step, local_epochs=2)
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))
        saves = {"enable_checkpointing": bool(more), "max_epochs": 3, "limit_train_batches": 2}
        module, _ = run(fed, *more, module=Classifier(backbone), ckpt=ckpt, **saves)
        return weights_of(module), fed

    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    whole, _ = fit(keep)
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]))
    per_round = len(paths) // 3
    assert len(paths) == 3 * per_round
    for step in (1, per_round - 1, per_round, per_round + 1, 2 * per_round):
        resumed, fed = fit(ckpt=paths[step - 1])
        assert torch.equal(resumed, whole), step
        assert [record.round for record in fed.records] == [0, 1, 2]


@pytest.mark.parametrize("limit", [1, 3])
def test_dp_sgd_takes_and_pays_for_so_many_steps(limit):
    private = DPSGD(1.0, 1.0, delta=1e-3, seed=1)
    fed = federated(local_epochs=2)
    run(fed, private, limit_train_batches=limit)
    for client, account in private.accounts.items():
        size = SIZES[client]
        ((noise, rate, steps),) = account.accountant.history
        assert (noise, steps) == (1.0, 2 * 2 * batches_of(size, limit))
        assert rate == pytest.approx(min(10 / size, 1.0), abs=1e-9)  # a limit changes no probability
