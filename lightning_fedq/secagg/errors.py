"""Errors of a round of secure aggregation: one type for each cause, with the stage and the client."""

from enum import Enum

from lightning_fedq.mechanisms.interface import AbortedRoundError


class Stage(Enum):
    """Stages of one round, in order. `CONFIRM` exists against an active server only."""

    ADVERTISE = "advertise keys"
    SHARE = "share keys"
    MASK = "masked input"
    CONFIRM = "consistency"
    UNMASK = "unmask"
    DONE = "done"


class SecAggError(AbortedRoundError):
    """A round that can't continue, or a refused message. Secure aggregation never returns a wrong sum.

    Args:
        reason: Expected and received values, in words.
        stage: Stage of the round.
        client: Client that caused the error, or that owns the secret in question. None if there is none.
    """

    def __init__(self, reason: str, stage: Stage, client: int | None = None) -> None:
        self.stage, self.client = stage, client
        suffix = "" if client is None else f", client {client}"
        super().__init__(f"[{stage.value}{suffix}] {reason}")


class MessageError(SecAggError):
    """A message of the wrong length, type or content: truncated, padded or not of this protocol."""


class TermsError(SecAggError):
    """A message of another session, round, attempt, cohort, threshold or modulus: stale or replayed."""


class AuthenticationError(SecAggError):
    """A tag, ciphertext or signature that does not verify: corrupted or forged."""


class StageError(SecAggError):
    """A message that is late, early or repeated, or that comes from an unexpected client."""


class RosterError(SecAggError):
    """A list of clients that lacks this client, contains an unknown client, or contains a key twice."""


class LowOrderKeyError(SecAggError):
    """A public key of low order, with which every key agreement gives zero."""


class ThresholdError(SecAggError):
    """Too few clients are left to recover the sum, or to hide the messages in it."""


class ShareError(SecAggError):
    """Shares that do not reconstruct the secret that their owner committed to."""


class ModelError(SecAggError):
    """A client that trained a different model than the server sent."""


class SymbolError(SecAggError):
    """A symbol outside the range that the modulus was chosen for, or not an integer at all."""
