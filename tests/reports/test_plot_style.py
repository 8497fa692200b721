"""Colours that colour-blind readers can tell apart, and pictures for a paper: one row, 7 inches, 8 points."""

import itertools
import math

import pytest
from matplotlib.text import Text

from lightning_fedq.reports.plot_style import _PAPER, COLOURS, picture_format
from lightning_fedq.reports.runs import plot_progress, save_figure

ROWS = [
    {"round": 1.0, "uplink_bits": 8e6, "setup_bits": 0.0, "val_acc": 0.5},
    {"round": 2.0, "uplink_bits": 8e6, "setup_bits": 0.0, "val_acc": 0.6},
]
# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as a dichromat sees it
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour):
    """Linear RGB of an sRGB colour."""
    values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def lab(rgb):
    """CIELAB of linear RGB, for the white of sRGB."""
    red, green, blue = (min(max(value, 0.0), 1.0) for value in rgb)
    x = (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047
    y = 0.2126729 * red + 0.7151522 * green + 0.0721750 * blue
    z = (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one, other):
    """Contrast ratio of two colours (WCAG 2)."""
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
def test_colour_blind_readers_can_tell_curves_apart(sight):
    """A CIELAB distance of 20 is large: a just noticeable difference is about 2.3. FedAvg is grey."""
    seen = {
        colour: lab([sum(map(math.prod, zip(row, linear(colour), strict=True))) for row in SIGHT[sight]])
        for colour in (*COLOURS, "#808080")
    }
    for one, other in itertools.combinations(seen, 2):
        assert math.dist(seen[one], seen[other]) > 20, (one, other)


def test_curves_can_be_read_on_white_and_on_the_dark_page():
    assert all(min(contrast(colour, paper) for paper in ("#ffffff", _PAPER)) > 2.5 for colour in COLOURS)


def row_of_panels(count=3):
    runs = {f"run {place} (RotatedCoins, epsilon 8 at delta 1e-5)": ROWS for place in range(count)}
    return plot_progress(runs, "val_acc", "val_acc\nε: over the run", row=True)


def test_a_picture_for_a_paper_has_one_row_and_one_font_size():
    figure = row_of_panels()
    figure.draw_without_rendering()
    assert figure.get_figwidth() == 7.0
    places = [axes.get_position() for axes in figure.axes]
    assert len({round(place.y0, 6) for place in places}) == 1 and places[0].x1 < places[1].x0
    written = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    assert {text.get_fontsize() for text in written} == {8.0} and len(written) > 10
    assert [axes.get_ylabel() for axes in figure.axes] == ["val_acc", ""]
    [legend] = figure.legends
    box, paper = legend.get_window_extent(), figure.bbox
    assert box.x0 >= paper.x0 and box.x1 <= paper.x1 and box.y1 <= paper.y1
    assert not row_of_panels(1).legends


@pytest.mark.parametrize(("ending", "begins"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_picture_is_written_by_the_ending_of_its_file(ending, begins, tmp_path):
    """The same figure gives the same bytes. Fonts of a PDF are embedded as TrueType (type 42)."""
    one, two = tmp_path / f"one.{ending}", tmp_path / f"two.{ending.upper()}"
    for path in (one, two):
        save_figure(row_of_panels(), path)
    assert one.read_bytes().startswith(begins) and one.read_bytes() == two.read_bytes()
    assert b"/Type3" not in one.read_bytes()


@pytest.mark.parametrize("name", ["figure", "figure.jpg", "pdf"])
def test_another_ending_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"must end with \.pdf, \.svg or \.png, got .*" + name):
        picture_format(tmp_path / name)
