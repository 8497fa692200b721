"""One federated run of the CPA paper's set-up, and what its tables ask of it.

Stated by the paper's section 5.1: epsilon 0.5, R = 1 and L = 1, nested Rc = 1 and Rn = 3, 5 samples a user of
MNIST, all of CIFAR-10 shared out. Taken from the authors' code: one local step, 30 rounds, gamma = 0.05, SGD
with momentum 0.5 whose buffer each client keeps across rounds. The engine gives a client a fresh optimiser in
every round; for one local step at a constant rate, `KeptMomentum` makes up for it exactly. It matters: at
learning rate 1 accuracy without it is some 20 points lower.

The signal-to-noise ratio is the authors': the variance of the exact mean over that of the error, averaged
over tensors and over rounds. They print 20 log10 of this ratio of variances, which doubles the decibels;
both are given here.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.models import Classifier
from lightning_fedq.functional.flatten import copy_into
from lightning_fedq.mechanisms import CPA, JoPEQ
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.ranges import FixedRange, RangeRule
from reproductions.bench import Claim, ImageData, Row, quiet_trainer
from reproductions.cpa.data import ClientImages, Images, Network, accuracy, load_images, network

GAMMA, STACK = 0.05, 250


class KeptMomentum(pl.Callback):
    """Let each client keep its momentum buffer across rounds, as in the authors' code.

    With one local step h = -lr g at a constant rate, SGD with a kept buffer sends b h_previous + h; so the
    updates are enough, and the optimiser itself stays without momentum. What a client holds on to is a
    vector of the model's size, for every client: fine for a reproduction, and why the engine does not.

    Args:
        federated: The federation, with one local step.
        momentum: b, in [0, 1).
    """

    def __init__(self, federated: Federated, momentum: float) -> None:
        self.federated, self.momentum = federated, momentum

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the engine the transform."""
        engine = self.federated.engine
        assert engine is not None
        if self.momentum:
            self._kept = engine.weights.new_zeros(self.federated.clients.num_clients, engine.weights.numel())
            engine.transform = self._with_momentum

    def _with_momentum(self, clients: Sequence[int], updates: Tensor) -> Tensor:
        rows = torch.tensor(clients)
        sent = self._kept.index_select(0, rows).mul_(self.momentum).add_(updates)
        self._kept.index_copy_(0, rows, sent)
        return sent


class Watch(pl.Callback):
    """Per round: the authors' ratio of variances, and accuracies in rounds that want one.

    Lightning's own validation would cost a loader and a loop a round.

    Args:
        federated: The federation.
        data: Its validation and test samples.
        val_every: Validate after every so many rounds, and after the last.
        test_at: Rounds, from 1, after which to test as well.

    Attributes:
        accuracies: Validation accuracy, one for each validation.
        tests: Test accuracy after each of `test_at`.
        ratios: Var(exact mean) / Var(error), averaged over tensors, of each round.
        best: Weights of the round with the best validation accuracy.
    """

    def __init__(
        self, federated: Federated, data: ClientImages, val_every: int, test_at: Collection[int]
    ) -> None:
        self.federated, self.data, self.val_every, self.test_at = federated, data, val_every, test_at
        self.accuracies: list[float] = []
        self.tests: dict[int, float] = {}
        self.ratios: list[float] = []
        self.best: Tensor | None = None
        self._before: Tensor | None = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the global model."""
        assert self.federated.engine is not None
        self._before = self.federated.engine.weights.clone()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare; the server's step is done, and the module holds the global model."""
        engine, number = self.federated.engine, trainer.current_epoch + 1
        assert engine is not None and engine.exact_mean is not None and self._before is not None
        exact = engine.exact_mean.double()
        error = exact - (engine.weights - self._before).double()
        sizes = list(engine.segments)
        parts = zip(torch.split(exact, sizes), torch.split(error, sizes), strict=True)
        self.ratios.append(sum(ratio_of_variances(a, b) for a, b in parts) / len(engine.segments))
        if number % self.val_every == 0 or number == trainer.max_epochs:
            self.accuracies.append(accuracy(pl_module, self.data.val_set.tensors))
            if self.accuracies[-1] == max(self.accuracies):
                self.best = engine.weights.clone()
        if number in self.test_at:
            self.tests[number] = accuracy(pl_module, self.data.test_set.tensors)


