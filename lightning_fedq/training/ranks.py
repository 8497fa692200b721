"""Training on several devices: ranks own disjoint clients of a round, and exchange one sum at its end.

Ranks exchange the round's sum, rank 0's files and requests to stop over a separate group (`rank_group`).
Every rank steps the server on the same sum, so no model is sent back. All ranks are compared in every round.

The sum is a sum of integers if the mechanism's messages add up to it. Otherwise it is a sum of decoded
floats, which is rounded alike in any order. For robust rules, joint decoders and secure aggregation every
rank gets all messages, in the order of one process, and does all of the server's work.

All ranks hold the same keys and trust each other, as in any simulation.
"""

from __future__ import annotations

import hashlib
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
    """Assign stacks to ranks, and return the indices of each rank's stacks.

    The stack with the most work comes first, and each goes to the rank with the least work. A client that
    trains alone stays at its own rank, which has its data open, unless this rank then has more than an even
    share of the work.
    """
    work, hands = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    weights = [len(stack.clients) * sum(stack.batch_sizes) for stack in stacks]
    # ties are broken by index, so that all ranks find the same assignment
    for index in sorted(range(len(stacks)), key=lambda i: (-weights[i], i)):
        clients = stacks[index].clients
        rank = clients[0] % num_ranks
        if len(clients) > 1 or num_ranks * (work[rank] + weights[index]) > sum(weights):
            rank = min(range(num_ranks), key=lambda r: (work[r], r))
        work[rank] += weights[index]
        hands[rank].append(index)
    return [sorted(hand) for hand in hands]


class RankSchedule(Schedule):
    """Schedule of one rank: its share of the stacks that one process would train.

    Args:
        schedule: Schedule of one process, with the same stacks.

    Attributes:
        places: Index of each of this rank's stacks among all stacks of the round, for the last request.
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
        # an idle rank has one step without clients
        return own or [Stack((), (1,), stacks[0].training_seed, ())]


class OtherRankStoppedError(RuntimeError):
    """Signal that another rank has given up the open round, so that it counts on no rank."""


class RankState(Protocol):
    """Clients of a rank, with steps, logs and states that are exchanged: a `round.ClientSide`."""

    def share(self) -> Any:
        """Return the state of this rank's clients in the open round. It can be pickled."""

    def merge_ranks(self, shares: Sequence[Any]) -> None:
        """Merge the states of all ranks, so that this rank's state equals that of one process."""


class _Kind(NamedTuple):
    """Shape and dtype of a rank's integer sum, and the range of its values."""

    shape: torch.Size
    dtype: torch.dtype
    lowest: int
    highest: int

    @classmethod
    def from_symbols(cls, symbols: Tensor) -> _Kind:
        lowest, highest = torch.aminmax(symbols)
        return cls(symbols.shape, symbols.dtype, int(lowest), int(highest))


def _dtype_of_sum(kinds: Sequence[_Kind]) -> torch.dtype:
    """Return a dtype of one byte if the sum over the ranks fits, else that of the sums.

    gloo and NCCL can't add integers of two bytes. A partial sum may wrap around, because later terms of the
    sum undo it.
    """
    lowest, highest = sum(kind.lowest for kind in kinds), sum(kind.highest for kind in kinds)
    for dtype in (torch.uint8, torch.int8):
        if torch.iinfo(dtype).min <= lowest and highest <= torch.iinfo(dtype).max:
            return dtype
    return kinds[0].dtype


class _Part(NamedTuple):
    """Contribution of one rank to a round, except its sum."""

    received: list[int]
    uplink_bits: int
    clipped: int
    non_finite: list[int]
    energy: float
    kind: _Kind | None
    messages: list[tuple[list[int], Tensor]]
    share: Any


