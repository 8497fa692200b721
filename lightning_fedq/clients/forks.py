"""Work that leaves nothing behind: done in a fork of this process, of which only the answer comes back.

Whatever is tried before the first round, on clients' data and by the user's code, would be the first to fill
what lies outside of every object: globals, class attributes, caches, data sets. In a fork it is dropped with
the process. Memory that processes share outlives it and is put back. Files stay, which is said.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch

from lightning_fedq._lightning import rank_zero_info
from lightning_fedq.data.sampling import in_short

T = TypeVar("T")

_SHARED = 1 << 28
"""Bytes of shared memory that are put back, small pieces first."""


class ForkFailedError(RuntimeError):
    """A fork has ended without an answer."""


class _ForkError(Exception):
    """Where in a fork an error came from."""

    def __str__(self) -> str:
        return f'in a fork of this process:\n"""\n{self.args[0]}"""'


def find_fork_obstacle(trainer: Any) -> str:
    """Why this Trainer's process can't be forked. "" where it can: on Linux, on a CPU, if it is the only one.

    PyTorch can't train in the fork of a process that sees a GPU, and ranks wait for each other. Nor can it
    after a backward pass where there is any other device, so a backward pass is tried.
    """
    strategy = trainer.strategy
    if sys.platform != "linux":
        return f"{sys.platform} has no safe forks"
    if getattr(strategy, "num_ranks", 1) > 1:
        return "ranks wait for each other"
    if strategy.root_device.type != "cpu" or torch.cuda.is_available():
        return "PyTorch can't train in the fork of a process that sees a GPU"
    try:
        _try_backward()
    except (RuntimeError, OSError) as error:  # of autograd's threads; or no memory for a fork
        return f"a backward pass failed in one: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return ""


@functools.cache
def _try_backward() -> None:
    """A backward pass in a fork, once a process: the one here has begun all of autograd's threads by then."""

    def backward() -> None:
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]

    backward()
    run_in_fork(backward)


def run_isolated(fork_obstacle: str, work: Callable[[], T]) -> T:
    """Do in a fork what is tried before the first round and leaves nothing behind, else here.

    Args:
        fork_obstacle: Why there are no forks, see `find_fork_obstacle`. "" if there are.
        work: Returns what can be pickled.
    """
    return work() if fork_obstacle else run_in_fork(work)


def run_in_fork(work: Callable[[], T]) -> T:
    """Do something in a fork and return its answer, or raise its error.

    Its warnings are dropped: the rounds will repeat those that matter. Memory that this process shares with
    others is afterwards what it was.

    Args:
        work: Returns what can be pickled.

    Raises:
        ForkFailedError: If the fork was ended from outside, by want of memory for one.

    Example:
        >>> seen = []
        >>> run_in_fork(lambda: seen.append(1) or len(seen)), seen
        (1, [])
    """
    before, open_files = _shared_memory(), _sizes_of_open_files()
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where there are threads
        process = os.fork()
    if not process:
        os.close(read)
        _run_and_send(work, write)
    os.close(write)  # a pipe ends when nobody holds this side
    try:
        with os.fdopen(read, "rb") as pipe:
            found = pipe.read()  # before the wait: a fork whose pipe is full does not end
        status = os.waitpid(process, 0)[1]
    except BaseException:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        raise
    finally:
        _restore_shared_memory(before)
    if not found:
        code = os.waitstatus_to_exitcode(status)
        why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise ForkFailedError(f"a fork in which a training was tried ended by {why}")
    value, error, text, written = pickle.loads(found)
    grown = {name for name, size in _sizes_of_open_files().items() if open_files.get(name, size) != size}
    _report_written_files(sorted({*written, *grown}))
    if error is not None:
        raise error from _ForkError(text)
    return cast(T, value)


def _run_and_send(work: Callable[[], Any], write: int) -> None:
    """In the fork: work, answer and end, past whatever the parent has to clean up."""
    written: dict[str, None] = {}
    _of_this_fork.append(written)
    sys.addaudithook(functools.partial(_note_written, written))
    torch.save = functools.partial(_save_and_note, torch.save, written)  # which opens files past Python
    try:
        gc.disable()  # the collector would touch, and so copy, every page
        torch.set_num_threads(1)  # threads of the parent are not there
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # nor are its workers ours
        try:
            with warnings.catch_warnings(record=True):
                found = pickle.dumps((work(), None, "", list(written)))
        except BaseException as error:
            found = pickle.dumps((None, _picklable_error(error), traceback.format_exc(), list(written)))
        for worker in multiprocessing.active_children():  # who would keep the pipe open
            worker.kill()
        with os.fdopen(write, "wb") as pipe:
            pipe.write(found)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # no atexit and no finaliser, which are the parent's


