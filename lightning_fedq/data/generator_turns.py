"""Several sequences of draws from the process's default generators, taken in turns or from secret keys.

Code that draws without a generator of its own, as dropout and random transforms do, then draws in each turn
what it would draw if its sequence were the only one. Python's and NumPy's generators are for transforms of
the data; a training step that draws from them is never mapped over clients.

A seed is no secret, however it was chosen: torch's CPU generator keeps 32 bits of it, which whoever sees the
result can try. `seed_generators` fills whole states from a key of 256 bits.
"""

import functools
import hashlib
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = tuple[Tensor, list[Tensor]]
_APART = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of several generators differ."""


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


_WORDS = 624
"""Words of a Mersenne Twister, which torch's CPU generator, NumPy's and Python's all are."""


@cache
def _blank_state() -> bytes:
    """The state of a new CPU generator, whose words follow 24 bytes and are 64 bits wide.

    Raises:
        RuntimeError: If this version of torch keeps it in another way.
    """
    state: bytes = torch.Generator().manual_seed(5).get_state().numpy().tobytes()
    words = np.frombuffer(state, np.uint64, _WORDS, 24) if len(state) >= 24 + 8 * _WORDS else ()
    if not np.array_equal(words, np.random.RandomState(5).get_state()[1]):  # type: ignore[arg-type,index]
        raise RuntimeError(
            f"torch {torch.__version__} keeps its random generator in a way that is not known here, so that "
            "it can't be filled from a secret; use a version of torch that the package was tested with"
        )
    return state


def seed_generators(key: bytes, *purpose: str | int) -> None:
    """Fill the states of the default generators of torch (all devices in use), NumPy and Python from a key.

    Nothing that is drawn afterwards follows from what was drawn before, or from a seed.

    Args:
        key: 32 bytes. Used once for a purpose.
        purpose: What is drawn. Other purposes draw other numbers.
    """
    blank, size = _blank_state(), 4 * _WORDS
    stream = hashlib.shake_256(key + repr(purpose).encode()).digest(8 + 3 * size + 24)
    own, ours, theirs = (np.frombuffer(stream, np.uint32, _WORDS, 8 + i * size) for i in range(3))
    state = bytearray(blank)
    state[:8] = stream[:8]  # what `torch.initial_seed` tells
    state[24 : 24 + 8 * _WORDS] = own.astype(np.uint64).tobytes()
    torch.default_generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
    np.random.set_state(("MT19937", ours, _WORDS, 0, 0.0))  # noqa: NPY002 (the one that transforms draw from)
    random.setstate((3, (*theirs.tolist(), _WORDS), None))
    rest = stream[-24:]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, generator in enumerate(torch.cuda.default_generators):
            generator.manual_seed((int.from_bytes(rest[:8], "little") + index) % 2**63)
            generator.set_offset(4 * (int.from_bytes(rest[8:16], "little") % 2**60))
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(int.from_bytes(rest[16:], "little") % 2**63)


def states_of_defaults() -> dict[str, object]:
    """States of the default generators that `seed_generators` fills, by name, to compare."""
    state, cuda = generator_state()
    numpy: Any = np.random.get_state()  # noqa: NPY002
    found: dict[str, object] = {
        "torch's generator": state.numpy().tobytes(),
        "NumPy's generator": (numpy[1].tobytes(), numpy[2]),
        "Python's generator": random.getstate(),
    }
    return found | {f"torch's generator on GPU {i}": own.numpy().tobytes() for i, own in enumerate(cuda)}


_OF_THE_PROCESS = (torch.default_generator, np.random.mtrand._rand, getattr(random, "_inst", None))


def is_of_the_process(generator: Any) -> bool:
    """Is a random generator one of the process, which is seeded elsewhere?"""
    return any(generator is one for one in _OF_THE_PROCESS)


def new_generator(like: Any, seed: int) -> Any:
    """A random generator of the same kind, of the library's own class, from a seed."""
    if isinstance(like, torch.Generator):
        return torch.Generator(like.device).manual_seed(seed)
    if isinstance(like, np.random.Generator):
        return np.random.Generator(type(like.bit_generator)(seed))
    if isinstance(like, np.random.RandomState):
        return np.random.RandomState(seed % 2**32)
    return random.Random(seed)


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Classes of random generators: torch's, NumPy's, Python's."""
_OBJECTS, _ENTRIES = 5_000, 10_000
"""Objects that are looked at for generators, and entries above which a container is data."""


