"""One federated round in two halves: clients encode and pack updates, the server decodes and applies them."""

from lightning_fedq.rounds.client import (
    BudgetSpentError,
    ClientBudget,
    RoundClient,
    StreamLog,
    UsedStreamError,
)
from lightning_fedq.rounds.engine import RoundEngine
from lightning_fedq.rounds.messages import (
    Broadcast,
    ForeignMessageError,
    ForgedMessageError,
    LateMessageError,
    MalformedMessageError,
    RefusedMessageError,
    RepeatedMessageError,
    RoundTask,
    UnexpectedMessageError,
)
from lightning_fedq.rounds.plan import Deadline, RoundPlan, RoundPlanner
from lightning_fedq.rounds.protocols import (
    Aggregator,
    OptimizerFactory,
    SecureSum,
    SecureSums,
    Tampering,
    UpdateTransform,
    check_aggregation,
)
from lightning_fedq.rounds.record import RoundRecord, metric_name
from lightning_fedq.rounds.server import RoundServer
from lightning_fedq.rounds.statistics import Statistics

__all__ = [
    "Aggregator",
    "Broadcast",
    "BudgetSpentError",
    "ClientBudget",
    "Deadline",
    "ForeignMessageError",
    "ForgedMessageError",
    "LateMessageError",
    "MalformedMessageError",
    "OptimizerFactory",
    "RefusedMessageError",
    "RepeatedMessageError",
    "RoundClient",
    "RoundEngine",
    "RoundPlan",
    "RoundPlanner",
    "RoundRecord",
    "RoundServer",
    "RoundTask",
    "SecureSum",
    "SecureSums",
    "Statistics",
    "StreamLog",
    "Tampering",
    "UnexpectedMessageError",
    "UpdateTransform",
    "UsedStreamError",
    "check_aggregation",
    "metric_name",
]
