"""Processes that are forks of this one, which has imported everything: a new one takes seconds for it."""

import multiprocessing
import os
import warnings
from contextlib import contextmanager

import pytest

FORK = multiprocessing.get_context("fork")


@contextmanager
def forks():
    """Processes that are started in here are forks, whatever they ask for."""
    with pytest.MonkeyPatch.context() as patch, _threads():
        patch.setattr(multiprocessing, "get_context", lambda method: FORK)
        yield


@contextmanager
def _threads():
    """Python 3.12 warns of those that a fork does not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def begin(work, *arguments, **variables):
    """Start a function in a fork, with these in its environment."""

    def begun():
        os.environ.update(variables)
        work(*arguments)

    process = FORK.Process(target=begun)
    with _threads():
        process.start()
    return process


def end(*processes):
    """Exit codes, with a minus of the signal; one that hangs is stopped."""
    for process in processes:
        process.join(timeout=900)
        process.kill()
    return [process.exitcode for process in processes]
