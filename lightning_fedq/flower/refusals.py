"""Refusals of a client, whose text the server reads, so that it reveals nothing about the data."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fedq._lightning import rank_zero_warn


class RefusedError(RuntimeError):
    """Refusal of a client. The server reads its text, so the text reveals nothing about the data."""


def refuse_in_private(words: str, error: Exception, place: str = "") -> RefusedError:
    """Log an error on this client, and return a refusal whose text tells the server nothing about it.

    Args:
        words: Text that the server reads, without a full stop.
        error: Error that stays here, because its text may contain data.
        place: Text before the error in the log.
    """
    rank_zero_warn(f"{place}{type(error).__name__}: {error}")
    return RefusedError(f"{words}. The client's log has the reason.")


@contextmanager
def refused_in_private(words: str, place: str = "", kind: type[Exception] = Exception) -> Iterator[None]:
    """Refuse with these words after an error of a kind (see `refuse_in_private`)."""
    try:
        yield
    except kind as error:
        raise refuse_in_private(words, error, place) from error


@contextmanager
def refused_settings(kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Raise an error about settings as `RefusedError`, because its text tells nothing about the data.

    Args:
        kind: Class of the errors about settings. Other errors pass.
    """
    try:
        yield
    except kind as error:
        raise RefusedError(str(error)) from error
