"""Public facts of a round, and the messages of its clients."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SMALLEST_RADIUS = 1e-300


@dataclass(frozen=True)
class HandOver:
    """Public pairs of clients that hand noise on, so that it cancels over rounds (`Mechanism.reuses_noise`).

    Args:
        since: Round and attempt in which the current block began. A block is a run of rounds without a gap or
            a repetition.
        before: (client, predecessor) for clients of this round. The client subtracts noise of its
            predecessor, a client of the previous round whose message is in that round's sum.
        after: (client, successor) for clients of this round. The successor subtracts the client's noise in
            the next round.

    Raises:
        ValueError: If a client appears twice on one side.
    """

    since: tuple[int, int]
    before: tuple[tuple[int, int], ...] = ()
    after: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for pairs in (self.before, self.after):
            own, others = {client for client, _ in pairs}, {other for _, other in pairs}
            if len(own) != len(pairs) or len(others) != len(pairs):
                raise ValueError(f"each client may be in one pair of a round only, got {pairs[:10]}")

    def check(self, round: int, attempt: int, members: frozenset[int]) -> None:
        """Refuse a hand-over that does not belong to a round.

        Noise that was handed on can be subtracted once only. A repeated or redrawn round therefore begins a
        new block, in which no client has a predecessor.

        Args:
            round: Round number.
            attempt: Number of earlier attempts at the round.
            members: Cohort of the round.

        Raises:
            ValueError: If the round is not in the block, if the first round of a block has predecessors, or
                if a pair is not one client of this cohort and one of another.
        """
        first, _ = self.since
        repeated = round > first and attempt > 0
        if self.since > (round, attempt) or repeated or (round == first and self.since[1] != attempt):
            raise ValueError(
                f"round {round}, attempt {attempt} is not part of the block that begins with {self.since}. "
                f"Begin a new block: since=({round}, {attempt}) and no predecessors."
            )
        if self.before and round == first:
            raise ValueError(f"round {round} is the first of its block, so it must have no predecessors")
        for client, other in (*self.before, *self.after):
            if client not in members or other in members:
                raise ValueError(
                    f"a pair must have one client of this cohort, got client {client} with {other}. "
                    "Use disjoint cohorts that take turns: cohort=Cyclic(...)."
                )


def split_groups(clients: Sequence[int], sizes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Split clients into groups of the given sizes, in their order.

    Examples:
        >>> split_groups((6, 1, 4), (2, 1))
        ((6, 1), (4,))
    """
    ends = [0, *itertools.accumulate(sizes)]
    return tuple(tuple(clients[start:end]) for start, end in itertools.pairwise(ends))


@dataclass(frozen=True)
class RoundContext:
    """Public facts of one round, which every party knows before the first client sends anything.

    Args:
        round: Round number, counted from 0.
        groups: Cohort, split into the groups that share peer randomness. A pair is a group of two, and an
            unpaired client a group of one. The order inside a group gives each client's rank.
        segments: Length of each segment (layer) of the flat vector. The lengths sum to `dim`.
        center: `(len(segments),)` float64, centre of each segment's range, in units of the update.
        radius: `(len(segments),)` float64, >= 1e-300, half-width of each segment's range, in units of the
            update.
        attempt: Number of earlier attempts at the same round, so that no stream is used for two payloads.
        num_colluding: Number of unknown clients of the cohort that may reveal everything to a server behind
            secure aggregation, their coins and noise included.
        since: Round and attempt in which the server's current block of rounds, without gaps or repetitions,
            began. The server's noise may rely on it (`Mechanism.separation`). None is this round. Clients do
            not get it.
        hand_over: Pairs of clients that hand noise on, for mechanisms with `Mechanism.reuses_noise`. None for
            a round by itself.

    Raises:
        ValueError: If a client is in two groups, or if shapes, radii or numbers are invalid.
    """

    round: int
    groups: tuple[tuple[int, ...], ...]
    segments: tuple[int, ...]
    center: Tensor
    radius: Tensor
    attempt: int = 0
    num_colluding: int = 0
    since: tuple[int, int] | None = None
    hand_over: HandOver | None = None

    def __post_init__(self) -> None:
        clients = [client for group in self.groups for client in group]
        if len(set(clients)) != len(clients):
            raise ValueError(f"a client may be in one group only, got groups {self.groups}")
        if any(size < 1 for size in self.segments) or not self.segments:
            raise ValueError(f"segments must be non-empty with sizes >= 1, got {self.segments}")
        expected = (len(self.segments),)
        if tuple(self.center.shape) != expected or tuple(self.radius.shape) != expected:
            raise ValueError(
                f"center and radius need one value per segment, shape {expected}, "
                f"got {tuple(self.center.shape)} and {tuple(self.radius.shape)}"
            )
        radii = self.radius.tolist()
        if not all(map(math.isfinite, (*self.center.tolist(), *radii))):
            raise ValueError("center and radius must be finite. Check the range rule and the global model.")
        if not 0 <= self.num_colluding <= len(clients):
            raise ValueError(
                f"num_colluding must be in [0, cohort size = {len(clients)}], got {self.num_colluding}"
            )
        if (smallest := min(radii)) < SMALLEST_RADIUS:  # 1 / radius would be infinite
            raise ValueError(
                f"radius must be at least {SMALLEST_RADIUS:g} in every segment, got {smallest}. "
                "Set the floor of the range rule."
            )
        if self.hand_over is not None:
            self.hand_over.check(self.round, self.attempt, frozenset(clients))

    @cached_property
    def dim(self) -> int:
        """Number of coordinates of an update."""
        return sum(self.segments)

    @cached_property
    def cohort(self) -> tuple[int, ...]:
        """Clients of this round, sorted."""
        return tuple(sorted(client for group in self.groups for client in group))

    @cached_property
    def members(self) -> frozenset[int]:
        """Cohort as a set."""
        return frozenset(self.cohort)

    @cached_property
    def _places(self) -> dict[int, tuple[tuple[int, ...], int]]:
        return {client: (group, rank) for group in self.groups for rank, client in enumerate(group)}

    def place(self, client: int) -> tuple[tuple[int, ...], int]:
        """Return the client's group and its rank in that group.

        Raises:
            KeyError: If the client is not in this round's cohort.
        """
        return self._places[client]

    def expand(self, per_segment: Tensor) -> Tensor:
        """Repeat one value per segment to one value per coordinate, `(dim,)`."""
        sizes = torch.tensor(self.segments, device=per_segment.device)
        return per_segment.repeat_interleave(sizes, output_size=self.dim)


@dataclass(frozen=True)
class Message:
    """Integer symbols of one client or of a batch of clients, and their number of bits.

    Args:
        symbols: `(dim_on_the_wire,)` integers of one client, or `(clients, dim_on_the_wire)` of a batch.
            Symbols may be summed over clients if the mechanism is homomorphic.
        num_bits: Total length of the clients' bitstreams, side information included.
        num_clipped: Number of coordinates outside the range, which were clipped. It is a diagnostic of the
            simulation, not sent and not private.
    """

    symbols: Tensor
    num_bits: int
    num_clipped: int = 0
