"""Switch the process's default random generators between several sequences, or seed them from secret keys.

Dropout and random transforms draw from the default generators. Each client has a separate sequence of draws,
which is switched on in the client's turn. So a client gets the draws that it would get without other clients.
Python's and NumPy's generators are for transforms of the data. A training step that draws from them is never
mapped over clients.

A seed is not secret, however it was chosen: torch's CPU generator keeps 32 bits of it, and an adversary who
sees the result can try all of them. So `seed_generators` fills whole generator states from a 256-bit key.
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
    """Seed torch's generators, like `torch.manual_seed`, but on devices in use only, which saves 0.4 ms."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seed_for_transforms(seed: int) -> None:
    """Seed the default generators of torch, Python and NumPy, from which transforms may draw."""
    seed_everywhere(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (transforms draw from this generator)


_WORDS = 624
"""State size of the Mersenne Twister, in 32-bit words, which torch (on CPU), NumPy and Python all use."""


@cache
def _blank_state() -> bytes:
    """Return the state of a new CPU generator of torch: 24 bytes, then the words as 64-bit integers.

    Raises:
        RuntimeError: If this version of torch has another state layout.
    """
    state: bytes = torch.Generator().manual_seed(5).get_state().numpy().tobytes()
    words = np.frombuffer(state, np.uint64, _WORDS, 24) if len(state) >= 24 + 8 * _WORDS else ()
    if not np.array_equal(words, np.random.RandomState(5).get_state()[1]):  # type: ignore[arg-type,index]
        raise RuntimeError(
            f"The generator state of torch {torch.__version__} has an unknown layout, so it can't be filled. "
            "Use a version of torch with which the package was tested."
        )
    return state


def seed_generators(key: bytes, *purpose: str | int) -> None:
    """Fill the states of the default generators of torch (all devices in use), NumPy and Python from a key.

    Later draws do not depend on earlier draws or on a seed.

    Args:
        key: Secret key of 32 bytes, to be used once for each purpose.
        purpose: Names the use of the draws. Different purposes give independent draws.
    """
    blank, size = _blank_state(), 4 * _WORDS
    stream = hashlib.shake_256(key + repr(purpose).encode()).digest(8 + 3 * size + 24)
    for_torch, for_numpy, for_python = (
        np.frombuffer(stream, np.uint32, _WORDS, 8 + i * size) for i in range(3)
    )
    state = bytearray(blank)
    state[:8] = stream[:8]  # the seed that `torch.initial_seed` returns
    state[24 : 24 + 8 * _WORDS] = for_torch.astype(np.uint64).tobytes()
    torch.default_generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
    np.random.set_state(("MT19937", for_numpy, _WORDS, 0, 0.0))  # noqa: NPY002 (transforms draw from it)
    random.setstate((3, (*for_python.tolist(), _WORDS), None))
    rest = stream[-24:]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, generator in enumerate(torch.cuda.default_generators):
            generator.manual_seed((int.from_bytes(rest[:8], "little") + index) % 2**63)
            generator.set_offset(4 * (int.from_bytes(rest[8:16], "little") % 2**60))
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(int.from_bytes(rest[16:], "little") % 2**63)


def states_of_defaults() -> dict[str, object]:
    """Return comparable states of the default generators that `seed_generators` fills, by name."""
    state, cuda = generator_state()
    numpy: Any = np.random.get_state()  # noqa: NPY002
    states: dict[str, object] = {
        "torch's generator": state.numpy().tobytes(),
        "NumPy's generator": (numpy[1].tobytes(), numpy[2]),
        "Python's generator": random.getstate(),
    }
    return states | {f"torch's generator on GPU {i}": gpu.numpy().tobytes() for i, gpu in enumerate(cuda)}


_NOT_OF_TORCH = (np.random.mtrand._rand, getattr(random, "_inst", None))
_OF_THE_PROCESS = (torch.default_generator, *_NOT_OF_TORCH)


def is_of_the_process(generator: Any) -> bool:
    """Return whether a generator is one of the process's default generators, which are seeded separately."""
    return any(generator is default for default in _OF_THE_PROCESS)


def new_generator(like: Any, seed: int) -> Any:
    """Return a new generator of the same library as another one, seeded from `seed`."""
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
"""Limits of the search for generators: number of objects, and entries of a container.

Larger containers count as data.
"""


def generators_in(*holders: Any) -> list[Any]:
    """Find random generators in data sets, transforms and functions: in attributes, containers and closures.

    The process's default generators are left out, and so is `random.SystemRandom`, which has no seed.

    Args:
        *holders: Objects to search.

    Examples:
        >>> class Turn:
        ...     def __init__(self) -> None:
        ...         self.draws = random.Random(0)
        >>> [type(generator).__name__ for generator in generators_in({"transforms": [Turn()]})]
        ['Random']
    """
    generators, queue, seen = list[Any](), deque(holders), set[int]()
    while queue and len(seen) < _OBJECTS:
        obj = queue.popleft()
        if id(obj) in seen or isinstance(obj, str | bytes | int | float | Tensor | np.ndarray | type | None):
            continue
        seen.add(id(obj))
        if isinstance(obj, GENERATORS):
            if not is_of_the_process(obj) and not isinstance(obj, random.SystemRandom):
                generators.append(obj)
        elif isinstance(obj, dict):
            queue.extend(obj.values() if len(obj) <= _ENTRIES else ())
        elif isinstance(obj, list | tuple | set | deque):
            queue.extend(obj if len(obj) <= _ENTRIES else ())
        elif isinstance(obj, types.MethodType):
            queue.extend((obj.__self__, obj.__func__))
        elif isinstance(obj, functools.partial):
            queue.extend((obj.func, obj.args, obj.keywords))
        elif isinstance(obj, types.FunctionType):
            cells = [cell.cell_contents for cell in obj.__closure__ or () if cell != types.CellType()]
            queue.extend((*cells, obj.__defaults__, obj.__kwdefaults__))
        elif not isinstance(obj, types.ModuleType):
            queue.append(getattr(obj, "__dict__", None))
            slots = (name for kind in type(obj).__mro__ for name in _get_slots(kind))
            queue.extend(getattr(obj, name, None) for name in slots)
    return generators


def _get_slots(kind: type) -> Sequence[str]:
    """Return the names in a class's `__slots__`."""
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator, which may be of a subclass."""
    _put_state(generator, get_state(new_generator(generator, seed)))


def _generator_class(generator: Any) -> Any:
    """Return the library's class of a generator, which may be of a subclass."""
    return next(kind for kind in GENERATORS if isinstance(generator, kind))


def get_state(generator: Any) -> Any:
    """Return the state of a random generator, which may be of a subclass."""
    kind = _generator_class(generator)
    if kind is np.random.Generator:
        return generator.bit_generator.state
    return kind.getstate(generator) if kind is random.Random else kind.get_state(generator)


def _put_state(generator: Any, state: Any) -> None:
    """Set the state of a random generator, which may be of a subclass."""
    kind = _generator_class(generator)
    if kind is np.random.Generator:
        generator.bit_generator.state = state
    elif kind is random.Random:
        kind.setstate(generator, state)
    else:
        kind.set_state(generator, state)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the default generators of torch (devices in use), NumPy and Python after the context."""
    state, others = generator_state(), list(map(get_state, _NOT_OF_TORCH))
    try:
        yield
    finally:
        set_generator_state(state)
        for generator, other in zip(_NOT_OF_TORCH, others, strict=True):
            _put_state(generator, other)


def generator_state() -> State:
    """Return the state of torch's CPU generator, and of the generators of the devices in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.default_generator.get_state(), cuda


def set_generator_state(state: State) -> None:
    """Set torch's generators to a state that `generator_state` returned."""
    torch.default_generator.set_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def same_state(left: State, right: State) -> bool:
    """Return whether two states are equal, so that nothing was drawn between them."""
    pairs = zip((left[0], *left[1]), (right[0], *right[1]), strict=False)
    return all(torch.equal(a, b) for a, b in pairs)


class GeneratorTurns:
    """States of the generators for several sequences of draws. A sequence starts when it is first activated.

    Args:
        held: Generators of data sets and transforms, in addition to the default generators.
    """

    def __init__(self, held: Sequence[Any] = ()) -> None:
        self.held = held
        self._seed_of: Callable[[int], int] | None = None
        self._states: dict[int, State] = {}
        self._others: dict[int, list[Any]] = {}

    def seed(self, seed: int) -> None:
        """Seed all generators from which transforms may draw."""
        seed_for_transforms(seed)
        for number, generator in enumerate(self.held, 1):
            reseed(generator, (seed + number * _APART) % 2**63)

    def begin(self, seed_of: Callable[[int], int]) -> None:
        """Drop the old sequences, and set the seeds of new ones.

        Args:
            seed_of: Returns the seed of a sequence by its index.
        """
        self._seed_of, self._states, self._others = seed_of, {}, {}

    @contextmanager
    def activate(self, index: int) -> Iterator[None]:
        """Draw from one sequence of torch's generators within the context.

        Before the first `begin` the generators are left unchanged.
        """
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
        """Draw from one sequence of all generators within the context: torch's, Python's, NumPy's, `held`."""
        others = (*_NOT_OF_TORCH, *self.held)
        if self._seed_of is not None and index in self._others:
            for generator, state in zip(others, self._others[index], strict=True):
                _put_state(generator, state)
        elif self._seed_of is not None:
            self.seed(self._seed_of(index))
        with self.activate(index):
            yield
        if self._seed_of is not None:
            self._others[index] = list(map(get_state, others))
