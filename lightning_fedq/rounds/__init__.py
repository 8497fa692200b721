"""One federated round without Lightning: plan, encode, aggregate, server step, record."""

from lightning_fedq.rounds.engine import RoundEngine
from lightning_fedq.rounds.parts import (
    Aggregator,
    OptimizerFactory,
    SecureSum,
    SecureSums,
    Tampering,
    Traffic,
    UpdateTransform,
    check_aggregation,
)
from lightning_fedq.rounds.plan import RoundPlan, RoundPlanner, round_half_up
from lightning_fedq.rounds.record import RoundRecord, metric_name

__all__ = [
    "Aggregator",
    "OptimizerFactory",
    "RoundEngine",
    "RoundPlan",
    "RoundPlanner",
    "RoundRecord",
    "SecureSum",
    "SecureSums",
    "Tampering",
    "Traffic",
    "UpdateTransform",
    "check_aggregation",
    "metric_name",
    "round_half_up",
]
