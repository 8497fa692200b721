"""Where one party keeps its secrets and what must outlive a message: a folder that nobody else can read."""

import fcntl
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_fedq.privacy.journal import OWN, name_file_in_errors, sync_folder


class Store:
    """Small tables by name in a folder of one party, each replaced as a whole.

    Args:
        folder: Created with permissions for its owner alone.

    Raises:
        OSError: If it can't be created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove_drafts(self) -> None:
        """Take away drafts of processes that were killed. Nobody else may be writing."""
        for draft in self.folder.glob("*.new"):
            draft.unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that works in the folder, whose new files nobody else can read.

        The lock goes with the process, however it ends.

        Raises:
            ValueError: If another one works there.
        """
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        before = os.umask(0o077)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"another server works in {self.folder}, and two would charge and overwrite each other's "
                    "rounds; stop the other one (flwr stop RUN), or give this federation a home of its own"
                ) from error
            self.remove_drafts()
            yield
        finally:
            os.umask(before)
            os.close(descriptor)

    def get(self, name: str) -> dict[str, Any] | None:
        """A table of numbers, text and bytes, or None.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text())
            return {
                key: bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
                for key, value in found.items()
            }
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged; put it back, or begin a new federation in another folder"
            ) from error

    def put(self, name: str, values: dict[str, Any]) -> None:
        """Write a table. When this returns, the disk has it whole."""
        plain = {
            key: {"hex": value.hex()} if isinstance(value, bytes) else value for key, value in values.items()
        }
        self._replace(f"{name}.json", json.dumps(plain).encode())

    def append(self, name: str, values: dict[str, Any]) -> None:
        """Add a line to a file that nobody but its owner reads. One of the same round gives way to it."""
        path, head = self.folder / f"{name}.jsonl", f'{{"round": {values["round"]},'.encode()
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if len(others := [line for line in lines if not line.startswith(head)]) < len(lines):
            self._replace(path.name, b"".join(others))
        with name_file_in_errors(path), open(path, "ab", opener=OWN) as file:
            file.write(json.dumps(values).encode() + b"\n")

    def pop(self, name: str) -> dict[str, Any] | None:
        """Read a table and forget it. Of two who ask at once, one finds it.

        Raises:
            ValueError: If the file is damaged.
        """
        taken = f"{name}.taken"
        try:
            (self.folder / f"{name}.json").rename(self.folder / f"{taken}.json")
        except FileNotFoundError:
            return None
        sync_folder(self.folder)  # or a power cut brings it back, and it is answered twice
        found = self.get(taken)
        self.drop(taken)
        return found

    def drop(self, name: str) -> None:
        """Forget a table, also one that holds tensors, or that a killed process was taking."""
        for kept in (f"{name}.json", f"{name}.taken.json", f"{name}.pt"):
            (self.folder / kept).unlink(missing_ok=True)
        sync_folder(self.folder)

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write what is too long for a table. What a killed process was taking is forgotten."""
        (self.folder / f"{name}.taken").unlink(missing_ok=True)
        self._replace(f"{name}.bin", data)

    def pop_bytes(self, name: str) -> bytes:
        """Return what `put_bytes` wrote, and forget it.

        Raises:
            ValueError: If there is nothing.
        """
        path, taken = self.folder / f"{name}.bin", self.folder / f"{name}.taken"
        try:
            path.rename(taken)  # of two who ask at once, one finds it
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing: it was used before, or never written") from error
        sync_folder(self.folder)
        data = taken.read_bytes()
        taken.unlink()
        return data

    def put_tensors(self, name: str, values: dict[str, Any]) -> None:
        """Write a table that holds tensors. When this returns, the disk has it whole.

        Args:
            values: Tensors and plain values by name.
        """
        buffer = io.BytesIO()
        torch.save(values, buffer)
        self._replace(f"{name}.pt", buffer.getvalue())

    def get_tensors(self, name: str) -> dict[str, Any] | None:
        """Read it, or None. Nothing in it is executed.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return None
        try:
            found = torch.load(path, weights_only=True)
        except Exception as error:  # torch raises many kinds
            raise ValueError(f"{path} is damaged; put a whole copy of it back") from error
        return dict(found)

    def move_tensors(self, name: str, to: str) -> None:
        """Put one in the place of another, at once."""
        (self.folder / f"{name}.pt").replace(self.folder / f"{to}.pt")
        sync_folder(self.folder)

    def _replace(self, name: str, data: bytes) -> None:
        path, new = self.folder / name, self.folder / f"{name}.new"
        with name_file_in_errors(path):
            with open(new, "wb", opener=OWN) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # or a power cut may leave the name with nothing in it
            new.replace(path)
        sync_folder(self.folder)
