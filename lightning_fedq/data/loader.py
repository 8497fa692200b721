"""The training loader of a federation: batches of one client after the other, or of one stack of clients.

A stack is a group of clients that train in one step (`data.batches`). Their batches have the same shapes and
arrive as one batch with a leading client dimension. A single client gets its batches as the user's own loader
would make them.

No result depends on the order of the clients. The data order of a client follows from its own seed. The
default generators of torch, Python and NumPy are seeded again for every client right before its first batch
is fetched, so that dropout masks and random transforms do not depend on earlier clients. In a stack the
clients take turns (`data.generator_turns`), so that they do not depend on the other clients either. Worker
processes get a seed for every client of every batch. Generators of the data set, its transforms or the
collate_fn are seeded again in the same way. This is the package's only use of the global generators.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lightning_fedq.data.batches import LocalWork, Stack
from lightning_fedq.data.generator_turns import GeneratorTurns, generators_in, seed_generators
from lightning_fedq.data.labels import Labels, read_labels
from lightning_fedq.data.lazy_datasets import ClientDatasets
from lightning_fedq.data.partition import Partition, larger_shares
from lightning_fedq.data.sampling import get_batching, get_collation, get_sampling, in_short
from lightning_fedq.functional.batch_stack import map_tensors, stacked

_APART = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of one client's batches differ."""


def _is_sequence(loader: object) -> TypeGuard[Dataset[Any]]:
    """Return whether a loader is a sequence of batches, and not several loaders, text or one batch."""
    has = functools.partial(hasattr, loader)
    is_other = isinstance(loader, list | tuple) or any(map(has, ("keys", "dtype", "encode")))
    return has("__len__") and has("__getitem__") and not is_other


def _as_it_is(batch: Any) -> Any:
    """Return the batch unchanged, as the collation of samples that are batches already."""
    return batch


def check_loader(loader: object) -> DataLoader[Any]:
    """Return the loader if its samples can be partitioned over clients. Wrap a sequence of batches.

    Raises:
        TypeError: If the loader is neither a sequence of batches nor a DataLoader over a data set with a
            length. Batches of another library can be wrapped (`DataLoader(list(batches), batch_size=None)`),
            and each batch then goes to one client. A stream of them needs one loader for each client.
        ValueError: If its sampler or batch sampler can't be applied to each client.
    """
    if not isinstance(loader, DataLoader) and _is_sequence(loader):
        loader = DataLoader(loader, batch_size=None, collate_fn=_as_it_is)
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"train_dataloader must return one or several torch DataLoaders, got {type(loader).__name__}. "
            "Wrap batches in DataLoader(list(batches), batch_size=None), or streams in "
            "FederatedDataModule(clients=[DataLoader(iterable_dataset, batch_size=None), ...]) with "
            "Federated(local_steps=...)."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"One stream can't be partitioned over clients, got the IterableDataset "
            f"{type(loader.dataset).__name__}. Use a map-style Dataset, or one stream for each client: "
            "FederatedDataModule(clients=[dataset, ...], batch_size=...)."
        )
    get_sampling(loader)
    return loader


def check_plain(loader: object) -> DataLoader[Any]:
    """Return the loader if it takes every sample once a pass, so that another rule may draw its batches.

    Raises:
        TypeError: If it is not one DataLoader over a data set with a length.
        ValueError: If its samples are whole batches, or if it has a special sampler.
    """
    checked = check_loader(loader)
    if checked.batch_sampler is None:
        raise ValueError(
            "The DataLoader has batch_size=None, but another rule must draw the samples of each batch. "
            "Give it a batch_size."
        )
    if get_sampling(checked) != (None, None):
        name = type(get_batching(checked).sampler).__name__
        raise ValueError(
            f"The DataLoader's sampler {name} would be replaced, because another rule draws the batches. "
            "Use shuffle=True or False."
        )
    return checked


