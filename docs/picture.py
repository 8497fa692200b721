"""Draw the pictures of README and the pages from tables, and find pictures of earlier tables.

    python docs/picture.py [NAME ...]
    python docs/picture.py --check

The first draws all pictures, or those that are named. The second exits with status 1 if a table has changed
since its picture was drawn.

Each PNG carries the hash of the rows that it was drawn from. A tutorial draws its pictures in the run that
made its notebook, which has the rows and the same pictures.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lightning_fedq.comparison import Comparison
from lightning_fedq.comparison.table import ABOVE, OPACUS
from lightning_fedq.data import IID, Dirichlet, FeatureShards, LabelShards, Partition, QuantitySkew
from lightning_fedq.reports.plot_style import legend, panels, series
from lightning_fedq.reports.runs import save_figure

DOCS = Path(__file__).parent
HASH = "sha256 of the rows"
"""Key of the PNG text chunk that names the rows a picture was drawn from."""

# ---- accuracy, epsilon and bytes: the table of guides/useful_epsilon.md ---------------------------------

WITHOUT_PRIVACY = 98.0
EPSILONS = (8, 2, 1)
SHOWN = {
    "(`strokes`)": "features whitened by strokes",
    "`fraction=0.125`": "strokes, one coordinate in 8",
    "(`leaves`)": "features whitened by generic pictures",
    "random projection": "features, random projection",
    "secure aggregation**": "pixels",
}
"""A part of each row of docs/guides/useful_epsilon.md: its name in the picture."""


def read_useful_epsilon() -> dict[str, tuple[float, list[float]]]:
    """Read the uplink bytes per round and the accuracy in % at each epsilon, by part of `SHOWN`.

    Raises:
        ValueError: If a row of `SHOWN` is missing.
    """
    page = (DOCS / "guides" / "useful_epsilon.md").read_text()
    rows = re.findall(r"^\| ([^|]+) " + r"\| ([\d.]+) " * len(EPSILONS) + r"\| ([\d,]+) \|$", page, re.M)
    found = {}
    for step, *cells, size in rows:
        for part in SHOWN:
            if part in step:
                found[part] = (float(size.replace(",", "")), [float(cell) for cell in cells])
    if missing := set(SHOWN) - set(found):
        raise ValueError(f"useful_epsilon.md has no row with {sorted(missing)}. Edit SHOWN")
    return found


def draw_useful_epsilon(rows: dict[str, tuple[float, list[float]]]) -> Figure:
    """Draw accuracy against epsilon above and uplink bytes below, as narrow as a phone screen."""
    figure, (above, below) = panels(2)
    styles = {name: series(place) for place, name in enumerate(SHOWN)}
    for name, label in SHOWN.items():
        above.plot(EPSILONS, rows[name][1], label=label, **styles[name])
    above.axhline(WITHOUT_PRIVACY, color="0.5", lw=1, ls="--", label="strokes without privacy")
    _set_epsilons(above, EPSILONS)
    above.set_xlabel("epsilon of a client over the run (smaller is more private)")
    above.set_ylabel("MNIST test accuracy, %")
    above.set_ylim(70, 100)
    legend(above)
    names = sorted(SHOWN, key=lambda name: rows[name][0])
    places = range(len(names))
    colours = [styles[name]["color"] for name in names]
    below.barh(places, [rows[name][0] for name in names], color=colours, height=0.42)
    for place, name in zip(places, names, strict=True):
        below.text(0, place - 0.3, f"{SHOWN[name]}: {rows[name][0]:,.0f}", fontsize=9, va="bottom")
    below.set_ylim(len(names) - 0.6, -0.85)
    below.set_yticks([])
    below.set_xlabel("bytes that a client sends per round, including keys")
    below.grid(False)
    below.spines["left"].set_visible(False)
    return figure


def _set_epsilons(axes: Any, epsilons: Sequence[float]) -> None:
    """Set a logarithmic axis with a tick at each epsilon."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])


# ---- client-level epsilon on MNIST: the first table of bench.md -----------------------------------------

VIEWS = ("server behind secure aggregation", "server that sees every message, each client once")


