"""Folder in which one party keeps its secrets and its state between messages, readable by it alone."""

import fcntl
import io
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_fedq.privacy.journal import OWN, name_file_in_errors, sync_folder

_PATIENCE = 5.0
"""Seconds to wait for another process that answers a message in the same folder."""


class Store:
    """Small tables by name in the folder of one party. Each table is replaced as a whole.

    Args:
        folder: Path of the folder, which is created with permissions for its owner alone.

    Raises:
        OSError: If the folder can't be created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this server, and let only the owner read new files.

        Raises:
            ValueError: If another process has the lock. Two servers would overwrite each other's rounds.
        """
        before = os.umask(0o077)
        try:
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            with self._locked(
                descriptor,
                f"Another server works in {self.folder}. Stop it (flwr stop RUN), or give this "
                "federation its own home.",
            ):
                yield
        finally:
            os.umask(before)

    @contextmanager
    def lock_message(self) -> Iterator[None]:
        """Lock the folder while a client answers one message.

        Raises:
            ValueError: If another process has the lock for longer than `_PATIENCE`.
        """
        with self._locked(
            os.open(self.folder, os.O_RDONLY),
            f"Another process answers a message in {self.folder}. Give each client its own folder "
            "(fedq-home), or wait for that answer.",
            _PATIENCE,
        ):
            yield

    @contextmanager
    def _locked(self, descriptor: int, refusal: str, seconds: float = 0.0) -> Iterator[None]:
        """Hold a lock, and close its file. The operating system releases it when the process ends."""
        end = time.monotonic() + seconds
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() >= end:
                        raise ValueError(refusal) from error
                time.sleep(0.05)
            # drafts of killed processes, because no other process writes now
            for draft in self.folder.glob("*.new"):
                draft.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a table of numbers, text and bytes, or None if there is none.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_text()).items()
            return {key: bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for key, v in values}
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged. Restore it, or begin a new federation in another folder."
            ) from error

    def put(self, name: str, values: dict[str, Any]) -> None:
        """Write a table. When this returns, all of it is on disk."""
        plain = {key: {"hex": v.hex()} if isinstance(v, bytes) else v for key, v in values.items()}
        self._replace(f"{name}.json", json.dumps(plain).encode())

    def append(self, name: str, values: dict[str, Any]) -> None:
        """Append a line to a file that only its owner can read, in place of one of the same round.

        Args:
            name: Name of the file without its ending.
            values: Values by name, with the number of the round under "round".
        """
        path, head = self.folder / f"{name}.jsonl", f'{{"round": {values["round"]},'.encode()
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if len(others := [line for line in lines if not line.startswith(head)]) < len(lines):
            self._replace(path.name, b"".join(others))
        with name_file_in_errors(path), open(path, "ab", opener=OWN) as file:
            file.write(json.dumps(values).encode() + b"\n")

    def pop(self, name: str) -> dict[str, Any] | None:
        """Read a table and delete it. Hold a lock, so that no other process reads it meanwhile.

        Raises:
            ValueError: If the file is damaged.
        """
        values = self.get(name)
        self.drop(name)
        return values

    def drop(self, name: str) -> None:
        """Delete a table, even one with tensors. A power cut does not restore it."""
        for file in (f"{name}.json", f"{name}.pt"):
            (self.folder / file).unlink(missing_ok=True)
        sync_folder(self.folder)

    def put_tensors(self, name: str, values: dict[str, Any]) -> None:
        """Write a table with tensors. When this returns, all of it is on disk.

        Args:
            name: Name of the table.
            values: Tensors and plain values by name.
        """
        buffer = io.BytesIO()
        torch.save(values, buffer)
        self._replace(f"{name}.pt", buffer.getvalue())

    def get_tensors(self, name: str) -> dict[str, Any] | None:
        """Return a table with tensors, or None if there is none. Reading runs no code of the file.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return None
        try:
            values = torch.load(path, weights_only=True)
        except Exception as error:  # torch raises errors of many types
            raise ValueError(f"{path} is damaged. Restore a complete copy") from error
        return dict(values)

    def move_tensors(self, name: str, to: str) -> None:
        """Replace one table with tensors by another, atomically."""
        (self.folder / f"{name}.pt").replace(self.folder / f"{to}.pt")
        sync_folder(self.folder)

    def _replace(self, name: str, data: bytes) -> None:
        """Write a file under a new name, which then replaces the old file."""
        # a name of its own, so that two processes never write or rename one draft
        path, new = self.folder / name, self.folder / f"{name}.{secrets.token_hex(8)}.new"
        with name_file_in_errors(path):
            with open(new, "wb", opener=OWN) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # synced, because a power cut could leave an empty file
            new.replace(path)
        sync_folder(self.folder)
