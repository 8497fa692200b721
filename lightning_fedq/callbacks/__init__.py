"""Lightning callbacks: the federation, DP-SGD, privacy budgets, attacks, reports and logging."""

from lightning_fedq.callbacks.byzantine import ByzantineClients
from lightning_fedq.callbacks.dpsgd import DPSGD
from lightning_fedq.callbacks.federated import Federated
from lightning_fedq.callbacks.langevin import Langevin
from lightning_fedq.callbacks.privacy_budget import PrivacyBudget
from lightning_fedq.callbacks.progress import RoundProgressBar
from lightning_fedq.callbacks.reload_best import ReloadBest
from lightning_fedq.callbacks.run_folder import RunFolder
from lightning_fedq.callbacks.tracking import WandbRounds

__all__ = [
    "DPSGD",
    "ByzantineClients",
    "Federated",
    "Langevin",
    "PrivacyBudget",
    "ReloadBest",
    "RoundProgressBar",
    "RunFolder",
    "WandbRounds",
]
