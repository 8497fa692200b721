"""FedProx, SCAFFOLD, FedDyn and ErrorFeedback against federations that are written out in plain PyTorch."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms import SCAFFOLD, ErrorFeedback, FedDyn, FedProx
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import LDPQ, FedAvg, TopK
from tests.digits_run import Classifier, Digits, ManualSteps, fitted, make_trainer, weights_of

CLIENTS, EACH, ROUNDS, RATE = 4, 12, 4, 0.2


def samples():
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS * EACH, 5, generator=draws)
    labels = torch.arange(CLIENTS).repeat_interleave(EACH) % 3
    return inputs + labels[:, None], labels


class Module(pl.LightningModule):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=RATE)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def loader():
    return DataLoader(TensorDataset(*samples()), batch_size=4)


INDICES = [list(range(c * EACH, (c + 1) * EACH)) for c in range(CLIENTS)]


def data(indices=INDICES):
    return FederatedDataModule.from_loader(loader(), loader(), clients=indices)


def train(algorithm, rounds=ROUNDS, ckpt_path=None, save=None, **settings):
    settings = {"mechanism": FedAvg(), "seed": 0, "clients_per_step": 1, **settings}
    trainer_settings = settings.pop("trainer", {})
    module = settings.pop("module", None) or Module()
    federated = Federated(num_clients=CLIENTS, algorithm=algorithm, **settings)
    trainer = fitted(
        module, federated, data=data(), ckpt_path=ckpt_path, max_epochs=rounds, **trainer_settings
    )
    if save:
        trainer.save_checkpoint(save)
    return weights_of(module), federated


def reference(kind, strength=0.0, rounds=ROUNDS, cohorts=None):
    """The papers' pseudocode, with a second vector for the control variates."""
    module = Module()
    inputs, labels = samples()
    x = weights_of(module).clone()
    own = [torch.zeros_like(x) for _ in range(CLIENTS)]
    common = torch.zeros_like(x)
    for round in range(rounds):
        cohort = range(CLIENTS) if cohorts is None else cohorts[round]
        if not cohort:
            continue
        updates, changes = [], []
        for c in cohort:
            nn.utils.vector_to_parameters(x.clone(), module.parameters())
            steps = 0
            for batch in torch.tensor(INDICES[c]).split(4):
                module.zero_grad()
                module.training_step((inputs[batch], labels[batch]), 0).backward()
                w = weights_of(module)
                g = torch.cat([p.grad.flatten() for p in module.parameters()])
                if kind == "prox":
                    g = g + strength * (w - x)
                elif kind == "scaffold":
                    g = g + common - own[c]
                elif kind == "dyn":
                    g = g - own[c] + strength * (w - x)
                nn.utils.vector_to_parameters(w - RATE * g, module.parameters())
                steps += 1
            updates.append(weights_of(module) - x)
            if kind == "scaffold":
                new = own[c] - common - updates[-1] / (steps * RATE)
                changes.append(new - own[c])
                own[c] = new
            elif kind == "dyn":
                own[c] = own[c] - strength * updates[-1]
            elif kind == "feedback":
                wanted = updates[-1] + own[c]
                least = wanted.abs().sort().values[-int(strength * len(x) + 0.5)]
                updates[-1] = torch.where(wanted.abs() >= least, wanted, 0.0)
                own[c] = wanted - updates[-1]
        mean = torch.stack(updates).mean(0)
        if kind == "scaffold":
            common = common + len(updates) / CLIENTS * torch.stack(changes).mean(
                0
            )  # as it is sent in the paper
        if kind == "dyn":
            common = common - strength / CLIENTS * torch.stack(updates).sum(0)
            mean = mean - common / strength
        x = x + mean
    return x


ALL = {
    "prox": (FedProx(0.5), 0.5),
    "scaffold": (SCAFFOLD(), 0.0),
    "dyn": (FedDyn(0.1), 0.1),
    "feedback": (ErrorFeedback(0.25), 0.25),
}
KEEP = ["scaffold", "dyn", "feedback"]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_it_is_the_paper_s(kind, clients_per_step):
    algorithm, strength = ALL[kind]
    found, _ = train(algorithm, clients_per_step=clients_per_step)
    torch.testing.assert_close(found, reference(kind, strength), atol=2e-6, rtol=1e-5)
    assert not torch.allclose(found, train(None)[0], atol=1e-4)


@pytest.mark.parametrize("kind", KEEP)
def test_of_drawn_cohorts(kind):
    """The server's vector follows from the mean update, with the cohort's share of all clients."""
    algorithm, strength = ALL[kind]
    found, federated = train(algorithm, cohort=2, rounds=6)
    cohorts = [federated.planner.plan(r, FedAvg()).survivors for r in range(6)]
    assert len(set(cohorts)) > 2
    torch.testing.assert_close(found, reference(kind, strength, 6, cohorts), atol=5e-6, rtol=1e-5)


class GivesUp(pl.Callback):
    """In one round, after all clients have trained: the server gives it up, or the program is stopped."""

    def __init__(self, federated: Federated, stops: bool) -> None:
        self.federated, self.stops, self.done = federated, stops, False

    def on_clients_done(self, trainer, done, expected):
        engine = self.federated.engine
        assert engine is not None
        if done == expected and engine.round == 1 and not self.done:
            self.done = True
            if self.stops:
                raise ArithmeticError("for a test")
            engine.abort("for a test")


