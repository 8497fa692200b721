"""Tasks on which mechanisms are compared: estimates of a mean, and small federated trainings.

A task runs one mechanism at one target and seed, and says what came of it. Every task clips updates to one
norm and has one number that is tuned for mechanisms that clip single coordinates, their range; trainings have
a learning rate besides. Keys come from the seed, so that a cell can be repeated bit for bit: the claims are
those of the same run with secret keys.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fedq.commands.mechanism_text import parse_call
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.mechanisms.registry import installed
from lightning_fedq.privacy.planning import HOMOGENEITY, KAPPA, Option, Problem, plan
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg

DELTA = 1e-5
MASKS = SecAgg(run="accounted", degree="auto", max_corrupt=0.02, max_dropout=0.02)
"""Masks are counted, which changes no sum; the server may collude with 2% of the clients."""
RANGES = (0.5, 1.5, KAPPA)
"""Ranges of a coordinate that are tried, in units of norm / sqrt(dim)."""


@dataclass(frozen=True)
class Result:
    """Scores and costs of one run.

    Args:
        score: Accuracy in the test, or the squared error of the mean over its squared length.
        validation: The same on what is tuned with.
        bits: Bits a parameter of one client's message, masks included, keys and shares not.
        all_bits: Bits a parameter of everything that a client sent in a round.
        planned: R as `fedq plan` has it before the run; None where it has no bound.
        seen: R as the run had it: noise over signal of all rounds.
        setting: The mechanism, as it was calibrated.
        seconds: Processor time.
        down: Bits a parameter that one client is sent in a round.
        spent: Epsilon of the run, by this package's account; infinite without privacy.
    """

    score: float
    validation: float
    bits: float
    all_bits: float
    planned: float | None
    seen: float
    setting: str
    seconds: float
    down: float | None = None
    spent: float | None = None


@dataclass(frozen=True)
class Tuning:
    """Numbers that a task tunes.

    Args:
        range: Range of a coordinate, in units of norm / sqrt(dim).
        rate: Learning rate of the clients; None where nothing is trained.
    """

    range: float = KAPPA
    rate: float | None = None


class Log(NamedTuple):
    """Where the figures of one run go: a logger of Lightning, by its class and arguments."""

    kind: str
    arguments: dict[str, Any]

    def made(self) -> Any:
        """The logger."""
        from lightning_fedq._lightning import pl

        return getattr(pl.loggers, self.kind)(**self.arguments)


class Job(NamedTuple):
    """One run.

    Args:
        option: A mechanism at its target, for updates of norm 1.
        target: The target; it sets the mechanism once more, where the run calibrates for itself. None is
            FedAvg's, without privacy.
        tuning: Range and rate.
        seed: Seed of data, weights, batches and keys.
        as_is: Is the mechanism left as it is, whatever the target?
        log: Logger, for what is trained.
        settings: What the logger is told of the run.
    """

    option: Option
    target: PrivacyTarget | None
    tuning: Tuning
    seed: int
    as_is: bool = False
    log: Log | None = None
    settings: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Task(ABC):
    """One problem with its sizes.

    Args:
        name: Name in tables and on the command line.
        clients: Clients of the federation.
        rounds: Rounds of a run.
        delta: Chance with which an epsilon may fail.
    """

    name: str
    clients: int
    rounds: int
    delta: float = field(default=DELTA, kw_only=True)

    better: Literal["larger", "smaller"] = field(default="larger", init=False)
    unit: str = field(default="test accuracy", init=False)

    @property
    @abstractmethod
    def dim(self) -> int:
        """Parameters."""

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Learning rates that are tried."""
        return (None,)

    @abstractmethod
    def run(self, job: Job) -> Result:
        """Run once."""

    def begin(self, out: Path, jobs: Sequence[Job], facts: dict[str, Any]) -> None:  # noqa: B027
        """Prepare for runs.

        Args:
            out: Folder of the comparison.
            jobs: What will run; nothing where every run is there.
            facts: What the folder keeps; what is found out may be added: "seconds" of a run.
        """

    def cost(self, out: Path, who: Adversary) -> str:
        """Sentence on the cost of all runs of a folder for their clients, "" where nobody is to protect."""
        return ""

    trains = True
    """Is something trained, that a logger could follow?"""

    note = "Keys come from a seed, so nothing here is private: ε is what secret keys would spend."
    """Stands below the table."""

    @property
    def identity(self) -> dict[str, str]:
        """Facts that tell a task from others of the same name and sizes."""
        return {}

    def tunings(self, mechanism: Mechanism) -> list[Tuning]:
        """Combinations to try: one range for what clips vectors, three for what clips coordinates.

        FedAvg, which clips nothing, has rates of its own.
        """
        if isinstance(mechanism, FedAvg) and self.rates == (None,):
            return [Tuning()]
        if isinstance(mechanism, FedAvg):
            return [Tuning(rate=rate) for rate in (0.01, 0.03, 0.1, 0.3)]
        ranges = (KAPPA,) if clips_vectors(mechanism) else RANGES
        return [Tuning(range, rate) for range in ranges for rate in self.rates]

    def target(self, epsilon: float, adversary: Adversary) -> PrivacyTarget:
        """The target of an epsilon."""
        return PrivacyTarget(epsilon, self.delta, adversary)

    def problem(self, epsilon: float, adversary: Adversary) -> Problem:
        """The target, and the sizes that `fedq plan` asks for."""
        target = self.target(epsilon, adversary)
        problem = Problem(self.clients, self.dim, self.rounds, target, MASKS, homogeneity=HOMOGENEITY)
        if adversary is Adversary.SERVER and self.rounds > 1:  # everybody once: the best that there is
            problem = replace(problem, clients_per_round=self.clients // self.rounds, in_turn=True)
        return problem

    def option(self, name: str, mechanism: Mechanism, epsilon: float, adversary: Adversary) -> Option:
        """Calibrate a mechanism.

        Args:
            name: Name of its row.
            mechanism: It, for updates of norm 1.

        Raises:
            ValueError: If the target can't be met.
        """
        [option] = plan(self.problem(epsilon, adversary), {name: mechanism}, once=self._once)
        if option.mechanism is None:
            raise ValueError(option.reason)
        return option

    _once = True
    """Is a participation in one round only tried, too?"""


def clips_vectors(mechanism: Mechanism) -> bool:
    """Whether the mechanism clips whole updates, so that the range of a coordinate is nothing to tune."""
    return "clip_norm" in parse_call(repr(mechanism))[1]


def scaled(mechanism: Mechanism, norm: float) -> Mechanism:
    """The mechanism for updates of another norm. One that clips coordinates is itself."""
    name, values = parse_call(repr(mechanism))
    for key in ("clip_norm", "granularity", "local_sigma"):
        if values.get(key) is not None:
            values[key] *= norm
    kinds = {**installed(), name: type(mechanism)}
    return kinds[name](**values)


@dataclass(frozen=True)
class MeanEstimation(Task):
    """Estimate in one round of the mean of vectors of norm 1, of whose energy 0.3 lies along the mean.

    Args:
        kind: "unit" is Gaussian, "sparse" has 1 in 100 coordinates, "heavy" has Student's t with 3 degrees.
        size: Length of the vectors.
    """

    kind: Literal["unit", "sparse", "heavy"] = "unit"
    size: int = 1024

    trains = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "better", "smaller")
        object.__setattr__(self, "unit", "squared error over squared mean")

    @property
    def dim(self) -> int:
        return self.size

    def run(self, job: Job) -> Result:
        from lightning_fedq.keys.randomness import SeededKeys
        from lightning_fedq.mechanisms.interface.ranges import FixedRange
        from lightning_fedq.rounds import RoundEngine, RoundPlanner
        from lightning_fedq.secagg import Aggregation

        start, mechanism, target, seed = time.process_time(), job.option.mechanism, job.target, job.seed
        assert mechanism is not None
        masked = target is not None and target.against is Adversary.SECAGG_SERVER
        engine = RoundEngine(
            mechanism,
            RoundPlanner(self.clients, seed),
            SeededKeys(seed),
            torch.zeros(self.size),
            (self.size,),
            FixedRange(job.tuning.range / math.sqrt(self.size)),
            secure_sums=partial(Aggregation, MASKS) if masked else None,
        )
        plan, step = engine.start(), max(1, 2**20 // self.size)
        for first in range(0, len(plan.survivors), step):
            part = plan.survivors[first : first + step]
            engine.receive(part, self._vectors(part, seed))
        record = engine.finish()
        coordinates = record.num_received * self.size
        error = 10.0 ** (-record.snr_db / 10.0) if record.mse else 0.0  # FedAvg's is exact
        return Result(
            error,
            error,
            (record.uplink_bits - record.protocol_bits) / coordinates,
            record.uplink_bits / coordinates,
            job.option.ratio,
            error,
            repr(mechanism),
            time.process_time() - start,
            record.downlink_bits / (record.cohort_size * self.size),
        )

    def _vectors(self, clients: tuple[int, ...], seed: int) -> Tensor:
        common = self._draw(torch.Generator().manual_seed(10**6 * seed + 999_999))
        own = torch.stack(
            [self._draw(torch.Generator().manual_seed(10**6 * seed + client)) for client in clients]
        )
        rows = math.sqrt(HOMOGENEITY) * common + math.sqrt(1.0 - HOMOGENEITY) * own
        return torch.nn.functional.normalize(rows, dim=1)

    def _draw(self, generator: torch.Generator) -> Tensor:
        values = torch.randn(self.size, generator=generator)
        if self.kind == "heavy":
            squares = torch.randn(3, self.size, generator=generator).square().sum(0)
            values = values / (squares / 3.0).sqrt()
        if self.kind == "sparse":
            values = values * (torch.rand(self.size, generator=generator) < 0.01)
        return torch.nn.functional.normalize(values, dim=0)


@dataclass(frozen=True)
class Training(Task):
    """A federated training: one local step a round on all of a client's samples, server momentum.

    Args:
        dataset: "digits" (scikit-learn's), "mnist", "cifar10" or "text" (`comparison.bench.samples`).
        network: "mlp" of one hidden layer, "linear", "cnn", a "cnn" with GroupNorm ("cnn_gn"), or a "lora".
        samples: Samples of each client.
        root: Folder of the images; digits and text need none.
        rates: Learning rates that are tried.
    """

    dataset: Literal["digits", "mnist", "cifar10", "text"] = "digits"
    network: Literal["mlp", "linear", "cnn", "cnn_gn", "lora"] = "mlp"
    samples: int = 3
    root: str = ""
    rates: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)

    @property
    def dim(self) -> int:
        return sum(p.numel() for p in self._network(0).parameters() if p.requires_grad)

    def _network(self, seed: int) -> torch.nn.Module:
        from lightning_fedq.comparison.bench.samples import adapted
        from lightning_fedq.data.models import CNN2, MLP
        from lightning_fedq.data.models.initial import seeded

        if self.network == "lora":
            return adapted(seed)
        if self.network in ("mlp", "linear"):
            size = {"digits": 64, "mnist": 784, "cifar10": 3072}[self.dataset]
            return seeded(MLP(in_features=size, hidden=[54] if self.network == "mlp" else []), seed)
        side, channels = {"digits": (8, 1), "mnist": (28, 1), "cifar10": (32, 3)}[self.dataset]
        layers: list[torch.nn.Module] = []
        for layer in CNN2(channels, side, widths=(8, 16)):
            layers.append(layer)
            if self.network == "cnn_gn" and isinstance(layer, torch.nn.Conv2d):
                layers.append(torch.nn.GroupNorm(4, layer.out_channels))
        return seeded(torch.nn.Sequential(*layers), seed)

    def run(self, job: Job) -> Result:
        from lightning_fedq._lightning import pl
        from lightning_fedq.algorithms import FedAvgM
        from lightning_fedq.callbacks import Federated, WandbRounds
        from lightning_fedq.comparison.bench.samples import Samples
        from lightning_fedq.data.models import Classifier
        from lightning_fedq.mechanisms.interface.ranges import FixedRange

        option, target, tuning, seed = job[:4]
        assert option.mechanism is not None and tuning.rate is not None
        start = time.process_time()
        gc.collect()  # a Trainer and its data are a cycle
        against = None if target is None else target.against
        norm, once = tuning.rate, against is Adversary.SERVER
        federated = Federated(
            scaled(option.mechanism, norm),
            self.clients,
            clients_per_round=self.clients // self.rounds if once else None,
            participation="once" if once else "random",
            local_steps=1,
            ranges=FixedRange(tuning.range * norm / math.sqrt(self.dim)),
            secure_aggregation=MASKS if against is Adversary.SECAGG_SERVER else None,
            server_optimizer=FedAvgM,
            seed=seed,
            privacy=None if job.as_is else target,
            check_isolation=False,
        )
        with quiet():
            network = self._network(seed)
            data = Samples(self.dataset, self.root, self.samples, self.samples * self.clients, seed)
            module = Classifier(network, lr=tuning.rate, momentum=0.0)
            trainer = pl.Trainer(
                max_epochs=self.rounds,
                accelerator="cpu",
                callbacks=[
                    federated,
                    *([WandbRounds()] if job.log and job.log.kind == "WandbLogger" else ()),
                ],
                logger=job.log.made() if job.log else False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
            )
            trainer.fit(module, datamodule=data)
            trainer.limit_val_batches = 1.0
            [validated] = trainer.validate(module, datamodule=data, verbose=False)
            [tested] = trainer.test(module, datamodule=data, verbose=False)
        records = [record for record in federated.records if not record.aborted]
        coordinates = sum(record.num_received for record in records) * self.dim
        sent = sum(record.uplink_bits for record in records)
        noises = [10.0 ** (-record.snr_db / 10.0) for record in records]
        result = Result(
            tested["test_acc"],
            validated["val_acc"],
            (sent - sum(record.protocol_bits for record in records)) / coordinates,
            sent / coordinates,
            option.ratio,
            sum(noises) / len(noises) / self.rounds,
            repr(federated.mechanism),
            time.process_time() - start,
            sum(record.downlink_bits for record in records)
            / (sum(record.cohort_size for record in records) * self.dim),
        )
        told(trainer.loggers, job, result)
        return result