def partition_dataset(
    loader: DataLoader[Any],
    partition: Partition | Sequence[Sequence[int]],
    num_clients: int,
    generator: torch.Generator,
    labels: Labels = None,
) -> list[Tensor]:
    """Partition the samples of a loader's data set over the clients.

    Args:
        loader: Loader with the data set and its sampler.
        partition: Partition, or the sample indices of each client.
        num_clients: Number of clients.
        generator: CPU generator of the partition's draws.
        labels: Source of the labels if the partition needs them. None looks in the usual places.

    Returns:
        Sample indices of each client, int64.

    Raises:
        ValueError: If a client has no sample, or less than one batch and the loader drops incomplete
            batches. Also if there are more clients than samples, or if explicit indices do not fit.
    """
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(partition, Partition):
        subset = get_sampling(loader)[1]
        values = partition.values(loader.dataset)
        if partition.needs_labels:
            values = read_labels(loader.dataset, labels)
        if subset is None:
            parts = partition.split(values, num_samples, num_clients, generator)
        else:
            values = None if values is None else values[subset]
            parts = [subset[p] for p in partition.split(values, len(subset), num_clients, generator)]
    else:
        parts = [torch.as_tensor(part, dtype=torch.int64) for part in partition]
        if len(parts) != num_clients:
            raise ValueError(f"There are indices of {len(parts)} clients, but num_clients is {num_clients}")
        indices = torch.cat(parts)
        if len(indices) and not (indices.min() >= 0 and indices.max() < num_samples):
            raise ValueError(
                f"Client indices must be in [0, {num_samples}), got {indices.min()} to {indices.max()}"
            )
    batching = get_batching(loader)
    least = batching.batch_size if batching.drop_last else 1
    small = [client for client, part in enumerate(parts) if len(part) < least]
    if small:
        raise ValueError(
            f"Clients {in_short(small)} have fewer than {least} samples. Use "
            f"{larger_shares(partition, parts, least)}"
            + (", or a smaller batch_size, or drop_last=False." if batching.drop_last else ".")
        )
    return parts


class ClientBatches(Dataset[Any]):
    """Data set of batches: the index of a batch is a tensor of sample indices.

    An index has shape `(batch,)` for one client and `(clients, batch)` for a stack. If the clients' batches
    differ in shape, they come as `UnequalBatches`, one for each client. An empty index gives one sample of
    zeros, which has the structure of a sample but no data.

    Args:
        dataset: Map-style data set. A `TensorDataset` (or a subset of one) with the default collation is
            read with one `index_select` per tensor, for any number of clients.
        collate_fn: Function that makes a batch from a list of samples.
        turns: Separate sequences of random numbers for the clients' random transforms. None uses one
            sequence for all clients.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[list[Any]], Any],
        turns: GeneratorTurns | None = None,
    ) -> None:
        self.dataset, self._collate, self._turns = dataset, collate_fn, turns or GeneratorTurns()
        self._turns.held = generators_in(dataset, collate_fn)
        self._tensors: tuple[Tensor, ...] | None = None
        self._subset: Tensor | None = None
        if collate_fn is default_collate:
            subset, inner = None, dataset
            while type(inner) is Subset:
                indices = torch.as_tensor(inner.indices, dtype=torch.int64)
                subset, inner = indices if subset is None else indices[subset], inner.dataset
            if type(inner) is TensorDataset:
                self._tensors, self._subset = inner.tensors, subset

    def __getitem__(self, asked: Tensor | tuple[Tensor, Sequence[int] | bytes]) -> Any:
        """Fetch one batch.

        Args:
            asked: Sample indices, optionally with the source of the random transforms: a seed for each
                client, or a secret key for the whole batch. Without them, the clients' turns are used.
        """
        indices, seeds = asked if isinstance(asked, tuple) else (asked, ())
        if isinstance(seeds, bytes):
            seed_generators(seeds, "fetch")
            batch = self.fetch(indices, GeneratorTurns())
            seed_generators(seeds, "fetched")  # the data set may have seeded the generators
            return batch
        if not seeds:
            return self.fetch(indices, self._turns)
        turns = GeneratorTurns(self._turns.held)
        turns.seed(seeds[0])
        turns.begin(seeds.__getitem__)
        return self.fetch(indices, turns)

    def fetch(self, indices: Tensor, turns: GeneratorTurns) -> Any:
        """Fetch one batch, with a separate sequence of random numbers for each client of a stack.

        Args:
            indices: Sample indices, `(batch,)` or `(clients, batch)`.
            turns: The clients' sequences of random numbers.
        """
        if not indices.numel():
            return map_tensors(torch.zeros_like, self._fetch_batch([0]))
        if self._tensors is not None:
            flat = indices.reshape(-1)
            flat = flat if self._subset is None else self._subset[flat]
            if indices.dim() == 1:
                return [tensor.index_select(0, flat.to(tensor.device)) for tensor in self._tensors]
            return [
                tensor.index_select(0, flat.to(tensor.device)).view(*indices.shape, *tensor.shape[1:])
                for tensor in self._tensors
            ]
        if isinstance(self.dataset, ClientDatasets):
            self.dataset.close_unused((indices if indices.dim() == 1 else indices[:, 0]).tolist())
        if indices.dim() == 1:
            return self._fetch_batch(indices.tolist())
        rows = []
        for index, row in enumerate(indices.tolist()):
            with turns.activate_all(index):
                rows.append(self._fetch_batch(row))
        return stacked(rows)

    def _fetch_batch(self, indices: list[int]) -> Any:
        fetch = getattr(self.dataset, "__getitems__", None)
        return self._collate(fetch(indices) if fetch else [self.dataset[index] for index in indices])


@dataclass(frozen=True)
class OnUsersData:
    """Initialisation of a worker process, in which `get_worker_info().dataset` is the user's data set.

    Args:
        begin: The user's `worker_init_fn`, or None.
    """

    begin: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        """Initialise the worker with this number."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # ordinary assignment is refused
        if self.begin is not None:
            self.begin(number)


