"""Errors, order and similarity of reconstructions."""

import pytest
import torch

from lightning_fedq.lab.leakage.pictures import in_order, picture_grid, psnr, ssim
from tests.lab.leakage.settings import candidates


def test_psnr_by_hand():
    truth = torch.zeros(2, 1, 4, 4)
    found = truth + torch.tensor([0.2, 0.0]).reshape(2, 1, 1, 1)
    # range 2, error .04: 10 log10(4 / .04) = 20 dB
    assert psnr(found, truth, 2.0).tolist() == pytest.approx([20.0, 100.0], abs=1e-5)


def test_a_batch_is_put_in_order():
    truth, _ = candidates(6)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(in_order(truth[order] + 0.01, truth), truth + 0.01)


def test_similarity():
    truth, _ = candidates(4)
    assert ssim(truth, truth, -1.0, 1.0) == pytest.approx(1.0, abs=1e-5)
    assert ssim(-truth, truth, -1.0, 1.0) < 0.3


def test_the_grid_has_a_row_for_each_name():
    truth, _ = candidates(3)
    figure = picture_grid(truth, {"vanilla": truth, "noise": -truth}, -1.0, 1.0)
    assert len(figure.axes) == 9
    assert [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()] == [
        "original",
        "vanilla",
        "noise",
    ]


def test_no_picture_form():
    with pytest.raises(ValueError, match=r"shape \(4, 64\) have no picture form"):
        ssim(torch.zeros(4, 64), torch.zeros(4, 64), 0.0, 1.0)
    with pytest.raises(ValueError, match="no picture form"):
        picture_grid(torch.zeros(4, 2, 8, 8), {}, 0.0, 1.0)
