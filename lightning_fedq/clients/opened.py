"""Files that a fork and whatever it starts open, in any language: Linux asks its parent before it opens them.

A filter of system calls (seccomp with user notification, Linux 5.5) stops each call that opens, renames or
links a file until the parent has noted its path. What other processes write meanwhile is in no such list.
Without such a filter Python's own calls are noted, by an audit hook, and `why_not` says so.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from lightning_fedq.clients.forks import in_fork

T = TypeVar("T")

_RENAMES = -1
"""In the place of flags: a file gets this name, and what was written under another one."""
_IN_MEMORY = -2
"""In the place of flags: they are the first eight bytes at the address of argument 2."""
_MACHINES: dict[str, tuple[int, int, dict[int, tuple[int | None, int, int]]]] = {
    "x86_64": (
        0xC000003E,
        317,
        {
            2: (None, 0, 1),
            85: (None, 0, _RENAMES),
            257: (0, 1, 2),
            437: (0, 1, _IN_MEMORY),  # open, creat, openat, openat2
            82: (None, 1, _RENAMES),
            86: (None, 1, _RENAMES),  # rename, link
            264: (2, 3, _RENAMES),
            265: (2, 3, _RENAMES),
            316: (2, 3, _RENAMES),  # renameat, linkat, ...
        },
    ),
    "aarch64": (
        0xC00000B7,
        277,
        {
            56: (0, 1, 2),
            437: (0, 1, _IN_MEMORY),
            38: (2, 3, _RENAMES),
            37: (2, 3, _RENAMES),
            276: (2, 3, _RENAMES),
        },
    ),
}
"""Of a machine: its number for filters, that of `seccomp`, and of calls: where folder, path, flags stand."""
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NEW_LISTENER_AND_NO_SLOWER = 1 << 3 | 1 << 2
_HERE = -100
_ANEW = os.O_WRONLY | os.O_TRUNC


class Open(NamedTuple):
    """One file that was opened, or got its name.

    Args:
        path: Absolute.
        flags: Flags of `os.open`.
        size: Bytes that it held and will still hold.
    """

    path: str
    flags: int
    size: int


class Opened:
    """List of what a fork and its children have opened so far, which they and their parent share.

    Attributes:
        why_not: Why only Python's own calls are in it. "" where all are.
    """

    def __init__(self) -> None:
        self._log, self.why_not = os.memfd_create("opened"), "it has not begun"

    def __len__(self) -> int:
        """Bytes of the list."""
        return os.fstat(self._log).st_size

    def since(self, length: int) -> list[Open]:
        """Files opened since the list was that long.

        Args:
            length: Bytes.
        """
        lines = os.pread(self._log, len(self) - length, length).decode(errors="surrogateescape").split("\0")
        found = (line.split(" ", 2) for line in lines[:-1])
        return [Open(path, int(flags), int(size)) for flags, size, path in found]

    def in_fork(self, work: Callable[[], T]) -> T:
        """Do something in a fork, and note what is opened there. Once.

        Args:
            work: Returns what can be pickled. `why_not` is right in it.
        """
        ours, theirs = socket.socketpair()
        parent = threading.Thread(target=self._note, args=(ours,), daemon=True)

        def begin() -> T:
            self.why_not = _filter(theirs)
            if self.why_not:
                sys.addaudithook(self._hear)
            return work()

        parent.start()
        try:
            return in_fork(begin)
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            parent.join()
            ours.close()
            theirs.close()
            os.close(self._log)

    def _note(self, ours: socket.socket) -> None:
        _, listeners, *_ = socket.recv_fds(ours, 1, 1)
        calls = _MACHINES.get(platform.machine(), (0, 0, {}))[2]
        for listener in listeners:
            try:
                for process, call, arguments in _notified(listener, ours):
                    with suppress(OSError):  # it has ended meanwhile
                        self._write(*_meant(process, arguments, *calls[call]))
            finally:
                os.close(listener)  # else who asks waits for ever

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not isinstance(args[0], int):
            self._write(os.path.abspath(os.fsencode(args[0])), args[2] or 0)
        elif event == "os.rename":
            self._write(os.path.abspath(os.fsencode(args[1])), _ANEW)
        elif event == "sqlite3.connect":
            self._write(os.path.abspath(os.fsencode(args[0])), os.O_RDWR)

    def _write(self, path: bytes, flags: int) -> None:
        size = 0
        with suppress(OSError):
            size = 0 if flags & os.O_TRUNC else os.stat(path).st_size
        os.write(self._log, b"%d %d %s\0" % (flags, size, os.path.normpath(path)))


def _notified(listener: int, ours: socket.socket) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Process, call and arguments of what is asked, which goes on afterwards, until `ours` is shut down."""
    import fcntl  # which Windows lacks, where there are no forks

    asked = select.poll()
    asked.register(listener, select.POLLIN)
    asked.register(ours, select.POLLIN)
    while True:
        ready = dict(asked.poll())
        if ours.fileno() in ready:
            return
        if not ready.get(listener, 0) & select.POLLIN:  # nobody is left who could ask
            asked.unregister(listener)
            continue
        question = bytearray(80)
        with suppress(OSError):  # who asked was killed
            fcntl.ioctl(listener, _RECEIVE, question)
            number, process, _, call, _, _, *arguments = struct.unpack("QIIiIQ6Q", question)
            yield process, call, tuple(arguments)
            fcntl.ioctl(listener, _SEND, bytearray(struct.pack("QqiI", number, 0, 0, 1)))


def _meant(
    process: int, arguments: tuple[int, ...], folder: int | None, path: int, flags: int
) -> tuple[bytes, int]:
    """Path and flags of a call, by where they stand among its arguments."""
    name = _text(process, arguments[path])
    if not name.startswith(b"/"):
        at = ctypes.c_int(arguments[folder]).value if folder is not None else _HERE
        where = "cwd" if at == _HERE else f"fd/{at}"
        name = os.path.join(os.readlink(f"/proc/{process}/{where}".encode()), name)
    if flags == _IN_MEMORY:
        return name, int.from_bytes(_memory(process, arguments[2], 8), sys.byteorder)
    return name, _ANEW if flags == _RENAMES else arguments[flags]


def _memory(process: int, at: int, count: int) -> bytes:
    """Bytes at an address of another process, or an `OSError` if there are not so many."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        found = os.pread(memory.fileno(), count, at)
    if len(found) < count:  # as of a process that has ended
        raise OSError(f"process {process} has no {count} bytes at {at}")
    return found


def _text(process: int, at: int) -> bytes:
    """The text at an address of another process."""
    found = b""
    while b"\0" not in found and len(found) < 4096:  # page by page: the next one may be nobody's
        found += _memory(process, at + len(found), 4096 - (at + len(found)) % 4096)
    return found.partition(b"\0")[0]


def _filter(theirs: socket.socket) -> str:
    """Let this process ask from here on. "", or why it can't."""
    if platform.machine() not in _MACHINES:
        return f"{platform.machine()} has other system calls"
    machine, seccomp, calls = _MACHINES[platform.machine()]
    steps = [(0x20, 0, 0, 4), (0x15, 0, len(calls) + 1, machine), (0x20, 0, 0, 0)]
    steps += [(0x15, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    steps += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _NOTIFY)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges, without which no filter is allowed
    listener = libc.syscall(seccomp, 1, _NEW_LISTENER_AND_NO_SLOWER, program)
    if listener < 0:
        return f"no filter of system calls: {os.strerror(ctypes.get_errno())}"
    socket.send_fds(theirs, [b"0"], [listener])
    os.close(listener)
    return ""
