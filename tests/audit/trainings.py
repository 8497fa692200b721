"""Audit, layer C, on real trainings: digits, a Lightning Trainer, and canaries whose coins are guessed.

Three kinds of canaries, by what the claim is about:

* a client for each, whose update is one large coordinate with the coin's sign in every round: claims about a
  client's whole update, the score is how far the released models moved along it, or its own messages;
* a coordinate for each, of one client whose update has the coins' signs: claims about a coordinate, the
  score is what an eavesdropper on the uplink sees;
* a sample for each, present or absent: `DPSGD`, the score is how far the model moved the sample's way;
* all samples, each with a weight of its own, counted like the draws of a simulation (`ManySamples`).

All other clients and samples train as they always do. Few canaries bound epsilon loosely: a lower bound far
below the claim says nothing, one above it refutes the claim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.audit.one_run import canary_coins, judge_guesses, surest_guesses
from lightning_fedq.audit.views import Finding, View
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import Classifier, Linear
from lightning_fedq.data.models.initial import seeded
from lightning_fedq.mechanisms import (
    LDPQ,
    AggregateGaussian,
    CorBin,
    DistributedDiscreteGaussian,
    GaussianNoise,
    LayeredGaussian,
)
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, SampledGaussianLoss
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.rounds import Tampering
from tests.digits_run import make_trainer, weights_of

DELTA = 1e-8
"""Far below what a report uses: m canaries cost the proof 2 m delta."""
_PIXELS, _CLASSES = 64, 10
_FAR = 10.0
"""Size of a canary, many times the clipping norm."""


@dataclass(frozen=True)
class CanaryRun:
    """A federated training with canaries.

    Args:
        adversary: Adversary whose view is scored: the outsider or the eavesdropper.
        clients: Are the canaries clients? Else they are coordinates of one client.
        canaries: How many; at most 640.
        honest: Clients that train.
        guesses: How many of the surest guesses are made.
    """

    mechanism: Mechanism
    adversary: Adversary
    clients: bool
    canaries: int = 500
    honest: int = 20
    rounds: int = 4
    guesses: int = 150
    seed: int = 0

    def __call__(self, alpha: float) -> Finding:
        """Train, guess and judge."""
        coins = canary_coins(self.canaries, self.seed)
        canaries = Canaries(coins, self.clients)
        number = self.honest + (self.canaries if self.clients else 1)
        fed = Federated(
            self.mechanism, number, seed=self.seed, clients_per_step=min(number, 64), ranges=FixedRange(1.0)
        )
        model = Classifier(seeded(Linear(_PIXELS), self.seed), lr=0.1)
        before = weights_of(model)
        trainer = make_trainer(fed, canaries, max_epochs=self.rounds, limit_val_batches=0)
        trainer.fit(model, datamodule=DigitsDataModule(batch_size=2))
        assert fed.engine is not None
        moved = (weights_of(model) - before)[: self.canaries].numpy()
        scores = moved if self.adversary is Adversary.OUTSIDER else canaries.seen
        claims = self.mechanism.claims(fed.engine.context(fed.engine.planner.plan(0, self.mechanism)))
        loss = next(claim.loss for claim in claims if claim.adversary is self.adversary)
        epsilon = spent(loss, DELTA, rounds=self.rounds).epsilon
        what = "clients" if self.clients else "coordinates"
        name = f"{type(self.mechanism).__name__}, {self.canaries} {what}, {_WORDS[self.adversary]}"
        guesses = surest_guesses(scores - scores.mean(), self.guesses)
        return judge_guesses(name, coins, guesses, epsilon, delta=DELTA, alpha=alpha)


_WORDS = {Adversary.OUTSIDER: "released models", Adversary.EAVESDROPPER: "messages"}


class Canaries(pl.Callback, Tampering):
    """Puts canaries into the updates of a federation, and adds up what their messages say.

    Args:
        coins: `(canaries,)`, +1 or -1.
        clients: Is each a client? Else each is a coordinate of client 0.
    """

    knows_clients = True

    def __init__(self, coins: NDArray[np.int64], clients: bool) -> None:
        self.coins, self.clients = coins, clients
        self.seen = np.zeros(len(coins))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stand between training and encoding, and between encoding and the wire."""
        engine = find_federated(trainer, "Canaries").started_engine
        engine.transform, engine.tampering = self.transform, self

    def transform(self, clients: Sequence[int], updates: Tensor) -> Tensor:
        """Replace the canaries' updates. See `rounds.UpdateTransform`."""
        for row, client in enumerate(clients):
            if self.clients and client < len(self.coins):
                updates[row] = 0.0
                updates[row, client] = _FAR * float(self.coins[client])
            elif not self.clients and client == 0:
                updates[row, : len(self.coins)] = _FAR * torch.from_numpy(self.coins).to(updates)
        return updates

    def send(self, clients, values, message, context, rand):
        # the message is looked at and stays as it is
        symbols = message.symbols.numpy()
        for row, client in enumerate(clients):
            if self.clients and client < len(self.coins):
                self.seen[client] += symbols[row, client]
            elif not self.clients and client == 0:
                self.seen += symbols[row, : len(self.coins)]
        return message


