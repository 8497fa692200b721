"""The ledger's journal: one line a round, on disk before the round's first message exists.

A checkpoint knows what was charged until it was written; a process that is killed outright takes the rest
with it. So every charge is appended to a file and synced first (write-ahead), and whoever resumes reads the
lines that its checkpoint does not contain. A last line that was torn by the crash paid for nothing, as nobody
encodes before the sync returns: it is cut off. One that lacks only its newline counts. Anything else that
can't be read is refused.

The file is text: a header that names the federation, then one JSON object a line, whose last field is the
CRC-32 of what precedes it. Clients stand there by number, or as a bit each where they are many. Nothing but a
newline ends a line. The file gets its name when its header is on the disk, so one without a header has lost
charges. A file that lost whole lines at its end can't be told from a shorter one, except by a checkpoint's
position in it.
"""

import base64
import errno
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

OWN = partial(os.open, mode=0o600)
"""Opens files which, where they are new, nobody but their owner reads."""
_VERSION = 2

_COST = (
    "put the file back. Whoever goes on without it must count every round as charged that may have been: "
    "load only the weights, begin a new federation, and add up what both spend"
)


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
        position: Bytes that the owner knows already; 0 reads from the first entry on.

    Raises:
        ValueError: If the file is of another federation, or shorter than `position`.
        OSError: If it can't be read or written.
    """

    def __init__(self, path: Path, mechanism: str, num_clients: int, position: int = 0) -> None:
        self.path = path.resolve()
        header, older = (
            json.dumps({"fedq ledger": version, "mechanism": mechanism, "clients": num_clients}) + "\n"
            for version in (_VERSION, 1)
        )
        if not path.exists():
            self._create(header.encode())
        with path.open("rb") as file:
            found, first = file.readline(), file.tell()
        if not found.endswith(b"\n"):
            raise ValueError(f"{path} has lost its first line and all behind it; {_COST}")
        if found not in (header.encode(), older.encode()):
            raise ValueError(
                f"{path} is the journal of another federation than {num_clients} clients of {mechanism}, or "
                "its first line is damaged; resume with the federation of the checkpoint, or put it back"
            )
        self._num_clients = num_clients
        self._unsigned = found == older.encode()  # of the version whose lines had no checksum
        self.position = max(position, first)
        if path.stat().st_size < self.position:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, the checkpoint knows {position}: charges are lost; "
                "put the whole file back"
            )

    def unread(self, mend: bool = True) -> list[Entry]:
        """Return the entries beyond `position` and move it behind them. A torn last line is cut off.

        Args:
            mend: Leave the file ready for the next line; False changes nothing in it.

        Raises:
            ValueError: If a complete line is no entry, or of a version that did not write lengths.
        """
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read()
        entries = []
        *lines, tail = data.split(b"\n")
        for line in lines:
            entries.append(self._entry(line))
            self.position += len(line) + 1
        if tail and _is_torn(tail):
            if mend:
                os.truncate(self.path, self.position)
        elif tail:
            entries.append(self._entry(tail))
            if mend:
                self._write(b"\n")
            self.position += len(tail) + 1
        return entries

    def _entry(self, line: bytes) -> Entry:
        try:
            found = json.loads(line)
            if not (self._unsigned and "crc" not in found) and line != sign_entry(found):
                raise ValueError("the checksum is wrong")
            who = self._named(found["clients"])
            entry = int(found["round"]), int(found["attempt"]), str(found["state"]), who
            dim, terms = found.get("dim"), str(found.get("terms", ""))
            name, number = str(found.get("ledger", "")), int(found.get("number", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} is damaged at byte {self.position}, so what was spent is not known; {_COST}"
            ) from error
        if not isinstance(dim, int):
            raise ValueError(
                f"{self.path} is of an older version and does not say how many parameters round {entry[0]} "
                "had, so what was spent is not known; load only the weights and begin a new federation"
            )
        return Entry(*entry, dim, terms, name, number)

    def _written(self, clients: Sequence[int] | None) -> object:
        """Numbers, or a bit for each client of the federation where that is shorter. Sorted ones only."""
        if clients is None or len(clients) * len(str(self._num_clients)) < self._num_clients / 6:
            return None if clients is None else list(clients)
        chosen = np.zeros(self._num_clients, dtype=bool)
        chosen[list(clients)] = True
        if not np.array_equal(np.flatnonzero(chosen), clients):  # bits would lose the order
            return list(clients)
        return {"bits": base64.b64encode(np.packbits(chosen).tobytes()).decode()}

    def _named(self, written: Any) -> tuple[int, ...] | None:
        """The clients that `_written` wrote.

        Raises:
            ValueError: If they are not of this federation; or another error of Python's for other types.
        """
        if not isinstance(written, dict):
            return None if written is None else tuple(int(client) for client in written)
        packed = np.frombuffer(base64.b64decode(written["bits"], validate=True), dtype=np.uint8)
        if len(packed) != -(-self._num_clients // 8):
            raise ValueError("bits of another number of clients")
        return tuple(np.flatnonzero(np.unpackbits(packed, count=self._num_clients)).tolist())

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
            state: Names what the round began with.
            clients: Clients to charge; None is everybody.
            dim: Coordinates of the vector that is charged for.
            terms: Terms on which the price of the charge depends, as text.
            ledger: Name that it is charged under.
            number: Number of charges under this name, this one included.

        Raises:
            RuntimeError: If somebody else wrote meanwhile; the entry stands.
            OSError: If it can't be written.
        """
        entry = {"round": round, "attempt": attempt, "state": state}
        entry |= ({"terms": terms} if terms else {}) | (
            {"ledger": ledger, "number": number} if ledger else {}
        )
        line = sign_entry({**entry, "clients": self._written(clients), "dim": dim}) + b"\n"
        end = self._write(line)
        if end != self.position + len(line):  # another process's line lies in between
            raise RuntimeError(
                f"another process writes {self.path} at the same time; let one run at a time go on from a "
                "checkpoint"
            )
        self.position = end

    def _create(self, header: bytes) -> None:
        """Make the file, which has its header from the first moment on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_path(self.path)
        try:
            self._write(header, draft)
            os.link(draft, self.path)  # fails where there is a file, which a rename would replace
        except FileExistsError:
            pass  # another process was faster
        except OSError:  # a file system without links
            draft.rename(self.path)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _write(self, data: bytes, path: Path | None = None) -> int:
        """Append in one go, wait for the disk, and return where the file ends."""
        path = path or self.path
        # unbuffered and appending, so that a line is one write at the end of the file
        with name_file_in_errors(self.path), open(path, "ab", buffering=0, opener=OWN) as file:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "no space left for a whole line")
            os.fsync(file.fileno())
            return file.tell()


def draft_path(path: Path) -> Path:
    """Another name beside a file, from which it is renamed once it is whole."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def drop_drafts(path: Path) -> None:
    """Take away what processes that were killed have left of `draft_path`. Nobody else may be writing."""
    for draft in path.parent.glob(f".{path.name}.{'[0-9a-f]' * 8}"):
        draft.unlink(missing_ok=True)


def is_journal_for(path: Path, mechanism: str, num_clients: int) -> bool:
    """Is a file the journal of this federation, by its first line?"""
    with suppress(ValueError, OSError), path.open("rb") as file:
        header = json.loads(file.readline())
        return bool(header["mechanism"] == mechanism and header["clients"] == num_clients)
    return False


def list_ledgers(path: Path) -> set[str]:
    """Names of the ledgers that a journal has charges of, "" for those of versions that wrote none."""
    names: set[str] = set()
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError, AttributeError):
                entry = json.loads(line)
                if "round" in entry:
                    names.add(str(entry.get("ledger", "")))
    return names


def sign_entry(entry: dict[str, object]) -> bytes:
    """The line of an entry, without its newline: the last field is the checksum of the others."""
    body = json.dumps({name: value for name, value in entry.items() if name != "crc"})
    return f'{body[:-1]}, "crc": "{zlib.crc32(body.encode()):08x}"}}'.encode()


def _is_torn(tail: bytes) -> bool:
    """Whether a line without its newline breaks off before its object is complete."""
    try:
        json.JSONDecoder().raw_decode(tail.decode(errors="replace"))
    except ValueError:
        return True
    return False


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Let an error of the disk say which file was written: a full one does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where folders can be opened at all."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
