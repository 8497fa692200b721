"""Callbacks that attack the updates of a simulation, and bound what they let out."""

from lightning_fedq.lab.callbacks.leakage import LeakageMonitor
from lightning_fedq.lab.callbacks.leakage_budget import LeakageBudget

__all__ = ["LeakageBudget", "LeakageMonitor"]
