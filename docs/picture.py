"""Draw docs/accuracy_epsilon_bits.png from the first table of docs/useful_privacy.md.

python docs/picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
PICTURE = DOCS / "accuracy_epsilon_bits.png"
WITHOUT_PRIVACY = 88.7
EPSILONS = (1, 2, 4, 8)
SHOWN = {
    "RotatedCoins, share 1/8": ("#0b7a75", "o"),
    "RotatedCoins": ("#2a7de1", "s"),
    "LDPQ": ("#d1495b", "D"),
    "DistributedDiscreteGaussian": ("#7b4fb5", "^"),
}
"""Rows of the table, by bits, with colour and marker."""


def read_rows() -> dict[str, tuple[float, list[float]]]:
    """Bits a parameter, at most, and accuracy in % at each epsilon, by mechanism."""
    table = (DOCS / "useful_privacy.md").read_text().partition("### Linear")[2].partition("###")[0]
    found = {}
    for name, bits, *cells in re.findall(
        r"^\| server behind secure aggregation, run \| ([^|]+) \| ([^|]+) "
        + r"\| ([\d.]+)[^|]*" * len(EPSILONS)
        + r"\|$",
        table,
        re.M,
    ):
        found[name] = (float(bits.split()[-1]), [float(cell) for cell in cells])
    return found


def draw() -> Figure:
    """Accuracy against epsilon on the left, bits of the same mechanisms on the right."""
    rows = read_rows()
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, (colour, marker) in SHOWN.items():
        left.plot(EPSILONS, rows[name][1], f"{marker}-", color=colour, lw=1.6, ms=6, mfc="white", mew=1.6)
    left.axhline(WITHOUT_PRIVACY, color="black", lw=0.8, ls="--")
    left.annotate("without privacy", (1, WITHOUT_PRIVACY), (0, 4), textcoords="offset points", fontsize=9)
    left.set_xscale("log", base=2)
    left.set_xticks(EPSILONS, [f"{epsilon}" for epsilon in EPSILONS])
    left.set_xlabel("epsilon of a client over the run")
    left.set_ylabel("MNIST test accuracy, %")
    left.set_ylim(55, 95)
    left.grid(alpha=0.25)
    names = ["without privacy", *reversed(SHOWN)]
    bits = [32.0, *(rows[name][0] for name in names[1:])]
    bars = right.barh(names, bits, color=["#444444", *(SHOWN[name][0] for name in names[1:])], height=0.6)
    right.bar_label(bars, [f"{number:g}" for number in bits], padding=3, fontsize=9)
    right.set_xlabel("bits a parameter up (masks on: keys and shares add 3)")
    right.set_xlim(0, 36)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE, dpi=130)
