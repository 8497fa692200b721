"""Accuracy against the epsilon of a whole client, adversary by adversary.

MNIST with public normalisation; a client holds five images (four where there are 10,000 clients) and takes
one step on all of them in a round. Every mechanism is calibrated to its target by `Federated(privacy=...)`
against the adversary of its view:

* `secagg`: the server behind secure aggregation, over the whole run, everybody in every round. Coins, noise
  and sums are real; masks are counted (`SecAgg(simulation="counted")`), which changes no sum.
* `outsider`: whoever sees all released models, over the whole run.
* `once`: the server that sees every message, over the whole run; each client takes part once.
* `message`: the same server, epsilon of a single message, everybody in every round. No guarantee over the
  run: every further round costs as much again.

Learning rates and ranges are tuned by validation accuracy with a seed of their own, once a view and epsilon,
for `RotatedCoins` or, where nothing is summed, `GaussianNoise` (mechanisms that clip vectors), `RotatedAxes`
(directions) and `LDPQ` or `CPA` (coordinates); vectors are clipped to twice the learning rate, without
privacy too. With 10,000 clients the noise of a sum decides on no rate, and rates are those tuned without
privacy. Tuning is not charged. What is reported is the last model or the mean of the last half of the
rounds, whichever does better in validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Literal

from lightning_fedq.mechanisms import (
    CPA,
    LDPQ,
    AggregateGaussian,
    AugCorBin,
    DistributedDiscreteGaussian,
    FedAvg,
    GaussianNoise,
    LaplaceNoise,
    PairedCoins,
    RotatedAxes,
    RotatedCoins,
)
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.reports.runs import save_figure
from reproductions.bench import ImageData, Row, Rows
from reproductions.useful.training import Federation, Run, train

Kind = Literal["linear", "cnn2"]
View = Literal["secagg", "outsider", "once", "message"]
PLAIN = "FedAvg, no privacy"
TUNING_SEED = 1000
_RATES = {"vector": (0.1, 0.25, 0.5, 1.0), "direction": (0.025, 0.05, 0.1, 0.25)}
_CROWD = 9_600
"""Clients beyond which noise behind a sum is too small to decide on a rate."""
_CLIP = 2.0
"""Norm to which vectors are clipped, over the learning rate."""
_RANGES = (0.5, 1.5, 4.5)
"""Ranges of a coordinate that are tried, in units of clip / sqrt(dim)."""


@dataclass(frozen=True)
class _Method:
    """A mechanism for updates that are clipped to a norm, its free parameter still open.

    Args:
        make: From the norm and the number of parameters.
        clips: "vector", "direction" or "coordinate": what it is tuned with.
    """

    make: Callable[[float, int], Mechanism]
    clips: Literal["vector", "direction", "coordinate"] = "vector"


_METHODS = {
    PLAIN: _Method(lambda clip, dim: FedAvg()),
    "GaussianNoise": _Method(lambda clip, dim: GaussianNoise(clip, 1.0)),
    "RotatedCoins": _Method(lambda clip, dim: RotatedCoins(clip)),
    "RotatedCoins, share 1/8": _Method(lambda clip, dim: RotatedCoins(clip, fraction=0.125)),
    "RotatedCoins, paired": _Method(lambda clip, dim: RotatedCoins(clip, paired=True)),
    "DistributedDiscreteGaussian": _Method(
        lambda clip, dim: DistributedDiscreteGaussian(clip, 0.05, 0.01, bits=16)
    ),
    "AggregateGaussian": _Method(lambda clip, dim: AggregateGaussian(clip, 1.0)),
    "LaplaceNoise": _Method(lambda clip, dim: LaplaceNoise(clip * math.sqrt(2.0 * dim / math.pi), 1.0)),
    "RotatedAxes": _Method(lambda clip, dim: RotatedAxes(1.0, clip), "direction"),
    "LDPQ": _Method(lambda clip, dim: LDPQ(1.0), "coordinate"),
    "PairedCoins": _Method(lambda clip, dim: PairedCoins(1.0), "coordinate"),
    "AugCorBin": _Method(lambda clip, dim: AugCorBin(1.0), "coordinate"),
    "CPA, some blocks": _Method(lambda clip, dim: CPA(1.0, epsilon_scope="round"), "coordinate"),
}


@dataclass(frozen=True)
class _View:
    """Against whom, over what, with whom; its mechanisms, and who is tuned in their place."""

    adversary: Adversary
    over: Literal["run", "round"]
    cohort: Literal["once"] | None
    methods: tuple[str, ...]
    tuned: dict[str, str]


_VIEWS: dict[View, _View] = {
    "secagg": _View(
        Adversary.SECAGG_SERVER,
        "run",
        None,
        (
            *("RotatedCoins", "GaussianNoise", "RotatedCoins, share 1/8", "DistributedDiscreteGaussian"),
            *("LDPQ", "RotatedCoins, paired", "PairedCoins", "AugCorBin"),
        ),
        {"vector": "RotatedCoins", "coordinate": "LDPQ"},
    ),
    "outsider": _View(Adversary.OUTSIDER, "run", None, ("AggregateGaussian",), {}),
    "once": _View(
        Adversary.SERVER,
        "run",
        "once",
        ("RotatedAxes", "GaussianNoise", "LaplaceNoise", "CPA, some blocks"),
        {"direction": "RotatedAxes", "vector": "GaussianNoise", "coordinate": "CPA, some blocks"},
    ),
    "message": _View(
        Adversary.SERVER,
        "round",
        None,
        ("RotatedAxes", "GaussianNoise", "CPA, some blocks"),
        {"direction": "RotatedAxes", "vector": "GaussianNoise", "coordinate": "CPA, some blocks"},
    ),
}


def useful_privacy(
    data: ImageData = ImageData(),  # noqa: B008 (frozen)
    num_clients: int = 1000,
    kinds: Sequence[Kind] = ("linear", "cnn2"),
    views: Sequence[View] = ("secagg", "outsider", "once", "message"),
    methods: Sequence[str] | None = None,
    epsilons: Sequence[float] = (1.0, 2.0, 4.0, 8.0),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    delta: float = 1e-5,
    rounds: int = 30,
    out: str = "runs/useful-privacy",
    resume: bool = False,
) -> dict[str, Any]:
    """Accuracy against client-level epsilon on MNIST, adversary by adversary, with real messages.

    Args:
        data: Where MNIST is.
        num_clients: K; five images each, or four above 9,600 clients.
        kinds: Models: "linear" (7,850 parameters), "cnn2" (6,422).
        views: Adversaries; see the module's text.
        methods: Names of mechanisms, to run only these; None is all of a view.
        epsilons: Targets of one client.
        seeds: Of model, data order and coins; the claims are those of the same run with secure keys.
        delta: Of the target, below 1 / num_clients.
        rounds: T.
        out: Folder of table, summary and picture.
        resume: Keep the rows that are in `out` already.

    Raises:
        ValueError: If there is no such mechanism.
    """
    unknown = sorted(set(methods or ()) - set(_METHODS))
    if unknown:
        raise ValueError(f"methods must be among {', '.join(_METHODS)}, got {', '.join(unknown)}")
    samples = 5 if num_clients <= _CROWD else 4
    settings = {"delta": delta, "rounds": rounds}
    rows, results = Rows(out, settings, resume), list[Row]()
    for seed, kind, view in product(seeds, kinds, views):
        federation = Federation(data.root, data.download, kind, num_clients, samples, rounds)
        bench = _Bench(rows, federation, view, delta)
        for name, epsilon in _cells(view, methods, epsilons):
            results.append(bench.result(name, epsilon, seed))
    _draw(results, rows.folder / "accuracy.png")
    return rows.finish(_verdicts(results), "accuracy against client-level epsilon, MNIST")


def _cells(
    view: View, methods: Sequence[str] | None, epsilons: Sequence[float]
) -> Iterator[tuple[str, float]]:
    if view == "secagg" and (methods is None or PLAIN in methods):
        yield PLAIN, math.inf
    for name in _VIEWS[view].methods:
        if methods is None or name in methods:
            yield from ((name, epsilon) for epsilon in epsilons)


@dataclass(frozen=True)
class _Bench:
    """Rows of one federation and view."""

    rows: Rows
    federation: Federation
    view: View
    delta: float

    def result(self, name: str, epsilon: float, seed: int) -> Row:
        """A tuned run; from the disk, if it is there."""
        key = self._key(name, epsilon, seed, "result")
        return self.rows.add(key, lambda: self._run(name, epsilon, seed, *self._tuned(name, epsilon)))

    def _key(self, name: str, epsilon: float, seed: int, what: str) -> Row:
        return {
            "what": what,
            "model": self.federation.kind,
            "clients": self.federation.num_clients,
            "view": self.view,
            "method": name,
            "target_epsilon": epsilon,
            "seed": seed,
        }

    def _tuned(self, name: str, epsilon: float) -> tuple[float, float]:
        """Learning rate and range, by validation."""
        clips, stands = _METHODS[name].clips, _VIEWS[self.view].tuned
        crowd = self.federation.num_clients > _CROWD and self.view in ("secagg", "outsider")
        if crowd and name != PLAIN and clips == "vector":
            return replace(self, view="secagg")._tuned(PLAIN, math.inf)
        if self.view == "outsider":  # the same noise behind masks, where it is tuned
            return replace(self, view="secagg")._tuned("RotatedCoins", epsilon)
        if name == PLAIN:
            grid, tuned = [(rate, 1.0) for rate in _RATES["vector"]], PLAIN
        elif clips == "coordinate":
            rate, _ = self._tuned(stands.get("direction", stands["vector"]), epsilon)
            grid, tuned = [(rate, spread) for spread in _RANGES], stands[clips]
        else:
            grid, tuned = [(rate, _RANGES[-1]) for rate in _RATES[clips]], stands[clips]
        found = [self._tuning_row(tuned, epsilon, *setting) for setting in grid]
        best = max(found, key=lambda row: float(row["val_acc"]))
        return float(best["lr"]), float(best["spread"])

    def _tuning_row(self, name: str, epsilon: float, lr: float, spread: float) -> Row:
        key = self._key(name, epsilon, TUNING_SEED, "tuning") | {"lr": lr, "spread": spread}
        done = [row for row in self.rows.rows if key.items() <= row.items()]
        return (
            done[0]
            if done
            else self.rows.add(key, partial(self._run, name, epsilon, TUNING_SEED, lr, spread))
        )

    def _run(self, name: str, epsilon: float, seed: int, lr: float, spread: float) -> Row:
        view, clip, dim = _VIEWS[self.view], _CLIP * lr, self.federation.dim
        plain = name == PLAIN
        target = None if plain else PrivacyTarget(epsilon, self.delta, view.adversary, view.over)
        run = train(
            self.federation,
            _METHODS[name].make(clip, dim),
            target,
            view.cohort,
            lr,
            spread * clip / math.sqrt(dim),
            seed,
            gradient_clip=_CLIP if plain else None,  # one step: the update's norm is lr times the gradient's
        )
        return {"lr": lr, "spread": spread} | _columns(run)


def _columns(run: Run) -> Row:
    val, test = run.accuracy
    return {
        "val_acc": 100.0 * val,
        "acc": 100.0 * test,
        "acc_last": 100.0 * run.last[1],
        "acc_averaged": 100.0 * run.averaged[1],
        "epsilon": run.epsilon,
        "update_bits": run.update_bits,
        "all_bits": run.all_bits,
        "cpu_seconds": run.cpu_seconds,
        "mechanism": run.mechanism,
    }


def _verdicts(results: Sequence[Row]) -> list[str]:
    """One line for each model, view and mechanism: accuracy at every epsilon, over seeds."""
    lines = []
    places = dict.fromkeys((r["model"], r["clients"], r["view"], r["method"]) for r in results)
    for place in places:
        own = [r for r in results if (r["model"], r["clients"], r["view"], r["method"]) == place]
        words = []
        for epsilon in dict.fromkeys(r["target_epsilon"] for r in own):
            values = [float(r["acc"]) for r in own if r["target_epsilon"] == epsilon]
            spread = f" +- {pstdev(values):.1f}" if len(values) > 1 else ""
            words.append(f"epsilon {epsilon:g}: {mean(values):.1f}{spread} ({len(values)})")
        bits = mean(float(r["update_bits"]) for r in own)
        lines.append(f"{', '.join(map(str, place))}: {'; '.join(words)}; {bits:.2g} bits a parameter")
    return lines


def _draw(results: Sequence[Row], path: Path) -> None:
    """One panel for each model and view, below each other: mean over seeds, bars from worst to best."""
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    places = list(dict.fromkeys((r["model"], r["clients"], r["view"]) for r in results))
    figure = Figure(figsize=(6.6, 3.5 * len(places)), layout="constrained")
    panels = figure.subplots(len(places), 1, squeeze=False)[:, 0]
    ticks = sorted({float(r["target_epsilon"]) for r in results if r["method"] != PLAIN})
    for (kind, clients, view), axes in zip(places, panels, strict=True):
        here = [r for r in results if (r["model"], r["clients"], r["view"]) == (kind, clients, view)]
        plain = [
            float(r["acc"])
            for r in results
            if (r["model"], r["clients"]) == (kind, clients) and r["method"] == PLAIN
        ]
        if plain:
            axes.axhline(mean(plain), color="black", linewidth=0.8, linestyle=":")
        ends = [_curve(axes, [r for r in here if r["method"] == name], name) for name in _METHODS]
        axes.set_title(f"{_TITLES[view]}: {kind}, {clients:,} clients", fontsize="medium", loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.grid(alpha=0.3)
        axes.set_ylabel("test accuracy, %")
        _name_ends(axes, [end for end in ends if end is not None])
    panels[-1].set_xlabel("epsilon of a client")
    save_figure(figure, path)


_TITLES = {
    "secagg": "server behind secure aggregation, run",
    "outsider": "outsider, run",
    "once": "server, run, each client once",
    "message": "server, one message",
}


def _curve(axes: Any, rows: Sequence[Row], name: str) -> tuple[str, float, str] | None:
    """Draw a mechanism; its name, where its curve ends, and its colour."""
    if not rows or name == PLAIN:
        return None
    values = dict[float, list[float]]()
    for row in rows:
        values.setdefault(float(row["target_epsilon"]), []).append(float(row["acc"]))
    epsilons = sorted(values)
    middle = [mean(values[e]) for e in epsilons]
    low = [m - min(values[e]) for e, m in zip(epsilons, middle, strict=True)]
    high = [max(values[e]) - m for e, m in zip(epsilons, middle, strict=True)]
    number = [method for method in _METHODS if method != PLAIN].index(name)
    colour = f"C{number % 10}"
    style = {"marker": "osD^v<>phX*P"[number % 12], "linestyle": "-" if number < 10 else "--"}
    axes.errorbar(
        epsilons, middle, [low, high], color=colour, capsize=2, linewidth=1.4, markersize=4, **style
    )
    return name, middle[-1], colour


def _name_ends(axes: Any, ends: Sequence[tuple[str, float, str]]) -> None:
    """Write each mechanism's name right of its curve, in its colour, none over another."""
    low, high = axes.get_ylim()
    apart, places = (high - low) / 13, list[float]()
    for _, end, _ in sorted(ends, key=lambda end: end[1]):
        places.append(max(end, places[-1] + apart) if places else end)
    over = max(places, default=low) - high  # those at the top make room downwards
    if over > 0:
        limit = high
        for number in reversed(range(len(places))):
            places[number] = min(places[number], limit)
            limit = places[number] - apart
    for (name, _, colour), place in zip(sorted(ends, key=lambda end: end[1]), places, strict=True):
        axes.annotate(
            name,
            (1.02, place),
            xycoords=("axes fraction", "data"),
            color=colour,
            fontsize="small",
            va="center",
            annotation_clip=False,
        )
