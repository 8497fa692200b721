"""Where what is tried before the first round is done, and who of its clients writes which file.

In forks nothing is left behind but files. Those that one client has written and another one reads carry data
from one to the other, whatever they look like.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from lightning_fedq.clients.forks import in_fork, why_no_forks

T = TypeVar("T")

NOBODY = -1
"""Who validates, and saves checkpoints."""
_CODE = ("/__pycache__/", "/dev/null", "/dev/urandom", "/dev/tty", "/proc/", "/sys/", "/torchinductor_")
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}
_CHANGES |= {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "socket.connect", "shutil.rmtree"}
_MOST = 20_000
"""Files of the run's folder that are looked at."""
_read: set[str] = set()
_wrote: set[str] = set()
_watches: list[int] = []
"""Processes, this one among them, that have the hook below, which can't be taken off."""


class Aside:
    """Does what is tried: in a fork where this process can be forked, else here.

    Args:
        trainer: The user's, in its fit.

    Attributes:
        why: Why it is not done in forks. "" if it is.
        written: Files that clients have written so far, and who did first.
    """

    def __init__(self, trainer: Any) -> None:
        self.why, self.written = why_no_forks(trainer), dict[str, int]()
        self.folder = str(trainer.default_root_dir)

    def do(self, client: int, work: Callable[[], T]) -> T:
        """Let one client try something.

        Args:
            client: Its number.
            work: Returns what can be pickled.
        """
        if self.why:
            return work()

        def watched() -> tuple[T, dict[str, int]]:
            watch = Files(self.written, self.folder)
            with watch.of(client):
                found = work()
            return found, watch.written

        found, self.written = in_fork(watched)
        return found


class Files:
    """Files and shared memory that clients write, in a fork: by what Python opens, maps and renames.

    Files that other languages open by themselves are seen in the run's folder only, by their times.

    Args:
        written: Files that clients have written so far, and who did first.
        folder: The run's.

    Attributes:
        written: The same, with what is found here.
        crossed: Files that one client wrote and another one read.
    """

    def __init__(self, written: Mapping[str, int], folder: str) -> None:
        self.written, self.crossed, self._folder = dict(written), set[str](), folder
        self._last = set[str]()
        if os.getpid() not in _watches:
            _watches.append(os.getpid())
            sys.addaudithook(_note)
            for owner in (torch, torch.UntypedStorage):
                _note_shared(owner)

    @contextmanager
    def of(self, client: int) -> Iterator[None]:
        """While it is open, a client trains."""
        _read.clear()
        _wrote.clear()
        before, start = dict(_files_in(self._folder)), time.time_ns() - 20_000_000
        yield
        opened = {path for path in _read | _wrote if not any(part in path for part in _CODE)}
        written = {path for path in opened & _wrote if os.path.isfile(path)}
        written |= {path for path in opened if _time_of(path) >= start}  # a data base, a map
        written |= {path for path, seen in _files_in(self._folder) if before.get(path) != seen}
        self._last = written
        for path in written | opened:
            if path in _read and self.written.get(path, client) != client:
                self.crossed.add(path)
            if path in written and client != NOBODY:
                self.written.setdefault(path, client)

    def digests(self) -> dict[str, str]:
        """Contents of the files that were written last."""
        found = {}
        for path in sorted(self._last):
            with suppress(OSError), open(path, "rb") as file:
                found[f"file {os.path.basename(path)}"] = hashlib.sha256(file.read()).hexdigest()
        return found


def _note(event: str, args: Any) -> None:
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path, mode, flags = os.path.abspath(os.fsdecode(args[0])), args[1] or "", args[2] or 0
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR)) or any(sign in mode for sign in "wax+")
        if writes:
            _wrote.add(path)
        if "+" in mode or not writes:
            _read.add(path)
    elif event == "mmap.__new__" and args[0] >= 0 and args[2] in (0, mmap.ACCESS_WRITE):
        path = os.readlink(f"/proc/self/fd/{args[0]}")
        _read.add(path)
        if path.startswith("/dev/shm/"):  # whose times do not tell
            _wrote.add(path)
        else:
            _wrote.discard(path)
    elif event == "os.rename":
        _wrote.add(os.path.abspath(os.fsdecode(args[1])))
    elif event == "sqlite3.connect":
        path = os.path.abspath(os.fsdecode(args[0]))
        _read.update((path, path + "-wal"))


def _note_shared(owner: Any) -> None:
    """Let `from_file`, which maps a file past Python, say so."""
    ordinary = owner.from_file

    def from_file(filename: Any, shared: bool = False, *args: Any, **kwargs: Any) -> Any:
        path = os.path.abspath(os.fsdecode(filename))
        _read.add(path)
        if shared and path.startswith("/dev/shm/"):
            _wrote.add(path)
        return ordinary(filename, shared, *args, **kwargs)

    owner.from_file = from_file


def _time_of(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _files_in(folder: str) -> Iterator[tuple[str, Any]]:
    number = 0
    for at, _, names in os.walk(folder):
        for name in names:
            number += 1
            if number > _MOST:
                return
            try:
                found = os.stat(path := os.path.join(at, name))
            except OSError:
                continue
            yield os.path.abspath(path), (found.st_mtime_ns, found.st_size)


def no_changes(event: str, args: Any) -> None:
    """Let Python change no file and reach nobody, as an audit hook of a fork."""
    if event == "open" and not isinstance(args[0], int):
        writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR) or any(sign in (args[1] or "") for sign in "wax+")
    else:
        writes = event in _CHANGES
    if writes:
        raise PermissionError("nothing can be written where hooks are tried")
