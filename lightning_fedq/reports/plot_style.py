"""Common style of all pictures: narrow panels under each other, legends above them, light and dark.

The colours of curves are readable on white and on the dark page of the HTML report, and differ for readers
with protanopia, deuteranopia or tritanopia. A dark picture differs only in its background and in the colour
of text and lines. A picture for a paper has its panels in one row.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1c6aa2", "#ff8004", "#b8243d", "#1cb2ca", "#6238ff", "#c39d65", "#a15501", "#9391ff")
MARKERS = "osD^vPX*h"  # one more than colours, so that ten curves differ
LINES = ("-", "--", "-.", ":")
WIDTH = 4.6
"""Width in inches. At 160 dots per inch it is 736 pixels, so 10-point letters have 11 pixels on a phone."""
ROW_WIDTH, ROW_FONT_SIZE = 7.0, 8.0
"""Width in inches of a picture for a paper (text width of two columns), and its font size in points."""
DPI, ROW_DPI = 160, 300
_PAPER, _INK = "#12161c", "#e6eaf0"


def panels(count: int, title: str = "", height: float = 3.2, row: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, one under the other or in a row.

    Args:
        count: Number of panels, >= 1.
        title: Title of the picture.
        height: Height in inches of a panel with its labels and legend.
        row: Whether the panels form a row with one y axis, for a paper. `finish_row` completes the figure
            and adds the title.
    """
    from matplotlib.figure import Figure  # takes half a second and is needed only here

    size = (ROW_WIDTH, height) if row else (WIDTH, height * count + (0.3 if title else 0.0))
    figure = Figure(figsize=size, dpi=ROW_DPI if row else DPI, layout="constrained")
    if title and not row:
        figure.suptitle(title, fontsize=10, wrap=True)
    shape = (1, count) if row else (count, 1)
    axes = list(figure.subplots(*shape, squeeze=False, sharey=row).flat)
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def series(place: int) -> dict[str, Any]:
    """Return colour, marker and line style of a series, which stay distinct if curves coincide.

    Args:
        place: Number of the series, from 0.

    Examples:
        >>> series(1)["marker"], series(1)["linestyle"]
        ('s', '--')
    """
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": LINES[place % len(LINES)],
        "markerfacecolor": "none",
    }


def legend(axes: Axes, title: str | None = None) -> None:
    """Put the legend above a panel, where it hides no curve and is not cut off.

    Args:
        axes: Panel with labelled curves.
        title: Title of the legend.
    """
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.01),
        frameon=False,
        fontsize=9,
        title=title,
        title_fontsize=10,
        alignment="left",
        borderaxespad=0.0,
        handlelength=3.0,
        ncols=1 if len(handles) > 1 else 2,
    )


def finish_row(figure: Figure, title: str) -> None:
    """Complete a picture for a paper: one legend above all panels, one y label, thin lines, one font size.

    Args:
        figure: Figure whose panels are in a row.
        title: Title of the picture.
    """
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.label_outer()
        axes.tick_params(which="both", labelsize=ROW_FONT_SIZE)
        for line in axes.findobj(Line2D):
            line.set(linewidth=0.7 * line.get_linewidth(), markersize=0.7 * line.get_markersize())  # type: ignore[attr-defined]
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        widest = (0.49 * max(map(len, labels)) + 4.5) * ROW_FONT_SIZE  # with its line, in points
        figure.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=min(max(int(72.0 * ROW_WIDTH / widest), 1), len(labels)),
            title=title,
            frameon=False,
            fontsize=ROW_FONT_SIZE,
            columnspacing=1.5,
            handlelength=3.0,
        )
    else:
        figure.suptitle(title)
    for text in figure.findobj(Text):
        text.set_fontsize(ROW_FONT_SIZE)  # type: ignore[attr-defined]


def picture_format(path: Path) -> str:
    """Return the format of a picture by the ending of its file.

    Raises:
        ValueError: If the file does not end with .pdf, .svg or .png.

    Examples:
        >>> picture_format(Path("figures/compare.pdf"))
        'pdf'
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("pdf", "svg", "png"):
        raise ValueError(f"A picture must end with .pdf, .svg or .png, got {path}")
    return kind


def picture_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as the bytes of a file. The same figure gives the same bytes.

    Args:
        figure: Figure to draw.
        kind: "pdf", "svg" or "png". A PNG has 128 colours, which is enough for lines and needs a quarter of
            the bytes.
    """
    import matplotlib
    from PIL import Image  # comes with matplotlib

    drawn, packed = io.BytesIO(), io.BytesIO()
    time: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})
    dpi, paper = max(figure.dpi, DPI), figure.get_facecolor()
    # journals refuse the fonts of type 3 that matplotlib embeds by default
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedq"}):
        figure.savefig(drawn, format=kind, dpi=dpi, facecolor=paper, metadata=time)
    if kind != "png":
        return drawn.getvalue()
    colours = Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    colours.save(packed, "PNG", optimize=True, dpi=(dpi, dpi))
    return packed.getvalue()


def darken(figure: Figure) -> None:
    """Change a figure for a dark page: a dark background, with light text and light lines for dark ones."""
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    figure.set_facecolor(_PAPER)
    for axes in figure.axes:
        axes.set_facecolor(_PAPER)
        for spine in axes.spines.values():
            spine.set_edgecolor(_INK)
        axes.tick_params(which="both", colors=_INK)
    for text in figure.findobj(Text):
        text.set_color(_INK)  # type: ignore[attr-defined]
    for line in figure.findobj(Line2D):
        if max(to_rgb(line.get_color())) < 0.45:  # type: ignore[attr-defined]
            line.set_color(_INK)  # type: ignore[attr-defined]
