"""Draw docs/splits.png: what clients hold by each partition, with few samples and with many.

python docs/split_picture.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lightning_fedq.data import IID, Dirichlet, FeatureShards, LabelShards, Partition, QuantitySkew

PICTURE = Path(__file__).parent / "splits.png"
CLIENTS = (479, 40, 5)
LABELS = torch.arange(10).repeat_interleave(144)
RULES: dict[str, Partition] = {
    "Dirichlet(0.1)": Dirichlet(0.1),
    "Dirichlet(1)": Dirichlet(1.0),
    "Dirichlet(100)": Dirichlet(100.0),
    "QuantitySkew(0.5)": QuantitySkew(0.5),
    "LabelShards(2)": LabelShards(2),
    "FeatureShards()": FeatureShards(),
    "IID()": IID(),
}


def held(rule: Partition, clients: int) -> tuple[Tensor, Tensor]:
    """Samples of each client, and the share of them that its most frequent class has."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(len(LABELS), generator=generator) if isinstance(rule, FeatureShards) else LABELS
    parts = rule.split(values, len(LABELS), clients, generator)
    counts = torch.stack([torch.bincount(LABELS[part], minlength=10) for part in parts]).double()
    return counts.sum(1), counts.amax(1) / counts.sum(1)


def draw() -> Figure:
    """Sizes over their mean above, the share of the largest class below; a column a number of clients."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    axes = figure.subplots(2, len(CLIENTS), sharex="row", sharey=True)
    for column, clients in enumerate(CLIENTS):
        found, mean = [held(rule, clients) for rule in RULES.values()], len(LABELS) / clients
        for row, values in enumerate(([size / mean for size, _ in found], [share for _, share in found])):
            ax = axes[row, column]
            boxes = [v.numpy() for v in values]
            ax.boxplot(boxes, orientation="horizontal", whis=(0, 100), widths=0.6)
            ax.set_yticks(range(1, len(RULES) + 1), list(RULES))
            ax.grid(axis="x", alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(f"{clients} clients, {mean:.0f} samples on average", fontsize=10)
        axes[0, column].set_xlabel("samples of a client / mean")
        axes[1, column].set_xlabel("share of its most frequent class")
    axes[0, 0].set_xlim(0, 6)
    axes[0, 0].invert_yaxis()
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE, dpi=110)
