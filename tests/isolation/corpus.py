"""Trainings in the styles in which people publish them: small, and each with one habit of its own.

Without dropout and other draws, so that one client with `FedAvg` has to end with the plain weights.
"""

from __future__ import annotations

import copy
from collections import deque

import torch
import torchmetrics
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_fedq._lightning import pl
from tests.isolation.published import Case
from tests.training.published_optimizers import SAM

EPOCHS = 3


class Training(Case):
    """Compared over several rounds."""

    rounds = EPOCHS


class OneCycle(Training):
    """Asks how many steps there will be."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, 0.2, total_steps=steps, cycle_momentum=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WarmupByHand(Training):
    """In `optimizer_step`, from the global step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 6)
        optimizer.step(closure=closure)


class _Teacher(Training):
    """A frozen copy that follows."""

    def build(self):
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.2)

    def training_step(self, batch, batch_idx):
        ours, theirs = self.net(batch[0]), self.teacher(batch[0])
        return nn.functional.cross_entropy(ours, batch[1]) + nn.functional.mse_loss(ours, theirs.detach())


class MeanTeacher(_Teacher):
    def on_train_batch_end(self, *args):
        self.follow()


class Gan(Training):
    """Two optimisers by hand, and a schedule each."""

    def build(self):
        self.critic = nn.Linear(3, 1)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        net, critic = self.optimizers()
        loss = self.loss(batch) - 0.1 * self.critic(self.net(batch[0])).mean()
        net.zero_grad()
        self.manual_backward(loss)
        net.step()
        critic.zero_grad()
        self.manual_backward(self.critic(self.net(batch[0]).detach()).square().mean())
        critic.step()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.critic)]
        return optimizers, [LambdaLR(one, lambda step: 0.9**step) for one in optimizers]


class ReplayBuffer(Training):
    """Trains on samples of earlier batches, too."""

    def on_train_epoch_start(self):
        self.samples = deque(maxlen=4)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for old in self.samples:
            loss = loss + 0.1 * self.loss(old)
        self.samples.append((batch[0][:2].clone(), batch[1][:2].clone()))
        return loss


class Metrics(Training):
    """Objects in the module, logged and computed by hand."""

    def build(self):
        self.acc, self.mean = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.acc((scores.argmax(1) == batch[1]).float())
        self.mean.update(scores.detach().mean())
        self.log("acc", self.acc, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(scores, batch[1])

    def on_train_epoch_end(self):
        self.log("mean", self.mean.compute())
        self.mean.reset()


class BatchNorm(Training):
    def build(self):
        self.net.insert(1, nn.BatchNorm1d(5))


class WeightNorm(Training):
    def build(self):
        nn.utils.parametrizations.weight_norm(self.net[0])


class Recurrent(Training):
    def build(self):
        self.net = nn.Sequential(nn.GRU(2, 4, batch_first=True))
        self.head = nn.Linear(4, 3)

    def loss(self, batch):
        hidden = self.net[0](batch[0].view(-1, 3, 2))[0][:, -1]
        return nn.functional.cross_entropy(self.head(hidden), batch[1])


class GradientHooks(Training):
    def build(self):
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class _ScalesGradients(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad.mul_(0.5)


class OwnCallback(Training):
    def callbacks(self):
        return [_ScalesGradients()]


class Finetuning(Training):
    """Lightning's own callback."""

    def build(self):
        self.backbone, self.head = self.net[0], self.net[2]
        del self.net

    def loss(self, batch):
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0]).tanh()), batch[1])

    def callbacks(self):
        return [pl.callbacks.BackboneFinetuning(1, lambda epoch: 1.0, verbose=False)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class SharpnessAware(Training):
    rounds = 1

    def configure_optimizers(self):
        return SAM(self.parameters(), lr=0.1, momentum=0.9)
