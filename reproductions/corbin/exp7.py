"""CorBin-FL, experiment 7 (its figure 3c): MNIST, two-layer VGG, epsilon 0.5; four mechanisms.

What the paper states: MNIST, "two-layer VGG", epsilon_p = 0.5, smoothing tuned over a grid per mechanism, the
best model reloaded after 5 epochs without improvement, 80/20 split of the pooled set, 20% of train for
validation, equal IID shares, and that CorBin-FL loses less than 1.5 points of accuracy to vanilla.

What it leaves open is in the authors' public code (github.com/solidlabnetwork/CorbinFL): 50 clients,
100 rounds of one local epoch, batches of 64, Adam with learning rate 0.001 and an L2 penalty of 0.003,
torch's initial law, and the network of `TwoConvolutions`. `authors` is that. `small` is the same for two
cores: half the side, an eighth of the width, a quarter of the hidden units and no dropout, a tenth of the
images in batches of 8, 40 rounds, and ten times the learning rate (a narrow layer's weights, hence its range
and the noise, are several times wider). `sgd` is our reading from before that code was known: `VGG2`, SGD
with momentum, 100 clients, He's initial law, a fifth of the images.

The paper quantises weights, in the last global model's layer-wise min and max. Updates are shown beside,
with a fixed range: the best radius of a short list, the same list for all mechanisms. An epoch of Adam moves
hardly any coordinate further than its learning rate times its steps. Vanilla sends floats: its target does
not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.data.datasets import MNISTDataModule
from lightning_fedq.data.models import Classifier
from lightning_fedq.data.models.initial import seeded
from lightning_fedq.mechanisms import LDPQ, AugCorBin, CorBin, FedAvg
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.ranges import FixedRange, PreviousMinMax, RangeRule
from lightning_fedq.reports.runs import save_figure
from reproductions.bench import Claim, ImageData, Row, Rows, curve_values, every, torchs_law, train
from reproductions.corbin.authors import LEARNING_RATE, LOG, ROUNDS, WEIGHT_DECAY, AdamClassifier, logged
from reproductions.corbin.networks import VGG2
from reproductions.corbin.tuning import Gap, gap, spread, tune

Target = Literal["weights", "updates"]
Optimizer = Literal["adam", "sgd"]
Reading = Literal["small", "authors", "sgd"]
Method = Literal["vanilla", "CorBin-FL", "AugCorBin-FL", "LDP-FL"]
METHODS: tuple[Method, ...] = ("vanilla", "LDP-FL", "CorBin-FL", "AugCorBin-FL")
SHARED_BITS, UNPAIRED, MOMENTUM, PATIENCE = 5, 0.2, 0.9, 5
TRAIN_SAMPLES, VAL_SAMPLES, TEST_SAMPLES = 44_800, 11_200, 14_000
ALLOWED = 1.5
"""Points that CorBin-FL may lose to vanilla, as published."""


class TwoConvolutions(nn.Sequential):
    """The "two-layer VGG" of the authors' code: two 3x3 convolutions with 2x2 maxima, then two layers.

    Args:
        side: Of the square grey image.
        width: Channels of the first convolution; the second has twice as many.
        hidden: Units between the linear layers.
        dropout: Of these units.
    """

    def __init__(self, side: int, width: int, hidden: int, dropout: float) -> None:
        super().__init__(
            *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(2 * width * (side // 4) ** 2, hidden), nn.ReLU()),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Linear(hidden, 10),
        )


class Case(NamedTuple):
    """A method, what it quantises, and its budget per coordinate and round, infinite for vanilla."""

    method: Method
    target: Target
    epsilon: float


class Preset(NamedTuple):
    """A reading of what the paper leaves open.

    Args:
        network: Makes the model for a seed.
        side: Of the images, which are averaged down to it.
        num_clients: Clients, all in every round.
        images: Training images that they hold together.
        val_images: Validation images. Where they are few, a lucky round is reloaded again and again.
        rounds: Rounds.
        local_epochs: Passes of a client over its images in a round.
        batch_size: Of the clients.
        optimizer: Of the clients.
        learning_rate: Its learning rate.
        weight_decay: Its L2 penalty.
        smoothing: The grid of lambda.
        radii: Fixed ranges to try for updates, in units of an update.
        margin: Factor on the half-range of weights.
    """

    network: Callable[[int], nn.Module]
    side: int
    num_clients: int
    images: int
    val_images: int
    rounds: int
    local_epochs: int
    batch_size: int
    optimizer: Optimizer
    learning_rate: float
    weight_decay: float
    smoothing: tuple[float, ...]
    radii: tuple[float, ...]
    margin: float


def _small(seed: int) -> nn.Module:
    return torchs_law(TwoConvolutions(14, 4, 32, 0.0), seed)


def _authors(seed: int) -> nn.Module:
    return torchs_law(TwoConvolutions(28, 32, 128, 0.5), seed)


def _vgg(seed: int) -> nn.Module:
    return seeded(VGG2(), seed)


TENTHS = tuple(n / 10 for n in range(1, 11))
ADAM: tuple[Optimizer, float, float] = ("adam", LEARNING_RATE, WEIGHT_DECAY)
PRESETS: dict[Reading, Preset] = {
    "small": Preset(
        *(_small, 14, 50, 4_480, 2_000, 40, 1, 8, "adam", 0.01, WEIGHT_DECAY, (1.0, 0.3, 0.1), (0.02,), 1.0)
    ),
    "authors": Preset(
        _authors, 28, 50, TRAIN_SAMPLES, VAL_SAMPLES, ROUNDS, 1, 64, *ADAM, TENTHS, (0.01,), 1.0
    ),
    "sgd": Preset(_vgg, 28, 100, 8_960, 2_000, 10, 3, 32, "sgd", 0.01, 0.0, (1.0, 0.5, 0.2), (0.02,), 1.1),
}


class MNIST(MNISTDataModule):
    """MNIST, pooled and split 80/20, its images averaged down.

    Args:
        data: Where it is.
        batch_size: Samples per training batch.
        num_train: Training samples.
        num_val: Validation samples.
        seed: Of the split.
        side: Images are averaged down to this; it divides 28.
    """

    def __init__(
        self, data: ImageData, batch_size: int, num_train: int, num_val: int, seed: int, side: int
    ) -> None:
        self._side = side
        super().__init__(data.root, data.download, batch_size, True, num_train, num_val, seed)

    def load(self) -> tuple[Tensor, Tensor, int]:
        """See `TensorDataModule.load`."""
        images, labels, official = super().load()
        return nn.functional.avg_pool2d(images, 28 // self._side), labels, official


@dataclass(frozen=True)
class Setting:
    """What the experiment can be asked for; None is the preset's.

    Args:
        data: Where MNIST is.
        preset: "small" (two cores), "authors" (their public code, for a GPU) or "sgd".
        epsilons: Local budgets per coordinate and round; the paper's figure has 0.5.
        targets: What is quantised; the paper quantises weights.
        methods: Which ones to train.
        seeds: Of model, split, data order and coins: a reproducible run is not private. The first chooses
            lambda, and the radius.
        num_clients: Clients, all in every round.
        images: Training images, 1 to 44,800, that the clients hold together.
        rounds: Rounds.
        local_epochs: Passes of a client over its images in a round.
        batch_size: Of the clients.
        optimizer: "adam" or "sgd", which has momentum 0.9.
        learning_rate: Its learning rate.
        weight_decay: Its L2 penalty.
        smoothing: The grid of lambda.
        radii: Fixed ranges to try for updates, in units of an update.
        margin: Factor on the half-range of weights; the paper has none, hence 1.
        resume: Keep the rows that are in `out` already.

    Raises:
        ValueError: If there are not as many images, or no such methods.
    """

    data: ImageData = field(default_factory=ImageData)
    preset: Reading = "small"
    epsilons: Sequence[float] = (0.5,)
    targets: Sequence[Target] = ("weights", "updates")
    methods: Sequence[Method] = METHODS
    seeds: Sequence[int] = (0, 1, 2)
    num_clients: int | None = None
    images: int | None = None
    rounds: int | None = None
    local_epochs: int | None = None
    batch_size: int | None = None
    optimizer: Optimizer | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    smoothing: Sequence[float] | None = None
    radii: Sequence[float] | None = None
    margin: float | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.images is not None and not 1 <= self.images <= TRAIN_SAMPLES:
            raise ValueError(f"images must be 1 to {TRAIN_SAMPLES}, got {self.images}")
        if not self.methods or not set(self.methods) <= set(METHODS):
            raise ValueError(f"methods must be some of {', '.join(METHODS)}, got {list(self.methods)}")

    @property
    def complete(self) -> Preset:
        """The preset with what was asked for in its place."""
        preset = PRESETS[self.preset]
        return preset._replace(
            **{name: getattr(self, name) for name in preset._fields if getattr(self, name, None) is not None}
        )


def corbin_exp7(out: str = "runs/corbin-exp7", **options: Any) -> dict[str, Any]:
    """CorBin-FL figure 3c: MNIST at epsilon 0.5 or several, vanilla, LDP-FL, CorBin-FL, AugCorBin-FL.

    Args:
        out: Folder of table and picture.
        options: See `Setting`.
    """
    setting = Setting(**options)
    asked = setting.complete
    settings = {
        "preset": setting.preset,
        "num_clients": asked.num_clients,
        "training_samples": asked.images,
        "validation_samples": asked.val_images,
        "side": asked.side,
        "rounds": asked.rounds,
        "local_epochs": asked.local_epochs,
        "batch_size": asked.batch_size,
        "optimizer": f"{asked.optimizer}, lr {asked.learning_rate}, weight decay {asked.weight_decay}",
        "shared_bits": SHARED_BITS,
    }
    _images(setting, 0).load()  # no images: before anything else
    rows, chosen = Rows(out, settings, setting.resume), dict[Case, list[Row]]()
    for case in _cases(setting):
        if case.method not in setting.methods:
            continue
        mechanism = _mechanism(case)

        def row(
            choice: tuple[RangeRule, float], seed: int, case: Case = case, mechanism: Mechanism = mechanism
        ) -> Row:
            rule, value = choice
            plain = case.method == "vanilla"
            key = {
                "method": case.method,
                "target": "any" if plain else case.target,
                "epsilon": case.epsilon,
                "range": "none" if plain else repr(rule),
                "smoothing": value,
                "seed": seed,
            }
            return rows.add(key, lambda: _train(setting, mechanism, case.target, rule, value, seed))

        grid = [(rule, value) for rule in _rules(case, asked) for value in asked.smoothing]
        chosen[case] = tune(row, grid, setting.seeds)
    beside = _beside_the_log(rows.rows, asked.rounds) if setting.preset == "authors" else []
    theirs = f"the authors' own log on MNIST: {widening(authors_leads()).line}"
    _draw(rows.rows, chosen, setting.targets, rows.folder / "accuracy.png")
    return rows.finish(
        [*_verdicts(chosen, setting), *beside, theirs], "test accuracy of the best validated round"
    )


def _cases(setting: Setting) -> list[Case]:
    """Vanilla once, because floats have no range and either target is the same; then the private methods."""
    private = [
        Case(method, target, epsilon)
        for target in setting.targets
        for epsilon in setting.epsilons
        for method in METHODS[1:]
    ]
    return [Case("vanilla", "updates", math.inf), *private]


def _mechanism(case: Case) -> Mechanism:
    if case.method == "vanilla":
        return FedAvg()
    private: dict[Method, Mechanism] = {
        "LDP-FL": LDPQ(case.epsilon),
        "CorBin-FL": CorBin(case.epsilon, SHARED_BITS),
        "AugCorBin-FL": AugCorBin(case.epsilon, SHARED_BITS, UNPAIRED),
    }
    return private[case.method]


def _rules(case: Case, asked: Preset) -> list[RangeRule]:
    """Ranges to try."""
    if case.method == "vanilla":
        return [FixedRange(1.0)]
    if case.target == "weights":
        return [PreviousMinMax(asked.margin)]
    return [FixedRange(radius) for radius in asked.radii]


def _images(setting: Setting, seed: int) -> MNIST:
    asked = setting.complete
    return MNIST(setting.data, asked.batch_size, asked.images, asked.val_images, seed, asked.side)


def _train(
    setting: Setting, mechanism: Mechanism, target: Target, rule: RangeRule, smoothing: float, seed: int
) -> Row:
    asked = setting.complete
    federated = Federated(
        mechanism,
        asked.num_clients,
        local_epochs=asked.local_epochs,
        sends=target,
        ranges=rule,
        server_lr=smoothing,
        seed=seed,
    )
    network, rate = asked.network(seed), asked.learning_rate
    if asked.optimizer == "adam":
        model: Classifier = AdamClassifier(network, rate, weight_decay=asked.weight_decay)
    else:
        model = Classifier(network, rate, MOMENTUM, asked.weight_decay)
    accelerator = "auto" if setting.preset == "authors" else "cpu"
    return train(model, _images(setting, seed), federated, asked.rounds, PATIENCE, accelerator).columns


def _verdicts(chosen: Mapping[Case, list[Row]], setting: Setting) -> list[str | Claim]:
    """The best lambda of each method by validation, and the verdicts on what the paper says."""
    lines = list[str | Claim]()
    for target in setting.targets:
        ahead: dict[float, Gap] = {}
        for epsilon in setting.epsilons:
            best = {
                name: rows
                for (name, kind, level), rows in chosen.items()
                if name == "vanilla" or (kind, level) == (target, epsilon)
            }
            where = f"{target}, epsilon {epsilon:g}"
            lines.append(f"{where}: " + ", ".join(f"{name} {spread(rows)}" for name, rows in best.items()))
            lines += [claim.at(where) for claim in figure_3c(best)]
            if "CorBin-FL" in best and "LDP-FL" in best:
                pair = "CorBin-FL", best["CorBin-FL"], "LDP-FL", best["LDP-FL"]
                ahead[epsilon] = gap(*pair, TEST_SAMPLES)
        if len(ahead) > 1:
            lines.append(widening(ahead).at(target))
    return lines


def figure_3c(best: Mapping[Method, list[Row]]) -> list[Claim]:
    """What the paper says of figure 3c, by the rows of the methods that are there, one a seed."""
    lead = {
        second: gap("CorBin-FL", best["CorBin-FL"], second, best[second], TEST_SAMPLES)
        for second in ("vanilla", "LDP-FL")
        if "CorBin-FL" in best and second in best
    }
    claims = []
    if "vanilla" in lead:
        words = f"figure 3c: CorBin-FL loses less than {ALLOWED} points to vanilla"
        claims.append(Claim(words, lead["vanilla"].words, lead["vanilla"].loses_less(ALLOWED), (32,)))
    if "LDP-FL" in lead:
        words = "figure 3c: CorBin-FL is above LDP-FL"
        claims.append(Claim(words, lead["LDP-FL"].words, lead["LDP-FL"].above))
    return claims


def widening(ahead: Mapping[float, Gap]) -> Claim:
    """What the paper says of experiment 7 at other budgets, by the lead over LDP-FL at each epsilon."""
    leads = sorted(ahead.items())
    steps = [
        Gap("", "", a.points - b.points, math.hypot(a.error, b.error), a.num_seeds).above
        for (_, a), (_, b) in pairwise(leads)
    ]
    words = ", ".join(f"{lead.points:.2f} points at {epsilon:g}" for epsilon, lead in leads)
    return Claim(
        "experiment 7: the lead over LDP-FL is larger at smaller epsilon", words, every(steps), (33,)
    )


def authors_leads() -> dict[float, Gap]:
    """The same leads in the authors' own log on MNIST: best lambda of each method, means of five seeds."""
    log, leads = LOG["MNIST"], dict[float, Gap]()
    for method, epsilon in log:
        if method == "CorBin-FL" and ("LDP-FL", epsilon) in log:
            lead = max(log[method, epsilon]) - max(log["LDP-FL", epsilon])
            leads[epsilon] = Gap(method, "LDP-FL", lead, 0.0, 5)
    return leads


