"""Privacy as an attacker measures it: what a mechanism really sends, inverted, matched and counted.

These are lower bounds: what these attacks fail to find, a better one may. None of it is differential privacy.
A class is imported when it is first used: mechanisms use bounds of this room, and its attacks use mechanisms.
"""

from typing import TYPE_CHECKING

from lightning_fedq.imports import lazily

if TYPE_CHECKING:
    from lightning_fedq.lab.leakage.estimate import LeakageEstimate
    from lightning_fedq.lab.leakage.inversion import DLG, Analytic, Attack, InvertingGradients, Matching, iDLG
    from lightning_fedq.lab.leakage.study import Study, StudyResult, calibrate
    from lightning_fedq.lab.leakage.views import Observation, observe

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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazily(__name__)
