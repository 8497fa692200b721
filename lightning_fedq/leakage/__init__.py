"""Privacy as an attacker measures it: what a mechanism really sends, inverted, matched and counted.

These are lower bounds: what these attacks fail to find, a better one may. None of it is differential privacy.
"""

from lightning_fedq.leakage.estimate import LeakageEstimate
from lightning_fedq.leakage.inversion import DLG, Analytic, Attack, InvertingGradients, Matching, iDLG
from lightning_fedq.leakage.study import Study, StudyResult, calibrate
from lightning_fedq.leakage.views import Observation, observe

__all__ = [
    "DLG",
    "Analytic",
    "Attack",
    "InvertingGradients",
    "LeakageEstimate",
    "Matching",
    "Observation",
    "Study",
    "StudyResult",
    "calibrate",
    "iDLG",
    "observe",
]
