"""What attacks refuse, and every cure that they name."""

import re

import pytest
from torch import nn

from lightning_fedq.leakage import Matching
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary
from reproductions.leakage.calibration import calibrate
from reproductions.leakage.inversion import Analytic, InvertingGradients, iDLG
from tests.leakage.settings import generator, mlp, study
from tests.reproductions.leakage.test_inversion import Once

SHORT = iDLG(1)


def attacked(**settings):
    """One attempt at a study."""
    study(**settings).run(FedAvg(), Adversary.EAVESDROPPER, 1, generator())


def calibrated(budget, attempts):
    calibrate(study(attack=Matching()), budget, generator(), attempts=attempts, max_probes=2)


def conv():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(72, 10)).eval()


REFUSALS = [
    (
        "gradient inversion differentiates the model twice, and {} can't be: {}; replace the layer,",
        lambda: attacked(attack=SHORT, model=mlp(Once())),
        lambda: attacked(attack=SHORT, model=mlp(nn.Sigmoid())),
        lambda: attacked(attack=Matching(), model=mlp(Once())),
    ),
    (
        "a batch of {} has more samples than classes, so labels can't be inferred; give the attacker",
        lambda: attacked(attack=SHORT, batch_size=11, labels_known=False),
        lambda: attacked(attack=SHORT, batch_size=11, labels_known=True),
    ),
    (
        "the attack Analytic needs a model that starts with a fully connected layer with a bias, got",
        lambda: attacked(attack=Analytic(), model=conv()),
        lambda: attacked(attack=SHORT, model=conv()),
        lambda: attacked(attack=InvertingGradients(1), model=conv()),
    ),
    (
        "the attack Analytic needs a batch of 1 for a model with several layers, got {}; use iDLG or",
        lambda: attacked(attack=Analytic(), model=mlp(), batch_size=2),
        lambda: attacked(attack=Analytic(), model=mlp(), batch_size=1),
        lambda: attacked(attack=SHORT, model=mlp(), batch_size=2),
        lambda: attacked(attack=InvertingGradients(1), model=mlp(), batch_size=2),
    ),
    (
        "a batch of {} and a model of {} parameters are too large for {}, at most {} and {}; one",
        lambda: attacked(attack=SHORT, batch_size=40, cohort_size=1),
        lambda: attacked(attack=SHORT, batch_size=4, cohort_size=1),
        lambda: attacked(attack=Matching(), batch_size=40, cohort_size=1),
    ),
    (
        "a budget of {} can't be shown with {} attempts: even without a hit the leakage may be {};",
        lambda: calibrated(0.3, 10),
        lambda: calibrated(0.3, 80),
        lambda: calibrated(0.8, 10),
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case[0][:50])
def test_what_is_refused_says_what_helps(case):
    words, refused, *cures = case
    with pytest.raises(ValueError, match=re.escape(words).replace(r"\{\}", ".*")):
        refused()
    for cure in cures:
        cure()
