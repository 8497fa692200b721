"""Files of a run folder about single clients, which a simulation has because it plays them.

They lie in `clients/`, apart from what a server would have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning_fedq.reports import mode_of, save_figure
from lightning_fedq.simulation.client_evaluation import EvaluatedClients

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVALUATION = "evaluation"
"""Name of the files about held-out samples: a line of JSON a measured round, and a picture of the last."""


def add_evaluation(folder: Path, measured: EvaluatedClients) -> None:
    """Add what models score on every client's held-out samples.

    Args:
        folder: The folder `clients` of a run; it is made if need be.
        measured: Measurements after a round.
    """
    folder.mkdir(exist_ok=True)
    with (folder / f"{EVALUATION}.jsonl").open("a") as file:
        file.write(json.dumps(measured.plain()) + "\n")


def draw_evaluation(folder: Path, measured: EvaluatedClients, metric: str, title: str) -> None:
    """Draw a metric of every client.

    Args:
        folder: The folder `clients` of a run.
        measured: Measurements after a round.
        metric: Metric to draw; the first one where it was not measured.
        title: Title of the picture.
    """
    names = measured.values["global"]
    name = metric if metric in names else next(iter(names))
    values: dict[str, list[float]] = {model: found[name].tolist() for model, found in measured.values.items()}
    words = f"{title}, round {measured.round + 1}"
    save_figure(client_figure(values, name, words), folder / f"{EVALUATION}.png")


def client_figure(values: Mapping[str, Sequence[float]], metric: str, title: str) -> Figure:
    """Draw the values of all clients, worst first, one line a model, with the mean of each.

    Args:
        values: By model, one value of each client.
        metric: Name of the metric.
        title: Title of the picture.

    Returns:
        A matplotlib figure that belongs to no window.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    for number, (model, found) in enumerate(values.items()):
        ordered = sorted(found, reverse=mode_of(metric) == "min")
        mean = float(torch.tensor(ordered, dtype=torch.float64).mean())
        color = f"C{number}"
        label = f"{model} model, mean {mean:.3g}"
        axes.plot(range(1, len(ordered) + 1), ordered, color=color, marker=".", label=label)
        axes.axhline(mean, color=color, linewidth=0.8, linestyle="--")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="clients, worst first", ylabel=f"{metric}, on the client's own held-out samples")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
