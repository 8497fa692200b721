"""Errors of a round of secure aggregation: one type a cause, with the stage and the client."""

from enum import Enum

from lightning_fedq.mechanisms.interface import AbortedRoundError


class Stage(Enum):
    """The stages of one round, in order. `CONFIRM` exists against an active server only."""

    ADVERTISE = "advertise keys"
    SHARE = "share keys"
    MASK = "masked input"
    CONFIRM = "consistency"
    UNMASK = "unmask"
    DONE = "done"


class SecAggError(AbortedRoundError):
    """A round that can't go on, or a message that is refused. A wrong sum is never the answer.

    Args:
        reason: What was wanted and what came.
        client: Client that caused it, or whose secret it is about; None if there is none.
    """

    def __init__(self, reason: str, stage: Stage, client: int | None = None) -> None:
        self.stage, self.client = stage, client
        who = "" if client is None else f", client {client}"
        super().__init__(f"[{stage.value}{who}] {reason}")


class MessageError(SecAggError):
    """A message of the wrong length, type or content: truncated, padded or not of this protocol."""


class TermsError(SecAggError):
    """A message of another session, round, attempt, cohort, threshold or modulus: stale or replayed."""


class AuthenticationError(SecAggError):
    """A tag, ciphertext or signature that does not verify: corrupted or forged."""


class StageError(SecAggError):
    """A message that is late, early, repeated, or from a client that is not expected."""


class RosterError(SecAggError):
    """A list of clients that is not what this client knows: itself missing, a stranger, a key twice."""


class LowOrderKeyError(SecAggError):
    """A public key of low order, with which every key agreement gives zero."""


class ThresholdError(SecAggError):
    """Too few clients are left for the sum to be recovered, or to be hidden well enough."""


class ShareError(SecAggError):
    """Shares that do not give back the secret that their owner committed to."""


class ModelError(SecAggError):
    """A client that trained another model than the rest."""


class SymbolError(SecAggError):
    """A symbol outside the range that the modulus was chosen for, or not an integer at all."""
