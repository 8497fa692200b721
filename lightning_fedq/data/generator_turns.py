"""Several sequences of draws from the process's default generators, taken in turns.

Code that draws without a generator of its own, as dropout and random transforms do, then draws in each turn
what it would draw if its sequence were the only one. Python's and NumPy's generators are for transforms of
the data; a training step that draws from them is never mapped over clients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedq._lightning import pl

State = tuple[Tensor, list[Tensor]]


def seed_everywhere(seed: int) -> None:
    """`torch.manual_seed`, but for devices in use only: it takes 0.4 ms to prepare those that are not."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seed_for_transforms(seed: int) -> None:
    """`seed_everywhere`, and the generators of Python and NumPy, from which transforms may draw."""
    seed_everywhere(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the one that transforms draw from)


_OF_THE_PROCESS = (torch.default_generator, np.random.mtrand._rand, getattr(random, "_inst", None))


def is_of_the_process(generator: Any) -> bool:
    """Is a random generator one of the process, which is seeded elsewhere?"""
    return any(generator is one for one in _OF_THE_PROCESS)


def new_generator(like: Any, seed: int) -> Any:
    """A random generator of the same kind, from a seed."""
    if isinstance(like, torch.Generator):
        return torch.Generator(like.device).manual_seed(seed)
    if isinstance(like, np.random.Generator):
        return np.random.Generator(type(like.bit_generator)(seed))
    if isinstance(like, np.random.RandomState):
        return np.random.RandomState(seed % 2**32)
    return type(like)(seed)


@contextmanager
def own_draws() -> Iterator[None]:
    """Put all global random generators back afterwards."""
    with torch.random.fork_rng(), pl.utilities.seed.isolate_rng(include_cuda=False):
        yield


def generator_state() -> State:
    """The state of the CPU's generator, and of those of the devices in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.default_generator.get_state(), cuda


def set_generator_state(state: State) -> None:
    """Go back to a state."""
    torch.default_generator.set_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def same_state(left: State, right: State) -> bool:
    """Has nothing been drawn in between?"""
    pairs = zip((left[0], *left[1]), (right[0], *right[1]), strict=False)
    return all(torch.equal(a, b) for a, b in pairs)


class GeneratorTurns:
    """One state of the default generators for each sequence of draws. Made when it is first needed."""

    def __init__(self) -> None:
        self._seed_of: Callable[[int], int] | None = None
        self._states: dict[int, State] = {}
        self._others: dict[int, tuple[Any, Any]] = {}

    def begin(self, seed_of: Callable[[int], int]) -> None:
        """Forget the old sequences.

        Args:
            seed_of: Seed of each new sequence.
        """
        self._seed_of, self._states, self._others = seed_of, {}, {}

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Draw from one sequence of torch's. From the generators as they are before the first `begin`."""
        if self._seed_of is None:
            yield
            return
        if index in self._states:
            set_generator_state(self._states[index])
        else:
            seed_everywhere(self._seed_of(index))
        yield
        self._states[index] = generator_state()

    @contextmanager
    def of_transforms(self, index: int) -> Iterator[None]:
        """The same, and from one sequence each of Python's and NumPy's."""
        if self._seed_of is not None:
            if index in self._others:
                random.setstate(self._others[index][0])
                np.random.set_state(self._others[index][1])  # noqa: NPY002
            else:
                seed_for_transforms(self._seed_of(index))
        with self.of(index):
            yield
        if self._seed_of is not None:
            self._others[index] = random.getstate(), np.random.get_state()  # noqa: NPY002
