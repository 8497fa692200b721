"""Trainings of CorBin-FL's experiments 1 to 6: CIFAR-10, all clients in every round, quantised weights.

What the paper states: CIFAR-10, ResNet18, 50 clients, batches of 64 (32 in experiment 4), 80/20 split of the
pooled images, 20% of train for validation, equal IID shares, weights quantised in the range of the last
global model's layer-wise min and max, d = 5 shared bits, gamma = 0.2, a grid of lambda tuned per mechanism
and experiment, the best model reloaded after 5 epochs (we read rounds) without improvement.

What it leaves open is in the authors' public code, and `paper` has it from there: one local epoch, Adam (see
`authors`), 100 rounds, the Gaussian's delta (1e-5), no augmentation, torch's initial law. `small` has three
local epochs, SGD with momentum 0.9, 30 rounds and He's initial law.
BatchNorm's running statistics are coordinates like any other (`buffers="share"`); GroupNorm stands beside it.
A range of no width (a norm's scales, all one at the start) is floored at a thousandth of the widest.

`small` runs the same lines on two cores: a perceptron, images of 16 x 16, a part of them. Lambda is
chosen by validation on the first seed, and the chosen one is then run on the others. Everything is seeded:
the runs can be repeated, and they are not private.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.data.models import Classifier, seeded
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.ranges import PreviousMinMax
from reproductions.bench import CIFAR10, ImageData, Row, Rows, load_cifar10, torchs_law, train
from reproductions.corbin.authors import LEARNING_RATE, ROUNDS, WEIGHT_DECAY, AdamClassifier
from reproductions.corbin.networks import ResNet18
from reproductions.corbin.tuning import tune

Norm = Literal["batch", "group"]
Scale = Literal["small", "paper"]
MOMENTUM, PATIENCE = 0.9, 5


class SmallNet(nn.Sequential):
    """Perceptron of 32 hidden units with a norm, for images of 16 x 16; 24,970 parameters.

    Stands in for ResNet18 where two cores have to do.

    Args:
        norm: Before the ReLU.
    """

    def __init__(self, norm: Norm) -> None:
        normalise = nn.BatchNorm1d(32) if norm == "batch" else nn.GroupNorm(4, 32)
        super().__init__(
            nn.Flatten(), nn.Linear(768, 32, bias=False), normalise, nn.ReLU(), nn.Linear(32, 10)
        )


class Preset(NamedTuple):
    """What differs between a GPU and two cores.

    Args:
        network: Makes the model for a kind of normalisation.
        side: Of the images, which are averaged down to it.
        num_train: Training images that the clients hold together; None is all 38,400.
        num_val: Validation images; None is all 9,600.
        local_epochs: Passes of a client over its images in a round.
        rounds: Rounds.
        learning_rate: Of the clients' optimiser.
        adam: Clients run Adam as in the authors' code, from torch's initial law; otherwise SGD, from He's.
        smoothing: The grid of lambda.
        norms: Kinds of normalisation.
        clients: The grid of experiment 4.
        accelerator: Lightning's.
    """

    network: type[nn.Module]
    side: int
    num_train: int | None
    num_val: int | None
    local_epochs: int
    rounds: int
    learning_rate: float
    adam: bool
    smoothing: tuple[float, ...]
    norms: tuple[Norm, ...]
    clients: tuple[int, ...]
    accelerator: str


TENTHS = tuple(n / 10 for n in range(1, 11))
PRESETS: dict[Scale, Preset] = {
    "paper": Preset(
        network=ResNet18,
        side=32,
        num_train=None,
        num_val=None,
        local_epochs=1,
        rounds=ROUNDS,
        learning_rate=LEARNING_RATE,
        adam=True,
        smoothing=TENTHS,
        norms=("batch", "group"),
        clients=(50, 100, 200, 500),
        accelerator="auto",
    ),
    "small": Preset(
        SmallNet, 16, 2_000, 500, 3, 30, 0.1, False, (1.0, 0.3), ("group",), (50, 150, 500), "cpu"
    ),
}


@dataclass(frozen=True)
class Setting:
    """What all six experiments can be asked for.

    Args:
        data: Where CIFAR-10 is.
        preset: "paper" (hours on a GPU) or "small" (two cores).
        seeds: Of model, split, data order and coins: a reproducible run is not private. The first
            chooses lambda.
        rounds: Instead of the preset's.
        smoothing: Grid of lambda instead of the preset's.
        norms: "batch" and "group", instead of the preset's.
        clients: Grid of experiment 4 instead of the preset's.
        margin: Factor on the layer-wise half-range; the paper has none, hence 1.
        resume: Keep the rows that are in `out` already.
    """

    data: ImageData = field(default_factory=ImageData)
    preset: Scale = "small"
    seeds: Sequence[int] = (0, 1, 2)
    rounds: int | None = None
    smoothing: Sequence[float] | None = None
    norms: Sequence[Norm] | None = None
    clients: Sequence[int] | None = None
    margin: float = 1.0
    resume: bool = False

    @property
    def client_grid(self) -> Sequence[int]:
        """Numbers of clients of experiment 4."""
        return self.clients or PRESETS[self.preset].clients


class Case(NamedTuple):
    """A row of an experiment: a method, its mechanism, and who takes part.

    Args:
        method: In words, with what varies.
        mechanism: What the clients send.
        num_clients: Clients, all in every round.
        dropout: Probability that a client drops out of a round, independently.
    """

    method: str
    mechanism: Mechanism
    num_clients: int = 50
    dropout: float = 0.0


class Table(NamedTuple):
    """All trainings of an experiment, and those of the chosen lambda, by normalisation and method."""

    rows: Rows
    chosen: dict[tuple[str, str], list[Row]]


def compare(
    name: str,
    setting: Setting,
    cases: Sequence[Case],
    out: str,
    batch_size: int = 64,
    smoothing: Sequence[float] | None = None,
) -> Table:
    """Train every case over the grid of lambda with the first seed, and with its best lambda for the others.

    Args:
        name: Of the experiment.
        setting: What was asked for.
        cases: Rows.
        out: Folder; every training's row is on disk when it ends.
        batch_size: Of the clients.
        smoothing: The grid, where the paper fixes it for this experiment; None is the setting's or preset's.

    Raises:
        FileNotFoundError: Before anything else, if there is no CIFAR-10.
        ValueError: If there is no seed, or `out` holds rows of other settings.
    """
    preset = PRESETS[setting.preset]
    load_cifar10(setting.data, preset.side)
    rounds, grid = setting.rounds or preset.rounds, smoothing or setting.smoothing or preset.smoothing
    common = {
        "experiment": name,
        "preset": setting.preset,
        "network": preset.network.__name__,
        "training_images": preset.num_train or 38_400,
        "rounds": rounds,
        "local_epochs": preset.local_epochs,
        "batch_size": batch_size,
        "optimizer": f"{'Adam' if preset.adam else 'SGD'}, lr {preset.learning_rate}, "
        + (f"L2 {WEIGHT_DECAY}" if preset.adam else f"momentum {MOMENTUM}"),
        "margin": setting.margin,
    }
    rows, chosen = Rows(out, common, setting.resume), dict[tuple[str, str], list[Row]]()
    for norm in setting.norms or preset.norms:
        for case in cases:

            def row(smoothing: float, seed: int, norm: Norm = norm, case: Case = case) -> Row:
                key = {"method": case.method, "norm": norm, "smoothing": smoothing, "seed": seed}
                return rows.add(key, lambda: _train(setting, case, norm, smoothing, seed, rounds, batch_size))

            chosen[norm, case.method] = tune(row, grid, setting.seeds)
    return Table(rows, chosen)


def _train(
    setting: Setting, case: Case, norm: Norm, smoothing: float, seed: int, rounds: int, batch_size: int
) -> Row:
    preset = PRESETS[setting.preset]
    federated = Federated(
        case.mechanism,
        case.num_clients,
        dropout_probability=case.dropout,
        local_epochs=preset.local_epochs,
        sends="weights",
        ranges=PreviousMinMax(setting.margin),
        server_lr=smoothing,
        seed=seed,
    )
    network = preset.network(norm=norm)
    if preset.adam:
        initial = torchs_law(network, seed)
        model: Classifier = AdamClassifier(initial, preset.learning_rate, weight_decay=WEIGHT_DECAY)
    else:
        model = Classifier(seeded(network, seed), preset.learning_rate, MOMENTUM)
    images = CIFAR10(setting.data, batch_size, preset.num_train, preset.num_val, seed, preset.side)
    return train(model, images, federated, rounds, PATIENCE, accelerator=preset.accelerator).columns
