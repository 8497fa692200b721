"""Errors and order of reconstructions."""

import pytest
import torch

from lightning_fedq.leakage.likeness import in_order, psnr
from tests.leakage.settings import candidates


def test_psnr_by_hand():
    truth = torch.zeros(2, 1, 4, 4)
    found = truth + torch.tensor([0.2, 0.0]).reshape(2, 1, 1, 1)
    # range 2, error .04: 10 log10(4 / .04) = 20 dB
    assert psnr(found, truth, 2.0).tolist() == pytest.approx([20.0, 100.0], abs=1e-5)


def test_a_batch_is_put_in_order():
    truth, _ = candidates(6)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(in_order(truth[order] + 0.01, truth), truth + 0.01)
