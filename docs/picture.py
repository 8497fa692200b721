"""Draw docs/accuracy_epsilon_bits.png and its dark twin from the first table of docs/useful_privacy.md.

python docs/picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
PICTURES = {"default": "accuracy_epsilon_bits.png", "dark_background": "accuracy_epsilon_bits_dark.png"}
"""File by style of matplotlib."""
WITHOUT_PRIVACY = 88.7
EPSILONS = (1, 2, 4, 8)
SHOWN = {
    "RotatedCoins": ("RotatedCoins", "#2a7de1", "s", "-"),
    "RotatedCoins, share 1/8": ("RotatedCoins, one coordinate in 8", "#12a39a", "o", "--"),
    "DistributedDiscreteGaussian": ("DistributedDiscreteGaussian", "#9a6bd6", "^", ":"),
    "LDPQ": ("LDPQ", "#e0586a", "D", "-"),
}
"""Rows of the table: name in the picture, colour, marker, line."""


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
    """Accuracy against epsilon above, bits of the same mechanisms below; as narrow as a telephone."""
    rows = read_rows()
    figure = Figure(figsize=(5.6, 6.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1.5, 1))
    for name, (label, colour, marker, line) in SHOWN.items():
        above.plot(EPSILONS, rows[name][1], marker + line, color=colour, lw=2, ms=8, mfc="none", label=label)
    above.axhline(WITHOUT_PRIVACY, color="grey", lw=1, ls="--", label="without privacy")
    above.set_xscale("log", base=2)
    above.set_xticks(EPSILONS, [f"{epsilon}" for epsilon in EPSILONS])
    above.set_xlabel("epsilon of a client over the run: less protects more")
    above.set_ylabel("MNIST test accuracy, %")
    above.set_ylim(55, 95)
    above.grid(alpha=0.25)
    above.legend(loc="lower right", fontsize=10.5, frameon=False)
    names = [*sorted(SHOWN, key=lambda name: rows[name][0]), "without privacy"]
    bits = [*(rows[name][0] for name in names[:-1]), 32.0]
    colours = [*(SHOWN[name][1] for name in names[:-1]), "grey"]
    places = range(len(names))
    below.barh(places, bits, color=colours, height=0.42)
    for place, name, number in zip(places, names, bits, strict=True):
        label = SHOWN[name][0] if name in SHOWN else name
        below.text(0, place - 0.3, f"{label}: {number:g}", fontsize=10.5, va="bottom")
    below.set_ylim(len(names) - 0.6, -0.85)
    below.set_yticks([])
    below.set_xlabel("bits a parameter on the wire, without keys")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    below.spines["left"].set_visible(False)
    return figure


if __name__ == "__main__":
    for style, name in PICTURES.items():
        with plt.style.context(["default", style, {"font.size": 12}]):
            draw().savefig(DOCS / name, dpi=130)