def read_bench() -> dict[str, Any]:
    """Read mean and deviation of the accuracy in % at each epsilon, by adversary and mechanism.

    Raises:
        ValueError: If the page has no rows for one of `VIEWS`.
    """
    page = (
        (DOCS / "bench.md").read_text().partition("### Linear model, 1,000 clients")[2].partition("### ")[0]
    )
    found: dict[str, Any] = {"without privacy": float(re.findall(r"Without privacy: ([\d.]+)", page)[0])}
    row = r"^\|([^|]*)\| ([^|]+) \| [^|]+ " + r"\| ([\d.]+) ± ([\d.]+) " * 4 + r"\|$"
    view = ""
    for first, name, *cells in re.findall(row, page, re.M):
        view = first.strip() or view  # an empty cell repeats the adversary above it
        values = [float(value) for value in cells]
        found.setdefault(view, {})[name] = [values[::2], values[1::2]]
    if missing := set(VIEWS) - set(found):
        raise ValueError(f"bench.md has no rows for {sorted(missing)}. Edit VIEWS")
    return found


def draw_bench(rows: dict[str, Any]) -> Figure:
    """Draw a panel for each adversary of `VIEWS`: mean and standard deviation over seeds."""
    figure, drawn = panels(len(VIEWS), height=4.2)
    for view, axes in zip(VIEWS, drawn, strict=True):
        for place, (name, (means, deviations)) in enumerate(rows[view].items()):
            axes.errorbar((1, 2, 4, 8), means, yerr=deviations, label=name, capsize=2, **series(place))
        axes.axhline(rows["without privacy"], color="0.5", linestyle="--", label="without privacy")
        _set_epsilons(axes, (1, 2, 4, 8))
        axes.set(xlabel="epsilon of a client over the run", ylabel="MNIST test accuracy, %")
        legend(axes, view)
    return figure


# ---- mechanisms at equal epsilon: docs/compare.csv, the runs of guides/compare.md -----------------------