class RankEngine(RoundEngine):
    """Server of every rank: each receives its own clients' messages, and all step on the sum of all ranks.

    Args:
        *args: Arguments of `RoundEngine`.
        stacks: Returns the stacks of all ranks, for the next round or the open one.
        **options: Keyword arguments of `RoundEngine`.

    Attributes:
        rank_state: Clients of this rank. Ranks exchange their states at the end of a round, before the server
            steps.
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
        self._shared_rounds = -1
        """Rounds of the ledger that all ranks know."""

    def start(self) -> RoundPlan:
        if self.transform is not None or self.tampering is not None:
            raise ValueError(
                "Callbacks that change updates, and Byzantine clients, need all clients in one process. "
                f'Leave them out, or use devices=1 instead of strategy="{NAME}"'
            )
        # rank 0 chooses the attempt and the ledger for all ranks, because only it reads the journal
        group, number = self._strategy.group, self.round + 1
        state = self.ledger.state(self.weights, self.ranges.center, self.ranges.radius)
        attempt = self.ledger.free_attempt(self.round, self.attempt, state)
        is_known = self.ledger.rounds == self._shared_rounds
        ledger = None if is_known else self.ledger.state_dict()
        starts = group.gather((attempt, self._start_digests(), ledger), f"the start of round {number}")
        self.attempt, expected, ledger = starts[0]
        for rank, (_, digests, _) in enumerate(starts):
            for name, cure in _CURES.items():
                if digests[name] != expected[name]:
                    raise RuntimeError(f"Rank {rank} has {name} than rank 0 in round {number}. {cure}")
        if ledger is not None and group.rank:
            self.ledger.follow(ledger)
        plan = super().start()
        self._shared_rounds = self.ledger.rounds
        self._strategy.is_single = True
        return plan

    def _start_digests(self) -> dict[str, bytes]:
        """Return digests that must agree on all ranks, or a client would train on two ranks, or on none."""
        cut = repr([(stack.clients, stack.batch_sizes) for stack in self._stacks()])
        ranges = torch.cat([self.ranges.center, self.ranges.radius])
        digests = _digest(self.weights), _digest(ranges), _short_digest(cut.encode())
        return dict(zip(_CURES, digests, strict=True))

    def _open(self, plan: RoundPlan) -> None:
        super()._open(plan)
        self._messages: list[tuple[list[int], Tensor]] = []

    def _add(self, symbols: Tensor, clients: Sequence[int]) -> None:
        if self._sum.kept == "messages":
            self._messages.append((list(clients), symbols))
        else:
            super()._add(symbols, clients)

    def finish(self) -> RoundRecord:
        """Add the sums of all ranks, and finish the round as one process would.

        Raises:
            OtherRankStoppedError: If another rank has given up the round.
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
        if self.rank_state is not None:  # before the server's optimiser, which may draw random numbers
            self.rank_state.merge_ranks([part.share for part in whole if part.share is not None])
        return super().finish()

    def abandon(self) -> None:
        # None tells the other ranks that this rank has given up the round
        if self.plan is not None and self._strategy.is_single and not self._strategy.fails:
            self._exchange_parts(None)
        super().abandon()

    def _exchange_parts(self, part: _Part | None) -> list[_Part | None]:
        found = self._strategy.group.gather(part, f"the end of round {self.round + 1}")
        self._strategy.is_single = False
        return found

    def _merge_parts(self, parts: Sequence[_Part]) -> None:
        """Merge the contributions of all ranks, so that this rank's state equals that of one process."""
        order = [client for stack in self._stacks() for client in stack.clients]
        place = {client: number for number, client in enumerate(order)}
        self._sum.received = sorted((c for part in parts for c in part.received), key=place.__getitem__)
        self.non_finite = sorted((c for part in parts for c in part.non_finite), key=place.__getitem__)
        self._uplink_bits = sum(part.uplink_bits for part in parts)
        self._clipped = sum(part.clipped for part in parts)
        self._energy = sum(part.energy for part in parts)
        self._add_sums([part.kind for part in parts if part.kind is not None])
        messages = [message for part in parts for message in part.messages]
        # in the order in which one process would receive them
        for clients, rows in sorted(messages, key=lambda message: place[message[0][0]]):
            try:
                self._sum.add(rows, clients)
            except AbortedRoundError as error:
                self._aborted = str(error)
                break
        self._messages = []
        if self._exact is not None:  # for the diagnostics
            self._strategy.group.add(self._exact)
            if self._clipped:  # on any rank
                if self._cut is None:
                    self._cut = torch.zeros_like(self._exact)
                self._strategy.group.add(self._cut)

    def _add_sums(self, kinds: Sequence[_Kind]) -> None:
        """Add the ranks' sums of integers, or their sums of decoded floats.

        Args:
            kinds: Shape, dtype and range of each rank's integer sum. Empty if there are none.
        """
        total, group = self._sum, self._strategy.group
        if kinds:
            symbols = total.integer_sum
            if symbols is None:
                symbols = torch.zeros(kinds[0].shape, dtype=kinds[0].dtype)
            narrow = symbols.to(_dtype_of_sum(kinds))
            group.add(narrow)
            total.integer_sum = narrow.to(symbols.dtype)
        if total.kept == "floats":
            sums_of_ranks = group.allgather(total.floats.parts)
            total.floats.parts.zero_()
            for sums in sums_of_ranks:  # in the order of the ranks, so that all ranks add alike
                total.floats.add_sum(sums)


