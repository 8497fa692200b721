"""Processes that share a federation: the group over which they communicate, and their strategy.

The group is not the default group of `torch.distributed`, so Lightning, torchmetrics and the user's module
see a single process. Otherwise they would add up metrics that every rank has in full, or wait for a rank that
trains its own clients. Objects always use gloo, which notices at once when a rank has ended. Tensors on a GPU
use NCCL, unless the user chooses gloo.

For Lightning every rank is a single device: it replaces no sampler, averages no gradients and exchanges
nothing between batches, and ranks may have different numbers of batches.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, get_args
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from lightning_fedq._lightning import pl

Backend = Literal["gloo", "nccl"]


_HEAD = 2**14
"""Bytes of a message that contains an object's length and start, so that most objects need one exchange."""


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _store(rank: int, size: int, address: tuple[str, int], timeout: timedelta) -> Any:
    """Return the store in which ranks find each other. On one machine it listens to this machine only.

    Ranks exchange pickles, which can run any code, and torch listens to all hosts by default. A store of the
    launcher is used if there is one (of torchrun, or Ray's default process group). If the address is another
    machine's, torch makes the store.
    """
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (rank, size):
        return _get_default_store()
    if not _is_loopback(address[0]) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(rendezvous("env://", rank, size, timeout=timeout))[0]  # type: ignore[no-untyped-call]
    tcp_store: Any = torch._C._distributed_c10d.TCPStore
    if rank:
        return tcp_store("127.0.0.1", address[1], size, False, timeout)
    with socket.create_server(("127.0.0.1", address[1])) as listening:
        descriptor = os.dup(listening.fileno())  # the store closes it
    return tcp_store("127.0.0.1", address[1], size, True, timeout, master_listen_fd=descriptor)


