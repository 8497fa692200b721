"""A round as mechanisms see it, and a message."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SMALLEST_RADIUS = 1e-300


@dataclass(frozen=True)
class HandOver:
    """Who takes back whose noise, where clients correlate theirs over rounds (`Mechanism.hands_on`). Public.

    Args:
        since: Round and attempt from which on rounds follow each other without a gap or a repetition.
        before: (client, predecessor) for clients of this round: whose noise of the round before they take
            back. Only predecessors whose message is in that round's sum.
        after: (client, successor) for clients of this round: who takes back their noise in the next one.

    Raises:
        ValueError: If somebody stands twice on one side.
    """

    since: tuple[int, int]
    before: tuple[tuple[int, int], ...] = ()
    after: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for pairs in (self.before, self.after):
            own, others = {client for client, _ in pairs}, {other for _, other in pairs}
            if len(own) != len(pairs) or len(others) != len(pairs):
                raise ValueError(
                    "noise is handed on from one client to one other, so each stands in one pair of a round; "
                    f"got {pairs[:10]}"
                )

    def check(self, round: int, attempt: int, members: frozenset[int]) -> None:
        """Refuse a hand-over that does not belong to a round.

        Raises:
            ValueError: With the cure.
        """
        first, _ = self.since
        repeated = round > first and attempt > 0
        if self.since > (round, attempt) or repeated or (round == first and self.since[1] != attempt):
            raise ValueError(
                f"round {round}, attempt {attempt} is no part of a block of rounds that begins with "
                f"{self.since}: noise that was handed on is taken back once, and a repeated or redrawn round "
                f"begins a new block, since=({round}, {attempt}) and no predecessors"
            )
        if self.before and round == first:
            raise ValueError(f"round {round} is the first of its block, so nobody has handed anything on yet")
        for client, other in (*self.before, *self.after):
            if client not in members or other in members:
                raise ValueError(
                    f"noise goes from a client of one round to one of the next, and client {client} with "
                    f"{other} are not one of this round's cohort and one of another; cohorts that take turns "
                    "(cohort=Cyclic(...)) are disjoint"
                )


@dataclass(frozen=True)
class RoundContext:
    """Public facts of one round, known to everybody before the first client sends anything.

    Args:
        round: Round number, counted from 0.
        groups: The cohort, cut into the groups that share peer randomness. A pair is a group of
            two, a client on its own a group of one; the order inside a group gives each client's rank.
        segments: Length of each segment (layer) of the flat vector; they sum to `dim`.
        center: `(len(segments),)` float64, centre of each segment's range, in units of the update.
        radius: `(len(segments),)` float64, >= 1e-300, half-width of each segment's range, same units.
        attempt: 0, and one more for every repetition of the same round, so that no stream is
            ever used for two payloads.
        num_corrupt: Clients of the cohort that may tell a server behind secure aggregation all they know,
            their own coins and noise included; which ones is open.
        since: Round and attempt from which on the server's rounds follow each other without a gap or a
            repetition, which its own noise may count on (`Mechanism.separation`); None is this round. Clients
            are not told.
        hand_over: Pairs of clients that hand noise on, for mechanisms that ask (`Mechanism.hands_on`); None
            is a round by itself.

    Raises:
        ValueError: If a client stands in two groups, or shapes, radii or numbers make no sense.
    """

    round: int
    groups: tuple[tuple[int, ...], ...]
    segments: tuple[int, ...]
    center: Tensor
    radius: Tensor
    attempt: int = 0
    num_corrupt: int = 0
    since: tuple[int, int] | None = None
    hand_over: HandOver | None = None

    def __post_init__(self) -> None:
        clients = [client for group in self.groups for client in group]
        if len(set(clients)) != len(clients):
            raise ValueError(f"a client may stand in one group only, got groups {self.groups}")
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
            raise ValueError("center and radius must be finite; check the range rule and the global model")
        if not 0 <= self.num_corrupt <= len(clients):
            raise ValueError(
                f"num_corrupt must be in [0, cohort size = {len(clients)}], got {self.num_corrupt}"
            )
        if (smallest := min(radii)) < SMALLEST_RADIUS:  # float32 has no such number
            raise ValueError(
                f"radius must be > 0 in every segment, {SMALLEST_RADIUS:g} at least, so that 1 / radius is a "
                f"number; got {smallest}; set a floor"
            )
        if self.hand_over is not None:
            self.hand_over.check(self.round, self.attempt, frozenset(clients))

    @cached_property
    def dim(self) -> int:
        """Number of coordinates of an update."""
        return sum(self.segments)

    @cached_property
    def cohort(self) -> tuple[int, ...]:
        """The clients of this round, sorted."""
        return tuple(sorted(client for group in self.groups for client in group))

    @cached_property
    def members(self) -> frozenset[int]:
        """The cohort as a set."""
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
    """Integer symbols of one client or a stack, and their bits on the wire.

    Args:
        symbols: `(dim_on_the_wire,)` integers of one client, or `(clients, dim_on_the_wire)` of a
            stack. Summing over clients is meaningful iff the mechanism is homomorphic.
        num_bits: Total length of the clients' bitstreams, side information included.
        num_clipped: Coordinates that lay outside the declared range and were clipped. A diagnostic
            of the simulation: it is not sent, and it is not private.
    """

    symbols: Tensor
    num_bits: int
    num_clipped: int = 0
