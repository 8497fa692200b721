"""Privacy as an attacker measures it: what a mechanism really sends, matched and counted.

These are lower bounds: what these attacks fail to find, a better one may. None of it is differential privacy.
"""

from lightning_fedq.leakage.budget import LeakageBudget
from lightning_fedq.leakage.estimate import LeakageEstimate
from lightning_fedq.leakage.matching import Attack, Matching
from lightning_fedq.leakage.monitor import LeakageMonitor
from lightning_fedq.leakage.study import Study, StudyResult
from lightning_fedq.leakage.views import Observation, observe

__all__ = [
    "Attack",
    "LeakageBudget",
    "LeakageEstimate",
    "LeakageMonitor",
    "Matching",
    "Observation",
    "Study",
    "StudyResult",
    "observe",
]
