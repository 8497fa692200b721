"""Accuracy against the epsilon of a whole client, where what is trained are few parameters on fixed features.

The federation of `useful-privacy`: MNIST, 1,000 clients of five images, one local step, everybody in every
round, a server behind secure aggregation that 2% of the clients collude with; or CIFAR-10, 10,000 clients of
five. A linear head without a bias stands on `FixedFeatures`, which see nobody's images. Rate and clip (over
the rate) are tuned with two seeds of their own by the accuracy on 10,000 images that no client holds, for
each epsilon, features and mechanism; that is not charged. CIFAR-10 is tuned with 8,000 clients, since nothing
is held out of 10,000 of five. The model is the last one, or the mean of the last half where that was better
in the tuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from statistics import mean, pstdev
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fedq.algorithms import FedAvgM
from lightning_fedq.data.datasets import CIFAR10DataModule, MNISTDataModule, TensorDataModule
from lightning_fedq.data.models import FixedFeatures, Linear
from lightning_fedq.mechanisms import FedAvg, GaussianNoise, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.privacy.target import PrivacyTarget
from reproductions.bench import ImageData, Row, Rows
from reproductions.useful.training import MASKS, Federation, Run, train

TUNING_SEEDS = (1000, 1001)
PLAIN = "FedAvg, no privacy"
Kind = Literal["strokes", "leaves", "random", "cifar"]


@dataclass(frozen=True)
class _Task:
    """Features, federation and what is tried in tuning.

    Args:
        features: Of which images.
        settings: Clients, images of each, rounds.
        momentum: Of the server.
        grid: Rate and clip over the rate, by epsilon.
    """

    features: dict[str, Any]
    settings: tuple[int, int, int]
    momentum: float
    grid: dict[float, tuple[tuple[float, float], ...]]


_MNIST = {"side": 28, "mean": 0.1307, "std": 0.3081}
_CIFAR = {
    "side": 32,
    "channels": 3,
    "pool": 2,
    "mean": [0.4914, 0.4822, 0.4465],
    "std": [0.247, 0.2435, 0.2616],
}


def _grid(*norms: float) -> tuple[tuple[float, float], ...]:
    """Rates and clips over the rate, by the norm of a clipped update: it decides most."""
    return tuple((norm / clip, clip) for norm, clip in product(norms, (0.05, 0.1)))


_SMALL = {8.0: _grid(10.0, 20.0, 40.0), 2.0: _grid(4.0, 6.0, 9.0), 1.0: _grid(2.0, 3.0, 4.5)}
TASKS: dict[Kind, _Task] = {
    "strokes": _Task(
        {**_MNIST, "size": 128, "pictures": "strokes", "norm": "log"}, (1000, 5, 30), 0.0, _SMALL
    ),
    "leaves": _Task({**_MNIST, "size": 128, "pictures": "leaves"}, (1000, 5, 30), 0.0, _SMALL),
    "random": _Task({**_MNIST, "size": 256, "pictures": None}, (1000, 5, 30), 0.0, _SMALL),
    "cifar": _Task(
        {**_CIFAR, "size": 1024, "pictures": "leaves", "norm": "log"},
        (10_000, 5, 100),
        0.9,
        {8.0: ((30.0, 0.2),), 2.0: ((15.0, 0.2),), 1.0: ((10.0, 0.2),)},
    ),
}
METHODS = ("RotatedCoins", "RotatedCoins, share 1/8", "GaussianNoise")


@lru_cache(maxsize=2)
def _kept(kind: Kind, root: str, download: bool) -> tuple[Tensor, Tensor, int]:
    """Features of all images, labels, and how many of the last are the official test set."""
    module = (CIFAR10DataModule if kind == "cifar" else MNISTDataModule)(root, download)
    images, labels, official = module.load()
    kept = FixedFeatures(**TASKS[kind].features).compute_features(TensorDataset(images, labels))
    return kept.tensors[0], kept.tensors[1], official


class KeptImages(TensorDataModule):
    """Features of as many images as clients will hold; where they hold all, none is left for validation."""

    def __init__(self, task: OnFeatures, seed: int) -> None:
        self.task, number = task, task.num_clients * task.samples
        self.holds_all = number == 50_000
        super().__init__(task.samples, False, None if self.holds_all else number, 10_000, seed)

    def load(self) -> tuple[Tensor, Tensor, int]:
        """See `TensorDataModule.load`; computed once a process."""
        return _kept(self.task.features, self.task.root, self.task.download)

    def setup(self, stage: str) -> None:
        """Split, or give clients all that is no test image."""
        super().setup(stage)
        if self.holds_all:
            images, labels, official = self.load()
            self.train_set = TensorDataset(images[:-official], labels[:-official])
            self.val_set = TensorDataset(images[:1], labels[:1])  # one of theirs: nobody asks it


@dataclass(frozen=True)
class OnFeatures(Federation):
    """A federation that trains a head on features.

    Args:
        features: Which.
    """

    features: Kind = "strokes"

    def network(self, seed: int) -> nn.Module:
        """A head without a bias, from zero."""
        head = Linear(TASKS[self.features].features["size"], bias=False)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        return head

    def data(self, seed: int) -> TensorDataModule:
        """Features in the place of images."""
        return KeptImages(self, seed)


def useful_features(
    data: ImageData = ImageData(),  # noqa: B008 (frozen)
    features: Sequence[Kind] = ("strokes", "leaves", "random"),
    methods: Sequence[str] = METHODS,
    epsilons: Sequence[float] = (1.0, 2.0, 8.0),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    delta: float = 1e-5,
    num_clients: int | None = None,
    rounds: int | None = None,
    run_masks: bool = False,
    broadcast_bits: int | None = None,
    out: str = "runs/useful-features",
    resume: bool = False,
) -> dict[str, Any]:
    """Accuracy against client-level epsilon of a head on fixed features, MNIST and CIFAR-10.

    Args:
        data: Where the images are.
        features: "strokes", "leaves", "random" (of MNIST), "cifar".
        methods: "RotatedCoins", "RotatedCoins, share 1/8", "GaussianNoise", "FedAvg, no privacy".
        epsilons: Targets of one client.
        seeds: Of data order and coins; the claims are those of the same run with secure keys.
        delta: Of the target, below 1 / num_clients.
        num_clients: None is 1,000, of CIFAR-10 10,000.
        rounds: None is 30, of CIFAR-10 100.
        run_masks: Run them in place of counting them, which changes no sum and takes longer.
        broadcast_bits: Of a parameter on its way down; None are floats.
        out: Folder of the table and its summary.
        resume: Keep the rows that are in `out` already.

    Raises:
        ValueError: If there is no such method.
    """
    if unknown := set(methods) - {*METHODS, PLAIN}:
        raise ValueError(f"methods must be among {', '.join((*METHODS, PLAIN))}, got {', '.join(unknown)}")
    rows, results = Rows(out, {"delta": delta}, resume), list[Row]()
    masks = replace(MASKS, simulation="masked") if run_masks else MASKS
    for kind, method, epsilon, seed in product(features, methods, epsilons, seeds):
        clients, samples, all_rounds = TASKS[kind].settings
        federation = OnFeatures(
            data.root, data.download, "linear", num_clients or clients, samples, rounds or all_rounds, kind
        )
        bench = _Bench(rows, federation, delta, masks, broadcast_bits)
        results.append(bench.result(method, epsilon, seed))
    return rows.finish(_verdicts(results), "accuracy against client-level epsilon, fixed features")


@dataclass(frozen=True)
class _Bench:
    """Rows of one federation."""

    rows: Rows
    federation: OnFeatures
    delta: float
    masks: Any
    broadcast_bits: int | None

    def result(self, method: str, epsilon: float, seed: int) -> Row:
        """A tuned run; from the disk, if it is there."""
        lr, clip, averaged = self._tuned(method, epsilon)
        model = "acc_averaged" if averaged else "acc_last"
        row = self._row("result", self.federation, method, epsilon, seed, lr, clip, model)
        return {**row, "acc": row[model]}

    def _tuned(self, method: str, epsilon: float) -> tuple[float, float, bool]:
        """Rate, clip over rate, and whether the mean of the last half is the better model."""
        kind, federation = self.federation.features, self.federation
        if kind == "cifar" and federation.num_clients == 10_000:
            federation = replace(federation, num_clients=8_000)
        settings = TASKS[kind].grid[epsilon]
        seeds = TUNING_SEEDS if len(settings) > 1 else TUNING_SEEDS[:1]
        names = ("val_last", "val_averaged")
        found: dict[tuple[float, float, str], float] = {}
        for setting in settings:
            rows = [self._row("tuning", federation, method, epsilon, seed, *setting) for seed in seeds]
            found |= {(*setting, name): mean(float(row[name]) for row in rows) for name in names}
        lr, clip, name = max(found, key=lambda key: found[key])
        return lr, clip, name == "val_averaged"

    def _row(
        self,
        what: str,
        federation: OnFeatures,
        method: str,
        epsilon: float,
        seed: int,
        lr: float,
        clip: float,
        model: str = "acc_last",
    ) -> Row:
        key: Row = {
            "what": what,
            "features": federation.features,
            "clients": federation.num_clients,
            "rounds": federation.rounds,
            "method": method,
            "target_epsilon": epsilon,
            "seed": seed,
            "lr": lr,
            "clip": clip,
            "masks": self.masks.simulation,
        }
        if self.broadcast_bits is not None:
            key["broadcast_bits"] = self.broadcast_bits
        if done := [row for row in self.rows.rows if key.items() <= row.items()]:
            return done[0]
        return self.rows.add(key, lambda: self._run(federation, method, epsilon, seed, lr, clip, model))

    def _run(
        self,
        federation: OnFeatures,
        method: str,
        epsilon: float,
        seed: int,
        lr: float,
        clip: float,
        model: str,
    ) -> Row:
        momentum, plain = TASKS[federation.features].momentum, method == PLAIN
        run = train(
            federation,
            _mechanism(method, lr * clip),
            None if plain else PrivacyTarget(epsilon, self.delta, Adversary.SECAGG_SERVER),
            None,
            lr,
            1.0,
            seed,
            server_optimizer=FedAvgM if momentum else None,
            masks=self.masks,
            broadcast_bits=self.broadcast_bits,
        )
        columns = _columns(run)
        return {**columns, "acc": columns[model]}


def _mechanism(method: str, clip: float) -> Mechanism:
    found: dict[str, Mechanism] = {
        PLAIN: FedAvg(),
        "RotatedCoins": RotatedCoins(clip),
        "RotatedCoins, share 1/8": RotatedCoins(clip, fraction=0.125),
        "GaussianNoise": GaussianNoise(clip, 1.0),
    }
    return found[method]


def _columns(run: Run) -> Row:
    up, down = run.all_bytes
    return {
        "val_last": 100.0 * run.last[0],
        "val_averaged": 100.0 * run.averaged[0],
        "acc_last": 100.0 * run.last[1],
        "acc_averaged": 100.0 * run.averaged[1],
        "epsilon": run.epsilon,
        "update_bits": run.update_bits,
        "bytes_up": up,
        "bytes_down": down,
        "cpu_seconds": run.cpu_seconds,
        "mechanism": run.mechanism,
    }


def _verdicts(results: Sequence[Row]) -> list[str]:
    """One line for each features and mechanism: accuracy at every epsilon over seeds, bytes up."""
    lines = []
    for place in dict.fromkeys((r["features"], r["method"]) for r in results):
        own, words = [r for r in results if (r["features"], r["method"]) == place], []
        for epsilon in sorted({float(r["target_epsilon"]) for r in own}, reverse=True):
            cell = [r for r in own if float(r["target_epsilon"]) == epsilon]
            scores = [float(r["acc"]) for r in cell]
            spread = f" ± {pstdev(scores):.1f}" if len(scores) > 1 else ""
            up = mean(float(r["bytes_up"]) for r in cell)
            words.append(f"{mean(scores):.1f}{spread} ({len(scores)}) at {epsilon:g}, {up:,.0f} bytes up")
        lines.append(f"{place[0]}, {place[1]}: {'; '.join(words)}")
    return lines
