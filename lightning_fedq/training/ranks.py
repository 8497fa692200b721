"""Many devices: ranks own disjoint clients of a round, and exchange one sum at its end.

To Lightning every rank is a single device: no sampler is swapped, no gradient is averaged, nothing is said
between batches, and ranks may have different numbers of them. What has to be one for all goes over a
process group of their own (`rank_group`): the round's sum, rank 0's files, and anybody's wish to stop. Every
rank steps the server on the same sum, so no model is sent back; that they agree is checked every round.

The sum is one of integers where messages add up to it, else one of the floats that they decode to, which
rounds alike in any order. For robust rules, joint decoders and secure aggregation every rank is given all
messages, in the order of one process, and is the whole server.

All ranks are one trust domain, as the clients of any simulation are: they hold the same keys.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.data.batches import Stack
from lightning_fedq.mechanisms.interface import AbortedRoundError
from lightning_fedq.rounds import RoundEngine, RoundPlan, RoundRecord
from lightning_fedq.training.rank_group import Backend, RankGroup
from lightning_fedq.training.schedule import Schedule

NAME = "fedq_clients"


class DistributedClientsStrategy(pl.strategies.SingleDeviceStrategy):
    """`Trainer(strategy="fedq_clients", devices=N, num_nodes=M)`, launched by Lightning, torchrun or SLURM.

    While a round is open every rank is on its own: what Lightning asks all ranks, each answers itself,
    because they have different numbers of batches and would wait for each other at different places. Rank 0's
    answer counts wherever files are written.

    Args:
        process_group_backend: "gloo" or "nccl" for the round's sum; None goes by the device.
        timeout: After which a rank that does not answer ends the run of the others.

    Attributes:
        num_ranks: Number of ranks, once the Trainer knows where it runs. To Lightning, `world_size` is 1.

    Raises:
        ValueError: If there is no such backend.
    """

    strategy_name = NAME

    def __init__(
        self, process_group_backend: Backend | None = None, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        super().__init__(device="cpu")
        if process_group_backend not in (*get_args(Backend), None):
            raise ValueError(
                f"process_group_backend must be 'gloo', 'nccl' or None, got {process_group_backend!r}"
            )
        self._backend, self._timeout = process_group_backend, timeout
        self.parallel_devices: list[torch.device] | None = None  # the Trainer fills in these three
        self.cluster_environment: Any = None
        self.num_nodes = 1
        self.global_rank = self.local_rank = 0
        self.num_ranks = 1
        self.on_its_own = self.fails = self.has_federation = False
        self.group: RankGroup

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        """This rank's device: of accelerators its own, and of CPUs any.

        Raises:
            ValueError: If the Trainer was given fewer accelerators than there are ranks on this machine.
        """
        devices = self.parallel_devices or [self._root_device]
        if devices[0].type == "cpu":
            return devices[0]
        if self.local_rank >= len(devices):
            raise ValueError(
                f"rank {self.local_rank} of this machine has no device of its own, because the Trainer has "
                f"devices={len(devices)}; give it as many as processes were started on the machine, or "
                'devices="auto"'
            )
        return devices[self.local_rank]

    @property
    def is_global_zero(self) -> bool:
        """Is this the rank that writes files?"""
        return self.global_rank == 0

    @property
    def backend(self) -> Backend:
        """Backend that the round's sum goes by.

        Raises:
            ValueError: If NCCL is to add up what is on no GPU.
        """
        on_gpu = self.root_device.type == "cuda"
        if self._backend == "nccl" and not on_gpu:
            raise ValueError(
                f"NCCL adds up tensors on GPUs, and this rank's device is {self.root_device}; "
                "use process_group_backend='gloo' or None"
            )
        return self._backend or ("nccl" if on_gpu else "gloo")

    def set_world_ranks(self) -> None:
        """Find out which rank this is, once the Trainer knows where it runs."""
        environment = self.cluster_environment
        environment.set_global_rank(environment.node_rank() * self.num_processes + environment.local_rank())
        environment.set_world_size(self.num_nodes * self.num_processes or 1)
        # torchrun, SLURM, MPI and Ray, which start the processes, don't listen and say how many there are
        self.num_ranks = environment.world_size()
        self.global_rank, self.local_rank = environment.global_rank(), environment.local_rank()
        pl.utilities.rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if not environment.creates_processes_externally:
            launcher = pl.strategies.launchers._SubprocessScriptLauncher
            self._launcher = launcher(environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the group.

        Raises:
            ValueError: If another number of processes was launched.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self.set_world_ranks()
        super().setup_environment()
        self.on_its_own = self.fails = self.has_federation = False
        if self.num_ranks > 1:
            self.group = _joined(self)

    def setup(self, trainer: pl.Trainer) -> None:
        if self.num_ranks > 1 and trainer.state.fn == "fit" and not self.has_federation:
            raise ValueError(
                f'strategy="{NAME}" spreads the clients of a Federated callback over its ranks, and the '
                f"Trainer has none: each of {self.num_ranks} ranks would train a model of its own on all "
                "data; add Federated to the callbacks, or use strategy='auto', beside DPSGD with devices=1"
            )
        super().setup(trainer)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, except where a round is about to start, which all ranks do together anyway."""
        if self._asks_others and name != "train_dataloader()":
            self.group.gather(None, f"the barrier {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's object, on all ranks."""
        return self.group.broadcast(obj, "a broadcast", src) if self._asks_others else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Do all ranks, or does any, say so?"""
        votes = self.group.gather(bool(decision), "a vote") if self._asks_others else [bool(decision)]
        return bool(min(votes) if all else max(votes))

    @property
    def _asks_others(self) -> bool:
        return self.num_ranks > 1 and not self.on_its_own and not self.group.is_lost

    def share_counts(self, module: torch.nn.Module) -> None:
        """Give every rank rank 0's integer buffers, which count batches and are in no update."""
        counts = [buffer for buffer in module.buffers() if not buffer.is_floating_point()]
        if not counts:
            return
        flat = torch.cat([buffer.flatten().to(torch.int64) for buffer in counts])
        self.group.share(flat)
        parts = torch.split(flat, [buffer.numel() for buffer in counts])
        for buffer, values in zip(counts, parts, strict=True):
            buffer.copy_(values.view_as(buffer))

    def share(self, module: torch.nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers, those that nobody trains included."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.group.share(tensor.detach())

    def on_exception(self, exception: BaseException) -> None:
        """Ask nobody any more: this rank is about to end, and others may have."""
        self.on_its_own = self.fails = True


_groups: dict[tuple[int, int], RankGroup] = {}
"""The group that this process has joined: one Trainer after another uses it."""


def _joined(strategy: DistributedClientsStrategy) -> RankGroup:
    place, environment = (strategy.global_rank, strategy.num_ranks), strategy.cluster_environment
    if place not in _groups:
        address = str(environment.main_address), int(environment.main_port)
        _groups[place] = RankGroup(*place, address, strategy.backend, strategy._timeout)
    return _groups[place]


atexit.register(_groups.clear)


pl.strategies.StrategyRegistry.register(
    NAME, DistributedClientsStrategy, description="ranks own disjoint clients of a federation"
)


def deal(stacks: Sequence[Stack], num_ranks: int) -> list[list[int]]:
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
        whole: The schedule of one process, cut into the same stacks.
        rank: This one.
        num_ranks: How many there are.

    Attributes:
        places: For each own stack of the round last asked for its place among those of one process.
    """

    def __init__(self, whole: Schedule, rank: int, num_ranks: int) -> None:
        vars(self).update(vars(whole))
        self._kept, self._rank, self._num_ranks = None, rank, num_ranks
        self.places: list[int] = []

    def _new(self, round: int, attempt: int, clients_per_step: int, most: int | None) -> list[Stack]:
        stacks = self.of_all_ranks(round, attempt, clients_per_step, most)
        self.places = deal(stacks, self._num_ranks)[self._rank] if stacks[0].clients else []
        own = [stacks[index] for index in self.places]
        return own or [Stack((), (1,), stacks[0].training_seed, ())]  # nobody's step, for a rank without work


class OtherRankStoppedError(RuntimeError):
    """Signal that another rank has given the open round up, so that it is void for all."""


class Beside(Protocol):
    """What is kept beside the server: `training.round.ClientSide`, steps, logs and states of clients."""

    def share(self) -> Any:
        """This rank's, of the open round. It can be pickled."""

    def take_in(self, shares: Sequence[Any]) -> None:
        """Be where one process would be, by the shares of all ranks."""


class _Kind(NamedTuple):
    """Shape and type of a rank's integer sum, and the interval that its coordinates lie in."""

    shape: torch.Size
    dtype: torch.dtype
    lowest: int
    highest: int

    @classmethod
    def of(cls, symbols: Tensor) -> _Kind:
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
        strategy: Strategy of this rank.
        stacks: Returns the stacks of the round to come, or of the open one, that one process would train.
        **options: See `RoundEngine`.

    Attributes:
        beside: Clients of this rank, whose shares the ranks exchange with their parts of a round, before the
            server steps.
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
        self.beside: Beside | None = None

    def start(self) -> RoundPlan:
        # rank 0, which alone reads the journal, says which attempt it is
        if self.transform is not None or self.tampering is not None:
            raise ValueError(
                "a callback that changes updates, or clients that lie, need all clients in one process; "
                f'leave it out, or use devices=1 in place of strategy="{NAME}"'
            )
        group, number, known = self._strategy.group, self.round + 1, self.ledger.rounds
        state = self.ledger.state(self.weights, self.ranges.center, self.ranges.radius)
        attempt = self.ledger.free_attempt(self.round, self.attempt, state)
        news = self.ledger.state_dict() if self.ledger.rounds != known else None
        found = group.gather((attempt, self._begins_with(), news), f"the start of round {number}")
        self.attempt, first, news = found[0]
        for rank, (_, begins, _) in enumerate(found):
            for name, cure in _CURES.items():
                if begins[name] != first[name]:
                    raise RuntimeError(f"rank {rank} has {name} than rank 0 in round {number}; {cure}")
        if news is not None and group.rank:
            self.ledger.follow(news)
        plan = super().start()
        self._strategy.on_its_own = True
        return plan

    def _begins_with(self) -> dict[str, bytes]:
        """Digests that all ranks must share, or a client would train on two of them, or on none."""
        cut = repr([(stack.clients, stack.batch_sizes) for stack in self._stacks()])
        ranges = torch.cat([self.ranges.center, self.ranges.radius])
        return dict(zip(_CURES, (_digest(self.weights), _digest(ranges), _short(cut.encode())), strict=True))

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
        kind = None if symbols is None else _Kind.of(symbols)
        own = total.received, self._uplink_bits, self._clipped, self.non_finite, self._energy
        share = None if self.beside is None else self.beside.share()
        parts = self._meet(_Part(*own, kind, self._messages, share))
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            raise OtherRankStoppedError(f"rank {parts.index(None)} has given up round {self.round + 1}")
        self._take_in(whole)
        if self.beside is not None:  # now, because a server's optimiser may draw random numbers, too
            self.beside.take_in([part.share for part in whole if part.share is not None])
        return super().finish()

    def abandon(self) -> None:
        # the others are told
        if self.plan is not None and self._strategy.on_its_own and not self._strategy.fails:
            self._meet(None)
        super().abandon()

    def _meet(self, part: _Part | None) -> list[_Part | None]:
        found = self._strategy.group.gather(part, f"the end of round {self.round + 1}")
        self._strategy.on_its_own = False
        return found

    def _take_in(self, parts: Sequence[_Part]) -> None:
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
            theirs = group.all_of(total.floats.parts)
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
    return _short(tensor.detach().cpu().contiguous().numpy().tobytes())


def _short(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def ranks_of(trainer: pl.Trainer) -> DistributedClientsStrategy | None:
    """The trainer's strategy, where it spreads clients over several ranks."""
    found = trainer.strategy
    return found if isinstance(found, DistributedClientsStrategy) and found.num_ranks > 1 else None
