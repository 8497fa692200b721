"""Privacy as an attacker measures it: what a mechanism really sends, inverted, matched and counted.

These are lower bounds: what these attacks fail to find, a better one may. None of it is differential privacy.
A class is imported when it is first used: mechanisms use bounds of this room, and its attacks use mechanisms.
"""

from typing import TYPE_CHECKING

from lightning_fedq.imports import lazily

if TYPE_CHECKING:
    from lightning_fedq.lab.leakage.estimate import LeakageEstimate as LeakageEstimate
    from lightning_fedq.lab.leakage.inversion import (
        DLG as DLG,
        Analytic as Analytic,
        Attack as Attack,
        InvertingGradients as InvertingGradients,
        Matching as Matching,
        iDLG as iDLG,
    )
    from lightning_fedq.lab.leakage.study import (
        Study as Study,
        StudyResult as StudyResult,
        calibrate as calibrate,
    )
    from lightning_fedq.lab.leakage.views import Observation as Observation, observe as observe

if not TYPE_CHECKING:  # a type checker knows the names from above, and a wrong one is an error to it
    __getattr__, __dir__, __all__ = lazily(__name__)