def ratio_of_variances(signal: Tensor, error: Tensor) -> float:
    """Var(signal) / Var(error) over the entries of one tensor; infinite without error."""
    noise = float(error.var())
    return float(signal.var()) / noise if noise > 1e-15 else math.inf


@dataclass(frozen=True)
class Run:
    """What one run reached.

    Args:
        last: Test accuracy after the last round.
        best: Test accuracy of the validated round with the best validation accuracy.
        tests: Test accuracy after the rounds that were asked for.
        ratio: Ratio of variances, averaged over tensors and rounds.
        mse: Squared error of the mean update per parameter, averaged over rounds.
        clip_rate: Share of coordinates beyond the range, averaged over rounds.
        cpu_seconds: Processor time, validation and test included.
        bits: Sent by all clients in the whole run.
        accuracies: Validation accuracy after each round, or every `val_every` of them.
        weights: The model after the last round, `(dim,)`.
    """

    last: float
    best: float
    tests: Mapping[int, float]
    ratio: float
    mse: float
    clip_rate: float
    cpu_seconds: float
    bits: int
    accuracies: tuple[float, ...]
    weights: Tensor

    @property
    def snr_db10(self) -> float:
        """10 log10 of the ratio: decibels of a ratio of variances."""
        return 10.0 * math.log10(self.ratio) if 0.0 < self.ratio < math.inf else math.inf

    @property
    def snr_db20(self) -> float:
        """20 log10 of it, as the authors print."""
        return 2.0 * self.snr_db10


@dataclass(frozen=True)
class Task:
    """Where the images are and how long a run is.

    Args:
        root: Folder of the images.
        download: Fetch what is missing.
        rounds: Rounds, >= 1.
        val_samples: Validation samples.
        seed: Of model, split, data order and coins.
        momentum: Of each client's SGD, its buffer kept across rounds; the authors' is 0.5.
        images: "mnist" or "cifar10".
        samples_per_client: Of each client; None shares out the whole training part.
        val_every: Validate after every so many rounds.
    """

    root: str
    download: bool
    rounds: int
    val_samples: int
    seed: int
    momentum: float = 0.5
    images: Images = "mnist"
    samples_per_client: int | None = 5
    val_every: int = 1

    @property
    def settings(self) -> dict[str, float]:
        """What the rows of a table that come from this task have in common."""
        return {
            "rounds": self.rounds,
            "momentum": self.momentum,
            "val_samples": self.val_samples,
            "seed": self.seed,
        }

    def run(
        self,
        mechanism: Mechanism,
        num_clients: int,
        lr: float,
        ranges: RangeRule | float,
        kind: Network = "linear",
        *,
        extra: Callable[[], Sequence[pl.Callback]] = tuple,
        test_at: Collection[int] = (),
        **federated_options: Any,
    ) -> Run:
        """Train one federation with one local step a round and test it.

        Args:
            mechanism: What the clients send.
            num_clients: Clients, all in every round.
            lr: Learning rate of the one local step.
            ranges: A rule, or the radius of a fixed range in units of the update.
            kind: The model.
            extra: Makes callbacks that come after `Federated`.
            test_at: Rounds, from 1, after which to test as well.
            federated_options: Passed on to `Federated`.
        """
        start = time.process_time()
        if num_clients >= 500:
            gc.collect()  # a Trainer and its data are a cycle: a grid of runs would hold all their tensors
        data = ClientImages(
            self.images,
            self.root,
            self.download,
            num_clients,
            self.samples_per_client,
            self.val_samples,
            self.seed,
        )
        federated = Federated(
            mechanism,
            num_clients,
            local_steps=1,
            clients_per_step=min(STACK, num_clients),
            ranges=FixedRange(ranges) if isinstance(ranges, float) else ranges,
            seed=self.seed,
            **federated_options,
        )
        model = Classifier(network(kind, self.seed, self.images), lr)
        watch = Watch(federated, data, self.val_every, test_at)
        callbacks = [federated, KeptMomentum(federated, self.momentum), *extra(), watch]
        trainer = quiet_trainer(self.rounds, callbacks, limit_val_batches=0)
        trainer.fit(model, datamodule=data)
        last = best = accuracy(model, data.test_set.tensors)
        assert watch.best is not None and federated.engine is not None
        final = federated.engine.weights
        if not torch.equal(watch.best, final):
            copy_into(watch.best, list(model.parameters()))
            best = accuracy(model, data.test_set.tensors)
        records = federated.records
        return Run(
            last,
            best,
            watch.tests,
            sum(watch.ratios) / len(records),
            sum(record.mse for record in records) / len(records),
            sum(record.clip_rate for record in records) / len(records),
            time.process_time() - start,
            sum(int(record.uplink_bits) for record in records),
            tuple(watch.accuracies),
            final,
        )