def _attempt_name(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Agree with all ranks on a name that no earlier attempt has used.

    torchrun starts ranks again with the store of those that were killed, and counts attempts for each machine
    alone. Each rank writes a new token, and then the tokens that it reads. If all have read the same tokens,
    this rank's new one is among them, so no other rank's is old.
    """
    tokens, readings = ([f"fedq {kind} {other}" for other in range(size)] for kind in ("token", "reading"))
    store.set(tokens[rank], uuid4().hex)
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        store.wait(tokens)
        reading = b" ".join(map(store.get, tokens))
        store.set(readings[rank], reading)
        store.wait(readings)
        if set(map(store.get, readings)) == {reading}:
            return hashlib.sha256(reading).hexdigest()
        time.sleep(0.01)
    raise dist.DistStoreError(f"The store has no new token of another rank after {timeout}")


def _device(gloo_group: Any, address: tuple[str, int]) -> Any:
    """Return gloo's device: the interface of GLOO_SOCKET_IFNAME, or the one on the route to rank 0.

    Torch would use the address of this machine's name, which is a loopback address on many machines.
    """
    if _is_loopback(address[0]):
        return gloo_group.create_device(hostname="127.0.0.1")
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo_group.create_device(interface=interface.split(",")[0])
    family, kind, _, _, there = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(there)  # chooses the route, and sends nothing
        return gloo_group.create_device(hostname=asking.getsockname()[0])


class RankLostError(RuntimeError):
    """Error of a rank that gets no answer from another rank."""


class RankGroup:
    """Exchange of objects and sums between the ranks of a federation. Every rank makes the same calls.

    Args:
        address: Host and port on which rank 0 listens.
        backend: Backend for tensors. NCCL accepts tensors on a GPU only.
        timeout: Time after which a rank that does not answer counts as lost.

    Attributes:
        is_lost: Whether another rank failed to answer. Then no rank is asked any more.

    Raises:
        RankLostError: In every method, if another rank has ended or does not answer. Other reasons for which
            a group can't be made (address in use, wrong interface) are torch's errors.
    """

    def __init__(
        self, rank: int, size: int, address: tuple[str, int], backend: Backend, timeout: timedelta
    ) -> None:
        self.rank, self.size, self.backend = rank, size, backend
        self.is_lost = False
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address[0], str(address[1])
        with self._answers(dist.DistError if rank else dist.DistStoreError):  # rank 0 may fail to listen
            store = _store(rank, size, address, timeout)
        store.set_timeout(timeout)
        gloo_group: Any = dist.ProcessGroupGloo
        gloo = gloo_group._Options()
        gloo._timeout, gloo._devices = timeout, [_device(gloo_group, address)]
        with self._answers():
            store = PrefixStore(_attempt_name(store, rank, size, timeout), store)
            self._objects: Any = gloo_group(PrefixStore("fedq objects", store), rank, size, gloo)
        self._tensors: Any = self._objects
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            prefix = PrefixStore("fedq tensors", store)
            self._tensors = dist.ProcessGroupNCCL(prefix, rank, size, options)
        self._store = store

    @contextmanager
    def _answers(self, unanswered: type[RuntimeError] = RuntimeError) -> Iterator[None]:
        try:
            yield
        except unanswered as error:
            self.is_lost = True
            raise RankLostError(
                f"Rank {self.rank} of {self.size} gets no answer from another rank. See that rank's output, "
                f"and resume with fit(ckpt_path=...) from the last checkpoint: {error}"
            ) from error

    def gather(self, obj: Any, place: str) -> list[Any]:
        """Return the objects of all ranks, in the order of the ranks.

        Args:
            obj: Object that can be pickled. Ranks trust each other.
            place: Point of the run, in words, which must be the same on all ranks.

        Raises:
            RuntimeError: If another rank is at another point of the run.
        """
        answers = self._gather((place, obj))
        for rank, (where, _) in enumerate(answers):
            if where != place:
                raise RuntimeError(
                    f"Rank {rank} is at {where!r} while rank {self.rank} is at {place!r}. Let all ranks do "
                    "the same, and stop them together"
                )
        return [other for _, other in answers]

    def _gather(self, obj: Any) -> list[Any]:
        data = pickle.dumps(obj)
        head = torch.zeros(_HEAD, dtype=torch.uint8)
        _write(head, len(data).to_bytes(8, "little") + data[: _HEAD - 8])
        with self._answers():
            heads = _allgather(self._objects, head, self.size)
            sizes = [int.from_bytes(part[:8].numpy().tobytes(), "little") for part in heads]
            parts, longest = [part[8:] for part in heads], max(sizes) + 8 - _HEAD
            if longest > 0:
                rest = torch.zeros(longest, dtype=torch.uint8)  # padded: tensors of one shape are gathered
                _write(rest, data[_HEAD - 8 :])
                rests = _allgather(self._objects, rest, self.size)
                parts = [torch.cat(both) for both in zip(parts, rests, strict=True)]
        return [pickle.loads(part[:size].numpy().data) for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, obj: Any, place: str, src: int = 0) -> Any:
        """Return the object of rank `src` on all ranks. See `gather`."""
        return self.gather(obj if self.rank == src else None, place)[src]

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of the ranks. All have the same shape."""
        with self._answers(), self._within_reach(tensor) as shown:
            return [part.to(tensor.device) for part in _allgather(self._tensors, shown, self.size)]

    def add(self, tensor: Tensor) -> None:
        """Add a tensor up over the ranks, in place. Sums of integers are exact."""
        with self._answers(), self._within_reach(tensor) as shown:
            self._tensors.allreduce([shown]).wait()

    def share(self, tensor: Tensor) -> None:
        """Overwrite a tensor with rank 0's values, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._answers(), self._within_reach(tensor) as shown:
            self._tensors.broadcast([shown], options).wait()

    @contextmanager
    def _within_reach(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensor, or a copy on the backend's device that is written back afterwards."""
        wanted = "cuda" if self.backend == "nccl" else "cpu"
        if tensor.device.type == wanted and tensor.is_contiguous():
            yield tensor
            return
        device = torch.device("cuda", torch.cuda.current_device()) if wanted == "cuda" else wanted
        copy = tensor.to(device, copy=True).contiguous()
        yield copy
        tensor.copy_(copy)


def _allgather(group: Any, tensor: Tensor, size: int) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(size)]
    group.allgather([found], [tensor]).wait()
    return found


def _write(tensor: Tensor, data: bytes) -> None:
    """Write bytes to the beginning of a uint8 tensor."""
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


# ---- strategy for Lightning --------------------------------------------------------------------------------


NAME = "fedq_clients"


