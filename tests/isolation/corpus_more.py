"""More published styles: several loaders, samplers, layers made late, queues, memory over epochs."""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from tests.isolation.corpus import Training
from tests.isolation.published import BATCH, SIZE, Data


class LabelledAndNot(Training):
    """Two loaders at once, one of them without labels."""

    class data(Data):
        def train_dataloader(self):
            labelled = DataLoader(TensorDataset(self.inputs, self.labels), batch_size=BATCH)
            return {
                "labelled": labelled,
                "not": DataLoader(TensorDataset(self.inputs * 0.5), batch_size=BATCH),
            }

    def training_step(self, batch, batch_idx):
        guesses = self.net(batch["not"][0]).softmax(1)
        entropy = -(guesses * guesses.clamp_min(1e-6).log()).sum(1).mean()
        return self.loss(batch["labelled"]) + 0.1 * entropy


class SparseEmbedding(Training):
    """Gradients of the table are sparse."""

    def build(self):
        self.table = nn.EmbeddingBag(8, 6, sparse=True)

    def loss(self, batch):
        words = (batch[0].abs() * 4).long().clamp_max(7)
        return nn.functional.cross_entropy(self.net(batch[0] + self.table(words)), batch[1])


class Moco(Training):
    """A queue of keys in a buffer, a pointer into it, and an encoder that follows.

    The pointer is an integer, which no update carries. So an epoch goes twice around the queue and ends where
    it began; with another length, the next round would write into other places of the queue.
    """

    def build(self):
        self.keys = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(SIZE // 2, 3)))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for slow, fast in zip(self.keys.parameters(), self.net.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
            found = nn.functional.normalize(self.keys(batch[0]))
        own = nn.functional.normalize(self.net(batch[0]))
        positive = (own * found).sum(1, keepdim=True)
        scores = torch.cat([positive, own @ self.queue.clone().T], 1) / 0.5
        start = int(self.pointer)
        self.queue[start : start + len(found)] = found
        self.pointer[0] = (start + BATCH) % len(self.queue)
        alike = nn.functional.cross_entropy(scores, torch.zeros(len(own), dtype=torch.long))
        return self.loss(batch) + 0.1 * alike


class StochasticAveraging(Training):
    """Lightning's own callback, from the second epoch on."""

    begins_late = True
    """A plain training of one epoch ends with the average, which has not begun: the first weights."""

    def callbacks(self):
        return [pl.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)]


class MemoryOfEpochs(Training):
    """A running mean that goes on over epochs, in an attribute: a plain training's rate follows it."""

    rounds = 1
    """A client's memory is dropped with the client, so that only the first round is the plain epoch."""

    def build(self):
        self.mean = 1.0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean = 0.8 * self.mean + 0.2 * loss.item()
        return loss / self.mean


class Curriculum(Training):
    """Data that depend on the epoch, by reloading."""

    flags = {"reload_dataloaders_every_n_epochs": 1}  # noqa: RUF012

    class data(Data):
        def train_dataloader(self):
            epoch = 0 if self.trainer is None else self.trainer.current_epoch
            return DataLoader(TensorDataset(self.inputs * (1 + 0.1 * epoch), self.labels), batch_size=BATCH)


class PenaltyOfGradients(Training):
    """A second derivative: the squared norm of the gradient by the inputs."""

    def loss(self, batch):
        inputs = batch[0].clone().requires_grad_(True)
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(self.net(inputs), batch[1])
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + 0.1 * slope.square().sum()


class Recomputed(Training):
    """Activations are computed again in the backward pass."""

    def loss(self, batch):
        return nn.functional.cross_entropy(checkpoint(self.net, batch[0], use_reentrant=False), batch[1])
