"""Checkpoints of a federation: of an unfinished round its start, and whose federation it is."""

from __future__ import annotations

import json
import math
import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fedq.rounds import RoundRecord
from lightning_fedq.training.journal import find_journal


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


class RecordsBeside:
    """Records in a file beside the ledger's journal, a line each, so that checkpoints do not grow.

    A checkpoint names the file and how much of it is its own. A file that has gone on without the checkpoint
    is left to others, and a new one begun.

    Attributes:
        rounds: Records that the file holds.
    """

    def __init__(self) -> None:
        self._path, self._bytes, self._crc, self.rounds = Path(), 0, 0, 0

    def add(self, folder: Path, plain: Callable[[int], list[dict[str, Any]]]) -> None:
        """Write records that the file lacks. When a round has ended: what is only tried ends none.

        Args:
            folder: Folder of the ledger's journal.
            plain: Returns the records from one on, see `plain_records`.
        """
        same = self._path.parent == folder and self._path.is_file()
        if not same or self._path.stat().st_size != self._bytes:
            self._path = folder / f"records-{secrets.token_hex(4)}.jsonl"
            self._bytes = self._crc = self.rounds = 0
        lines = [json.dumps(record).encode() + b"\n" for record in plain(self.rounds)]
        data = b"".join(lines)
        with open(self._path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._bytes, self._crc = self._bytes + len(data), zlib.crc32(data, self._crc)
        self.rounds += len(lines)

    def named(self, rounds: int) -> dict[str, Any] | None:
        """File, length and checksum of so many records, for a checkpoint. None if they are not in it."""
        if not rounds or rounds != self.rounds:
            return None
        return {"file": str(self._path), "bytes": self._bytes, "crc": self._crc, "rounds": self.rounds}

    def load(self, saved: Mapping[str, Any], checkpoint: object) -> list[dict[str, Any]]:
        """Read what a checkpoint has `named`, and go on there.

        Raises:
            FileNotFoundError: If the file is missing.
            ValueError: If it is damaged, or not the one.
        """
        path = find_journal(saved["file"], checkpoint)
        if path is None:
            raise FileNotFoundError(
                f"{saved['file']}, which holds the records of this checkpoint's {saved['rounds']} rounds, is "
                "missing; put it back beside the checkpoint, or load only the weights and begin a new "
                "federation"
            )
        with path.open("rb") as file:
            data = file.read(saved["bytes"])
        if zlib.crc32(data) != saved["crc"]:
            raise ValueError(
                f"{path} is damaged, or of another run: it is not what this checkpoint's {saved['rounds']} "
                "rounds have written; put a whole copy of it back beside the checkpoint, or load only the "
                "weights and begin a new federation"
            )
        self._path, self._bytes = path.resolve(), saved["bytes"]
        self._crc, self.rounds = saved["crc"], saved["rounds"]
        return [json.loads(line) for line in data.splitlines()]


def records_of(
    saved: Sequence[dict[str, Any]] | Mapping[str, Any],
    checkpoint: object,
    beside: RecordsBeside | None = None,
) -> list[RoundRecord]:
    """The records of a checkpoint: in it, or beside it where the run keeps a journal.

    Args:
        saved: What the checkpoint says of them.
        checkpoint: Its path.
        beside: Goes on where they lie.

    Raises:
        FileNotFoundError: If their file is missing.
        ValueError: If it is damaged.
    """
    plain = (beside or RecordsBeside()).load(saved, checkpoint) if isinstance(saved, Mapping) else saved
    return [RoundRecord(**{**r, "non_finite_clients": tuple(r["non_finite_clients"])}) for r in plain]
