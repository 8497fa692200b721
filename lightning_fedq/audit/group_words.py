"""Audit, layer A, for groups: joint law of their symbols, given all that is public, in whole words.

What a group shares hides something only from those who do not hold it. A simulation sees laws, not who knows
them, and a stream that is public, or a flip that is a little too rare, leaves most laws as they were. So the
shipped encoder of its clients is fed with chosen words: of the group's stream, and of each one's private one.
Public streams, and those shared with the server, are drawn as ever and stay. Then

* coordinates with equal values and equal chosen words have to give equal symbols, whatever the public streams
  say there: else these decide what the group's secret should;
* for every shared word the number of private words that give a one follows by bisection. Where a shared word
  counts by its remainder, that is known for all of them, else by another bisection for where it changes: the
  joint law in exact fractions, for all words.

Laws of any two inputs (both ends and the centre), with all inputs of the others, are compared with the claims
about one message, about all messages of the group, about one and the shared word, and about their sum.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fedq.audit.enumeration_words import UnlikeError
from lightning_fedq.audit.views import View
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys, Stream
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, NonPrivate, PrivacyClaim, RoundContext

Words = NDArray[np.uint64]
Law = dict[tuple[int, ...], int]
"""Masses, in units that all laws of a group have in common."""

_DIM = 1024
_MANY = 64
"""Clients, of which the first group is counted."""
_TOP = (1 << 32) - 1
_GRID = np.linspace(0, _TOP, 65).astype(np.uint64)
"""Words between which a symbol changes at most once, for up to five shared bits of a word."""
_ODDS = 1 + Fraction(1, 1 << 40)
"""Relative slack, for the floats of the claim."""


class _Chosen(Stream):
    """One chosen word a coordinate, in every read. Where bytes or bits are read, the word's first ones."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def fill(self, out: NDArray[Any]) -> None:
        if out.dtype == np.uint8 and 8 * len(out) == len(self._words):
            out[:] = np.packbits((self._words >> np.uint64(31)).astype(np.uint8))
        elif len(out) == len(self._words) and out.itemsize <= 4:
            out[:] = (self._words >> np.uint64(32 - 8 * out.itemsize)).astype(out.dtype)
        else:
            raise ValueError(
                f"one word of at most 32 bits a coordinate can be counted, got {len(out)} of {out.dtype}"
            )


class _ChosenRandomness(ClientRandomness):
    """Streams of a group whose shared and private words are chosen, all others as ever."""

    def __init__(self, seed: int, group: tuple[int, ...], shared: Words, private: Words) -> None:
        super().__init__(SeededKeys(seed), group, 0)
        self._shared, self._words = shared, private

    def peer(self, group: tuple[int, ...], purpose: str) -> Stream:
        return _Chosen(self._shared)

    def private(self, client: int, purpose: str) -> Stream:
        return _Chosen(self._words)


