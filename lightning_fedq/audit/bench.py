"""The audit's bench: two neighbouring cohorts, encoded and decoded by a mechanism as it is shipped.

The victim is client 0. Each of its coordinates holds one of two inputs, "high" (label 0) or "low" (label 1):
far above and far below the range where a claim is about substitution, far above and zero where it is about
zeroing out. Two worlds with keys of their own see opposite labels, and labels change with every round and
between the two layers, so that a stream that is used twice shows in what two rounds, or two layers, say
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.audit.views import Array
from lightning_fedq.core import Adversary, Mechanism, Neighbours, NonPrivate, PrivacyClaim, RoundContext
from lightning_fedq.randomness import ClientRandomness, PublicRandomness, SeededKeys

Integers = NDArray[np.int64]

CALIBRATION = 1 << 40
"""Rounds from here on choose the edges of bins and are not counted."""
_FAR = 4.0
_BINS = 32
_FEWEST_CALIBRATED = 4000
MOST_CALIBRATIONS = 512


@dataclass(frozen=True)
class Played:
    """One round of one world.

    Args:
        mechanism: Who encoded it.
        context: The round.
        symbols: `(clients, m)` messages of the cohort, in order.
        labels: `(dim,)` which of the two inputs each coordinate of the victim held.
        public: What the server knows.
    """

    mechanism: Mechanism
    context: RoundContext
    symbols: Tensor
    labels: Integers
    public: PublicRandomness

    def labels_of(self, positions: int) -> Integers:
        """Labels of the positions of a view; where symbols are no coordinates, all hold the same."""
        if positions == len(self.labels):
            return self.labels
        return np.full(positions, self.labels[0])

    def message(self) -> Array:
        """The victim's message."""
        return np.asarray(self.symbols[0].numpy(), np.float64)

    def decoded_message(self) -> Array:
        """The victim's message, as the server decodes it."""
        return self.decoded([0])

    def total(self) -> Array:
        """The sum of all messages."""
        return np.asarray(self.symbols.sum(0, dtype=torch.int64).numpy(), np.float64)

    def released(self) -> Array:
        """The decoded sum of all updates."""
        return self.decoded(list(self.context.cohort))

    def others(self) -> Array:
        """The decoded sum less what the last client sent, who is curious and knows its own part."""
        return self.decoded(list(self.context.cohort)[:-1])

    def group(self) -> Array:
        """The victim's message and the sum of those of its group, as one number."""
        members = list(self.context.place(0)[0])
        rest = self.symbols[[c for c in members if c != 0]].sum(0, dtype=torch.int64)
        joint = self.symbols[0].to(torch.int64) * len(members) + rest
        return np.asarray(joint.numpy(), np.float64)

    def decoded(self, clients: list[int]) -> Array:
        """The decoded sum of the updates of some clients."""
        decoded = self.mechanism.decode(self.symbols[clients], clients, self.context, self.public)
        return np.asarray(decoded.numpy(), np.float64)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _classify(values: Array, edges: Array, out: Integers) -> None:
    """How many of the ascending edges are <= each value."""
    for i in range(values.size):
        low, high = 0, edges.size
        while low < high:
            middle = (low + high) // 2
            if edges[middle] <= values[i]:
                low = middle + 1
            else:
                high = middle
        out[i] = low


