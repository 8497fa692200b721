"""Work in a fork of this process, from which only the result returns.

Trials before the first round run the user's code on clients' data. In this process they could change globals,
class attributes, caches or data sets. In a fork these changes end with the process. Memory that processes
share is restored afterwards. Files that the fork writes remain.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_SHARED = 1 << 28
"""Largest number of bytes of shared memory that are restored. Small pieces are restored first."""


class ForkFailedError(RuntimeError):
    """Error for a fork that ended without a result."""


class _ForkError(Exception):
    """Cause of an error from a fork: the traceback in the fork as text."""

    def __str__(self) -> str:
        return f'in a fork of this process:\n"""\n{self.args[0]}"""'


def find_fork_obstacle(trainer: Any) -> str:
    """Return why this Trainer's process can't be forked, or "" if it can.

    Forks need Linux and a CPU. PyTorch can't train in the fork of a process that sees a GPU. With other
    devices, PyTorch fails in a fork after a backward pass, so a backward pass is tried.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no safe forks"
    if trainer.strategy.root_device.type != "cpu" or torch.cuda.is_available():
        return "PyTorch can't train in the fork of a process that sees a GPU"
    try:
        _try_backward()
    except (RuntimeError, OSError) as error:  # from autograd's threads, or no memory for a fork
        return f"a backward pass failed in one: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return ""


@functools.cache
def _try_backward() -> None:
    """Try a backward pass in a fork, once per process. One here first starts all threads of autograd."""

    def backward() -> None:
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]

    backward()
    run_in_fork(backward)


def run_in_fork(work: Callable[[], T]) -> T:
    """Run work in a fork and return its result, or raise its error.

    Warnings in the fork are dropped, because the rounds repeat the relevant ones. Shared memory is restored
    afterwards.

    Args:
        work: Function whose result can be pickled.

    Raises:
        ForkFailedError: If the fork was killed, for example because memory was exhausted.

    Examples:
        >>> seen = []
        >>> run_in_fork(lambda: seen.append(1) or len(seen)), seen
        (1, [])
    """
    before = _shared_memory()
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
        process = os.fork()
    if not process:
        os.close(read)
        _run_and_send(work, write)
    os.close(write)  # reading ends only when all write ends of the pipe are closed
    try:
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read()  # before the wait, because a fork with a full pipe does not end
        status = os.waitpid(process, 0)[1]
    except BaseException:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        raise
    finally:
        _restore_shared_memory(before)
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise ForkFailedError(f"The fork for a trial of the training ended with {reason}")
    value, error, text = pickle.loads(answer)
    if error is not None:
        raise error from _ForkError(text)
    return cast(T, value)


def _run_and_send(work: Callable[[], Any], write: int) -> None:
    """In the fork, run the work, send the result, and exit without the parent's clean-up."""
    try:
        gc.disable()  # the collector would write to every page and so copy it
        torch.set_num_threads(1)  # a fork does not have the parent's threads
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # nor its workers
        try:
            with warnings.catch_warnings(record=True):
                answer = pickle.dumps((work(), None, ""))
        except BaseException as error:
            answer = pickle.dumps((None, picklable_error(error), traceback.format_exc()))
        for worker in multiprocessing.active_children():  # a worker would keep the pipe open
            worker.kill()
        with os.fdopen(write, "wb") as pipe:
            pipe.write(answer)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # skip atexit functions and finalisers, which belong to the parent


def picklable_error(error: E) -> E | RuntimeError:
    """Return the error, or a RuntimeError with its text if it can't be pickled and loaded."""
    try:
        pickle.loads(pickle.dumps(error))  # some errors can be pickled but not loaded
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _shared_memory() -> dict[int, bytes]:
    """Return the contents of writable memory that this process shares with others, by address.

    Locks and devices are left out, because they contain no data of the training.
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
                with suppress(OSError):  # the mapped file may have become shorter
                    found[start] = os.pread(memory.fileno(), size, start)
    return found


def _restore_shared_memory(before: dict[int, bytes]) -> None:
    """Write earlier contents back into the shared memory that has changed."""
    if not before:
        return
    now = _shared_memory()
    changed = [start for start, was in before.items() if start in now and now[start] != was]
    if changed:
        with open("/proc/self/mem", "rb+", buffering=0) as memory:
            for start in changed:
                os.pwrite(memory.fileno(), before[start], start)
