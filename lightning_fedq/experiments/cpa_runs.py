"""One federated run of the CPA paper's set-up, and what its tables ask of it.

The set-up of the authors' code (the paper states almost none of it): 10,000 training images held out for
validation, pixels (x - 0.5) / 0.5, clients with 5 samples each, one local step on all five, 30 rounds,
gamma = 0.05, SGD with momentum 0.5 whose buffer each client keeps across rounds. The engine gives a client
a fresh optimiser in every round; for one local step at a constant rate, `KeptMomentum` makes up for it
exactly. It matters: at learning rate 1 accuracy without it is some 20 points lower.

The signal-to-noise ratio is the authors': the variance of the exact mean over that of the error, averaged
over tensors and over rounds. They print 20 log10 of this ratio of variances, which doubles the decibels;
both are given here.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.commands.compare import print_table
from lightning_fedq.core import Mechanism
from lightning_fedq.datasets import MNISTDataModule
from lightning_fedq.datasets.tensors import TensorDataModule
from lightning_fedq.functional.flatten import copy_into
from lightning_fedq.mechanisms import CPA
from lightning_fedq.models import MLP, Classifier, Linear
from lightning_fedq.ranges import FixedRange, RangeRule
from lightning_fedq.reports import write_rows, write_summary

GAMMA, SAMPLES_PER_CLIENT, VAL_SAMPLES, STACK = 0.05, 5, 10_000, 250
Network = Literal["linear", "mlp"]


@lru_cache(maxsize=2)
def _mnist(root: str, download: bool) -> tuple[Tensor, Tensor, int]:
    images, labels, official = MNISTDataModule(root, download).load()
    return images.mul_(2 * 0.3081).add_(2 * 0.1307 - 1.0), labels, official


class FiveSamplesEach(TensorDataModule):
    """MNIST with pixels in [-1, 1] and 5 training samples for each client.

    Args:
        root: Folder that holds `MNIST/raw`.
        download: Fetch what is missing.
        num_clients: Clients to come.
        val_samples: Validation samples, at most 12,000.
        seed: Of who holds what.
    """

    def __init__(self, root: str, download: bool, num_clients: int, val_samples: int, seed: int) -> None:
        samples = SAMPLES_PER_CLIENT
        super().__init__(samples, False, samples * num_clients, val_samples, seed)
        self.root, self.download = root, download

    def load(self) -> tuple[Tensor, Tensor, int]:
        """See `TensorDataModule.load`; read from disk once a process."""
        return _mnist(self.root, self.download)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """A few large batches, cut out of the tensors as slices rather than sample by sample."""
        return _slices(self.val_set)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """As for validation."""
        return _slices(self.test_set)


def _slices(samples: TensorDataset) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(
        samples, batch_size=None, sampler=BatchSampler(SequentialSampler(samples), 5_000, False)
    )


def network(kind: Network, seed: int) -> nn.Module:
    """784-10, or 784-32-16-10 with ReLU; weights from torch's default law and a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    model = Linear() if kind == "linear" else MLP(784, (32, 16))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                bound = 1.0 / math.sqrt(module.in_features)
                for parameter in module.parameters():
                    parameter.uniform_(-bound, bound, generator=generator)
    return model


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
        """Stand in front of the engine's `receive`."""
        engine = self.federated.engine
        assert engine is not None
        kept = engine.weights.new_zeros(self.federated.num_clients, engine.weights.numel())
        receive = engine.receive

        def with_momentum(clients: Sequence[int], updates: Tensor) -> None:
            rows = list(clients)
            kept[rows] = self.momentum * kept[rows] + updates
            receive(clients, kept[rows])

        engine.receive = with_momentum  # type: ignore[method-assign]


class Watch(pl.Callback):
    """Per round: validation accuracy and the authors' ratio of variances; keeps the best model.

    Attributes:
        accuracies: Validation accuracy after each round.
        ratios: Var(exact mean) / Var(error), averaged over tensors, of each round.
        best: Weights of the round with the best validation accuracy.
    """

    def __init__(self, federated: Federated) -> None:
        self.federated = federated
        self.accuracies: list[float] = []
        self.ratios: list[float] = []
        self.best: Tensor | None = None
        self._before: Tensor | None = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the global model."""
        assert self.federated.engine is not None
        self._before = self.federated.engine.weights.clone()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare; Lightning validates after the server's step."""
        engine = self.federated.engine
        assert engine is not None and engine._exact is not None and self._before is not None
        exact = engine._exact.double() / engine.planner.cohort_size
        error = exact - (engine.weights - self._before).double()
        sizes = list(engine.segments)
        parts = zip(torch.split(exact, sizes), torch.split(error, sizes), strict=True)
        self.ratios.append(sum(ratio_of_variances(a, b) for a, b in parts) / len(engine.segments))
        self.accuracies.append(float(trainer.callback_metrics["val_acc"]))
        if self.accuracies[-1] == max(self.accuracies):
            self.best = engine.weights.clone()


