"""Train configurations as `fedq fit` does, one after the other or several at a time in worker processes.

A worker is another interpreter of one thread. It trains one configuration after the other, so that it imports
torch and Lightning once, and it ends when its input does, which is when whoever started it is gone.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from lightning_fedq.reports.runs import write_atomically

DONE = ".done"
"""End of the name of the file that names the folder of a run which has ended, its test included."""
REFUSED = (ValueError, TypeError, ImportError)
"""Errors of one run that say what it can't have; any other one ends the comparison."""


def train(file: Path, settings: Mapping[str, Any]) -> str:
    """Train one configuration. Beside it are what it prints, and at the end the name of its folder.

    Args:
        file: A configuration with a `RunFolder`.
        settings: What its loggers are told beside the figures.

    Returns:
        Why the run is refused; "" if it was trained.

    Raises:
        KeyboardInterrupt: If it was interrupted.
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
        if leaves.code == 2:  # the parser refuses it
            return f"its configuration is refused: {log.read_text().strip().splitlines()[-2:]}"
        raise KeyboardInterrupt from leaves  # so Lightning answers Ctrl-C
    assert cli.run_folder is not None and cli.run_folder.path is not None
    log_figures(cli.trainer.loggers, settings, cli.run_folder.path)
    write_atomically(file.with_suffix(DONE), cli.run_folder.path.name)
    return ""


def train_all(runs: Mapping[Path, Mapping[str, Any]], jobs: int) -> Iterator[tuple[Path, str]]:
    """Train configurations, and yield each as it ends, with the reason if it is refused.

    Args:
        runs: Configurations, and what the loggers of each are told.
        jobs: Runs at a time; 1 trains in this process.

    Raises:
        RuntimeError: If a worker fails, or was ended from outside, for its memory say.
    """
    if min(jobs, len(runs)) < 2:
        for file, settings in runs.items():
            yield file, train(file, settings)
        return
    mine, workers = threading.local(), list[subprocess.Popen[str]]()

    def ask(file: Path) -> str:
        if not hasattr(mine, "worker"):
            mine.worker = _worker()
            workers.append(mine.worker)
        answer = ""
        with suppress(OSError):  # a worker that is gone
            mine.worker.stdin.write(json.dumps([str(file), runs[file]]) + "\n")
            mine.worker.stdin.flush()
            answer = mine.worker.stdout.readline()
        if not answer:
            raise RuntimeError(
                "a process of the comparison ended in the middle of a run (memory?); give the same command "
                "again, with fewer --jobs"
            )
        reason, error = json.loads(answer)
        if error:
            raise RuntimeError(error)
        return str(reason)

    pool = ThreadPoolExecutor(min(jobs, len(runs)))
    try:
        files = {pool.submit(ask, file): file for file in runs}
        for done in as_completed(files):
            yield files[done], done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            with suppress(OSError), worker:  # closes its pipes, one of which may be broken, and waits
                worker.kill()
        pool.shutdown()


def _worker() -> subprocess.Popen[str]:
    """Start a process that runs `serve`. Ctrl-C does not reach it."""
    from lightning_fedq._lightning import pl

    code = f"import {pl.__name__}; from lightning_fedq.comparison.processes import serve; serve()"
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=here,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def serve() -> None:
    """Train what comes on the standard input, a line of JSON each, and answer: a reason, and an error."""
    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints
    for line in sys.stdin:
        file, settings = json.loads(line)
        try:
            answer = train(Path(file), settings), ""
        except BaseException as error:
            answer = "", f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and Lightning's lines of a hundred short runs off the screen."""
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
