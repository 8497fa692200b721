"""Many devices: ranks own disjoint clients of a round, and exchange one sum at its end.

What has to be one for all goes over a group of their own (`rank_group`): the round's sum, rank 0's files, and
anybody's wish to stop. Every rank steps the server on the same sum, so no model is sent back; that they agree
is checked every round.

The sum is one of integers where messages add up to it, else one of the floats that they decode to, which
rounds alike in any order. For robust rules, joint decoders and secure aggregation every rank is given all
messages, in the order of one process, and is the whole server.

All ranks are one trust domain, as the clients of any simulation are: they hold the same keys.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.data.batches import Stack
from lightning_fedq.mechanisms.interface import AbortedRoundError
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import RoundEngine, RoundPlan, RoundRecord
from lightning_fedq.training.loops import Schedule
from lightning_fedq.training.rank_group import NAME, DistributedClientsStrategy, RankGroup


def assign_stacks(stacks: Sequence[Stack], num_ranks: int) -> list[list[int]]:
    """Indices of the stacks of each rank: the heaviest first, each to the rank with the least work.

    A client that trains alone stays at its own rank, which has its data open, while that has no more than an
    even share of the work.
    """
    work, hands = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    weights = [len(stack.clients) * sum(stack.batch_sizes) for stack in stacks]
    # ties by index, so that all ranks deal alike
    for index in sorted(range(len(stacks)), key=lambda i: (-weights[i], i)):
        clients = stacks[index].clients
        rank = clients[0] % num_ranks
        if len(clients) > 1 or num_ranks * (work[rank] + weights[index]) > sum(weights):
            rank = min(range(num_ranks), key=lambda r: (work[r], r))
        work[rank] += weights[index]
        hands[rank].append(index)
    return [sorted(hand) for hand in hands]


class RankSchedule(Schedule):
    """Those stacks of a round that this rank trains, of the ones that one process would train.

    Args:
        schedule: The schedule of one process, cut into the same stacks.

    Attributes:
        places: For each own stack of the round last asked for its place among those of one process.
    """

    def __init__(self, schedule: Schedule, rank: int, num_ranks: int) -> None:
        vars(self).update(vars(schedule))
        self._last_stacks, self._rank, self._num_ranks = None, rank, num_ranks
        self.places: list[int] = []

    def _make_stacks(
        self, round: int, attempt: int, clients_per_step: int, max_batches: int | None
    ) -> list[Stack]:
        stacks = self.global_stacks(round, attempt, clients_per_step, max_batches)
        self.places = assign_stacks(stacks, self._num_ranks)[self._rank] if stacks[0].clients else []
        own = [stacks[index] for index in self.places]
        return own or [Stack((), (1,), stacks[0].training_seed, ())]  # nobody's step, for a rank without work


class OtherRankStoppedError(RuntimeError):
    """Signal that another rank has given the open round up, so that it is void for all."""


class RankState(Protocol):
    """Clients of a rank, whose steps, logs and states are kept beside the server: a `round.ClientSide`."""

    def share(self) -> Any:
        """This rank's, of the open round. It can be pickled."""

    def merge_ranks(self, shares: Sequence[Any]) -> None:
        """Be where one process would be, by the shares of all ranks."""


class _Kind(NamedTuple):
    """Shape and type of a rank's integer sum, and the interval that its coordinates lie in."""

    shape: torch.Size
    dtype: torch.dtype
    lowest: int
    highest: int

    @classmethod
    def from_symbols(cls, symbols: Tensor) -> _Kind:
        lowest, highest = torch.aminmax(symbols)
        return cls(symbols.shape, symbols.dtype, int(lowest), int(highest))


def _dtype_of_sum(kinds: Sequence[_Kind]) -> torch.dtype:
    """A type of one byte, if the sum over the ranks fits: gloo and NCCL add up no integers of two.

    On the way from rank to rank a partial sum may wrap around, which the rest of the sum undoes.
    """
    lowest, highest = sum(kind.lowest for kind in kinds), sum(kind.highest for kind in kinds)
    for dtype in (torch.uint8, torch.int8):
        if torch.iinfo(dtype).min <= lowest and highest <= torch.iinfo(dtype).max:
            return dtype
    return kinds[0].dtype


class _Part(NamedTuple):
    """Contribution of one rank to a round, beside its sum."""

    received: list[int]
    uplink_bits: int
    clipped: int
    non_finite: list[int]
    energy: float
    kind: _Kind | None
    messages: list[tuple[list[int], Tensor]]
    share: Any