class _Encoder:
    """All clients' symbols as a function of words, for both ends of the range and its centre.

    Args:
        mechanism: Mechanism of groups, with one coin a coordinate.
        seed: Seed of the public streams.
    """

    def __init__(self, mechanism: Mechanism, seed: int) -> None:
        one = torch.ones(1, dtype=torch.float64)
        self.mechanism, self._seed = mechanism, seed
        self.group = tuple(range(mechanism.group_sizes(_MANY)[0]))
        self.context = RoundContext(0, (self.group,), (_DIM,), 0 * one, one)
        ends = mechanism.worst_pair(0, self.context, PublicRandomness(SeededKeys(seed), 0))
        values = (*ends, torch.zeros(_DIM))
        self._values = [torch.stack([value] * len(self.group)).float() for value in values]
        self.size = len(self._values)

    def symbols(self, shared: Words, private: Words) -> NDArray[np.int64]:
        """One symbol for every value, client and two words: `(values, clients, len(shared))`."""
        parts = []
        for first in range(0, len(shared), _DIM):
            taken = [np.resize(words[first : first + _DIM], _DIM) for words in (shared, private)]
            rand = _ChosenRandomness(self._seed, self.group, *taken)
            rows = [self.mechanism.encode(value, self.context, rand).symbols for value in self._values]
            parts.append(torch.stack(rows).to(torch.int64).numpy()[:, :, : len(shared) - first])
        return np.concatenate(parts, 2)

    def check_alike(self) -> None:
        """Refuse symbols that hang on more than values, shared and private words.

        Raises:
            UnlikeError: If coordinates differ.
        """
        drawn = np.random.default_rng(self._seed).integers(0, _TOP + 1, (2, _DIM), dtype=np.uint64)
        here, moved = self.symbols(*drawn), self.symbols(*np.roll(drawn, 1, axis=1))
        if not np.array_equal(np.roll(here, 1, axis=2), moved):
            raise UnlikeError(
                f"{type(self.mechanism).__name__}: equal words of a group give other symbols from "
                "coordinate to coordinate, so that public streams decide what the group's stream should"
            )

    def ones(self, shared: Words) -> NDArray[np.int64]:
        """Private words that give a one: `(values, clients, len(shared))`."""
        around = (np.repeat(shared, len(_GRID)), np.tile(_GRID, len(shared)))
        seen = self.symbols(*around).reshape(self.size, len(self.group), len(shared), len(_GRID))
        if int(seen.max()) > 1:
            raise ValueError(f"{self.mechanism} has more than one coin a coordinate")
        total: NDArray[np.int64] = (seen[..., :-1] * np.diff(_GRID).astype(np.int64)).sum(-1) + seen[..., -1]
        value, who, word, place = np.nonzero(seen[..., :-1] != seen[..., 1:])
        low, high = _GRID[place], _GRID[place + 1]  # the symbol at `low` holds up to where it changes
        before = seen[value, who, word, place]
        while len(low) and int((high - low).max()) > 1:
            middle = (low + high) // np.uint64(2)
            found = self.symbols(shared[word], middle)[value, who, np.arange(len(low))]
            same = found == before
            low, high = np.where(same, middle, low), np.where(same, high, middle)
        if len(low):  # from `high` on up to the next point of the grid it is the other one
            rest = (_GRID[place + 1] - high).astype(np.int64)
            np.add.at(total, (value, who, word), np.where(before == 1, -rest, rest))
        return total

    def pieces(self) -> tuple[list[Fraction], NDArray[np.int64]]:
        """Share of the shared words in every piece, and `ones` there: `(values, clients, pieces)`.

        Raises:
            ValueError: If words count neither by their remainders nor in few stretches.
        """
        # the last word may lie beyond the last whole multiple of the group's size, and is not taken then
        drawn = np.random.default_rng(self._seed).integers(0, _TOP, 64, dtype=np.uint64)
        drawn, size = np.concatenate([drawn, _GRID[:-1]]), len(self.group)
        found = self.ones(np.arange(size, dtype=np.uint64))
        if np.array_equal(self.ones(drawn), found[..., drawn % np.uint64(size)]):
            return [Fraction(1, size)] * size, found
        starts, shares = self._stretches()
        found = self.ones(starts)
        place = np.searchsorted(starts, drawn, side="right") - 1
        if not np.array_equal(self.ones(drawn), found[..., place]):
            raise ValueError(
                f"{self.mechanism}: the law of a group changes elsewhere than between few stretches"
            )
        return shares, found

    def _stretches(self) -> tuple[Words, list[Fraction]]:
        """First shared word of every stretch in which `ones` stay, and the share of its words."""
        counts = self.ones(_GRID)
        changed = np.nonzero((counts[..., 1:] != counts[..., :-1]).any((0, 1)))[0]
        low, high = _GRID[changed], _GRID[changed + 1]
        left = counts[..., changed]
        while len(low) and int((high - low).max()) > 1:
            middle = (low + high) // np.uint64(2)
            same = (self.ones(middle) == left).all((0, 1))
            low, high = np.where(same, middle, low), np.where(same, high, middle)
        starts = np.concatenate([np.zeros(1, np.uint64), high])
        ends = pairwise([*starts.tolist(), _TOP + 1])
        return starts, [Fraction(int(end) - int(start), _TOP + 1) for start, end in ends]