def _beside_the_log(table: Sequence[Row], rounds: int) -> list[str]:
    """Ours beside the authors' own figures, where their log has the training."""
    lines = []
    for row in table:
        epsilon = float(row["epsilon"])
        theirs = logged("MNIST", row["method"], epsilon, row["smoothing"])
        if theirs is not None and row["target"] == "weights":
            lines.append(
                f"{row['method']}, epsilon {epsilon:g}, lambda {row['smoothing']:g}, seed {row['seed']}: "
                f"{row['test']:.2f} after {rounds} rounds, in the authors' log {theirs:.2f} after {ROUNDS}"
            )
    return lines


def _draw(table: Sequence[Row], chosen: dict[Case, list[Row]], targets: Sequence[Target], path: Path) -> None:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(11, 4 * len(targets)), layout="constrained")
    for (left, right), target in zip(figure.subplots(len(targets), 2, squeeze=False), targets, strict=True):
        for (method, kind, epsilon), rows in chosen.items():
            if kind != target and method != "vanilla":
                continue
            values = curve_values(rows[0]["val_by_round"])
            name = f"{method}, epsilon {epsilon:g}"
            label = f"{name}, lambda {rows[0]['smoothing']:g}"
            left.plot(range(1, len(values) + 1), values, label=label)
            tried = [r for r in table if (r["method"], r["epsilon"]) == (method, epsilon)]
            tried = [r for r in tried if r["target"] in (target, "any")]
            grid = sorted({float(r["smoothing"]) for r in tried})
            best = [max(r["test"] for r in tried if r["smoothing"] == value) for value in grid]
            right.plot(grid, best, marker="o", label=name)
        left.set(
            xlabel="round", ylabel="validation accuracy, %", title=f"target: {target}, best lambda of each"
        )
        right.set(xlabel="smoothing lambda", ylabel="test accuracy, %", title=f"target: {target}")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend()
    save_figure(figure, path)
