"""Many devices: ranks own disjoint clients of a round, and exchange one integer sum at its end.

To Lightning every rank is a single device: no sampler is swapped, no gradient is averaged, nothing is said
between batches, and ranks may have different numbers of them. What has to be one for all goes over the
process group explicitly: the round's sum, rank 0's files, and anybody's wish to stop. Every rank steps the
server on the same sum, so no model is sent back; that they agree is checked every round.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.core import Mechanism
from lightning_fedq.data.batches import Stack
from lightning_fedq.federation.schedule import Schedule
from lightning_fedq.rounds import RoundEngine, RoundPlan, RoundRecord

NAME = "fedq_clients"


class DistributedClientsStrategy(pl.strategies.SingleDeviceStrategy):
    """`Trainer(strategy="fedq_clients", devices=N, num_nodes=M)`, launched by Lightning, torchrun or SLURM.

    Args:
        process_group_backend: "gloo" or "nccl"; None goes by the device.
        timeout: After which a rank that does not answer ends the run of the others.
    """

    strategy_name = NAME

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        super().__init__(device="cpu")
        self._backend, self._timeout = process_group_backend, timeout
        self.parallel_devices: list[torch.device] | None = None  # the Trainer fills in these three
        self.cluster_environment: Any = None
        self.num_nodes = 1
        self.global_rank = self.local_rank = 0

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices or ())

    @property
    def num_ranks(self) -> int:
        """Number of ranks. To Lightning, `world_size` is 1."""
        return self.num_nodes * self.num_processes or 1

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return self.parallel_devices[self.local_rank] if self.parallel_devices else self._root_device

    @property
    def is_global_zero(self) -> bool:
        """Is this the rank that writes files?"""
        return self.global_rank == 0

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if not environment.creates_processes_externally:
            launcher = pl.strategies.launchers._SubprocessScriptLauncher
            self._launcher = launcher(environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the process group."""
        super().setup_environment()
        environment = self.cluster_environment
        environment.set_global_rank(environment.node_rank() * self.num_processes + environment.local_rank())
        environment.set_world_size(self.num_ranks)
        self.global_rank, self.local_rank = environment.global_rank(), environment.local_rank()
        pl.utilities.rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        if dist.is_initialized():
            return
        os.environ["MASTER_ADDR"] = str(environment.main_address)
        os.environ["MASTER_PORT"] = str(environment.main_port)
        backend = self._backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
        dist.init_process_group(
            backend, rank=self.global_rank, world_size=self.num_ranks, timeout=self._timeout
        )
        atexit.register(_leave)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's object, on all ranks."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def gather(self, obj: Any) -> list[Any]:
        """Everybody's object, on all ranks, in their order."""
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, obj)
        return found

    def share(self, module: torch.nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers, those that nobody trains included."""
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Do all ranks, or does any, say so?"""
        votes = self.gather(bool(decision))
        return bool(min(votes) if all else max(votes))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


pl.strategies.StrategyRegistry.register(
    NAME, DistributedClientsStrategy, description="ranks own disjoint clients of a federation"
)


def deal(stacks: Sequence[Stack], num_ranks: int) -> list[list[int]]:
    """Indices of the stacks of each rank: the heaviest first, each to the rank with the least work."""
    work, hands = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    weights = [len(stack.clients) * sum(stack.batch_sizes) for stack in stacks]
    for index in sorted(range(len(stacks)), key=lambda i: (-weights[i], i)):
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
    """

    def __init__(self, whole: Schedule, rank: int, num_ranks: int) -> None:
        vars(self).update(vars(whole))
        self._kept, self._rank, self._num_ranks = None, rank, num_ranks

    def of_all_ranks(self, round: int, attempt: int, clients_per_step: int, most: int | None) -> list[Stack]:
        """Stacks that one process would train, in its order."""
        return super()._new(round, attempt, clients_per_step, most)

    def _new(self, round: int, attempt: int, clients_per_step: int, most: int | None) -> list[Stack]:
        stacks = self.of_all_ranks(round, attempt, clients_per_step, most)
        own = [stacks[index] for index in deal(stacks, self._num_ranks)[self._rank]]
        return own or [Stack((), (1,), stacks[0].training_seed, ())]  # nobody's step, for a rank without work

    @property
    def rounds_differ(self) -> bool:
        """A rank has other stacks every round."""
        return True


class RankEngine(RoundEngine):
    """The server of every rank: each takes its own clients' messages, and all step on the sum over ranks.

    Args:
        *args: See `RoundEngine`.
        strategy: Of this rank.
        order: Returns the clients of the open round in the order of one process.
        **options: See `RoundEngine`.
    """

    def __init__(
        self,
        *args: Any,
        strategy: DistributedClientsStrategy,
        order: Callable[[], list[int]],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._strategy, self._order = strategy, order

    def start(self) -> RoundPlan:
        """See `RoundEngine.start`. Rank 0, which alone reads the journal, says which attempt it is.

        Raises:
            RuntimeError: If the ranks have different models.
            ValueError: If a callback changes or replaces updates, which takes all clients in one process.
        """
        if self.transform is not None or self.tampering is not None:
            raise ValueError(
                "a callback that changes updates, or clients that lie, need all clients in one process; "
                f'leave it out, or use devices=1 in place of strategy="{NAME}"'
            )
        state = self.ledger.state(self.weights, self.ranges.center, self.ranges.radius)
        free = self.ledger.free_attempt(self.round, self.attempt, state)
        self.attempt, digest = self._strategy.broadcast((free, _digest(self.weights)))
        if digest != _digest(self.weights):
            raise RuntimeError(
                f"rank {self._strategy.global_rank} has another model than rank 0 in round {self.round + 1}; "
                "a callback has changed it on one of them only"
            )
        return super().start()

    def finish(self) -> RoundRecord:
        """Add up over the ranks, and finish as one process would."""
        self._exchange()
        return super().finish()

    def _exchange(self) -> None:
        total = self._sum
        symbols = total.integer_sum
        kind = None if symbols is None else (symbols.shape, symbols.dtype)
        own = (total.received, self._uplink_bits, self._clipped, self._non_finite, kind)
        everybody = self._strategy.gather(own)
        received = {client for part in everybody for client in part[0]}
        order = self._order()
        total.received = [client for client in order if client in received]
        self._uplink_bits, self._clipped = (sum(part[i] for part in everybody) for i in (1, 2))
        named = {client for part in everybody for client in part[3]}
        self._non_finite = [client for client in order if client in named]
        kinds = [part[4] for part in everybody if part[4] is not None]
        if kinds:
            if symbols is None:
                symbols = torch.zeros(kinds[0][0], dtype=kinds[0][1], device=self.weights.device)
            dist.all_reduce(symbols)
            total.integer_sum = symbols
        if self._exact is not None:
            dist.all_reduce(self._exact)


def _digest(weights: Tensor) -> bytes:
    return hashlib.sha256(weights.detach().cpu().contiguous().numpy().tobytes()).digest()[:8]


class Settings(Protocol):
    """The settings of a federation that matter to ranks."""

    mechanism: Mechanism
    secure_aggregation: Any

    @property
    def buffers(self) -> str:
        """Way with buffers that training changes."""

    @property
    def plain_sum(self) -> bool:
        """Does the model depend on the messages through their plain sum only?"""


def check_for_ranks(settings: Settings, rule: object | None) -> None:
    """Refuse what needs every message, or a client's memory, in one place.

    Raises:
        ValueError: With the cure.
    """
    why, mechanism = "", settings.mechanism
    if not mechanism.homomorphic or mechanism.joint:
        why = f"the messages of {mechanism} do not add up to one integer sum"
    elif not settings.plain_sum:
        why = "a weighted mean or a robust rule needs every message in one place"
    elif settings.secure_aggregation is not None:
        why = "the parties of secure aggregation are simulated in one process"
    elif settings.buffers == "local":
        why = "buffers='local' keeps every client's buffers where it trained, and clients change ranks"
    elif rule is not None:
        why = f"{type(rule).__name__} keeps every client's account in one process"
    if why:
        raise ValueError(f'{why}; train in one process (devices=1), or leave it out with strategy="{NAME}"')


def ranks_of(trainer: pl.Trainer) -> DistributedClientsStrategy | None:
    """The trainer's strategy, where it spreads clients over several ranks."""
    found = trainer.strategy
    return found if isinstance(found, DistributedClientsStrategy) and found.num_ranks > 1 else None
