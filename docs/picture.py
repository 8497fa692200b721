"""Draw docs/accuracy_epsilon_bits.png and its dark twin from the table of docs/guides/useful_epsilon.md.

python docs/picture.py          # draw them
python docs/picture.py --check  # exit with status 1 if the table has changed since they were drawn
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lightning_fedq.reports.plot_style import legend, panels, series
from lightning_fedq.reports.runs import save_figure

DOCS = Path(__file__).parent
PICTURE = DOCS / "accuracy_epsilon_bits.png"
TWIN = PICTURE.with_name(f"{PICTURE.stem}_dark.png")
HASH = "sha256 of the rows"
"""Key of the PNG text chunk that names the rows a picture was drawn from."""
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


def read_rows() -> dict[str, tuple[float, list[float]]]:
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
        raise ValueError(f"useful_epsilon.md has no row with {sorted(missing)}; edit SHOWN")
    return found


def hash_rows() -> str:
    """Return the hash of all figures that the picture shows."""
    return sha256(json.dumps([read_rows(), WITHOUT_PRIVACY], sort_keys=True).encode()).hexdigest()


def draw() -> Figure:
    """Draw accuracy against epsilon above and uplink bytes below, as narrow as a phone screen."""
    rows = read_rows()
    figure, (above, below) = panels(2)
    styles = {name: series(place) for place, name in enumerate(SHOWN)}
    for name, label in SHOWN.items():
        above.plot(EPSILONS, rows[name][1], label=label, **styles[name])
    above.axhline(WITHOUT_PRIVACY, color="0.5", lw=1, ls="--", label="strokes without privacy")
    above.set_xscale("log", base=2)
    above.set_xticks(EPSILONS, [f"{epsilon}" for epsilon in EPSILONS])
    above.set_xlabel("epsilon of a client over the run (smaller is more private)")
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
    below.set_xlabel("bytes that a client sends per round, including keys")
    below.grid(False)
    below.spines["left"].set_visible(False)
    return figure


def sign(path: Path) -> None:
    """Write the hash of the rows into a picture."""
    with Image.open(path) as picture:
        text = PngInfo()
        text.add_text(HASH, hash_rows())
        picture.save(path, pnginfo=text, dpi=picture.info.get("dpi"), optimize=True)


def is_current(path: Path) -> bool:
    """Check whether a picture was drawn from today's rows."""
    with Image.open(path) as picture:
        return bool(picture.info.get(HASH) == hash_rows())


def main(argv: Sequence[str]) -> int:
    """Draw both pictures, or check them."""
    if "--check" in argv:
        stale = [path.name for path in (PICTURE, TWIN) if not is_current(path)]
        for name in stale:
            print(f"docs/{name}: out of date, run `python docs/picture.py`")
        return int(bool(stale))
    save_figure(draw(), PICTURE, twin=True)
    for path in (PICTURE, TWIN):
        sign(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