class RankEngine(RoundEngine):
    """The server of every rank: each takes its own clients' messages, and all step on those of all ranks.

    Args:
        *args: See `RoundEngine`.
        stacks: Returns the stacks of the round to come, or of the open one, that one process would train.
        **options: See `RoundEngine`.

    Attributes:
        rank_state: Clients of this rank, whose shares the ranks exchange with their parts of a round, before
            the server steps.
    """

    def __init__(
        self,
        *args: Any,
        strategy: DistributedClientsStrategy,
        stacks: Callable[[], list[Stack]],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._strategy, self._stacks = strategy, stacks
        self.rank_state: RankState | None = None
        self._told = -1

    def start(self) -> RoundPlan:
        # rank 0, which alone reads the journal, says which attempt it is
        if self.transform is not None or self.tampering is not None:
            raise ValueError(
                "a callback that changes updates, or clients that lie, need all clients in one process; "
                f'leave it out, or use devices=1 in place of strategy="{NAME}"'
            )
        group, number = self._strategy.group, self.round + 1
        state = self.ledger.state(self.weights, self.ranges.center, self.ranges.radius)
        attempt = self.ledger.free_attempt(self.round, self.attempt, state)
        news = self.ledger.state_dict() if self.ledger.rounds != self._told else None
        found = group.gather((attempt, self._start_digests(), news), f"the start of round {number}")
        self.attempt, first, news = found[0]
        for rank, (_, begins, _) in enumerate(found):
            for name, cure in _CURES.items():
                if begins[name] != first[name]:
                    raise RuntimeError(f"rank {rank} has {name} than rank 0 in round {number}; {cure}")
        if news is not None and group.rank:
            self.ledger.follow(news)
        plan = super().start()
        self._told = self.ledger.rounds
        self._strategy.is_single = True
        return plan

    def _start_digests(self) -> dict[str, bytes]:
        """Digests that all ranks must share, or a client would train on two of them, or on none."""
        cut = repr([(stack.clients, stack.batch_sizes) for stack in self._stacks()])
        ranges = torch.cat([self.ranges.center, self.ranges.radius])
        return dict(
            zip(_CURES, (_digest(self.weights), _digest(ranges), _short_digest(cut.encode())), strict=True)
        )

    def _open(self, plan: RoundPlan) -> None:
        super()._open(plan)
        self._messages: list[tuple[list[int], Tensor]] = []

    def _add(self, symbols: Tensor, clients: Sequence[int]) -> None:
        if self._sum.kept == "messages":
            self._messages.append((list(clients), symbols))
        else:
            super()._add(symbols, clients)

    def finish(self) -> RoundRecord:
        """Add up over the ranks, and finish as one process would.

        Raises:
            OtherRankStoppedError: If another rank has given the round up.
        """
        total = self._sum
        symbols = total.integer_sum
        kind = None if symbols is None else _Kind.from_symbols(symbols)
        own = total.received, self._uplink_bits, self._clipped, self.non_finite, self._energy
        share = None if self.rank_state is None else self.rank_state.share()
        parts = self._exchange_parts(_Part(*own, kind, self._messages, share))
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            raise OtherRankStoppedError(f"rank {parts.index(None)} has given up round {self.round + 1}")
        self._merge_parts(whole)
        if self.rank_state is not None:  # now, because a server's optimiser may draw random numbers, too
            self.rank_state.merge_ranks([part.share for part in whole if part.share is not None])
        return super().finish()

    def abandon(self) -> None:
        # the others are told
        if self.plan is not None and self._strategy.is_single and not self._strategy.fails:
            self._exchange_parts(None)
        super().abandon()

    def _exchange_parts(self, part: _Part | None) -> list[_Part | None]:
        found = self._strategy.group.gather(part, f"the end of round {self.round + 1}")
        self._strategy.is_single = False
        return found

    def _merge_parts(self, parts: Sequence[_Part]) -> None:
        total, group = self._sum, self._strategy.group
        order = [client for stack in self._stacks() for client in stack.clients]
        place = {client: number for number, client in enumerate(order)}
        total.received = sorted((c for part in parts for c in part.received), key=place.__getitem__)
        self.non_finite = sorted((c for part in parts for c in part.non_finite), key=place.__getitem__)
        self._uplink_bits = sum(part.uplink_bits for part in parts)
        self._clipped = sum(part.clipped for part in parts)
        self._energy = sum(part.energy for part in parts)
        kinds = [part.kind for part in parts if part.kind is not None]
        if kinds:
            symbols = total.integer_sum
            if symbols is None:
                symbols = torch.zeros(kinds[0].shape, dtype=kinds[0].dtype)
            narrow = symbols.to(_dtype_of_sum(kinds))
            group.add(narrow)
            total.integer_sum = narrow.to(symbols.dtype)
        if total.kept == "floats":
            theirs = group.allgather(total.floats.parts)
            total.floats.parts.zero_()
            for sums in theirs:  # by rank, so that all ranks add alike
                total.floats.add_sum(sums)
        messages = [message for part in parts for message in part.messages]
        for clients, rows in sorted(messages, key=lambda message: place[message[0][0]]):
            try:
                total.add(rows, clients)
            except AbortedRoundError as error:
                self._aborted = str(error)
                break
        self._messages = []
        if self._exact is not None:
            group.add(self._exact)


_CURES = {
    "another model": "a callback has changed it; let it do the same on all",
    "another range": "give Federated the same ranges on all ranks",
    "other stacks of clients": "give all ranks the same data, batch_size, limit_train_batches, local_epochs, "
    "local_steps and clients_per_step",
}


def _digest(tensor: Tensor) -> bytes:
    return _short_digest(tensor.detach().cpu().contiguous().numpy().tobytes())


def _short_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


# ---- what is refused, and said -----------------------------------------------------------------------------


WORTH = 60.0
"""Seconds of training from which on idle cores are worth a word."""


def check_for_ranks(rule: object | None, client_indices: Sequence[Tensor]) -> None:
    """Refuse what needs a client's memory in one place: accounts, and streams that go on where they stopped.

    Raises:
        ValueError: With the cure.
    """
    if rule is not None:
        raise ValueError(
            f"{type(rule).__name__} keeps every client's account in one process; train in one process "
            f'(devices=1), or leave it out with strategy="{NAME}"'
        )
    streams = [client for client, part in enumerate(client_indices) if not len(part)]
    if streams:
        raise ValueError(
            f"the data of clients {streams[:10]} are streams, and every rank would read its own copy; "
            f'train in one process (devices=1), or use data sets with a length with strategy="{NAME}"'
        )


def check_same_on_all_ranks(group: RankGroup, facts: dict[str, str]) -> None:
    """Refuse ranks that were started with different settings.

    Args:
        facts: What must be the same, in words.

    Raises:
        ValueError: On every rank that differs, naming what does.
    """
    theirs = group.broadcast(facts, "the comparison of settings")
    differing = [key for key in facts if facts[key] != theirs[key]]
    if differing:
        raise ValueError(
            f"rank {group.rank} was started with other settings than rank 0: "
            + ", ".join(f"{key} = {facts[key]} (on rank 0 {theirs[key]})" for key in differing)
            + "; start all ranks with the same program, arguments and data"
        )


def warn_idle_ranks(stacks: Sequence[Stack], num_ranks: int) -> None:
    """Warn where a round has fewer stacks than there are ranks."""
    if len(stacks) < num_ranks:
        most = max(len(stack.clients) for stack in stacks)
        rank_zero_warn(
            f"a round has {len(stacks)} stacks of up to {most} clients, so only {len(stacks)} of {num_ranks} "
            "ranks have work; use a smaller clients_per_step, or fewer devices"
        )


def idle_cores(seconds: float, num_stacks: int) -> str | None:
    """Say what more ranks would have brought a fit in one process on a CPU, if that is worth a word.

    Args:
        seconds: For which its clients trained.
        num_stacks: Stacks of a round, which are what ranks share.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    ranks = min(cores // threads, num_stacks)
    if seconds < WORTH or ranks < 2:
        return None
    return (
        f"clients trained for {seconds:.0f} s on {threads} of {cores} cores; with {ranks} ranks, "
        f'Trainer(strategy="{NAME}", devices={ranks}), it is {seconds / ranks:.0f} s at best'
    )


def agree_on_start(
    ranks: DistributedClientsStrategy, facts: dict[str, str], client_indices: Sequence[Tensor], ledger: Ledger
) -> None:
    """All ranks have the same federation and data, and rank 0, which keeps the journal, the ledger.

    Args:
        facts: Facts that must be the same, in words.
        ledger: Ledger, which follows that of rank 0.

    Raises:
        ValueError: On every rank that differs, naming what does.
    """
    sizes = [len(part) for part in client_indices]
    theirs = ranks.group.broadcast(sizes, "the sizes of clients")
    for client, (own, other) in enumerate(zip(sizes, theirs, strict=False)):
        if own != other:
            raise ValueError(
                f"rank {ranks.group.rank} has {own} samples of client {client}, and rank 0 has {other}; "
                "start all ranks with the same data"
            )
    dealt = hashlib.sha256(b"".join(part.numpy().tobytes() for part in client_indices))
    check_same_on_all_ranks(ranks.group, {**facts, "who holds which samples": dealt.hexdigest()[:16]})
    first = ranks.group.broadcast(ledger.state_dict(), "the ledger at the start")
    if not ranks.is_global_zero:
        ledger.follow(first)
