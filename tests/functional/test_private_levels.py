"""Draws from a probability matrix."""

import numpy as np
import pytest

from lightning_fedq.functional.private_levels import draw_outputs


@pytest.mark.parametrize("points", [2, 3])
def test_outputs_have_exactly_their_law(points):
    """All 2^8 top bytes of both words stand for 2^24 words each where counts are multiples of them."""
    counts = np.array([[100, 50, 106], [30, 200, 26], [6, 50, 200]])[:points]
    knots = np.linspace(-1.0, 1.0, points)
    edges = np.cumsum(counts, axis=1)[:, :-1].astype(np.uint32) << np.uint32(24)
    up, words = (w.ravel().astype(np.uint32) << np.uint32(24) for w in np.mgrid[:256, :256])
    for value in (-1.0, -0.5, 0.25, 1.0):
        out = draw_outputs(np.full(len(up), value), up, words, edges)
        wanted = [np.interp(value, knots, 256 * column) for column in counts.T]
        assert np.array_equal(np.bincount(out, minlength=3), wanted)