class DistributedClientsStrategy(pl.strategies.SingleDeviceStrategy):
    """`Trainer(strategy="fedq_clients", devices=N, num_nodes=M)`, launched by Lightning, torchrun or SLURM.

    While a round is open, each rank answers Lightning's questions to all ranks alone. Ranks have different
    numbers of batches, so they would wait for each other at different places. Rank 0's answer counts for
    files.

    Args:
        process_group_backend: "gloo" or "nccl" for the round's sum. None chooses by the device.
        timeout: Time after which the other ranks end if a rank does not answer.

    Attributes:
        num_ranks: Number of ranks, once the Trainer knows its environment. For Lightning `world_size` is 1.

    Raises:
        ValueError: If the backend is neither of these.
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
        self.is_single = self.fails = self.has_federation = False
        self.group: RankGroup

    @property
    def num_processes(self) -> int:
        """Number of ranks on this machine."""
        return len(self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        """Device of this rank: its own accelerator, or the CPU.

        Raises:
            ValueError: If the Trainer was given fewer accelerators than there are ranks on this machine.
        """
        devices = self.parallel_devices or [self._root_device]
        if devices[0].type == "cpu":
            return devices[0]
        if self.local_rank >= len(devices):
            raise ValueError(
                f"Rank {self.local_rank} of this machine has no device, because the Trainer has "
                f"devices={len(devices)}. Set devices to the number of processes on this machine, or use "
                'devices="auto"'
            )
        return devices[self.local_rank]

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes files."""
        return self.global_rank == 0

    @property
    def backend(self) -> Backend:
        """Backend for the round's sum.

        Raises:
            ValueError: If NCCL was chosen, but this rank's device is not a GPU.
        """
        on_gpu = self.root_device.type == "cuda"
        if self._backend == "nccl" and not on_gpu:
            raise ValueError(
                f"NCCL needs tensors on GPUs, but this rank's device is {self.root_device}. "
                "Use process_group_backend='gloo' or None"
            )
        return self._backend or ("nccl" if on_gpu else "gloo")

    def set_world_ranks(self) -> None:
        """Set the number of ranks and this rank's number, once the Trainer knows its environment."""
        environment = self.cluster_environment
        environment.set_global_rank(environment.node_rank() * self.num_processes + environment.local_rank())
        environment.set_world_size(self.num_nodes * self.num_processes or 1)
        # launchers such as torchrun, SLURM, MPI and Ray ignore the values set above, and know the number
        self.num_ranks = environment.world_size()
        self.global_rank, self.local_rank = environment.global_rank(), environment.local_rank()
        pl.utilities.rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if not environment.creates_processes_externally:
            launcher = pl.strategies.launchers._SubprocessScriptLauncher
            self._launcher = launcher(environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the group of the ranks.

        Raises:
            ValueError: If the number of launched processes differs from the Trainer's.
        """
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self.set_world_ranks()
        super().setup_environment()
        self.is_single = self.fails = self.has_federation = False
        if self.num_ranks > 1:
            place = self.global_rank, self.num_ranks
            if place not in _groups:
                address = str(environment.main_address), int(environment.main_port)
                _groups[place] = RankGroup(*place, address, self.backend, self._timeout)
            self.group = _groups[place]

    def setup(self, trainer: pl.Trainer) -> None:
        if self.num_ranks > 1 and trainer.state.fn == "fit" and not self.has_federation:
            raise ValueError(
                f'strategy="{NAME}" needs a Federated callback, or each of {self.num_ranks} ranks would '
                "train on all data. Add Federated to the callbacks, or use strategy='auto' (DPSGD: devices=1)"
            )
        super().setup(trainer)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, except at the start of a round, which waits for all ranks anyway."""
        if self._has_other_ranks and name != "train_dataloader()":
            self.group.gather(None, f"the barrier {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src` on all ranks."""
        return self.group.broadcast(obj, "a broadcast", src) if self._has_other_ranks else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks agree to a decision, or any rank does."""
        votes = self.group.gather(bool(decision), "a vote") if self._has_other_ranks else [bool(decision)]
        return bool(min(votes) if all else max(votes))

    @property
    def _has_other_ranks(self) -> bool:
        return self.num_ranks > 1 and not self.is_single and not self.group.is_lost

    def share_counts(self, module: torch.nn.Module) -> None:
        """Overwrite integer buffers with rank 0's. They count batches, and no update contains them."""
        counts = [buffer for buffer in module.buffers() if not buffer.is_floating_point()]
        if not counts:
            return
        flat = torch.cat([buffer.flatten().to(torch.int64) for buffer in counts])
        self.group.share(flat)
        parts = torch.split(flat, [buffer.numel() for buffer in counts])
        for buffer, values in zip(counts, parts, strict=True):
            buffer.copy_(values.view_as(buffer))

    def share(self, module: torch.nn.Module) -> None:
        """Overwrite all parameters and buffers with rank 0's, with those that are not trained."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.group.share(tensor.detach())

    def on_exception(self, exception: BaseException) -> None:
        """Stop communicating: this rank is about to end, and other ranks may have ended."""
        self.is_single = self.fails = True


_groups: dict[tuple[int, int], RankGroup] = {}
"""Group that this process has joined, by rank and number of ranks. Later Trainers use it again."""


atexit.register(_groups.clear)


pl.strategies.StrategyRegistry.register(
    NAME, DistributedClientsStrategy, description="ranks own disjoint clients of a federation"
)


def get_rank_strategy(trainer: pl.Trainer) -> DistributedClientsStrategy | None:
    """Return the Trainer's strategy if it divides clients over several ranks. Else None."""
    found = trainer.strategy
    return found if isinstance(found, DistributedClientsStrategy) and found.num_ranks > 1 else None