def ratio_of_variances(signal: Tensor, error: Tensor) -> float:
    """Var(signal) / Var(error) over the entries of one tensor; infinite without error."""
    noise = float(error.var())
    return float(signal.var()) / noise if noise > 1e-15 else math.inf


@dataclass(frozen=True)
class Run:
    """What one run reached.

    Args:
        last: Test accuracy after the last round.
        best: Test accuracy of the round with the best validation accuracy.
        ratio: Ratio of variances, averaged over tensors and rounds.
        clip_rate: Share of coordinates beyond the range, averaged over rounds.
        cpu_seconds: Processor time, validation and test included.
        bits: Sent by all clients, cumulated after each round.
        accuracies: Validation accuracy after each round.
    """

    last: float
    best: float
    ratio: float
    clip_rate: float
    cpu_seconds: float
    bits: tuple[int, ...]
    accuracies: tuple[float, ...]

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
        root: Folder that holds `MNIST/raw`.
        download: Fetch what is missing.
        rounds: Rounds, >= 1.
        val_samples: Validation samples.
        seed: Of model, split, data order and coins.
        momentum: Of each client's SGD, its buffer kept across rounds; the authors' is 0.5.
    """

    root: str
    download: bool
    rounds: int
    val_samples: int
    seed: int
    momentum: float = 0.5

    def run(
        self,
        mechanism: Mechanism,
        num_clients: int,
        lr: float,
        ranges: RangeRule | float,
        kind: Network = "linear",
        extra: Callable[[], Sequence[pl.Callback]] = tuple,
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
            federated_options: Passed on to `Federated`.
        """
        start = time.process_time()
        gc.collect()  # a Trainer and its data are a cycle: a grid of runs would hold all their tensors
        data = FiveSamplesEach(self.root, self.download, num_clients, self.val_samples, self.seed)
        federated = Federated(
            mechanism,
            num_clients,
            clients_per_step=min(STACK, num_clients),
            ranges=FixedRange(ranges) if isinstance(ranges, float) else ranges,
            seed=self.seed,
            **federated_options,
        )
        model, watch = Classifier(network(kind, self.seed), lr), Watch(federated)
        trainer = pl.Trainer(
            max_epochs=self.rounds,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[federated, KeptMomentum(federated, self.momentum), *extra(), watch],
        )
        trainer.fit(model, datamodule=data)
        last = _test(model, data)
        assert watch.best is not None
        copy_into(watch.best, list(model.parameters()))
        records = federated.records
        bits = torch.tensor([record.uplink_bits for record in records]).cumsum(0)
        return Run(
            last,
            _test(model, data),
            sum(watch.ratios) / len(watch.ratios),
            sum(record.clip_rate for record in records) / len(records),
            time.process_time() - start,
            tuple(bits.tolist()),
            tuple(watch.accuracies),
        )


@torch.no_grad()
def _test(model: Classifier, data: FiveSamplesEach) -> float:
    inputs, labels = data.test_set.tensors
    return float((model(inputs).argmax(1) == labels).double().mean())


# ---- the two readings of CPA --------------------------------------------------------------------------


def authors_cpa(epsilon: float, nested: bool = False) -> tuple[CPA, float]:
    """CPA as the authors' code runs it, and its radius: 3 levels (nested 3 x 3), no dither, no debiasing.

    Their gamma tiles [-gamma, gamma] with N cells, so that the outermost level is gamma (1 - 1 / N).
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
    )
    return mechanism, GAMMA * (1.0 - 1.0 / levels**stages)


def unbiased_cpa(epsilon: float, nested: bool = False) -> tuple[CPA, float]:
    """CPA repaired, and its radius: 2 levels (nested 2 x 2), subtracted dither, unbiased decoder."""
    return CPA(epsilon, stages=2 if nested else 1), GAMMA / 2


# ---- what every experiment writes -----------------------------------------------------------------------


def finish(
    folder: Path,
    table: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    verdicts: Sequence[str],
    title: str,
) -> dict[str, Any]:
    """Write `table.csv` and `summary.json`, print both, return the summary."""
    summary = {"settings": settings, "verdicts": list(verdicts), "table": list(table)}
    write_rows(folder / "table.csv", table)
    write_summary(folder / "summary.json", summary)
    print_table(table, title)
    for line in verdicts:
        print(line)
    print(f"{folder / 'table.csv'}\n{folder / 'summary.json'}")
    return summary
