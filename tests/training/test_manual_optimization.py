"""Manual optimisation and several optimisers: one client at a time, each with fresh optimisers."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import digits, make_trainer, weights_of

ROUNDS, NUM_CLIENTS, BATCH = 3, 4, 5


class Adversaries(pl.LightningModule):
    """Two networks against each other, each with its own optimiser; a third part is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(8, 64), nn.Linear(64, 1)
        self.idle = nn.Linear(2, 2)

    def losses(self, images):
        made = self.generator(images[:, :8]).sigmoid()
        real, fake = self.critic(images), self.critic(made.detach())
        critic = nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()
        return nn.functional.softplus(-self.critic(made)).mean(), critic

    critic_every = 1
    """The critic trains on every so-many-th batch."""

    def training_step(self, batch, batch_idx):
        for index, optimizer in enumerate(self.optimizers()):
            if index == 1 and batch_idx % self.critic_every:
                continue
            self.toggle_optimizer(optimizer)
            loss = self.losses(batch[0])[index]
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss_{index}", loss, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9),
        ]


def loader(num_samples=60):
    inputs, labels = digits()
    return DataLoader(TensorDataset(inputs[:num_samples], labels[:num_samples]), batch_size=BATCH)


def by_hand(module, parts, max_steps=None):
    """Client after client from the same weights with fresh optimisers, then the mean; losses by round."""
    inputs, _ = digits()
    seen = []
    now, rounds = 0, 0
    while rounds < ROUNDS if max_steps is None else now < max_steps:
        trained, losses, most = [], [], 0
        for part in parts:
            local, steps = copy.deepcopy(module), 0
            optimizers = local.configure_optimizers()
            for batch, start in enumerate(range(0, len(part), BATCH)):
                if max_steps is not None and now + steps >= max_steps:
                    break
                images = inputs[part[start : start + BATCH]]
                for index, optimizer in enumerate(optimizers):
                    if index == 1 and batch % local.critic_every:
                        continue
                    steps += 1
                    local.zero_grad()
                    loss = local.losses(images)[index]
                    loss.backward()
                    own = optimizer.param_groups[0]["params"]
                    torch.nn.utils.clip_grad_norm_(own, 0.5)
                    optimizer.step()
                    if index == 0:
                        losses.append(loss.item())
            trained.append(weights_of(local))
            most = max(most, steps)
        now, rounds = now + most, rounds + 1
        torch.nn.utils.vector_to_parameters(torch.stack(trained).mean(0), module.parameters())
        seen.append(sum(losses) / len(losses))
    return weights_of(module), seen


def test_a_gan_trains_as_by_hand_client_after_client():
    ours, seen = Adversaries(), []
    expected = copy.deepcopy(ours)

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(trainer.callback_metrics["loss_0"].item())

    fed = Federated(FedAvg(), NUM_CLIENTS, seed=0)
    trainer = make_trainer(fed, Watch(), max_epochs=ROUNDS)
    trainer.fit(ours, loader())
    parts = [part.tolist() for part in fed.client_indices]
    weights, losses = by_hand(expected, parts)
    torch.testing.assert_close(weights_of(ours), weights, atol=1e-5, rtol=1e-4)
    assert seen == pytest.approx(losses, abs=1e-5)
    assert fed.clients_per_step_chosen == 1
    assert fed.records[0].num_received == NUM_CLIENTS
    dim = sum(p.numel() for part in (ours.generator, ours.critic) for p in part.parameters())
    assert fed.engine is not None and fed.engine.weights.numel() == dim, (
        "what no optimiser holds stays at home"
    )


def test_resume_is_bit_for_bit(tmp_path):
    """From the end of a round, and from the middle of one."""
    whole, module = Adversaries(), Adversaries()
    make_trainer(Federated(FedAvg(), NUM_CLIENTS, seed=0), max_epochs=ROUNDS).fit(whole, loader())

    class Stop(pl.Callback):
        is_shared_by_clients = True

        def on_train_batch_end(self, trainer, module, *args):
            if trainer.current_epoch == 1 and fed.training_clients == (1,) and args[-1] == 1:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    fed = Federated(FedAvg(), NUM_CLIENTS, seed=0)
    first = make_trainer(fed, Stop(), max_epochs=2)
    first.fit(module, loader())
    first.save_checkpoint(tmp_path / "end.ckpt")
    for name in ("middle.ckpt", "end.ckpt"):
        again = Adversaries()
        resumed = make_trainer(Federated(FedAvg(), NUM_CLIENTS, seed=0), max_epochs=ROUNDS)
        resumed.fit(again, loader(), ckpt_path=tmp_path / name)
        assert torch.equal(weights_of(again), weights_of(whole)), name


@pytest.mark.parametrize("critic_every", [1, 2])
@pytest.mark.parametrize("max_steps", [2, 5, 6, 7, 10])
def test_max_steps_counts_the_steps_of_all_optimisers_of_one_client(max_steps, critic_every):
    """A client's last batch is the one in which they are reached, as in an ordinary training."""
    ours, steps = Adversaries(), []
    ours.critic_every = critic_every
    expected = copy.deepcopy(ours)

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            steps.append(trainer.global_step)

    fed = Federated(FedAvg(), NUM_CLIENTS, seed=0)  # three batches a client, 6 (or 5) steps a round
    trainer = make_trainer(fed, Watch(), max_steps=max_steps, max_epochs=-1)
    trainer.fit(ours, loader())
    parts = [part.tolist() for part in fed.client_indices]
    weights, losses = by_hand(expected, parts, max_steps)
    torch.testing.assert_close(weights_of(ours), weights, atol=1e-5, rtol=1e-4)
    assert len(fed.records) == len(losses) == len(steps)