def generators_in(*holders: Any) -> list[Any]:
    """Random generators that data sets, transforms and functions hold, in attributes, containers and cells.

    Not those of the process, nor `random.SystemRandom`, which has no seed.

    Example:
        >>> class Turn:
        ...     def __init__(self) -> None:
        ...         self.draws = random.Random(0)
        >>> [type(one).__name__ for one in generators_in({"transforms": [Turn()]})]
        ['Random']
    """
    found, queue, seen = list[Any](), deque(holders), set[int]()
    while queue and len(seen) < _OBJECTS:
        one = queue.popleft()
        if id(one) in seen or isinstance(one, str | bytes | int | float | Tensor | np.ndarray | type | None):
            continue
        seen.add(id(one))
        if isinstance(one, GENERATORS):
            if not is_of_the_process(one) and not isinstance(one, random.SystemRandom):
                found.append(one)
        elif isinstance(one, dict):
            queue.extend(one.values() if len(one) <= _ENTRIES else ())
        elif isinstance(one, list | tuple | set | deque):
            queue.extend(one if len(one) <= _ENTRIES else ())
        elif isinstance(one, types.MethodType):
            queue.extend((one.__self__, one.__func__))
        elif isinstance(one, functools.partial):
            queue.extend((one.func, one.args, one.keywords))
        elif isinstance(one, types.FunctionType):
            kept = [cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType()]
            queue.extend((*kept, one.__defaults__, one.__kwdefaults__))
        elif not isinstance(one, types.ModuleType):
            queue.append(getattr(one, "__dict__", None))
            slots = (name for kind in type(one).__mro__ for name in _get_slots(kind))
            queue.extend(getattr(one, name, None) for name in slots)
    return found


def _get_slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def reseed(generator: Any, seed: int) -> None:
    """Let a generator, or one of a subclass, begin anew from a seed."""
    _put_state(generator, get_state(new_generator(generator, seed)))


def _generator_class(generator: Any) -> Any:
    return next(kind for kind in GENERATORS if isinstance(generator, kind))


def get_state(generator: Any) -> Any:
    """The state of a random generator, or of one of a subclass."""
    kind = _generator_class(generator)
    if kind is np.random.Generator:
        return generator.bit_generator.state
    return kind.getstate(generator) if kind is random.Random else kind.get_state(generator)


def _put_state(generator: Any, state: Any) -> None:
    kind = _generator_class(generator)
    if kind is np.random.Generator:
        generator.bit_generator.state = state
    elif kind is random.Random:
        kind.setstate(generator, state)
    else:
        kind.set_state(generator, state)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Put the default generators of torch (all devices in use), NumPy and Python back afterwards."""
    state, others = generator_state(), (random.getstate(), np.random.get_state())  # noqa: NPY002
    try:
        yield
    finally:
        set_generator_state(state)
        random.setstate(others[0])
        np.random.set_state(others[1])  # noqa: NPY002


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
    """One state of the generators for each sequence of draws. Made when it is first needed.

    Args:
        held: Generators that data sets and transforms hold, beside the default ones.
    """

    def __init__(self, held: Sequence[Any] = ()) -> None:
        self.held = held
        self._seed_of: Callable[[int], int] | None = None
        self._states: dict[int, State] = {}
        self._others: dict[int, tuple[Any, Any, list[Any]]] = {}

    def seed(self, seed: int) -> None:
        """Let all generators from which transforms may draw begin anew from a seed."""
        seed_for_transforms(seed)
        for number, generator in enumerate(self.held, 1):
            reseed(generator, (seed + number * _APART) % 2**63)

    def begin(self, seed_of: Callable[[int], int]) -> None:
        """Forget the old sequences.

        Args:
            seed_of: Seed of each new sequence.
        """
        self._seed_of, self._states, self._others = seed_of, {}, {}

    @contextmanager
    def activate(self, index: int) -> Iterator[None]:
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
    def activate_all(self, index: int) -> Iterator[None]:
        """The same, and from one sequence each of Python's and NumPy's."""
        if self._seed_of is not None:
            if index in self._others:
                random.setstate(self._others[index][0])
                np.random.set_state(self._others[index][1])  # noqa: NPY002
                for generator, state in zip(self.held, self._others[index][2], strict=True):
                    _put_state(generator, state)
            else:
                self.seed(self._seed_of(index))
        with self.activate(index):
            yield
        if self._seed_of is not None:
            states = [get_state(generator) for generator in self.held]
            self._others[index] = random.getstate(), np.random.get_state(), states  # noqa: NPY002
