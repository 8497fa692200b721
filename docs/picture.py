"""Draw docs/accuracy_epsilon_bits.png and its dark twin from the tables of the pages on what epsilon costs.

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
WITHOUT_PRIVACY = 98.0
EPSILONS = (8, 2, 1)
SHOWN = {
    "(`strokes`)": "features whitened by strokes",
    "`share=0.125`": "strokes, one coordinate in 8",
    "(`leaves`)": "features whitened by generic pictures",
    "random projection": "features, random projection",
    "**masks**": "pixels",
}
"""A part of each row of docs/guides/useful_epsilon.md: name in the picture."""


def read_rows() -> dict[str, tuple[float, list[float]]]:
    """Bytes that a client sends in a round, and accuracy in % at each epsilon, by part of `SHOWN`."""
    page = (DOCS / "guides" / "useful_epsilon.md").read_text().partition("## Do it")[0]
    rows = re.findall(r"^\| ([^|]+) " + r"\| ([\d.]+) " * len(EPSILONS) + r"\| ([\d,]+) \|$", page, re.M)
    found = {}
    for step, *cells, size in rows:
        for part in SHOWN:
            if part in step:
                found[part] = (float(size.replace(",", "")), [float(cell) for cell in cells])
    return found


def draw() -> Figure:
    """Accuracy against epsilon above, bytes of the same below; as narrow as a telephone."""
    rows = read_rows()
    figure, (above, below) = panels(2)
    styles = {name: series(place) for place, name in enumerate(SHOWN)}
    for name, label in SHOWN.items():
        above.plot(EPSILONS, rows[name][1], label=label, **styles[name])
    above.axhline(WITHOUT_PRIVACY, color="0.5", lw=1, ls="--", label="strokes without privacy")
    above.set_xscale("log", base=2)
    above.set_xticks(EPSILONS, [f"{epsilon}" for epsilon in EPSILONS])
    above.set_xlabel("epsilon of a client over the run: less protects more")
    above.set_ylabel("MNIST test accuracy, %")
    above.set_ylim(70, 100)
    legend(above)
    names = sorted(SHOWN, key=lambda name: rows[name][0])
    places = range(len(names))
    below.barh(
        places,
        [rows[name][0] for name in names],
        color=[styles[name]["color"] for name in names],
        height=0.42,
    )
    for place, name in zip(places, names, strict=True):
        below.text(0, place - 0.3, f"{SHOWN[name]}: {rows[name][0]:,.0f}", fontsize=9, va="bottom")
    below.set_ylim(len(names) - 0.6, -0.85)
    below.set_yticks([])
    below.set_xlabel("bytes that a client sends in a round, keys included")
    below.grid(False)
    below.spines["left"].set_visible(False)
    return figure


if __name__ == "__main__":
    save_figure(draw(), PICTURE, twin=True)