@dataclass(frozen=True)
class SampleCanaries:
    """An ordinary training with `DPSGD` and canary samples: each lights a feature that no digit has.

    Args:
        noise_multiplier: Noise multiplier of `DPSGD`.
        epochs: Passes over the data, on average.
        guesses: How many of the surest guesses are made.
        sgd: The callback; tests plant others.
    """

    noise_multiplier: float = 1.0
    canaries: int = 256
    epochs: int = 10
    guesses: int = 100
    seed: int = 0
    sgd: Callable[..., DPSGD] = DPSGD

    def __call__(self, alpha: float) -> Finding:
        """Train, guess and judge."""
        coins = canary_coins(self.canaries, self.seed)
        labels, features = np.arange(self.canaries) % _CLASSES, _PIXELS + np.arange(self.canaries)
        private = self.sgd(
            noise_multiplier=self.noise_multiplier, max_grad_norm=1.0, delta=DELTA, seed=self.seed
        )
        model = Classifier(seeded(Linear(_PIXELS + self.canaries), self.seed), lr=0.5)
        before = weights_of(model)
        trainer = make_trainer(private, max_epochs=self.epochs, limit_val_batches=0)
        trainer.fit(model, datamodule=_WithCanaries(coins, labels))
        weights = _CLASSES * (_PIXELS + self.canaries)
        moved = (weights_of(model) - before)[:weights].reshape(_CLASSES, -1).numpy()
        # a canary of class y pulls row y of its column up and all rows of it down a little
        scores = moved[labels, features] - moved[:, features].mean(0)
        guesses = surest_guesses(scores - scores.mean(), self.guesses)
        epsilon = private.accountant.get_epsilon(DELTA)
        name = f"DPSGD, {self.canaries} samples, released model"
        return judge_guesses(name, coins, guesses, epsilon, delta=DELTA, alpha=alpha)


