"""The vocabulary: what a client sends, what a mechanism is, and what it promises to whom.

Everything here is a frozen value or an abstract method. State (ranges, error feedback, the
ledger) lives in `lightning_fedq.rounds`, randomness comes in as an argument, and the code that
adds claims up to an epsilon is in `lightning_fedq.privacy`, apart from the claims themselves.
"""

from lightning_fedq.mechanisms.interface.base import AuditCase, Mechanism
from lightning_fedq.mechanisms.interface.claims import (
    NO_SLACK,
    AbortedRoundError,
    Adversary,
    Neighbours,
    PrivacyClaim,
    Slack,
    Unit,
    count_hidden_clients,
    no_guarantee,
    same_for_all,
    single_message_claims,
)
from lightning_fedq.mechanisms.interface.context import SMALLEST_RADIUS, HandOver, Message, RoundContext
from lightning_fedq.privacy.losses import (
    CoinSum,
    ConcentratedLoss,
    GaussianLoss,
    HiddenPair,
    LaplaceLoss,
    Loss,
    NonPrivate,
    PmfPairs,
    RenyiLoss,
    SampledGaussianLoss,
)

__all__ = [
    "NO_SLACK",
    "SMALLEST_RADIUS",
    "AbortedRoundError",
    "Adversary",
    "AuditCase",
    "CoinSum",
    "ConcentratedLoss",
    "GaussianLoss",
    "HandOver",
    "HiddenPair",
    "LaplaceLoss",
    "Loss",
    "Mechanism",
    "Message",
    "Neighbours",
    "NonPrivate",
    "PmfPairs",
    "PrivacyClaim",
    "RenyiLoss",
    "RoundContext",
    "SampledGaussianLoss",
    "Slack",
    "Unit",
    "count_hidden_clients",
    "no_guarantee",
    "same_for_all",
    "single_message_claims",
]
