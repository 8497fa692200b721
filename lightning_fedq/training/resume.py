"""Checkpoints of a federation: of an unfinished round its start, and whose federation it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fedq.rounds import RoundRecord


def begin_again(loops: dict[str, Any]) -> None:
    """Let a state of Lightning's loops say that an unfinished round has not begun."""
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    now = epochs["current"]
    if now["ready"] == now["processed"] or (now["started"] == now["ready"] and batches["is_last_batch"]):
        return
    for counts in (now, epochs["total"]):
        counts["ready"] = counts["started"] = counts["processed"]
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False


def check_federation(own: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Refuse a checkpoint of another federation.

    Args:
        own: Setting that the checkpoint must agree with, in words.
        theirs: The same of the checkpoint.

    Raises:
        ValueError: Naming what differs.
    """
    differing = [
        f"{key} = {theirs.get(key)} (here {own.get(key)})"
        for key in (*own, *(theirs.keys() - own.keys()))
        if own.get(key) != theirs.get(key)
    ]
    if differing:
        raise ValueError(
            f"the checkpoint is of another federation: {', '.join(differing)}; "
            "resume with its settings, or load only its weights"
        )


def plain_records(records: Sequence[RoundRecord], private: bool, lengths: bool) -> list[dict[str, Any]]:
    """Records in the types that a checkpoint may hold.

    Args:
        records: Records of the run's rounds.
        private: Whether what only a simulation knows is left out.
        lengths: Whether lengths of messages are kept then.
    """
    kept = [record.released() if private else record for record in records]
    hidden = {"uplink_bits": math.nan} if private and not lengths else {}
    return [{**vars(r), "non_finite_clients": list(r.non_finite_clients), **hidden} for r in kept]


def records_of(plain: Sequence[dict[str, Any]]) -> list[RoundRecord]:
    """The records that `plain_records` wrote."""
    return [RoundRecord(**{**r, "non_finite_clients": tuple(r["non_finite_clients"])}) for r in plain]
