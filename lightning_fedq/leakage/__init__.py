"""Empirical leakage: attacks on the messages that a mechanism really sends, and their hit rates.

The results are lower bounds, because a better attack may find more. They are not differential privacy.
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