def _note_written(written: dict[str, None], event: str, args: tuple[Any, ...]) -> None:
    """Note what Python opens to be written to, in an audit hook of a fork."""
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
        _note_file(written, args[0])


def _note_file(written: dict[str, None], file: Any) -> None:
    """Note a file, if it is one of the user's: no device and no cache of Python, Numba or torch."""
    if isinstance(file, str | bytes | os.PathLike):
        name = os.path.abspath(os.fsdecode(file))
        own = (f"{os.sep}__pycache__{os.sep}", f"{os.sep}torchinductor_", f"{os.sep}.cache{os.sep}")
        if not name.startswith(("/dev/", "/proc/")) and not any(part in name for part in own):
            written[name] = None


def _save_and_note(
    save: Callable[..., None], written: dict[str, None], obj: Any, f: Any, *args: Any, **kwargs: Any
) -> None:
    _note_file(written, f)
    save(obj, f, *args, **kwargs)


def _sizes_of_open_files() -> dict[str, int]:
    """Sizes of the files that this process has open and whoever started it has not, by name.

    Where output goes to a file, others write to that, too.
    """
    files = _open_files("/proc/self/fd")
    others = {(one.st_dev, one.st_ino) for one in _open_files(f"/proc/{os.getppid()}/fd").values()}
    for number in (0, 1, 2):
        with suppress(OSError):
            stream = os.fstat(number)
            others.add((stream.st_dev, stream.st_ino))
    return {name: one.st_size for name, one in files.items() if (one.st_dev, one.st_ino) not in others}


def _open_files(folder: str) -> dict[str, os.stat_result]:
    """Regular files among a process's descriptors, by name."""
    found = {}
    with suppress(OSError):
        for number in os.listdir(folder):
            with suppress(OSError):
                status = os.stat(f"{folder}/{number}")
                if stat.S_ISREG(status.st_mode):
                    found[os.readlink(f"{folder}/{number}")] = status
    return found


_said: set[str] = set()
_of_this_fork: list[dict[str, None]] = []
"""What has been written in this process, if it is a fork."""


def _report_written_files(names: Sequence[str]) -> None:
    """Say, once in a process, which files hooks write where they are only tried."""
    for own in _of_this_fork:
        own.update(dict.fromkeys(names))
    if names and not _said and not _of_this_fork:
        _said.update(names)
        rank_zero_info(
            "hooks that are tried before the first round, in forks that are dropped, have written to "
            f"{in_short(names, 4)}; files stay, and nothing in them is of a round yet: what is to be written "
            "once a round belongs in on_round_end or a hook of validation"
        )


def _picklable_error(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))  # some errors are pickled and can't be read
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _shared_memory() -> dict[int, bytes]:
    """Contents of writable memory that this process shares with others, by its address.

    Not in locks and devices, which are no memory of anybody's data.
    """
    pieces: list[tuple[int, int]] = []
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            where, rights, *rest = line.split(maxsplit=5)
            name = rest[3] if len(rest) > 3 else ""
            is_device = name.startswith("/dev/") and not name.startswith(("/dev/shm/", "/dev/zero"))
            if rights.startswith("rw") and rights[3] == "s" and not is_device and "/sem." not in name:
                start, end = (int(part, 16) for part in where.split("-"))
                pieces.append((end - start, start))
    found, total = {}, 0
    if pieces:
        with suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
            for size, start in sorted(pieces):
                total += size
                if total > _SHARED:
                    break
                with suppress(OSError):  # a file that has become shorter
                    found[start] = os.pread(memory.fileno(), size, start)
    return found


def _restore_shared_memory(before: dict[int, bytes]) -> None:
    if not before:
        return
    now = _shared_memory()
    changed = [start for start, was in before.items() if start in now and now[start] != was]
    if changed:
        with open("/proc/self/mem", "rb+", buffering=0) as memory:
            for start in changed:
                os.pwrite(memory.fileno(), before[start], start)
