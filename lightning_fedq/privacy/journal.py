"""Journal of a ledger: a file with one line per charge, on disk before the first message of the round exists.

A checkpoint knows only the charges before it was written, and a killed process loses later ones. So every
charge is appended to a file and synced first (write-ahead). A resumed run then reads the lines that its
checkpoint does not contain. A last line that the crash cut short paid for nothing, because no client encodes
before the sync returns, so it is removed. A last line that lacks only its newline counts. Any other line that
can't be read is an error.

The file is text: a header that names the federation, then one JSON object per line, whose last field is the
CRC-32 of the rest of the line. Clients are listed by number, or as one bit each where there are many. Only a
newline ends a line. The file gets its name after its header is on the disk, so a file without a header has
lost charges. Whole lines that are missing at the end can be detected only by the position that a checkpoint
stores.
"""

import base64
import errno
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

OWN = partial(os.open, mode=0o600)
"""Opener for `open`: a file that it creates can be read by its owner only."""
_VERSION = 2

_COST = (
    "Put the file back. Without it, load only the weights, begin a new federation and add up what both "
    "spend, with every round counted that may have been charged."
)


class Entry(NamedTuple):
    """One charge: the clients of one attempt at one round.

    Args:
        round: Number of the round, from 0.
        attempt: Number of earlier attempts at this round.
        state: Digest of the model and the range with which the attempt began.
        clients: Charged clients. None is all clients, and an empty one is an entry that
            only raises `dim`.
        dim: Number of coordinates of the vector that is charged for.
        terms: Terms on which the price of the charge depends, as JSON. "" where they are not known.
        ledger: Name under which the charge was made. "" for entries without clients, and for clients' logs.
        number: Number of this charge under that name, from 1.
    """

    round: int
    attempt: int
    state: str
    clients: Sequence[int] | NDArray[np.int64] | None
    dim: int
    terms: str = ""
    ledger: str = ""
    number: int = 0


