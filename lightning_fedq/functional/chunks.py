"""Processing of long arrays in chunks: random draws in order, computation in several threads.

Threads are enough, because the compiled loops release the interpreter's lock. A chunk's result depends only
on this chunk, and chunks do not depend on the number of threads. So results do not depend on it, either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

CHUNK = 1 << 14
"""Coordinates per chunk, so that a chunk's random words and arrays stay in the processor's cache."""

Drawn = TypeVar("Drawn")
Result = TypeVar("Result")


def in_chunks(
    count: int, draw: Callable[[int], Drawn], work: Callable[[slice, Drawn], Result], size: int = CHUNK
) -> list[Result]:
    """Draw for one chunk after the other and work on them, in as many threads as torch uses.

    Args:
        count: Number of all coordinates, >= 0.
        draw: Function of a chunk's length. It is called in the caller's thread, in the order of the chunks.
        work: Function of a chunk's slice and its draw. It may change only this slice of shared arrays.
        size: Size of a chunk, >= 1.

    Returns:
        Results of `work`, in the order of the chunks.
    """
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    threads = min(torch.get_num_threads(), len(parts) // 2)
    if threads < 2:
        return [work(part, draw(part.stop - part.start)) for part in parts]
    results: list[Result] = []
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for part in parts:
            if len(pending) >= 3 * threads:  # limits the memory of draws that wait for their work
                results.append(pending.popleft().result())
            pending.append(pool.submit(work, part, draw(part.stop - part.start)))
        results += [future.result() for future in pending]
    return results