_CURES = {
    "another model": "A callback has changed it: let it do the same on all ranks",
    "another range": "Give Federated the same ranges on all ranks",
    "other stacks of clients": "Give all ranks the same data, batch_size, limit_train_batches, local_epochs, "
    "local_steps and clients_per_step",
}


def _digest(tensor: Tensor) -> bytes:
    return _short_digest(tensor.detach().cpu().contiguous().numpy().tobytes())


def _short_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


# ---- checks and warnings -----------------------------------------------------------------------------------


def check_for_ranks(rule: object | None, client_indices: Sequence[Tensor]) -> None:
    """Refuse settings that need a client's state in one process: accounts of a batch rule, and streams.

    Raises:
        ValueError: If there is a batch rule, or the data of a client are a stream.
    """
    if rule is not None:
        raise ValueError(
            f"{type(rule).__name__} keeps the accounts of all clients in one process. Use devices=1, or "
            f'leave it out with strategy="{NAME}"'
        )
    streams = [client for client, part in enumerate(client_indices) if not len(part)]
    if streams:
        raise ValueError(
            f"The data of clients {streams[:10]} are streams, which every rank would read separately. "
            f'Use devices=1, or data sets with a length with strategy="{NAME}"'
        )


def check_same_on_all_ranks(group: RankGroup, facts: dict[str, str]) -> None:
    """Refuse ranks that were started with different settings.

    Args:
        facts: Settings that must be equal, in words.

    Raises:
        ValueError: If this rank's settings differ from rank 0's. The message names them.
    """
    theirs = group.broadcast(facts, "the comparison of settings")
    differing = [key for key in facts if facts[key] != theirs[key]]
    if differing:
        raise ValueError(
            f"Rank {group.rank} was started with other settings than rank 0: "
            + ", ".join(f"{key} = {facts[key]} (on rank 0 {theirs[key]})" for key in differing)
            + ". Start all ranks with the same program, arguments and data"
        )


def warn_idle_ranks(stacks: Sequence[Stack], num_ranks: int) -> None:
    """Warn if a round has fewer stacks than there are ranks."""
    if len(stacks) < num_ranks:
        largest = max(len(stack.clients) for stack in stacks)
        rank_zero_warn(
            f"A round has {len(stacks)} stacks of up to {largest} clients, so only {len(stacks)} of "
            f"{num_ranks} ranks have work. Use a smaller clients_per_step, or fewer devices"
        )


def agree_on_start(
    ranks: DistributedClientsStrategy, facts: dict[str, str], client_indices: Sequence[Tensor], ledger: Ledger
) -> None:
    """Check that all ranks have the same settings and partition, and send them rank 0's ledger.

    Args:
        facts: Settings that must be equal, in words.
        client_indices: Sample indices of each client.
        ledger: This rank's ledger. It becomes a copy of that of rank 0, which keeps the journal.

    Raises:
        ValueError: If this rank's settings or data differ from rank 0's. The message names them.
    """
    sizes = [len(part) for part in client_indices]
    theirs = ranks.group.broadcast(sizes, "the sizes of clients")
    for client, (own, other) in enumerate(zip(sizes, theirs, strict=False)):
        if own != other:
            raise ValueError(
                f"Rank {ranks.group.rank} has {own} samples of client {client}, but rank 0 has {other}. "
                "Start all ranks with the same data"
            )
    dealt = hashlib.sha256(b"".join(part.numpy().tobytes() for part in client_indices))
    check_same_on_all_ranks(ranks.group, {**facts, "partition of the samples": dealt.hexdigest()[:16]})
    first = ranks.group.broadcast(ledger.state_dict(), "the ledger at the start")
    if not ranks.is_global_zero:
        ledger.follow(first)