def worker_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of a loader's worker processes, as arguments for another loader."""
    names = "num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor"
    settings = {name: getattr(loader, name) for name in names}
    return {**settings, "worker_init_fn": OnUsersData(loader.worker_init_fn)}


class ClientLoader:
    """Training loader of a simulated federation, which serves the batches of each round to the round loop.

    Args:
        loader: The user's loader, which gives the data set, the collation and the workers.
        work: Samples of each client, and its passes over them.
        stacks: Returns the stacks of the coming round, in training order.
        length: Number of steps of a round. None counts the steps of the stacks.

    Attributes:
        turns: Sequences of random numbers of the present stack's clients, in their order.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        work: LocalWork,
        stacks: Callable[[], Sequence[Stack]],
        length: int | None = None,
    ) -> None:
        self.loader, self._work, self._stacks, self._length = loader, work, stacks, length
        self.turns = GeneratorTurns()
        self._batches = ClientBatches(loader.dataset, get_collation(loader), self.turns)
        equal_sizes = len({len(held) for held in work.client_indices}) == 1
        self._table = torch.stack(list(work.client_indices)) if equal_sizes else None
        self._generator = torch.Generator()
        self._workers = None
        if loader.num_workers:
            self._workers = DataLoader(
                self._batches,
                sampler=_Indices(self),
                batch_size=None,
                persistent_workers=loader.persistent_workers,
                generator=self._generator,
                **worker_settings(loader),
            )

    dataset = property(attrgetter("loader.dataset"), doc="The user's data set, of all clients.")
    batch_size = property(attrgetter("_work.batch_size"), doc="Samples in a full batch of one client.")
    num_workers = property(attrgetter("loader.num_workers"), doc="Worker processes of the user's loader.")
    drop_last = property(attrgetter("_work.drop_last"), doc="Whether incomplete last batches are dropped.")
    collate_fn = property(attrgetter("loader.collate_fn"), doc="The user's collation of samples.")

    @property
    def sampler(self) -> Any:
        """The user's sampler if it has `set_epoch`, which Lightning calls.

        Other samplers are hidden, because Lightning replaces a random sampler with `overfit_batches`.

        Raises:
            AttributeError: If the sampler has no `set_epoch`.
        """
        if not hasattr(self.loader.sampler, "set_epoch"):
            raise AttributeError("A client's samples follow from the plan of the round, not from a sampler")
        return self.loader.sampler

    def over(self, loader: DataLoader[Any]) -> ClientLoader:
        """Return a client loader with the same partition over a reloaded loader of the user.

        Raises:
            ValueError: If its data set has another length, or its batches have another size.
        """
        old, new = len(self.dataset), len(loader.dataset)  # type: ignore[arg-type]
        size = get_batching(loader).batch_size
        if new != old or size != self.batch_size:
            raise ValueError(
                f"The reloaded training loader has {new} samples in batches of {size}, but the partition has "
                f"{old} in batches of {self.batch_size}. Keep both, or set "
                "reload_dataloaders_every_n_epochs=0."
            )
        work = replace(self._work, sampling=get_sampling(loader)[0])  # sampling weights may have changed
        return ClientLoader(loader, work, self._stacks, self._length)

    def __len__(self) -> int:
        """Return the number of steps of the coming round."""
        if self._length is not None:
            return self._length
        return sum(len(stack.batch_sizes) for stack in self._stacks())

    def indices(self, stack: Stack) -> Iterator[Tensor]:
        """Yield the sample indices of each batch: `(batch,)` for one client, else `(clients, batch)`."""
        if not stack.clients:
            return
        if stack.samples:
            yield from stack.samples
            return
        total, clients = sum(stack.batch_sizes), list(stack.clients)
        seeds = stack.order_seeds or (None,) * len(clients)
        in_one_pass = total <= sum(self._work.passes[clients[0]])
        if len(clients) == 1:
            order = self._order(clients[0], seeds[0], total)
        elif self._table is not None and not stack.order_seeds and in_one_pass:
            order = self._table[clients, :total]  # without shuffling and repetition one gather suffices
        else:
            order = torch.stack([self._order(c, s, total) for c, s in zip(clients, seeds, strict=True)])
        yield from torch.split_with_sizes(order, stack.batch_sizes, dim=-1)

    def _order(self, client: int, seed: int | None, total: int) -> Tensor:
        """Return the sample indices of one client, pass after pass, `(total,)`.

        Args:
            client: The client.
            seed: Seed of the client's data order. None keeps the order of its samples.
            total: Number of indices.
        """
        held, used = self._work.client_indices[client], sum(self._work.passes[client])
        num_passes = -(-total // used)
        if seed is None:
            return held[:total] if num_passes == 1 else held[:used].repeat(num_passes)[:total]
        generator, sampling = torch.Generator().manual_seed(seed), self._work.sampling
        if sampling is not None:
            passes = [sampling.draw(held, generator)[:used] for _ in range(num_passes)]
        else:
            passes = [held[torch.randperm(len(held), generator=generator)[:used]] for _ in range(num_passes)]
        return torch.cat(passes)[:total]

    def fetch(self, indices: Tensor) -> Any:
        """Return a batch of the given samples for a trial, without moving the clients' random sequences."""
        return self._batches.fetch(indices, GeneratorTurns())

    def round_indices(self) -> Iterator[tuple[Tensor, Sequence[int] | bytes]]:
        """Yield the sample indices of every batch of the round, with a key or, for workers, seeds."""
        for stack in self._stacks():
            yield from self._asked(stack, self._workers is not None)

    def _asked(self, stack: Stack, seeded: bool) -> Iterator[tuple[Tensor, Sequence[int] | bytes]]:
        """Yield the sample indices of a stack's batches, each with its secret key or with seeds.

        Args:
            stack: Clients that train in one step.
            seeded: Whether each batch gets a seed for each client, as worker processes need.
        """
        seeds = [stack.row_seed(row) for row in range(max(len(stack.clients), 1))] if seeded else []
        for number, indices in enumerate(self.indices(stack)):
            if stack.keys:
                yield indices, stack.keys[number]
            else:
                yield indices, [(seed + number * _APART) % 2**63 for seed in seeds]

    def iterate_stacks(self) -> Iterator[tuple[Stack, Iterator[Any]]]:
        """Yield the stacks of the coming round with an iterator over their batches.

        The generators are seeded before each stack's first batch. Batches that the caller does not take are
        skipped.
        """
        stacks = self._stacks()
        if self._workers is None:
            batches: Iterator[Any] = map(self._batches.__getitem__, self.round_indices())
        else:
            self._generator.manual_seed(stacks[0].training_seed)
            batches = iter(self._workers)
        for stack in stacks:
            if stack.keys:
                seed_generators(stack.keys[0], "before the first batch")
            of_stack = self._seeded(stack, islice(batches, len(stack.batch_sizes)))
            yield stack, of_stack
            deque(of_stack, maxlen=0)  # skip the remaining batches

    def stack_batches(self, stack: Stack) -> Iterator[Any]:
        """Return the batches of one stack, drawn in this process and independently of the round."""
        return self._seeded(stack, map(self._batches.__getitem__, self._asked(stack, False)))

    def _seeded(self, stack: Stack, batches: Iterator[Any]) -> Iterator[Any]:
        """Seed the generators, then yield the batches. With secret keys, seed them before every batch."""
        if stack.keys:
            for key, batch in zip(stack.keys, batches, strict=False):
                seed_generators(key, "handed over")  # hooks on the batch run before hooks of the step
                yield batch
            return
        self.turns.seed(stack.training_seed)
        self.turns.begin(stack.row_seed)
        yield from batches

    def __iter__(self) -> Iterator[Any]:
        """Refuse to iterate, because only the round loop draws batches (`iterate_stacks`).

        Values that follow from all clients' data, such as class weights and means, would bypass the
        mechanism. Lightning asks whether there is an iterator, so the iterator refuses its first batch.

        Raises:
            RuntimeError: If the first batch is requested.
        """
        raise RuntimeError(
            "Only clients may iterate the training loader, since statistics of all data would bypass the "
            "mechanism. Use Federated(statistics=Statistics(size=..., bound=...)), or compute them from "
            "public data."
        )
        yield


class _Indices:
    """Sampler for the worker processes: the sample indices of whole batches, with seeds."""

    def __init__(self, loader: ClientLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[Tensor, Sequence[int]]]:
        return self._loader.round_indices()

    def __len__(self) -> int:
        return len(self._loader)
