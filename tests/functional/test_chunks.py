import threading

import numpy as np
import pytest
import torch

from lightning_fedq.functional.chunks import CHUNK, in_chunks


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, CHUNK, CHUNK + 1, 20 * CHUNK + 7])
def test_every_coordinate_is_worked_on_once_and_in_order(two_threads, count):
    counter, out = iter(range(count)), np.full(count, -1)

    def draw(size):
        return [next(counter) for _ in range(size)]

    def work(part, drawn):
        out[part] = drawn
        return part.start

    assert in_chunks(count, draw, work) == list(range(0, count, CHUNK))
    assert np.array_equal(out, np.arange(count))


def test_work_runs_in_other_threads_and_drawing_does_not(two_threads):
    barrier, drawing = threading.Barrier(2, timeout=20), set()

    def draw(size):
        drawing.add(threading.get_ident())

    def work(part, drawn):
        barrier.wait()  # passes only if two chunks are worked on at once
        return threading.get_ident()

    workers = in_chunks(6 * CHUNK, draw, work)
    assert drawing == {threading.get_ident()}
    assert len(set(workers)) == 2 and threading.get_ident() not in workers


def test_errors_reach_the_caller(two_threads):
    def work(part, drawn):
        raise ValueError(f"no {part.start}")

    with pytest.raises(ValueError, match="no 0"):
        in_chunks(9 * CHUNK, lambda size: None, work)
