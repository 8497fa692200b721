"""Secure aggregation: the server learns the sum of the clients' symbols and nothing else.

The protocol is Bonawitz et al. 2017, with double masks, Shamir shares and dropouts at every stage. The server
may be curious or active, and the graph complete or sparse (SecAgg+). `docs/secagg.md` describes the
protection.
"""

from lightning_fedq.secagg.client import Client
from lightning_fedq.secagg.errors import (
    AuthenticationError,
    LowOrderKeyError,
    MessageError,
    ModelError,
    RosterError,
    SecAggError,
    ShareError,
    Stage,
    StageError,
    SymbolError,
    TermsError,
    ThresholdError,
)
from lightning_fedq.secagg.server import Server
from lightning_fedq.secagg.simulation import Aggregation, Traffic, expected_traffic, model_digest
from lightning_fedq.secagg.terms import SecAgg, Terms

__all__ = [
    "Aggregation",
    "AuthenticationError",
    "Client",
    "LowOrderKeyError",
    "MessageError",
    "ModelError",
    "RosterError",
    "SecAgg",
    "SecAggError",
    "Server",
    "ShareError",
    "Stage",
    "StageError",
    "SymbolError",
    "Terms",
    "TermsError",
    "ThresholdError",
    "Traffic",
    "expected_traffic",
    "model_digest",
]
