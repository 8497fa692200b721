"""Buffers that training changes: shared, local or frozen."""

import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.mechanisms import LDPQ, FedAvg
from tests.by_hand import averaging_with_own
from tests.callbacks.silent import Silent
from tests.digits_run import Classifier, Digits, digits, make_trainer

CLIENTS, BATCH = 4, 5


def normed(momentum=0.1):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Tanh(), nn.Linear(8, 10)]
    return Classifier(nn.Sequential(*layers))


def federated(buffers="share", mechanism=None, **settings):
    return Federated(
        mechanism or FedAvg(), CLIENTS, seed=1, buffers=buffers, **{"clients_per_step": 1, **settings}
    )


def fit(fed, module=None, rounds=3, **trainer):
    module = module or normed()
    make_trainer(fed, max_epochs=rounds, **trainer).fit(module, datamodule=Digits(80, BATCH))
    return module


def by_hand(fed, mode, rounds, momentum=0.1):
    """A mean of parameters and, shared, of statistics."""
    model = normed(momentum).backbone
    own = [name for name, b in model.named_buffers() if mode == "local" and b.is_floating_point()]
    begin = (lambda model: model[1].eval()) if mode == "frozen" else (lambda model: None)
    return averaging_with_own(model, fed, rounds, own.__contains__, BATCH, begin)[0]


@pytest.mark.parametrize("clients_per_step", [1, 4])
@pytest.mark.parametrize("mode", ["share", "local", "frozen"])
def test_is_the_loop_over_clients(mode, clients_per_step):
    fed = federated(mode, clients_per_step=clients_per_step)
    module = fit(fed)
    assert fed.clients_per_step_chosen == clients_per_step
    for name, value in by_hand(fed, mode, 3).items():
        torch.testing.assert_close(module.backbone.state_dict()[name], value, atol=2e-6, rtol=1e-5, msg=name)
    assert fed.engine is not None
    assert fed.engine.weights.numel() == 64 * 8 + 8 + 16 + 80 + 10 + (16 if mode == "share" else 0)
    assert fed.fit.vector.num_buffers == (16 if mode == "share" else 0)
    assert module.backbone[1].training


def test_cumulative_statistics_and_counters():
    """Without momentum the counter itself enters the statistics, so it has to start where the round does."""
    fed = federated()
    module = fit(fed, normed(None))
    for name, value in by_hand(fed, "share", 3, None).items():
        torch.testing.assert_close(module.backbone.state_dict()[name], value, atol=2e-6, rtol=1e-5, msg=name)
    assert int(module.backbone[1].num_batches_tracked) == 3 * 4


class Queue(Classifier):
    """Contrasts a batch with earlier ones, which wait in a ring with a pointer, as MoCo's keys do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, 10))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("large", torch.tensor(2**40 + 1))

    def loss(self, inputs, labels):
        scores = self.backbone(inputs)
        start = int(self.pointer)
        rows = torch.arange(start, start + len(scores)) % len(self.queue)
        contrast = (scores.tanh() @ self.queue.clone().T).mean()
        self.queue[rows] = scores.detach().tanh()
        self.pointer[0] = (start + len(scores)) % len(self.queue)
        self.large += 1
        return nn.functional.cross_entropy(scores, labels) + 0.1 * contrast

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)


@pytest.mark.parametrize("clients_per_step", ["auto", 4])
def test_a_queue_with_an_integer_pointer_is_each_client_s_own(clients_per_step):
    fed, module = federated("local", clients_per_step=clients_per_step), Queue()
    if clients_per_step == 4:
        with pytest.warns(UserWarning, match=r"one client at a time.*own integer buffers \(pointer, large\)"):
            fit(fed, module)
    else:
        fit(fed, module)
    inputs, labels = digits()

    def step(model, part):
        gradients = torch.autograd.grad(model.loss(inputs[part], labels[part]), list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.data.sub_(0.5 * gradient)

    buffers = {name for name, _ in Queue().named_buffers()}
    state, own = averaging_with_own(Queue(), fed, 3, buffers.__contains__, BATCH, step=step)
    assert int(own[0]["large"]) == 2**40 + 1 + 3 * 4, "four batches a round"
    for name, value in state.items():
        torch.testing.assert_close(module.state_dict()[name], value, atol=2e-6, rtol=1e-5, msg=name)
    assert fed.engine is not None and fed.engine.weights.numel() == 650, "neither travels"
    assert torch.equal(module.pointer, torch.zeros(1, dtype=torch.int64)), "between rounds those of the start"


def test_an_integer_pointer_that_nobody_keeps_is_named_with_a_cure_that_helps():
    with pytest.warns(UserWarning, match=r"changed pointer, large, which .* don't send.*buffers='local'"):
        fit(federated("share"), Queue())
    fit(federated("local"), Queue(), rounds=1)


class Whitens(nn.Module):
    """Keeps a running mean of its own, assigned anew or in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, inputs):
        if self.training:
            new = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
            if self.in_place:
                self.mean.copy_(new)
            else:
                self.mean = new
        return inputs - self.mean


@pytest.mark.parametrize("in_place", [False, True])
def test_other_layers_with_statistics_are_found_by_a_rehearsal(in_place):
    def build():
        torch.manual_seed(0)
        return Classifier(nn.Sequential(Whitens(in_place), nn.Linear(64, 10)))

    fed = federated()
    module = fit(fed, build())
    assert fed.engine is not None and fed.engine.segments == (640, 10, 64)
    assert module.backbone[0].mean.abs().sum() > 0
    assert torch.equal(fit(federated(mechanism=Silent()), build()).backbone[0].mean, torch.zeros(64))
    stacked = fit(federated(clients_per_step=4), build())
    torch.testing.assert_close(stacked.state_dict(), module.state_dict(), atol=2e-6, rtol=1e-5)


class Transfer(Classifier):
    """A frozen backbone that its own forward puts into eval mode, as Lightning's documentation does."""

    def __init__(self, where: str) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8)))
        self.head, self.where = nn.Linear(8, 10), where
        self.backbone.requires_grad_(False)
        if where == "before":
            self.backbone.eval()

    def on_train_epoch_start(self):
        if self.where == "epoch":
            self.backbone.eval()

    def training_step(self, batch, batch_idx):
        if self.where == "step":
            self.backbone.eval()
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        self.head(self.backbone(batch[0]))


@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode at the start of training")
@pytest.mark.parametrize("where", ["before", "epoch", "step"])
def test_a_frozen_backbone_in_eval_mode_stays_as_it_is(where):
    fed = federated(mechanism=LDPQ(epsilon_per_coordinate=1.0))
    module = fit(fed, Transfer(where))
    fresh = Transfer(where)
    for name, value in module.backbone.state_dict().items():
        assert torch.equal(value, fresh.backbone.state_dict()[name]), name
    assert fed.engine is not None and fed.engine.segments == (80, 10)


def test_an_unknown_way():
    with pytest.raises(ValueError, match="buffers must be one of share, local, frozen, got 'keep'"):
        federated("keep")


def test_the_privacy_page_counts_buffers(tmp_path):
    folder = RunFolder("run", str(tmp_path), show=False)
    make_trainer(federated(mechanism=LDPQ(epsilon_per_coordinate=1.0)), folder, max_epochs=1).fit(
        normed(), datamodule=Digits(80, BATCH)
    )
    assert folder.summary["num_buffers"] == 16 and folder.summary["num_parameters"] == 626
    report = (tmp_path / "run" / "report.md").read_text()
    assert "16 of 642 coordinates are buffers, charged like parameters" in report
