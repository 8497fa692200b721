"""The ledger's journal: one line a round, on disk before the round's first message exists.

A checkpoint knows what was charged until it was written; a process that is killed outright takes the rest
with it. So every charge is appended to a file and synced first (write-ahead), and whoever resumes reads the
lines that its checkpoint does not contain. A last line that was torn by the crash paid for nothing, because
nobody encodes before the sync returns: it is cut off. Anything else that is damaged is refused.

The file is text: a header that names the federation, then one JSON object a line, with a checksum of the rest
of the line. A header that was torn has charged nothing, and is written anew.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_VERSION = 2
_CHECK = ', "check": "{:08x}"}}\n'
_CHECK_LENGTH = len(_CHECK.format(0))


class Entry(NamedTuple):
    """One charge: the clients (None is everybody) of one attempt at one round, begun in a `state`.

    `dim` is the length of the vector that is charged for, `terms` are those that its price hangs on, as text
    ("" where nobody has said); it is the `number`th charge under a `ledger`'s name ("" where it has none). No
    clients at all: the vector of the open round has
    become so long.
    """

    round: int
    attempt: int
    state: str
    clients: tuple[int, ...] | None
    dim: int
    terms: str = ""
    ledger: str = ""
    number: int = 0


class Journal:
    """An append-only file of charges, of which `position` bytes are known to its owner.

    Args:
        path: The file; it is created with its folder where it does not exist.
        mechanism: What is charged for, as text.
        num_clients: Clients of the federation.
        position: Bytes that the owner knows already; 0 reads from the first entry on.

    Raises:
        ValueError: If the file is of another federation, or shorter than `position`.
        OSError: If it can't be read or written.
    """

    def __init__(self, path: Path, mechanism: str, num_clients: int, position: int = 0) -> None:
        self.path = path.resolve()
        names = {"mechanism": mechanism, "clients": num_clients}
        header = (json.dumps({"fedq ledger": _VERSION, **names}) + "\n").encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        found = path.read_bytes()[: len(header)] if path.exists() else b""
        if len(found) < len(header) and header.startswith(found):  # torn: nothing was charged yet
            if found:
                os.truncate(path, 0)
            self._write(header)
            sync_folder(path.parent)
        elif found != header:
            self._refuse_header(path, names)
        self.position = max(position, len(header))
        if path.stat().st_size < self.position:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, the checkpoint knows {position}: charges are lost; "
                "put the whole file back"
            )

    @staticmethod
    def _refuse_header(path: Path, names: dict[str, object]) -> None:
        with path.open("rb") as file:
            first = file.readline()
        if first == (json.dumps({"fedq ledger": 1, **names}) + "\n").encode():
            raise ValueError(
                f"{path} is of an older version, whose lines have no checksum, so that what was spent is not "
                "known for sure; load only the weights and begin a new federation"
            )
        raise ValueError(
            f"{path} is the journal of another federation than {names['clients']} clients of "
            f"{names['mechanism']}; resume with the federation of the checkpoint"
        )

    def unread(self) -> list[Entry]:
        """Return the entries beyond `position` and move it behind them. A torn last line is cut off.

        Raises:
            ValueError: If a line is damaged in another way than a crash would.
        """
        with self.path.open("rb") as file:
            file.seek(self.position)
            *lines, torn = file.read().split(b"\n")
        entries = []
        for line in lines:
            entries.append(self._entry(line + b"\n"))
            self.position += len(line) + 1
        if _is_whole(torn + b"\n"):  # but for its newline it was written: it counts
            entries.append(self._entry(torn + b"\n"))
            self.position = self._write(b"\n")
        elif torn:
            if _is_whole(torn[:-1] + b"\n"):  # nor is this one torn
                self._entry(torn)
            os.truncate(self.path, self.position)
        return entries

    def _entry(self, line: bytes) -> Entry:
        try:
            if not _is_whole(line):
                raise ValueError("the checksum is another one")
            found = json.loads(line)
            clients = found["clients"]
            who = None if clients is None else tuple(int(client) for client in clients)
            entry = int(found["round"]), int(found["attempt"]), str(found["state"]), who
            dim, terms = int(found["dim"]), str(found.get("terms", ""))
            name, number = str(found.get("ledger", "")), int(found.get("number", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} is damaged at byte {self.position}, so what was spent is not known; "
                "put the file back, or load only the weights and begin a new federation"
            ) from error
        return Entry(*entry, dim, terms, name, number)

    def append(
        self,
        round: int,
        attempt: int,
        state: str,
        clients: Sequence[int] | None,
        dim: int,
        terms: str = "",
        ledger: str = "",
        number: int = 0,
    ) -> None:
        """Write one entry behind `position` and return when it is on the disk. First read what is `unread`.

        Args:
            round: Round number.
            attempt: Attempt at this round.
            state: Names what the round began with.
            clients: Who is charged; None is everybody.
            dim: Coordinates of the vector that is charged for.
            terms: That its price hangs on, as text.
            ledger: Name that it is charged under.
            number: Of charges under this name, this one included.

        Raises:
            RuntimeError: If somebody else wrote meanwhile; the entry stands.
            OSError: If it can't be written.
        """
        entry = {"round": round, "attempt": attempt, "state": state}
        entry |= ({"terms": terms} if terms else {}) | (
            {"ledger": ledger, "number": number} if ledger else {}
        )
        who = None if clients is None else list(clients)
        line = _checked(json.dumps({**entry, "clients": who, "dim": dim}))
        end = self._write(line)
        if end != self.position + len(line):
            raise RuntimeError(
                f"another process writes {self.path} at the same time; let one run at a time go on from a "
                "checkpoint"
            )
        self.position = end

    def _write(self, data: bytes) -> int:
        """Append in one go, wait for the disk, and return where the file ends.

        Raises:
            OSError: If there is no room; what was written of the line is cut off again.
        """
        with self.path.open("ab", buffering=0) as file:
            written = file.write(data) or 0
            if written < len(data):
                file.truncate(file.tell() - written)
                why = "no space left on the device, so nothing was charged"
                raise OSError(errno.ENOSPC, why, str(self.path))
            os.fsync(file.fileno())
            return file.tell()


def _checked(body: str) -> bytes:
    """A JSON object as a line, with a checksum of the object as its last entry."""
    return (body[:-1] + _CHECK.format(zlib.crc32(body.encode()))).encode()


def _is_whole(line: bytes) -> bool:
    """Is a line one that `_checked` gives?"""
    body = line[:-_CHECK_LENGTH] + b"}"
    return line == body[:-1] + _CHECK.format(zlib.crc32(body)).encode()


def sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where folders can be opened at all."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