def read_compare() -> list[dict[str, Any]]:
    """Read the figures of each run, as `fedq compare` wrote them into its `table.csv`."""
    words = ("mechanism", "monitor", "setting")
    with (DOCS / "compare.csv").open() as file:
        return [
            {name: value if name in words else float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def draw_compare(rows: list[dict[str, Any]]) -> Figure:
    """Draw the picture of the comparison, as `fedq compare` draws it."""
    names, epsilons, seeds = ({row[key] for row in rows} for key in ("mechanism", "epsilon", "seed"))
    known = sorted(name for name in names if name != ABOVE and not name.endswith(OPACUS))
    epsilons = sorted(epsilons - {math.inf})
    return Comparison.from_names("digits", known, epsilons=epsilons, seeds=len(seeds)).picture(rows)


# ---- partitions -----------------------------------------------------------------------------------------

CLIENTS = (479, 40, 5)
RULES: dict[str, Partition] = {
    "Dirichlet(0.1)": Dirichlet(0.1),
    "Dirichlet(1)": Dirichlet(1.0),
    "Dirichlet(100)": Dirichlet(100.0),
    "QuantitySkew(0.5)": QuantitySkew(0.5),
    "LabelShards(2)": LabelShards(2),
    "FeatureShards()": FeatureShards(),
    "IID()": IID(),
}


def partition_samples() -> dict[str, list[list[list[float]]]]:
    """Return the samples of each client over their mean, and the share of its largest class, by clients."""
    found: dict[str, list[list[list[float]]]] = {}
    labels = torch.arange(10).repeat_interleave(144)
    for clients in CLIENTS:
        sizes, shares = [], []
        for rule in RULES.values():
            generator = torch.Generator().manual_seed(0)
            features = torch.rand(len(labels), generator=generator)
            values = features if isinstance(rule, FeatureShards) else labels
            parts = rule.split(values, len(labels), clients, generator)
            counts = torch.stack([torch.bincount(labels[part], minlength=10) for part in parts]).double()
            sizes.append((counts.sum(1) * clients / len(labels)).tolist())
            shares.append((counts.amax(1) / counts.sum(1)).tolist())
        found[str(clients)] = [sizes, shares]
    return found


def draw_partitions(rows: dict[str, list[list[list[float]]]]) -> Figure:
    """Draw sizes over their mean above, the share of the largest class below, and a column per number."""
    figure = Figure(figsize=(11, 5.4), dpi=110, layout="constrained")
    axes = figure.subplots(2, len(CLIENTS), sharex="row", sharey=True)
    for column, (clients, both) in enumerate(rows.items()):
        for panel, values in zip(axes[:, column], both, strict=True):
            panel.boxplot(values, orientation="horizontal", whis=(0, 100), widths=0.6)
            panel.set_yticks(range(1, len(RULES) + 1), list(RULES))
            panel.grid(axis="x", alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        mean = 1440 / int(clients)
        axes[0, column].set_title(f"{clients} clients, {mean:.0f} samples on average", fontsize=10)
        axes[0, column].set_xlabel("samples of a client / mean")
        axes[1, column].set_xlabel("share of its most frequent class")
    axes[0, 0].set_xlim(0, 6)
    axes[0, 0].invert_yaxis()
    return figure


# ---- all pictures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A picture of a page.

    Args:
        name: Name of its file, without the ending.
        read: Function that returns all figures that the picture shows.
        draw: Function that draws them.
        twin: Whether there is a second file for dark pages.
    """

    name: str
    read: Callable[[], Any]
    draw: Callable[[Any], Figure]
    twin: bool = True

    @property
    def files(self) -> list[Path]:
        """Files of the picture."""
        return [DOCS / f"{self.name}{dark}.png" for dark in ("", *(["_dark"] if self.twin else []))]

    def hash_rows(self) -> str:
        """Return the hash of all figures that the picture shows."""
        return sha256(json.dumps(self.read(), sort_keys=True).encode()).hexdigest()

    def save(self) -> None:
        """Draw the files, and write the hash of the rows into them."""
        save_figure(self.draw(self.read()), self.files[0], twin=self.twin)
        text = PngInfo()
        text.add_text(HASH, self.hash_rows())
        for path in self.files:
            with Image.open(path) as picture:
                picture.save(path, pnginfo=text, dpi=picture.info.get("dpi"), optimize=True)

    def find_stale(self) -> list[str]:
        """Return the files that were not drawn from today's rows."""
        rows = self.hash_rows()
        return [path.name for path in self.files if _read_hash(path) != rows]


def _read_hash(path: Path) -> str | None:
    """Return the hash of rows that a picture carries."""
    with Image.open(path) as picture:
        found: str | None = picture.info.get(HASH)
        return found


PICTURES = (
    Picture(
        "accuracy_epsilon_bits",
        lambda: [read_useful_epsilon(), WITHOUT_PRIVACY],
        lambda rows: draw_useful_epsilon(rows[0]),
    ),
    Picture("useful_privacy", read_bench, draw_bench),
    Picture("compare", read_compare, draw_compare),
    Picture("splits", partition_samples, draw_partitions, twin=False),
)


def find_stale_tutorials() -> list[str]:
    """Return the pictures of tutorials that differ from those in the notebook of the same run."""
    stale = []
    for notebook in sorted((DOCS / "tutorials").glob("*.ipynb")):
        outputs = [
            out for cell in json.loads(notebook.read_text())["cells"] for out in cell.get("outputs", ())
        ]
        page = notebook.with_suffix(".md").read_text()
        if any(out["output_type"] == "stream" and out["text"].rstrip() not in page for out in outputs):
            stale.append(f"tutorials/{notebook.stem}.md")
        for data in (out["data"] for out in outputs if out["output_type"] == "display_data"):
            name = data["text/plain"]
            if (notebook.parent / name).read_bytes() != base64.b64decode(data["image/png"]):
                stale.append(f"tutorials/{name}")
    return stale


def main(argv: Sequence[str]) -> int:
    """Draw pictures, or check all of them."""
    if "--check" in argv:
        stale = [name for picture in PICTURES for name in picture.find_stale()]
        for name in stale:
            print(f"docs/{name}: out of date, run `python docs/picture.py`")
        tutorials = find_stale_tutorials()
        for name in tutorials:
            print(f"docs/{name}: not of the run of its notebook, run `make tutorials`")
        return int(bool(stale or tutorials))
    for picture in PICTURES:
        if not argv or picture.name in argv:
            picture.save()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