def told(loggers: Sequence[Any], job: Job, result: Result) -> None:
    """Give loggers the settings and the figures of a run, by the names that the table has."""
    figures = {
        "score": result.score,
        "epsilon_spent": job.option.epsilon,
        "bits_up": result.bits,
        "bits_keys": result.all_bits - result.bits,
        "bits_down": result.down,
        "bits_both_ways": None if result.down is None else result.all_bits + result.down,
    }
    known = {f"compare/{name}": v for name, v in figures.items() if v is not None and math.isfinite(v)}
    for logger in loggers:
        if type(logger).__name__ == "WandbLogger":
            logger.experiment.config.update({"compare": dict(job.settings)})
            logger.experiment.summary.update(known)
            logger.experiment.finish()
        else:
            logger.log_hyperparams(dict(job.settings))
            logger.log_metrics(known)
            logger.finalize("success")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and Lightning's lines of a hundred short runs off the screen."""
    names = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def tasks(data: Path | None) -> Mapping[str, Task]:
    """All tasks by name, and those on images if there is a folder of them."""
    kinds: tuple[Literal["unit", "sparse", "heavy"], ...] = ("unit", "sparse", "heavy")
    found: list[Task] = [
        MeanEstimation(f"mean-{kind}-{size}", 1000, 1, kind, size)
        for size in (2**10, 2**16)
        for kind in kinds
    ]
    found.append(Training("digits", 479, 20))
    found.append(Training("text-lora", 1000, 15, "text", "lora", 16, rates=(0.1, 0.3)))
    if data is not None:
        root, few = str(data), (0.3, 1.0)
        found.append(Training("mnist-linear", 1000, 30, "mnist", "linear", 5, root))
        found.append(Training("mnist-cnn", 1000, 10, "mnist", "cnn", 2, root, few))
        found.append(Training("cifar10-cnn", 1000, 10, "cifar10", "cnn_gn", 2, root, few))
        found.append(Training("mnist-linear-10k", 10_000, 5, "mnist", "linear", 4, root, few))
    return {task.name: task for task in found}
