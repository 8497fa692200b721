"""Runs side by side, in processes of one thread each that end when whoever started them does."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from lightning_fedq._lightning import pl
from lightning_fedq.comparison.bench.tasks import Job, Result, Task

REFUSED = (ValueError, TypeError, ImportError)
"""Errors of one run that say what it can't have; any other one ends the comparison."""


def results(task: Task, jobs: Sequence[Job], processes: int) -> Iterator[tuple[int, Result | str]]:
    """Run jobs, and yield the place of each as it ends, with its result or the reason why there is none.

    Args:
        processes: Runs at a time. 1 is in this process, job by job in their order.

    Raises:
        RuntimeError: If a process was ended from outside, for its memory say.
    """
    if min(processes, len(jobs)) < 2:
        for place, job in enumerate(jobs):
            yield place, _result(task, job)
        return
    fresh, waiting = multiprocessing.get_context("spawn"), iter(enumerate(jobs))
    at_work: dict[Any, tuple[Any, int]] = {}  # by connection: a process, and the place of its job
    try:
        for _ in range(min(processes, len(jobs))):
            mine, there = fresh.Pipe()
            process = fresh.Process(target=_serve, args=(there, pl.__name__))
            process.start()
            there.close()  # or its end would not be seen here
            place, job = next(waiting)
            mine.send(task)
            mine.send(job)
            at_work[mine] = process, place
        while at_work:
            here: Any = wait(list(at_work))[0]
            process, place = at_work[here]
            try:
                found = here.recv()
            except EOFError:
                raise RuntimeError(
                    "a process of the comparison ended in the middle of a run (memory?); what has ended is "
                    "kept: give the same command again, with fewer --jobs"
                ) from None
            if isinstance(found, Exception):
                raise found
            following = next(waiting, None)
            if following is None:
                here.close()
                del at_work[here]
            else:
                at_work[here] = process, following[0]
                here.send(following[1])
            yield place, found
    finally:
        for mine, (process, _) in at_work.items():
            mine.close()
            process.terminate()


def _result(task: Task, job: Job) -> Result | str:
    try:
        return task.run(job)
    except REFUSED as refused:
        return " ".join(str(refused).split())
    except SystemExit as leaves:  # so Lightning answers Ctrl-C
        raise KeyboardInterrupt from leaves


def _serve(jobs: Connection, package: str) -> None:
    """Take a task and run what comes, until whoever sends it is gone.

    Args:
        package: Lightning's package that the task works with.
    """
    import_module(package)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to answer
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    task = jobs.recv()
    while True:
        found: object
        try:
            job = jobs.recv()
        except (EOFError, OSError):
            return
        try:
            found = _result(task, job)
        except OSError as error:
            found = error
        except BaseException as error:  # of a class that may not be known on the other side
            found = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            jobs.send(found)
        except OSError:
            return