class Bins:
    """Classes of a number: each value its own where there are few, else 32 that are equally likely.

    Args:
        values: A sample; only the edges depend on it.
    """

    def __init__(self, values: Array) -> None:
        levels = np.unique(values)
        if len(levels) > _BINS:
            levels = np.unique(np.quantile(values, np.arange(_BINS) / _BINS))
        self.edges, self.size = levels[1:], len(levels)
        # pairs of outcomes need coarser classes
        self._width = -(-self.size // 8)
        self.coarse_size = -(-self.size // self._width)

    def fine(self, values: Array) -> Integers:
        """Class of each value, 0 to `size` - 1."""
        out = np.empty(len(values), np.int64)
        _classify(values, self.edges, out)
        return out

    def coarse(self, classes: Integers) -> Integers:
        """Neighbouring classes merged, 0 to `coarse_size` - 1, at most 8."""
        return np.asarray(classes // self._width)


class Bench:
    """Encodes two neighbours again and again.

    Args:
        mechanism: As it is shipped.
        seed: Of the audit's own keys.
        segments: Length of each layer, two of them.
        concentrated: Put the whole difference into the first coordinate; else all coordinates differ.
        num_clients: Size of the cohort.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        seed: int,
        segments: tuple[int, int],
        *,
        concentrated: bool = False,
        num_clients: int = 4,
    ) -> None:
        self.mechanism, self.segments, self.concentrated = mechanism, segments, concentrated
        self.keys = [SeededKeys(2 * seed), SeededKeys(2 * seed + 1)]
        self.dim = sum(segments)
        groups, start = [], 0
        for size in mechanism.group_sizes(num_clients):
            groups.append(tuple(range(start, start + size)))
            start += size
        self.groups = tuple(groups)
        self._range = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        self.claims = {claim.adversary: claim for claim in mechanism.claims(self.context(0))}
        # the others: all high, all low, opposite, zero; the pattern changes from coordinate to coordinate
        high = torch.tensor([1.0, -1.0, 1.0, 0.0]).repeat(self.dim)[: self.dim]
        opposite = torch.tensor([1.0, -1.0, -1.0, 0.0]).repeat(self.dim)[: self.dim]
        self.others = torch.stack([opposite if c % 2 else high for c in range(num_clients)])
        self.num_symbols = self._probe()
        self.aligned = self.num_symbols == self.dim
        """Is there one symbol for every coordinate? Only then do the layers hold opposite inputs."""
        self._labels = [self._labels_of(turned) for turned in (0, 1)]
        self._inputs = [self._updates(labels) for labels in self._labels]

    def context(self, round: int) -> RoundContext:
        """The public part of a round."""
        return RoundContext(round, self.groups, self.segments, *self._range)

    def private_claim(self, adversary: Adversary) -> PrivacyClaim | None:
        """The claim against an adversary, or None if there is no guarantee."""
        claim = self.claims[adversary]
        return None if isinstance(claim.loss, NonPrivate) else claim

    @cached_property
    def neighbours(self) -> Neighbours:
        """What differs; the same in all claims of a mechanism."""
        (kind,) = {claim.neighbours for claim in self.claims.values()}
        return kind

    def _probe(self) -> int:
        context = self.context(CALIBRATION)
        rand = ClientRandomness(self.keys[0], context.cohort, CALIBRATION)
        return int(self.mechanism.encode(self.others.clone(), context, rand).symbols.shape[1])

    def _labels_of(self, turned: int) -> Integers:
        labels = np.full(self.dim, turned, np.int64)
        if self.aligned:
            labels[self.segments[0] :] = 1 - turned
        return labels

    def _updates(self, labels: Integers) -> Tensor:
        updates = self.others.clone()
        low = -_FAR if self.neighbours is Neighbours.SUBSTITUTION else 0.0
        updates[0] = torch.where(torch.from_numpy(labels) == 0, _FAR, low)
        if self.concentrated:
            updates[0, 1:] = 0.0
        return updates

    def play(self, round: int, world: int) -> Played:
        """Encode one round of one world, clipping included: all inputs of the victim lie far outside."""
        context, turned = self.context(round), (round + world) % 2
        rand = ClientRandomness(self.keys[world], context.cohort, round)
        symbols = self.mechanism.encode(self._inputs[turned].clone(), context, rand).symbols
        public = PublicRandomness(self.keys[world], round)
        return Played(self.mechanism, context, symbols, self._labels[turned], public)

    def calibration(self, at_most: int) -> list[Played]:
        """Some rounds that are not counted; `at_most` so many."""
        rounds = 2 * (1 + _FEWEST_CALIBRATED // (2 * (1 if self.concentrated else self.dim)))
        return [self.play(CALIBRATION + 1 + round, 0) for round in range(min(rounds, at_most))]

    @staticmethod
    def packed(played: Played) -> bytes:
        """The victim's message as it goes on the wire."""
        return played.mechanism.code(played.context).pack(played.symbols[0])