class _WithCanaries(pl.LightningDataModule):
    """Digits with a feature more for every canary, and the canaries that are present."""

    def __init__(self, coins: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        super().__init__()
        self._coins, self._labels = coins, labels

    def setup(self, stage: str) -> None:
        """Read the digits."""
        images, digits, _ = DigitsDataModule().load()
        present = torch.from_numpy(np.flatnonzero(self._coins > 0))
        inputs = torch.zeros(len(images) + len(present), _PIXELS + len(self._coins))
        inputs[: len(images), :_PIXELS] = images.reshape(-1, _PIXELS)
        inputs[len(images) + torch.arange(len(present)), _PIXELS + present] = _FAR
        self._data = TensorDataset(inputs, torch.cat([digits, torch.from_numpy(self._labels)[present]]))

    def train_dataloader(self) -> DataLoader[Any]:
        """One batch is a tenth of the data or less."""
        return DataLoader(self._data, batch_size=180, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Lightning wants one beside a `validation_step`. Nothing is validated here."""
        return DataLoader(self._data, batch_size=180)


@dataclass(frozen=True)
class ManySamples:
    """A training with `DPSGD` in which every sample is a canary, present or absent, with a weight of its own.

    The gradient of a sample is its own weight, far above the clip, so a weight moves by how often its sample
    took part, plus noise. With correct sampling and noise the weights are independent, so they are counted
    like the draws of a simulation, against the claim of the accountant over all steps. This shows noise that
    is too small, and samples whose taking part is not drawn afresh.

    Args:
        noise_multiplier: Noise multiplier of `DPSGD`.
        epochs: Passes over the data, on average, of ten steps each.
        sgd: The callback; tests plant others.
    """

    noise_multiplier: float = 1.5
    canaries: int = 6000
    epochs: int = 20
    seed: int = 0
    sgd: Callable[..., DPSGD] = DPSGD

    def __call__(self, alpha: float) -> Finding:
        """Train, count and judge."""
        coins = canary_coins(self.canaries, self.seed)
        private = self.sgd(
            noise_multiplier=self.noise_multiplier, max_grad_norm=1.0, delta=DELTA, seed=self.seed
        )
        model = _OwnWeights(coins)
        make_trainer(private, max_epochs=self.epochs).fit(model)
        scores = model.layer.weight.detach().flatten().double().numpy()
        ((noise, rate, steps),) = private.accountant.history
        learning = np.arange(self.canaries) % 2 == 0
        edges = np.unique(np.quantile(scores[learning], np.arange(1, 32) / 32))
        name = f"DPSGD, {self.canaries} samples, a weight each"
        view = View(name, SampledGaussianLoss(noise, rate), steps, 1, len(edges) + 1)
        for half, label, place in zip(learning, coins, np.searchsorted(edges, scores), strict=True):
            view.add(int(not half), np.array([int(label < 0)]), np.array([place]))
        return view.judge(alpha)


class _OwnWeights(pl.LightningModule):
    """A weight for every sample, and a loss that is linear in it."""

    def __init__(self, coins: NDArray[np.int64]) -> None:
        super().__init__()
        self._coins = coins
        self.layer = torch.nn.Linear(len(coins), 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Minus the mean output: the gradient of a sample is minus itself."""
        loss: Tensor = -self.layer(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD. The learning rate scales all scores alike."""
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self) -> DataLoader[Any]:
        """The samples that are present, a tenth of them a batch."""
        at = torch.from_numpy(np.flatnonzero(self._coins > 0))
        inputs = torch.zeros(len(at), len(self._coins))
        inputs[torch.arange(len(at)), at] = _FAR
        return DataLoader(TensorDataset(inputs), batch_size=len(at) // 10, shuffle=True)


_CLIENT_RUN = CanaryRun(AggregateGaussian(1.0, 2.0, entropy_code="elias"), Adversary.OUTSIDER, clients=True)
_COORDINATE_RUN = CanaryRun(LDPQ(1.0), Adversary.EAVESDROPPER, clients=False)
TRAININGS: tuple[CanaryRun | SampleCanaries | ManySamples, ...] = (
    _CLIENT_RUN,
    replace(_CLIENT_RUN, mechanism=LayeredGaussian(1.0, 2.0, entropy_code="elias")),
    replace(_CLIENT_RUN, mechanism=DistributedDiscreteGaussian(1.0, 0.16, 0.02)),
    replace(_CLIENT_RUN, mechanism=GaussianNoise(1.0, 2.0), adversary=Adversary.EAVESDROPPER),
    _COORDINATE_RUN,
    replace(_COORDINATE_RUN, mechanism=CorBin(1.0)),
    SampleCanaries(),
    ManySamples(),
)
"""Trainings that the table of docs/audit.md shows."""