class Journal:
    """Append-only file of charges, of which the owner knows the first `position` bytes.

    Args:
        path: Path of the file. The file and its folder are created where they do not exist.
        mechanism: Mechanism whose messages are charged for, as text.
        num_clients: Number of clients of the federation.
        position: Number of bytes that the owner knows already. 0 reads from the first entry.

    Raises:
        ValueError: If the file is of another federation, has lost its header, or is shorter than `position`.
        OSError: If the file can't be read or written.
    """

    def __init__(self, path: Path, mechanism: str, num_clients: int, position: int = 0) -> None:
        self.path = path.resolve()
        owner = {"fedq ledger": _VERSION, "mechanism": mechanism, "clients": num_clients}
        header = json.dumps(owner).encode() + b"\n"
        if not path.exists():
            self._create(header)
        with path.open("rb") as file:
            header_line, first = file.readline(), file.tell()
        if not header_line.endswith(b"\n"):
            raise ValueError(f"{path} has lost its first line and all later ones. {_COST}")
        if header_line != header:
            raise ValueError(
                f"{path} is the journal of another federation than {num_clients} clients of {mechanism}, or "
                "damaged. Resume with the federation of the checkpoint, or put the file back."
            )
        self._num_clients = num_clients
        self.position = max(position, first)
        if path.stat().st_size < self.position:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, but the checkpoint knows {position}: charges are "
                "lost. Put the whole file back."
            )

    def unread(self, mend: bool = True) -> list[Entry]:
        """Return the entries after `position`, and move `position` to the end.

        A last line that was cut short is removed.

        Args:
            mend: Whether to repair the end of the file for the next line. False leaves the file unchanged.

        Raises:
            ValueError: If a complete line is no valid entry.
        """
        entries = self.read_unknown(lambda name, number: False, mend)
        return [
            entry if entry.clients is None else entry._replace(clients=tuple(map(int, entry.clients)))
            for entry in entries
        ]

    def read_unknown(self, is_known: Callable[[str, int], bool], mend: bool = True) -> Iterator[Entry]:
        """Yield the entries after `position`, with clients as an array. `position` moves with them.

        Args:
            is_known: Function that returns whether a ledger's name and the number of a charge are known.
                Clients of such an entry are not decoded, and None.
            mend: Whether to repair the end of the file, see `unread`.

        Raises:
            ValueError: See `unread`.
        """
        with self.path.open("rb") as file:
            file.seek(self.position)
            *lines, tail = file.read().split(b"\n")
        for line in lines:
            entry = self._entry(line, is_known)
            self.position += len(line) + 1
            yield entry
        if tail and _is_torn(tail):
            if mend:
                os.truncate(self.path, self.position)
        elif tail:
            entry = self._entry(tail, is_known)
            if mend:
                self._write(b"\n")
            self.position += len(tail) + 1
            yield entry

    def _entry(self, line: bytes, is_known: Callable[[str, int], bool]) -> Entry:
        """Return the entry of a line.

        Raises:
            ValueError: If the line is damaged.
        """
        try:
            fields = json.loads(line)
            if line != sign_entry(fields):
                raise ValueError("the checksum is wrong")
            name, number = str(fields.get("ledger", "")), int(fields.get("number", 0))
            clients = None if is_known(name, number) else self._named(fields["clients"])
            entry = int(fields["round"]), int(fields["attempt"]), str(fields["state"]), clients
            dim, terms = int(fields["dim"]), str(fields.get("terms", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} is damaged at byte {self.position}, so the spending is not known. {_COST}"
            ) from error
        return Entry(*entry, dim, terms, name, number)

    def _written(self, clients: Sequence[int] | NDArray[np.int64] | None) -> object:
        """Return clients as they are written: a list of numbers, or bits if that is shorter.

        Bits are used for sorted clients only, because they would lose the order.
        """
        if clients is None or len(clients) * len(str(self._num_clients)) < self._num_clients / 6:
            return None if clients is None else list(clients)
        chosen = np.zeros(self._num_clients, dtype=bool)
        chosen[list(clients)] = True
        if not np.array_equal(np.flatnonzero(chosen), clients):  # clients are not sorted
            return list(clients)
        return {"bits": base64.b64encode(np.packbits(chosen).tobytes()).decode()}

    def _named(self, written: Any) -> NDArray[np.int64] | None:
        """Return the clients that `_written` wrote.

        Raises:
            ValueError: If the bits are of another number of clients. Values of other types raise other
                errors.
        """
        if not isinstance(written, dict):
            return None if written is None else np.array([int(client) for client in written], dtype=np.int64)
        packed = np.frombuffer(base64.b64decode(written["bits"], validate=True), dtype=np.uint8)
        if len(packed) != -(-self._num_clients // 8):
            raise ValueError("the bits are of another number of clients")
        return np.flatnonzero(np.unpackbits(packed, count=self._num_clients))

    def append(self, entry: Entry) -> None:
        """Write one entry at `position` and return when it is on the disk. Call `unread` before.

        Raises:
            RuntimeError: If another process wrote to the file meanwhile. The entry stays in the file.
            OSError: If the entry can't be written.
        """
        fields: dict[str, object] = {"round": entry.round, "attempt": entry.attempt, "state": entry.state}
        if entry.terms:
            fields["terms"] = entry.terms
        if entry.ledger:
            fields |= {"ledger": entry.ledger, "number": entry.number}
        line = sign_entry({**fields, "clients": self._written(entry.clients), "dim": entry.dim}) + b"\n"
        end = self._write(line)
        if end != self.position + len(line):  # another process has written a line before this one
            raise RuntimeError(
                f"Another process is writing to {self.path}. "
                "Let only one run at a time resume from a checkpoint."
            )
        self.position = end

    def _create(self, header: bytes) -> None:
        """Create the file so that it never exists without its header."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        try:
            self._write(header, draft)
            os.link(draft, self.path)  # fails if the file exists, which a rename would replace
        except FileExistsError:
            pass  # another process has created it meanwhile
        except OSError:  # the file system has no links
            draft.rename(self.path)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _write(self, data: bytes, path: Path | None = None) -> int:
        """Append data in one write, wait for the disk, and return the position of the end of the file."""
        path = path or self.path
        # without a buffer and in append mode, a line is one write at the end of the file
        with name_file_in_errors(self.path), open(path, "ab", buffering=0, opener=OWN) as file:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "no space left for a whole line")
            os.fsync(file.fileno())
            return file.tell()


def is_journal_for(path: Path, mechanism: str, num_clients: int) -> bool:
    """Return whether a file is the journal of this federation, by its first line."""
    with suppress(ValueError, OSError), path.open("rb") as file:
        header = json.loads(file.readline())
        return bool(header["mechanism"] == mechanism and header["clients"] == num_clients)
    return False


def list_ledgers(path: Path) -> set[str]:
    """Return the names of the ledgers that have charges in a journal, "" for entries without a name."""
    names: set[str] = set()
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError, AttributeError):
                entry = json.loads(line)
                if "round" in entry:
                    names.add(str(entry.get("ledger", "")))
    return names


def sign_entry(entry: dict[str, object]) -> bytes:
    """Return the line of an entry without its newline. The last field is the checksum of the others."""
    body = json.dumps({name: value for name, value in entry.items() if name != "crc"})
    return f'{body[:-1]}, "crc": "{zlib.crc32(body.encode()):08x}"}}'.encode()


def _is_torn(tail: bytes) -> bool:
    """Return whether a line without its newline ends before its JSON object is complete."""
    try:
        json.JSONDecoder().raw_decode(tail.decode(errors="replace"))
    except ValueError:
        return True
    return False


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the path to errors of writing, because an error of a full disk does not name it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make the name of a new file durable, on systems where folders can be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
