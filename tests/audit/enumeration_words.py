"""Audit, layer A, at full word length: the exact law of a shipped encoder that reads one word a coordinate.

A symbol that grows or falls with its word takes each value on an interval of words, and bisection over the
encoder itself, fed with chosen words, finds every end of every interval: the law of the symbol in whole
words, for the real 32 or 52 bits, without counting 2^52 of them. Two clients and two layers are given the
same words and have to give the same symbols. (The second word that the far tails of noise
read moves a symbol inside one first word only.) The laws of two worst inputs are compared with the claim at
several epsilons, and where the specification names the counts, with the counts.
"""

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fedq.audit.views import View
from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys, Stream
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, NonPrivate, RoundContext

_DIM = 1024
_CLIENTS = (0, 1)
_FAR = 4.0
_UNIFORM_BITS = 52
_TOTAL_VARIATION = 2.0**-40
"""What a sampler may be off by, where its claim states a distance: its words are longer than 52 bits."""
_ODDS = 1 + Fraction(1, 1 << 40)
"""Relative slack, for the floats of the claim; all other laws are exact, however large epsilon is."""


class UnlikeError(ValueError):
    """One word gives different symbols where the law has to be the same."""


class _ChosenWords(Stream):
    """Every read gives the same chosen words, one a coordinate. Counts in units of the word that is read."""

    def __init__(self, chosen: NDArray[np.uint64], seen: list[int]) -> None:
        self._chosen, self._seen, self._middle = chosen, seen, np.uint64(1 << 31)

    def fill(self, out: NDArray[Any]) -> None:
        bits = 8 * out.itemsize
        self._seen[0] = min(bits, _UNIFORM_BITS)
        shift = np.uint64(bits - self._seen[0])
        # the second words of far tails, fewer than coordinates: all alike
        whole = len(out) % len(self._chosen) == 0
        words = np.resize(self._chosen, len(out)) if whole else np.full(len(out), self._middle)
        out[:] = (words << shift).astype(out.dtype)


class _ChosenRandomness(ClientRandomness):
    """Clients whose private words are chosen, the same in both layers, and whose dithers are all the same."""

    def __init__(self, chosen: NDArray[np.uint64], dither: int, seen: list[int]) -> None:
        super().__init__(SeededKeys(0), _CLIENTS, 0)
        self._chosen, self._dither, self._seen = chosen, dither, seen

    def private(self, client: int, purpose: str) -> Stream:
        return _ChosenWords(self._chosen, self._seen)

    def shared_with_server(self, client: int, purpose: str) -> Stream:
        return _ChosenWords(np.full(1, self._dither, np.uint64), [0])


def _context() -> RoundContext:
    ones = torch.ones(2, dtype=torch.float64)
    return RoundContext(0, tuple((client,) for client in _CLIENTS), (_DIM, _DIM), 0 * ones, ones)


def exact_law(mechanism: Mechanism, value: float, dither: int = 0) -> dict[int, Fraction]:
    """The probability of every symbol, in whole words.

    Args:
        mechanism: Its encoder reads one private word a coordinate, and the symbol is monotone in it.
        value: The input, in every coordinate.
        dither: Dither of all coordinates, where there is one: an integer of 52 bits.

    Raises:
        ValueError: If some words show that the symbol is not monotone.
        UnlikeError: If one word gives different symbols in two layers, or for two clients.
    """
    update, context, seen = torch.full((len(_CLIENTS), 2 * _DIM), value), _context(), [0]

    def symbols(words: NDArray[np.uint64]) -> NDArray[np.int64]:
        chosen = np.zeros(_DIM, np.uint64)
        chosen[: len(words)] = words
        out = mechanism.encode(update, context, _ChosenRandomness(chosen, dither, seen)).symbols
        layers = out.reshape(2 * len(_CLIENTS), _DIM) if out.shape[1] == 2 * _DIM else out  # blocks have none
        parts = layers[:, : len(words)]
        if not torch.equal(parts, parts[:1].expand_as(parts)):
            raise UnlikeError(f"{type(mechanism).__name__}: clients or layers differ in what a word gives")
        return np.asarray(parts[0].numpy(), np.int64)

    symbols(np.zeros(1, np.uint64))
    top = (1 << seen[0]) - 1
    ends = _interval_ends(symbols, top)
    law: dict[int, Fraction] = {}
    start = 0
    for last, symbol in ends:
        if symbol in law:
            raise ValueError(f"the symbol {symbol} of {mechanism} is not one interval of words")
        law[symbol] = Fraction(last + 1 - start, top + 1)
        start = last + 1
    return law


def _interval_ends(symbols, top):
    """Last word and symbol of every interval, in order."""
    grid = [i * top // (_DIM - 1) for i in range(_DIM)]  # enough to show a symbol that goes up and down
    at = symbols(np.array(grid, np.uint64)).tolist()
    open_ = [c for c in zip(grid[:-1], at[:-1], grid[1:], at[1:], strict=True) if c[1] != c[3]]
    found = [(top, at[-1])]
    while open_:
        # ends that touch are where the symbol changes; all others are halved, in one encoding
        found += [(a, at_a) for a, at_a, b, _ in open_ if b - a == 1]
        wide = [interval for interval in open_ if interval[2] - interval[0] > 1]
        open_ = []
        for first in range(0, len(wide), _DIM):
            part = wide[first : first + _DIM]
            middles = [(a + b) // 2 for a, _, b, _ in part]
            drawn = symbols(np.array(middles, np.uint64)).tolist()
            for (a, at_a, b, at_b), middle, at_middle in zip(part, middles, drawn, strict=True):
                halves = ((a, at_a, middle, at_middle), (middle, at_middle, b, at_b))
                open_ += [half for half in halves if half[1] != half[3]]
    return sorted(found)


def enumerate_words(mechanism: Mechanism, dithers: tuple[int, ...] = (0,)) -> list[str]:
    """Compare the exact laws of the two ends of the range with the claim. Return what contradicts it.

    Args:
        mechanism: Mechanism that `exact_law` can enumerate; claims something for a single message.
        dithers: Public dithers to try, where there are any.
    """
    claim = next(c for c in mechanism.claims(_context()) if c.adversary is Adversary.EAVESDROPPER)
    if isinstance(claim.loss, NonPrivate):
        return []
    loss = claim.loss.spread(2 * _DIM) if claim.compositions == 1 else claim.loss
    view, differs = View("one symbol", loss, 1, 1, 2), []
    for dither in dithers:
        try:
            laws = [exact_law(mechanism, value, dither) for value in (_FAR, -_FAR)]
        except UnlikeError as unlike:
            differs.append(str(unlike))
            continue
        for first, second in (laws, laws[::-1]):
            for epsilon in view.epsilons:
                odds = Fraction(np.exp(epsilon)) * _ODDS
                delta = sum(max(p - odds * second.get(s, Fraction(0)), Fraction(0)) for s, p in first.items())
                slack = (1.0 + np.exp(epsilon)) * _TOTAL_VARIATION if claim.slack.distance else 0.0
                if float(delta) > view.allowed(epsilon) + slack:
                    differs.append(
                        f"{type(mechanism).__name__}: at epsilon {epsilon:.3g} delta is {float(delta):.12g}, "
                        f"{view.allowed(epsilon):.12g} is claimed"
                    )
    return differs
