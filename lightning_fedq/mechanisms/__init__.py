"""One paper, or one idea, per file."""

from lightning_fedq.mechanisms.corbin import AugCorBin, CorBin
from lightning_fedq.mechanisms.fedavg import FedAvg
from lightning_fedq.mechanisms.ldpq import LDPQ

__all__ = ["LDPQ", "AugCorBin", "CorBin", "FedAvg"]
