"""Files of a run folder about single clients, which a simulation has because it plays them.

They lie in `clients/`, apart from what a server would have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fedq.reports.runs import mode_of, save_figure, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fedq.training.client_evaluation import EvaluatedClients

EVALUATION = "evaluation"
"""Name of the files about held-out samples: a line of JSON a measured round, and a picture of the last."""
HOLDINGS = "holdings"
"""Name of the files of who holds what: a table and a picture."""


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


def write_holdings(
    folder: Path, sizes: Sequence[int], held_out: Sequence[int], counts: Tensor | None, title: str
) -> None:
    """Write who holds what: a table with a row for each client, and a picture.

    Args:
        folder: The folder `clients` of a run; it is made if need be.
        sizes: Samples that each client trains on.
        held_out: Samples that each client keeps out of it; empty if nobody does.
        counts: `(clients, labels)` samples of each label; None where labels are not at hand.
        title: Title of the picture.
    """
    folder.mkdir(exist_ok=True)
    labels = [] if counts is None else [f"label_{label}" for label in range(counts.shape[1])]
    lines = [",".join(["client", "samples", *(["held_out"] if held_out else []), *labels])]
    for client, size in enumerate(sizes):
        of_labels = [] if counts is None else counts[client].tolist()
        lines.append(",".join(map(str, [client, size, *held_out[client : client + 1], *of_labels])))
    write_atomically(folder / f"{HOLDINGS}.csv", "\n".join(lines) + "\n")
    save_figure(holdings_figure(sizes, counts, title), folder / f"{HOLDINGS}.png")


def holdings_figure(sizes: Sequence[int], counts: Tensor | None, title: str) -> Figure:
    """Draw how many samples every client trains on and, where labels are at hand, of which labels.

    Args:
        sizes: Samples of each client.
        counts: `(clients, labels)` samples of each label, or None.
        title: Title of the picture.

    Returns:
        A matplotlib figure that belongs to no window.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = 1 if counts is None else 2
    figure = Figure(figsize=(8, 2.2 + 1.8 * panels), layout="constrained")
    all_axes = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
    figure.suptitle(title, fontsize="medium")
    all_axes[0].bar(range(len(sizes)), sizes, width=1.0 if len(sizes) > 100 else 0.8)
    all_axes[0].set_ylabel("samples")
    if counts is not None:
        image = all_axes[1].imshow(
            counts.T.numpy(), aspect="auto", interpolation="nearest", cmap="Blues", vmin=0
        )
        all_axes[1].set_ylabel("label")
        all_axes[1].yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=all_axes[1], label="samples")
    all_axes[-1].set_xlabel("client")
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


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
