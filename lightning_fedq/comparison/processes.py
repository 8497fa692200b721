"""Train configurations as `fedq fit` does, one after the other or in several worker processes.

A worker is another interpreter with one thread. It trains one configuration after the other, so it imports
torch and Lightning only once. It is killed when the parent is interrupted, and ends if the parent is killed.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

from lightning_fedq.reports.runs import write_atomically

DONE = ".done"
"""Suffix of the file that holds the name of a finished run's folder. It is written after the test."""
STARTS = 6.0
"""Seconds until a worker process has started."""
REFUSED = (ValueError, TypeError, ImportError)
"""Errors that refuse the settings of one run. Every other error ends the comparison."""


def train(file: Path, settings: Mapping[str, Any]) -> str:
    """Train one configuration.

    Its output goes to a file with suffix `.log` next to the configuration. After the test, a file with
    suffix `DONE` gets the name of the run folder.

    Args:
        file: Configuration with a `RunFolder` callback.
        settings: Settings that are logged together with the figures of the run.

    Returns:
        Reason why the run is refused, or "" if it was trained.

    Raises:
        KeyboardInterrupt: If the run was interrupted.
    """
    from lightning_fedq.commands.run import FedqCLI  # imports Lightning's command line
    from lightning_fedq.comparison.table import log_figures

    log = file.with_suffix(".log")
    try:
        with log.open("a") as screen, quiet(), redirect_stdout(screen), redirect_stderr(screen):
            cli = FedqCLI(["fit", "--config", str(file)])
    except REFUSED as refused:
        return " ".join(str(refused).split())
    except SystemExit as leaves:
        if leaves.code == 2:  # the parser refuses the configuration
            return f"its configuration is refused: {log.read_text().strip().splitlines()[-2:]}"
        raise KeyboardInterrupt from leaves  # Lightning exits this way after Ctrl-C
    assert cli.run_folder is not None and cli.run_folder.path is not None
    log_figures(cli.trainer.loggers, settings, cli.run_folder.path)
    write_atomically(file.with_suffix(DONE), cli.run_folder.path.name)
    return ""


def train_all(runs: Mapping[Path, Mapping[str, Any]], jobs: int) -> Iterator[tuple[Path, str]]:
    """Train configurations, and yield each file when its run ends, with the reason if it is refused.

    Args:
        runs: Configuration files, with the settings that the loggers of each run get.
        jobs: Number of runs at a time. 1 trains in this process.

    Yields:
        File and reason. The reason is "" if the run was trained.

    Raises:
        RuntimeError: If a worker was killed, for example by the out-of-memory killer.
    """
    if min(jobs, len(runs)) < 2:
        for file, settings in runs.items():
            yield file, train(file, settings)
        return
    from lightning_fedq._lightning import pl

    others = set(active_children())
    pool = ProcessPoolExecutor(min(jobs, len(runs)), get_context("spawn"), _begin, (pl.__name__,))
    try:
        files = {pool.submit(train, file, settings): file for file, settings in runs.items()}
        for done in as_completed(files):
            yield files[done], done.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "A worker process ended during a run, perhaps for lack of memory. Repeat the command with fewer "
            "--jobs."
        ) from error
    finally:
        for worker in set(active_children()) - others:  # else Ctrl-C would wait for the runs that have begun
            worker.kill()
        pool.shutdown(cancel_futures=True)


def _begin(package: str) -> None:
    """Prepare a worker: the same Lightning package, one thread, and an end with its parent, not by Ctrl-C."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)

    import_module(package)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and Lightning's log lines, which would fill the screen over many short runs."""
    names = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def describe_duration(runs: int, processes: int, seconds: float) -> str:
    """Return a text on the expected duration of the remaining runs.

    Args:
        runs: Number of remaining runs.
        processes: Number of runs at a time.
        seconds: Duration of one run, or NaN if it is not known.
    """
    remaining = runs * seconds / processes + (STARTS if processes > 1 else 0.0)
    shown = f"{remaining:.0f} s" if remaining < 90.0 else f"{remaining / 60.0:.0f} min"
    times = "duration unknown" if math.isnan(seconds) else f"about {shown}"
    return f"{runs} more runs, {processes} at a time: {times}"
