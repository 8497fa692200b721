"""Similarity and pictures of reconstructions."""

import pytest
import torch

from reproductions.leakage.pictures import picture_grid, ssim
from tests.leakage.settings import candidates


def test_similarity():
    truth, _ = candidates(4)
    assert ssim(truth, truth, -1.0, 1.0) == pytest.approx(1.0, abs=1e-5)
    assert ssim(-truth, truth, -1.0, 1.0) < 0.3


def test_the_grid_has_a_row_for_each_name():
    truth, _ = candidates(3)
    figure = picture_grid(truth, {"vanilla": truth, "noise": -truth}, -1.0, 1.0)
    assert len(figure.axes) == 9
    labels = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()]
    assert labels == ["original", "vanilla", "noise"]


def test_no_picture_form():
    with pytest.raises(ValueError, match=r"shape \(4, 64\) have no picture form"):
        ssim(torch.zeros(4, 64), torch.zeros(4, 64), 0.0, 1.0)
    with pytest.raises(ValueError, match="no picture form"):
        picture_grid(torch.zeros(4, 2, 8, 8), {}, 0.0, 1.0)