@dataclass(frozen=True)
class Options:
    """What every experiment of the CPA paper can be asked for.

    Args:
        data: Where the images are.
        momentum: Of each client's SGD, kept across rounds; the authors' is 0.5.
        val_samples: Held out; the authors' 10,000.
        resume: Keep the rows that are in `out` already.
    """

    data: ImageData = field(default_factory=ImageData)
    momentum: float = 0.5
    val_samples: int = 10_000
    resume: bool = False

    def task(self, rounds: int, seed: int, **more: Any) -> Task:
        """One run; `more` is further arguments of `Task`.

        Raises:
            FileNotFoundError: If its images are not there and are not to be downloaded.
        """
        where = self.data.root, self.data.download
        task = Task(*where, rounds, self.val_samples, seed, self.momentum, **more)
        load_images(task.images, *where)  # before any training of a table
        return task


# ---- the two readings of CPA --------------------------------------------------------------------------


NESTED_RATES = (2, 8)
"""Points of the coarse and of the nested stage by the paper: Rc = 1 and Rn = 3."""


def authors_cpa(epsilon: float, nested: bool = False) -> tuple[CPA, float]:
    """CPA as the authors' code runs it, and its radius: 3 levels (nested 3 x 3), no dither, no debiasing.

    The code takes the paper's R = 1 for 2^R + 1 levels, and its Rn = 3 for 3 levels. Their
    gamma tiles [-gamma, gamma] with N cells, so that the outermost level is gamma (1 - 1 / N).
    """
    levels, stages, nesting = (3, 2, 3) if nested else (3, 1, None)
    mechanism = CPA(
        epsilon,
        levels=levels,
        stages=stages,
        nesting=nesting,
        words="near_balanced",
        dither="none",
        decoder="authors_code",
        epsilon_scope="bit",
    )
    return mechanism, GAMMA * (1.0 - 1.0 / levels**stages)


def stated_nested_cpa(epsilon: float) -> tuple[CPA, float]:
    """Nested CPA at the rates that the paper states, 2 x 8 points, and else as its authors' code computes."""
    coarse, nested = NESTED_RATES
    mechanism = CPA(
        epsilon,
        levels=coarse,
        stages=2,
        nesting=nested,
        words="balanced",
        dither="none",
        decoder="authors_code",
        epsilon_scope="bit",
    )
    return mechanism, GAMMA * (1.0 - 1.0 / (coarse * nested))


def unbiased_cpa(epsilon: float, nested: bool = False) -> tuple[CPA, float]:
    """CPA repaired, and its radius: 2 levels (nested 2 x 8), subtracted dither, unbiased decoder."""
    coarse, fine = NESTED_RATES
    return CPA(
        epsilon,
        levels=coarse,
        stages=2 if nested else 1,
        nesting=fine if nested else None,
        epsilon_scope="bit",
    ), GAMMA / 2


def jopeq(epsilon: float, rate: int = 1) -> JoPEQ:
    """JoPEQ at the paper's rate, 1 everywhere but in table V; a rate R is 2^R + 1 levels in its own code."""
    return JoPEQ(epsilon, levels=2**rate + 1)


def at_one_rate(
    table: Sequence[Row], fits: Callable[[Row], bool], what: str, rows: tuple[int, ...]
) -> list[Claim]:
    """How many cells of a published table are met at each learning rate, the same for all of them.

    Args:
        table: Cells with `lr`, as the paper ran them.
        fits: Is a cell met?
        what: The statement.
        rows: Rows of docs/papers.md.
    """
    met = {
        lr: [fits(row) for row in table if row["lr"] == lr] for lr in dict.fromkeys(r["lr"] for r in table)
    }
    words = ", ".join(f"{sum(cells)} of {len(cells)} cells at {lr:g}" for lr, cells in met.items())
    return [Claim(f"{what}, at one learning rate for all", words, any(map(all, met.values())), rows)]
