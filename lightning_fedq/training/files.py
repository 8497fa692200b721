"""Where what is tried before the first round is done, and who of its clients writes which file.

In forks nothing is left behind but files. Those that one client has written and another one reads carry data
from one to the other, whatever they look like.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from lightning_fedq.clients.forks import why_no_forks
from lightning_fedq.clients.opened import Opened

T = TypeVar("T")

NOBODY = -1
"""Who validates, and saves checkpoints."""
_CODE = ("/__pycache__/", "/dev/null", "/dev/urandom", "/dev/tty", "/proc/", "/sys/", "/torchinductor_")
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}
_CHANGES |= {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "socket.connect", "shutil.rmtree"}


class Aside:
    """Does what is tried: in a fork where this process can be forked, else here.

    Args:
        trainer: The user's, in its fit.

    Attributes:
        why: Why it is not done in forks. "" if it is.
        written: Files that clients have written so far, and who did first.
        failed: Why the rehearsal of a client ended early. "" if it did not.
        raised: Hooks that raised in it, see `stale_hooks`.
        blind: Why only files that Python itself opens were seen. "" where all were.
    """

    def __init__(self, trainer: Any) -> None:
        self.why, self.written, self.blind = why_no_forks(trainer), dict[str, int](), ""
        self.failed, self.raised = "", list[str]()

    def do(self, client: int, work: Callable[[], T]) -> T:
        """Let one client try something.

        Args:
            work: Returns what can be pickled.
        """
        if self.why:
            return work()

        def watched(watch: Files) -> T:
            with watch.of(client):
                return work()

        return self.watched(watched)

    def watched(self, work: Callable[[Files], T]) -> T:
        """Do something in a fork, where files are watched.

        Args:
            work: Is given who watches; returns what can be pickled.
        """
        opened = Opened()

        def watched() -> tuple[T, dict[str, int], str]:
            watch = Files(self.written, opened)
            return work(watch), watch.written, opened.why_not

        found, self.written, self.blind = opened.in_fork(watched)
        return found


class Files:
    """Files that clients write, in a fork: by what it and whatever it starts open, rename, or hold open.

    Args:
        written: Files that clients have written so far, and who did first.
        opened: What is opened in this fork.

    Attributes:
        written: The same, with what is found here.
        crossed: Files that one client wrote and another one read.
    """

    def __init__(self, written: Mapping[str, int], opened: Opened) -> None:
        self.written, self.crossed, self._opened = dict(written), set[str](), opened
        self._last, self._before, self._after = set[str](), dict[str, int](), dict[str, int]()
        streams = list(_held_open())
        self._streams = {fd: (path, flags) for path, fd, flags in streams if not flags & os.O_RDWR}
        self._held = {path for path, _, flags in streams if flags & os.O_RDWR}
        for fd, (_, flags) in self._streams.items():
            _take_place_of_its_own(fd, flags)

    @contextmanager
    def of(self, client: int) -> Iterator[None]:
        """While it is open, a client trains."""
        # times of files are coarser than the clock
        begun, start = len(self._opened), time.time_ns() - 20_000_000
        watched = self._held | {path for path, _ in self._streams.values()}
        sizes = {path: os.path.getsize(path) for path in watched if os.path.isfile(path)}
        places, self._before, self._after = {fd: _place(fd) for fd in self._streams}, dict(sizes), {}
        yield
        opened = [one for one in self._opened.since(begun) if not any(part in one.path for part in _CODE)]
        for one in opened:
            self._before.setdefault(one.path, one.size)
        read = {one.path for one in opened if not one.flags & os.O_WRONLY}
        written = {one.path for one in opened if one.flags & os.O_WRONLY and os.path.isfile(one.path)}
        self._held |= {one.path for one in opened if one.flags & (os.O_WRONLY | os.O_RDWR)}
        # a data base, a map or an open file: whether it was written its time tells, but of memory
        written |= {path for path in self._held if _time_of(path) >= start}
        written |= {one.path for one in opened if one.flags & os.O_RDWR and one.path.startswith("/dev/shm/")}
        # other processes may write to what was open before the fork, but don't move this one's place there
        for fd, (path, flags) in self._streams.items():
            if (place := _place(fd)) != places[fd]:
                written.add(path)
                self._before[path] = sizes.get(path, 0) if flags & os.O_APPEND else places[fd]
                self._after[path] = place
        self._last = written
        self.crossed |= {path for path in read if self.written.get(path, client) != client}
        for path in written if client != NOBODY else ():
            self.written.setdefault(path, client)

    def digests(self) -> dict[str, str]:
        """Contents of the files that were written last, and what was added: files outlive a fork."""
        found = {}
        for path in sorted(self._last):
            with suppress(OSError), open(path, "rb") as file:
                held, name = file.read(), f"file {os.path.basename(path)}"
                found[name] = hashlib.sha256(held).hexdigest()
                added = held[self._before.get(path, 0) : self._after.get(path)]
                found[f"{name}, at its end"] = hashlib.sha256(added).hexdigest()
        return found


def _held_open() -> Iterator[tuple[str, int, int]]:
    """Files that this process could write to: path, number, flags. Its own streams are left out."""
    import fcntl  # which Windows lacks, where there are no forks

    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            flags, path = fcntl.fcntl(fd, fcntl.F_GETFL), os.readlink(f"/proc/self/fd/{fd}")
            if flags & (os.O_WRONLY | os.O_RDWR) and fd > 2 and os.path.isfile(path):
                yield path, fd, flags


def _take_place_of_its_own(fd: int, flags: int) -> None:
    """Write to an open file at a place that is no longer shared with the processes that inherited it."""
    with suppress(OSError):  # a file that may not be opened again
        own = os.open(f"/proc/self/fd/{fd}", flags & (os.O_ACCMODE | os.O_APPEND))
        os.lseek(own, _place(fd), os.SEEK_SET)
        os.dup2(own, fd, os.get_inheritable(fd))
        os.close(own)


def _place(fd: int) -> int:
    """Where an open file is written next. 0 in one that is closed."""
    try:
        return os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return 0


def _time_of(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def no_changes(event: str, args: Any) -> None:
    """Let Python change no file and reach nobody, as an audit hook of a fork."""
    if event == "open" and not isinstance(args[0], int):
        writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR) or any(sign in (args[1] or "") for sign in "wax+")
    else:
        writes = event in _CHANGES
    if writes:
        raise PermissionError("nothing can be written where hooks are tried")
