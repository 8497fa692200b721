"""Membership inference: the count by hand, and what it finds with and without noise."""

import pytest
import torch

from lightning_fedq.leakage import Matching
from lightning_fedq.mechanisms import FedAvg, GaussianNoise
from lightning_fedq.mechanisms.bases.calibration import gaussian_noise_multiplier
from lightning_fedq.mechanisms.interface import Adversary
from reproductions.leakage.membership import at_false_positive_rate, membership_inference
from tests.leakage.settings import generator, study

VIEW = Adversary.EAVESDROPPER


def test_the_rate_by_hand():
    others = torch.arange(1000.0)
    members = torch.tensor([998.5, 998.0, 1200.0, -5.0])
    found = at_false_positive_rate(members, others)  # one false alarm allowed: threshold 998
    assert (found.hits, found.members, found.false_positive_rate) == (2, 4, 1e-3)
    assert found.limits[0] < found.true_positive_rate < found.limits[1]
    with pytest.raises(ValueError, match="needs at least 1000 non-members, got 999"):
        at_false_positive_rate(members, others[:999])


def test_members_show_without_noise_and_not_under_much():
    setting = study(attack=Matching())
    plain = membership_inference(setting, FedAvg(), VIEW, generator())
    assert plain.others >= 1000
    assert plain.true_positive_rate > 0.05  # 50 times the false-positive rate
    # (0.5, 1e-5)-DP in one round: TPR <= e^.5 FPR + 1e-5 = .0017 in expectation; 1% alarms below 1e-6
    private = GaussianNoise(setting.largest_norm, gaussian_noise_multiplier(0.5, 1e-5, 1))
    assert membership_inference(setting, private, VIEW, generator()).true_positive_rate < 0.01


def test_refusal():
    with pytest.raises(ValueError, match="shadows must be >= 8"):
        membership_inference(study(), FedAvg(), VIEW, generator(), shadows=2)
