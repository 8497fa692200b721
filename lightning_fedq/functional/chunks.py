"""Long arrays a chunk at a time: what is drawn comes in order, what is computed may run in several threads.

Kernels here let go of the interpreter's lock, so that threads are enough. Every chunk's result depends on
that chunk alone, and chunks are cut the same way whatever the number of threads: neither shows in a result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

CHUNK = 1 << 14
"""Coordinates per chunk: a chunk's random words and arrays stay in the processor's cache."""

Drawn = TypeVar("Drawn")
Result = TypeVar("Result")


def in_chunks(
    count: int, draw: Callable[[int], Drawn], work: Callable[[slice, Drawn], Result], size: int = CHUNK
) -> list[Result]:
    """Draw for one chunk after the other and work on them, in as many threads as torch uses.

    Args:
        count: Coordinates in all, >= 0.
        draw: Given a chunk's length; called in the caller's thread, in the chunks' order.
        work: Given a chunk's place and what was drawn for it; may touch its own place only.
        size: Size of a chunk, >= 1.

    Returns:
        What `work` returned, in the chunks' order.
    """
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    threads = min(torch.get_num_threads(), len(parts) // 2)
    if threads < 2:
        return [work(part, draw(part.stop - part.start)) for part in parts]
    results: list[Result] = []
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for part in parts:
            if len(pending) >= 3 * threads:  # memory: what is drawn waits for its work
                results.append(pending.popleft().result())
            pending.append(pool.submit(work, part, draw(part.stop - part.start)))
        results += [future.result() for future in pending]
    return results
