"""Types of the mechanism interface: mechanism, round context, message, privacy claim and privacy losses.

Everything here is a frozen value or an abstract method. State (ranges, error feedback, the ledger) lives in
`lightning_fedq.rounds`, and randomness is an argument. `lightning_fedq.privacy` has the accountants, which
add the claims of a run up to an epsilon.
"""

from lightning_fedq.mechanisms.interface.base import Mechanism, group_clients
from lightning_fedq.mechanisms.interface.claims import (
    ANY_NUMBER,
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
from lightning_fedq.mechanisms.interface.context import (
    SMALLEST_RADIUS,
    HandOver,
    Message,
    RoundContext,
    split_groups,
)
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
    "ANY_NUMBER",
    "NO_SLACK",
    "SMALLEST_RADIUS",
    "AbortedRoundError",
    "Adversary",
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
    "group_clients",
    "no_guarantee",
    "same_for_all",
    "single_message_claims",
    "split_groups",
]
