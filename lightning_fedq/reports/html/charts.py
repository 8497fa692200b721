"""Charts as inline SVG: lines. Colours are classes of the page.

Shapes are values here; `pages/chart.html` writes them, and escapes what they say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from lightning_fedq.reports.html.templates import render

WIDTH, HEIGHT = 460.0, 280.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 12.0, 14.0, 44.0
COLOURS = 8
"""Series that a page tells apart by colour; further ones are dashed."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A series of a chart.

    Args:
        name: Name in the tooltip.
        points: Pairs of x and y.
        series: Number of its colour.
        target: Whether it is a limit to draw dashed.
    """

    name: str
    points: Points
    series: int
    target: bool = False


class _Shape(NamedTuple):
    """An element of SVG: its name, attributes, what it says when pointed at, and its text."""

    tag: str
    attributes: dict[str, Any]
    title: str = ""
    text: str = ""


def _text(x: float, y: float, anchor: str, words: str) -> _Shape:
    return _Shape("text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}, text=words)


class _Frame:
    """Axes of a chart, and where a value lies in it."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], zero: bool, log: bool) -> None:
        self.log = log
        self.low_x, self.high_x = min(xs), max(xs)
        if self.low_x == self.high_x:
            self.low_x, self.high_x = self.low_x - 0.5, self.high_x + 0.5
        if log:
            self.ticks = _decades(min(ys), max(ys))
            self.low, self.high = math.log10(self.ticks[0]), math.log10(self.ticks[-1])
        else:
            self.ticks = nice_ticks(0.0 if zero else min(ys), max(ys))
            self.low, self.high = self.ticks[0], self.ticks[-1]

    def x(self, value: float) -> float:
        share = (value - self.low_x) / (self.high_x - self.low_x)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        share = (place - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def drawn(self, x_label: str) -> list[_Shape]:
        """Grid, numbers and the name of the x axis."""
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        shapes = []
        for tick in self.ticks:
            y = f"{self.y(tick):.1f}"
            shapes.append(_Shape("line", {"class": "grid", "x1": _LEFT, "x2": right, "y1": y, "y2": y}))
            shapes.append(_text(_LEFT - 8, self.y(tick) + 4, "end", f"{tick:g}"))
        ticks = whole_ticks(self.low_x, self.high_x)
        shapes += [_text(self.x(tick), bottom + 18, "middle", f"{tick:g}") for tick in ticks]
        return [*shapes, _text((_LEFT + right) / 2, HEIGHT - 8, "middle", x_label)]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`, about `count` of them."""
    if high <= low:
        low, high = (low - 0.5, low + 0.5) if low else (0.0, 1.0)
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * place:.10g}") for place in range(first, last + 1)]


def whole_ticks(low: float, high: float) -> list[float]:
    """Whole numbers within a range, six or fewer."""
    step = max(1.0, *(tick for tick in nice_ticks(0.0, high - low, 5)[1:2]))
    step = math.ceil(step)
    ticks = [float(value) for value in range(math.ceil(low), math.floor(high) + 1) if value % step == 0]
    return ticks or [float(math.ceil(low))]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9)
    return [10.0**place for place in range(first, max(last, first + 1) + 1)]


def line_chart(lines: Sequence[Line], label: str, zero: bool = False, x_label: str = "round") -> Markup:
    """Draw series against rounds, or another number.

    A logarithmic axis where values differ by more than 50 times.

    Args:
        lines: What to draw; infinite and missing values are left out.
        label: What a reader who can't see the picture is told.
        zero: Whether the axis begins at 0.
        x_label: Name of the x axis.

    Returns:
        An `<svg>` element; "" where there is no value.
    """
    finite = [(line, [(x, y) for x, y in line.points if math.isfinite(y)]) for line in lines]
    ys = [y for _, points in finite for _, y in points]
    xs = [x for line, points in finite for x, _ in points if not line.target]
    if not xs:
        return Markup("")
    log = min(ys) > 0 and max(ys) > 50 * min(ys)
    frame = _Frame(xs, ys, zero, log)
    shapes = frame.drawn(x_label)
    for line, points in finite:
        if not points:
            continue
        style = f"s{line.series % COLOURS}" + (
            " target" if line.target else " second" if line.series >= COLOURS else ""
        )
        if line.target:
            points = [(frame.low_x, points[0][1]), (frame.high_x, points[0][1])]
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        shapes.append(_Shape("polyline", {"class": f"line {style}", "points": path}, line.name))
        if len(points) <= 40 and not line.target:
            shapes += [
                _Shape(
                    "circle",
                    {"class": f"dot {style}", "cx": f"{frame.x(x):.1f}", "cy": f"{frame.y(y):.1f}", "r": 2.6},
                    f"{line.name}, {x_label} {x:g}: {y:.4g}",
                )
                for x, y in points
            ]
    return _svg(shapes, label)


def _svg(shapes: Sequence[_Shape], label: str) -> Markup:
    return render("chart.html", shapes=shapes, label=label, width=f"{WIDTH:g}", height=f"{HEIGHT:g}")
