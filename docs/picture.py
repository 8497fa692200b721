"""Draw docs/accuracy_epsilon_bits.png and its dark twin from the first table of docs/useful_privacy.md.

python docs/picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.figure import Figure

from lightning_fedq.reports.hand import legend, panels, series
from lightning_fedq.reports.runs import save_figure

DOCS = Path(__file__).parent
PICTURE = DOCS / "accuracy_epsilon_bits.png"
WITHOUT_PRIVACY = 88.7
EPSILONS = (1, 2, 4, 8)
SHOWN = {
    "RotatedCoins": "RotatedCoins",
    "RotatedCoins, share 1/8": "RotatedCoins, one coordinate in 8",
    "DistributedDiscreteGaussian": "DistributedDiscreteGaussian",
    "LDPQ": "LDPQ",
}
"""Rows of the table: name in the picture."""


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
    figure, (above, below) = panels(2)
    styles = {name: series(place) for place, name in enumerate(SHOWN)}
    for name, label in SHOWN.items():
        above.plot(EPSILONS, rows[name][1], label=label, **styles[name])
    above.axhline(WITHOUT_PRIVACY, color="0.5", lw=1, ls="--", label="without privacy")
    above.set_xscale("log", base=2)
    above.set_xticks(EPSILONS, [f"{epsilon}" for epsilon in EPSILONS])
    above.set_xlabel("epsilon of a client over the run: less protects more")
    above.set_ylabel("MNIST test accuracy, %")
    above.set_ylim(55, 95)
    legend(above)
    names = [*sorted(SHOWN, key=lambda name: rows[name][0]), "without privacy"]
    bits = [*(rows[name][0] for name in names[:-1]), 32.0]
    colours = [*(styles[name]["color"] for name in names[:-1]), "0.5"]
    places = range(len(names))
    below.barh(places, bits, color=colours, height=0.42)
    for place, name, number in zip(places, names, bits, strict=True):
        label = SHOWN.get(name, name)
        below.text(0, place - 0.3, f"{label}: {number:g}", fontsize=9, va="bottom")
    below.set_ylim(len(names) - 0.6, -0.85)
    below.set_yticks([])
    below.set_xlabel("bits a parameter on the wire, without keys")
    below.grid(False)
    below.spines["left"].set_visible(False)
    return figure


if __name__ == "__main__":
    save_figure(draw(), PICTURE, twin=True)
