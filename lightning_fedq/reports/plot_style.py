"""Common style of all pictures: narrow panels under each other, legends above them, light and dark.

The colours of curves are readable on white and on the dark page of the HTML report. A dark picture therefore
differs only in its background and in the colour of text and lines.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2a7de1", "#d1610d", "#12a39a", "#b04fa0", "#9a7b00", "#8a6bd6", "#e0586a", "#808890")
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")
WIDTH = 4.6
"""Width in inches. At 160 dots per inch it is 736 pixels, so 10-point letters have 11 pixels on a phone."""
DPI = 160
_PAPER, _INK = "#12161c", "#e6eaf0"


def panels(count: int, title: str = "", height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, one under the other.

    Args:
        count: Number of panels, >= 1.
        title: Title of the picture.
        height: Height in inches of a panel with its labels and legend.
    """
    from matplotlib.figure import Figure  # takes half a second and is needed only here

    figure = Figure(figsize=(WIDTH, height * count + (0.3 if title else 0.0)), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10, wrap=True)
    axes = list(figure.subplots(count, 1, squeeze=False)[:, 0])
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


def png(figure: Figure) -> bytes:
    """Return a figure as PNG with 128 colours, which is enough for lines and needs a quarter of the bytes."""
    from PIL import Image  # comes with matplotlib

    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, facecolor=figure.get_facecolor())
    colours = Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    colours.save(packed, "PNG", optimize=True)
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