def _laws(
    shares: list[Fraction], ones: NDArray[np.int64], victim: int, own: int, others: Sequence[int]
) -> dict[str, Law]:
    """Laws of what each view sees, with value `own` of the victim and `others` of the rest, in order.

    In units of one over 2^32 for every client, times the shares' common denominator.
    """
    whole, common = _TOP + 1, _common(shares)
    laws: dict[str, Law] = {name: {} for name in ("one", "all", "word", "sum")}
    values = [*others[:victim], own, *others[victim:]]
    for piece, share in enumerate(shares):
        chances = [int(ones[value, who, piece]) for who, value in enumerate(values)]
        for bits in product((0, 1), repeat=len(values)):
            mass = int(share * common)
            for bit, chance in zip(bits, chances, strict=True):
                mass *= chance if bit else whole - chance
            mine = bits[victim]
            views = {"one": (mine,), "all": bits, "word": (mine, piece), "sum": (sum(bits),)}
            for name, seen in views.items():
                laws[name][seen] = laws[name].get(seen, 0) + mass
    return laws


_VIEWS = {
    Adversary.EAVESDROPPER: "one",
    Adversary.SERVER: "all",
    Adversary.SERVER_AND_PARTNER: "word",
    Adversary.CLIENT: "word",
    Adversary.SECAGG_SERVER: "sum",
    Adversary.OUTSIDER: "sum",
}


def _common(shares: list[Fraction]) -> int:
    """Common denominator."""
    return math.lcm(*(share.denominator for share in shares))


def _excess(first: Law, second: Law, view: View, unit: int) -> str:
    """Where the first law is beyond the claim, in words. Masses are divided by `unit`."""
    for epsilon in view.epsilons:
        odds = Fraction(float(np.exp(epsilon))) * _ODDS
        more, less = odds.denominator, odds.numerator
        beyond = sum(max(more * p - less * second.get(s, 0), 0) for s, p in first.items())
        delta = float(Fraction(beyond, more * unit))
        if delta > (allowed := view.allowed(epsilon)) + 2.0**-40:
            return f"at epsilon {epsilon:.3g} delta is {delta:.9g}, {allowed:.9g} is claimed"
    return ""


def _share(claim: PrivacyClaim, coordinates: int) -> View:
    loss = claim.loss.spread(coordinates) if claim.compositions == 1 else claim.loss
    return View(claim.adversary.name.lower(), loss, 1, 1, 2)


def enumerate_group_words(mechanism: Mechanism, seeds: tuple[int, ...] = (0, 1)) -> list[str]:
    """Compare the joint law of a group, given the public streams, with the claims. Return contradictions.

    Args:
        mechanism: Mechanism of groups, with one coin a coordinate; three or four members take seconds.
        seeds: Seeds of the public streams.

    Raises:
        ValueError: If words can't be counted.
    """
    name, differs = type(mechanism).__name__, []
    for seed in seeds:
        encoder = _Encoder(mechanism, seed)
        try:
            encoder.check_alike()
        except UnlikeError as unlike:
            return [str(unlike)]
        shares, ones = encoder.pieces()
        unit = _common(shares) * (_TOP + 1) ** len(encoder.group)
        claims = [c for c in mechanism.claims(encoder.context) if not isinstance(c.loss, NonPrivate)]
        views = [(_VIEWS[c.adversary], _share(c, mechanism.num_symbols(encoder.context))) for c in claims]
        rest = product(range(encoder.size), repeat=len(encoder.group) - 1)
        for victim, others in product(encoder.group, rest):
            laws = [_laws(shares, ones, victim, own, others) for own in range(encoder.size)]
            for (one, two), (seen, view) in product(permutations(laws, 2), views):
                if excess := _excess(one[seen], two[seen], view, unit):
                    differs.append(f"{name}, a group against the {view.name}: {excess}")
    return sorted(set(differs))