@pytest.mark.parametrize("kind", KEEP)
@pytest.mark.parametrize("stops", [False, True])
def test_clients_keep_nothing_of_a_round_that_was_given_up(kind, stops):
    """Two of four in each cohort: the next one does not write over what it left."""
    algorithm, strength = ALL[kind]
    module, rounds = Module(), 6
    federated = Federated(FedAvg(), CLIENTS, algorithm=algorithm, seed=0, cohort=2, clients_per_step=1)
    gives_up = GivesUp(federated, stops)
    if stops:
        with pytest.raises(ArithmeticError, match="for a test"):
            make_trainer(federated, gives_up, max_epochs=rounds).fit(module, datamodule=data())
        assert federated.engine is not None and federated.engine.round == 1
        make_trainer(federated, max_epochs=rounds - 1).fit(module, datamodule=data())
    else:
        with pytest.warns(UserWarning, match="Round 2 was aborted"):
            make_trainer(federated, gives_up, max_epochs=rounds).fit(module, datamodule=data())
    assert gives_up.done and len(federated.records) == rounds
    attempts = [int(stops and r == 1) for r in range(rounds)]
    cohorts = [federated.planner.plan(r, FedAvg(), attempts[r]).survivors for r in range(rounds)]
    assert not set(cohorts[1]) <= set(cohorts[2])
    if not stops:
        cohorts[1] = ()
    wanted = reference(kind, strength, rounds, cohorts)
    torch.testing.assert_close(weights_of(module), wanted, atol=5e-6, rtol=1e-5)


def test_without_a_pull_it_is_federated_averaging():
    assert torch.equal(train(FedProx(0.0))[0], train(None)[0])


@pytest.mark.parametrize("kind", ALL)
def test_resumed_as_if_never_stopped(kind, tmp_path):
    algorithm, _ = ALL[kind]
    whole, _ = train(algorithm)
    train(algorithm, rounds=2, save=tmp_path / "two.ckpt")
    assert torch.equal(train(algorithm, ckpt_path=tmp_path / "two.ckpt")[0], whole)


def test_no_checkpoint_of_a_private_run_holds_what_clients_keep(tmp_path):
    path, settings = tmp_path / "two.ckpt", {"mechanism": LDPQ(1.0), "seed": None, "client_metrics": "none"}
    train(SCAFFOLD(), rounds=2, save=path, **settings)
    saved = torch.load(path, weights_only=False)
    [state] = [s for s in saved["callbacks"].values() if "federation" in s]
    assert "algorithm" not in state
    with pytest.warns(UserWarning, match="has no client states of SCAFFOLD"):
        train(SCAFFOLD(), rounds=3, ckpt_path=path, **settings)


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path):
    train(FedProx(0.5), rounds=1, save=tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=r"algorithm = FedProx\(mu=0.5\) \(here None\)"):
        train(None, rounds=2, ckpt_path=tmp_path / "one.ckpt")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"algorithm": FedDyn(), "weighting": "samples"}, ValueError, "plain mean update"),
        ({"algorithm": FedDyn(), "sends": "weights"}, ValueError, "plain mean update"),
        ({"algorithm": ErrorFeedback(), "weighting": "samples"}, ValueError, "plain mean update"),
        ({"algorithm": "FedProx"}, TypeError, "a local algorithm, such as FedProx"),
        ({"algorithm": FedProx}, TypeError, "the class FedProx itself"),
    ],
)
def test_what_does_not_go_together(settings, error, words):
    with pytest.raises(error, match=words):
        Federated(FedAvg(), CLIENTS, **settings)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_what_clients_take_for_sent_is_sent(share):
    """Buffers travel beside the parameters, and a smaller share of the mechanism's leaves out more."""
    norm = share == 0.1
    layers = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10)) if norm else nn.Linear(64, 10)
    made = Federated(TopK(0.1), CLIENTS, seed=1, algorithm=ErrorFeedback(share))
    with pytest.raises(ValueError, match=r"send \d+ coordinates and (128|0) of buffers, but TopK"):
        make_trainer(made).fit(Classifier(layers), datamodule=Digits())


def test_numbers_out_of_range():
    for make in (lambda: FedProx(-1.0), lambda: FedProx(float("nan")), lambda: FedDyn(0.0)):
        with pytest.raises(ValueError, match="must be a finite number"):
            make()
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 0"):
        ErrorFeedback(0.0)


def test_scaffold_takes_no_other_optimizer():
    with pytest.raises(ValueError, match="without momentum"):
        train(SCAFFOLD(), module=Module(partial(torch.optim.Adam, lr=0.1)))


def test_by_hand_and_with_accumulation():
    """The term comes once in a step, whoever makes it."""

    class ByHand(ManualSteps, Module):
        """Takes its steps itself."""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = train(FedProx(0.5), module=ByHand())
    torch.testing.assert_close(found, reference("prox", 0.5), atol=2e-6, rtol=1e-5)
    both = [
        train(FedProx(0.5), trainer={"accumulate_grad_batches": 2}, clients_per_step=n)[0] for n in (1, 4)
    ]
    torch.testing.assert_close(*both, atol=2e-6, rtol=1e-5)
    averaged = train(None, trainer={"accumulate_grad_batches": 2})[0]
    assert not torch.allclose(both[0], averaged, atol=1e-4)  # two steps a round: the second one is pulled
