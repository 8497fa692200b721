"""The training loader of a federation: batches client by client, or stack by stack.

The batches of a stack of clients have the same shapes, and arrive as one batch with a leading client
dimension. A client on its own gets its batches
as the user's own loader would have made them. Nothing here depends on the order of the clients: the
data order of a client follows from its own seed, and the generators of torch, Python and NumPy are re-seeded
for every client right before its first batch is fetched, so that dropout masks and random transforms do not
depend on who trained before; in a stack the clients take turns (`data.generator_turns`), so that they do not
depend on who trains beside it either. Worker processes are told a seed for every client of every batch. That
re-seeding is the package's one use of the global generators. Generators that the data set, its transforms or
the collate_fn hold are re-seeded in the same way.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
    """Is it one of batches? Not what Lightning takes for several loaders, text, or a batch itself."""
    has = functools.partial(hasattr, loader)
    is_other = isinstance(loader, list | tuple) or any(map(has, ("keys", "dtype", "encode")))
    return has("__len__") and has("__getitem__") and not is_other


def _as_it_is(batch: Any) -> Any:
    return batch


def check_loader(loader: object) -> DataLoader[Any]:
    """Return the loader if its samples can be dealt out to clients, else a sequence of batches as one.

    Raises:
        TypeError: If it is not one DataLoader over a dataset with a length.
        ValueError: If its sampling can't be carried over to the clients.
    """
    if not isinstance(loader, DataLoader) and _is_sequence(loader):
        loader = DataLoader(loader, batch_size=None, collate_fn=_as_it_is)
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"train_dataloader must return torch DataLoaders to federate, got {type(loader).__name__}; "
            "return one, or a dict or list of them. Batches of another library, of which each is dealt out "
            "whole: DataLoader(list(batches), batch_size=None). Where they are a stream give every client "
            "a DataLoader(an IterableDataset over its batches, batch_size=None), as "
            "FederatedDataModule(clients=[loader, ...]), with Federated(local_steps=...)"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"one stream can't be dealt out to clients, as nobody knows what comes, got the IterableDataset "
            f"{type(loader.dataset).__name__}; give every client its own: "
            "FederatedDataModule(clients=[dataset, ...], batch_size=...), or use a map-style Dataset"
        )
    get_sampling(loader)
    return loader


def check_plain(loader: object) -> DataLoader[Any]:
    """Return the loader if it takes every sample once a pass, which others may then sample as they need.

    Raises:
        TypeError: If it is not one DataLoader over a dataset with a length.
        ValueError: If a sampler of its own prefers some samples.
    """
    found = check_loader(loader)
    if found.batch_sampler is None:
        raise ValueError(
            "a DataLoader with automatic batching off gives whole batches, and another rule draws the "
            "samples of each; give it a batch_size"
        )
    if get_sampling(found) != (None, None):
        name = type(get_batching(found).sampler).__name__
        raise ValueError(
            f"the DataLoader's sampler {name} would be replaced, because another rule draws the batches; "
            "use shuffle=True or False"
        )
    return found


def partition_dataset(
    loader: DataLoader[Any],
    partition: Partition | Sequence[Sequence[int]],
    num_clients: int,
    generator: torch.Generator,
    labels: Labels = None,
) -> list[Tensor]:
    """Decide which samples each client holds.

    Args:
        loader: The loader whose dataset is dealt out.
        partition: A rule, or the sample indices of each client.
        labels: Place of the labels, if the partition needs any; None looks in the usual places.

    Returns:
        One int64 index tensor a client.

    Raises:
        ValueError: If a client holds nothing, or less than one batch where the loader drops the last
            one; if there are more clients than samples; if explicit indices do not fit.
    """
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(partition, Partition):
        there = get_sampling(loader)[1]
        known = partition.values(loader.dataset)
        if partition.needs_labels:
            known = read_labels(loader.dataset, labels)
        if there is None:
            parts = partition.split(known, num_samples, num_clients, generator)
        else:
            known = None if known is None else known[there]
            parts = [there[p] for p in partition.split(known, len(there), num_clients, generator)]
    else:
        parts = [torch.as_tensor(part, dtype=torch.int64) for part in partition]
        if len(parts) != num_clients:
            raise ValueError(f"the data are dealt out to {len(parts)} clients, num_clients is {num_clients}")
        indices = torch.cat(parts)
        if len(indices) and not (indices.min() >= 0 and indices.max() < num_samples):
            raise ValueError(
                f"client indices must lie in [0, {num_samples}), got {indices.min()} to {indices.max()}"
            )
    batching = get_batching(loader)
    least = batching.batch_size if batching.drop_last else 1
    small = [client for client, part in enumerate(parts) if len(part) < least]
    if small:
        raise ValueError(
            f"clients {in_short(small)} hold fewer than {least} samples; use "
            f"{larger_shares(partition, parts, least)}"
            + (", or a smaller batch_size, or drop_last=False" if batching.drop_last else "")
        )
    return parts


class ClientBatches(Dataset[Any]):
    """The batch of given samples: index `(batch,)` for one client, `(clients, batch)` for a stack.

    Batches of clients that differ in shape come as `UnequalBatches`, one a client.

    A batch of nobody is one sample of zeros, which has the structure of a sample and nobody's values.

    Args:
        dataset: Map-style dataset. A `TensorDataset` with the default collation, or a subset of one,
            is read with one `index_select` a tensor, whatever the number of clients.
        collate_fn: Makes a batch of a list of samples.
        turns: The clients' sequences of random numbers, for random transforms; None is one for all.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[list[Any]], Any],
        turns: GeneratorTurns | None = None,
    ) -> None:
        self._dataset, self._collate, self._turns = dataset, collate_fn, turns or GeneratorTurns()
        self._turns.held = generators_in(dataset, collate_fn)
        self._tensors: tuple[Tensor, ...] | None = None
        self._subset: Tensor | None = None
        if collate_fn is default_collate:
            subset, inner = None, dataset
            while type(inner) is Subset:
                own = torch.as_tensor(inner.indices, dtype=torch.int64)
                subset, inner = own if subset is None else own[subset], inner.dataset
            if type(inner) is TensorDataset:
                self._tensors, self._subset = inner.tensors, subset

    @property
    def dataset(self) -> Dataset[Any]:
        """The user's data set."""
        return self._dataset

    def __getitem__(self, asked: Tensor | tuple[Tensor, Sequence[int] | bytes]) -> Any:
        """Fetch one batch, each client in its turn, or from its own seed, or a secret, where there is one."""
        indices, seeds = asked if isinstance(asked, tuple) else (asked, ())
        if isinstance(seeds, bytes):
            seed_generators(seeds, "fetch")
            batch = self.fetch(indices, GeneratorTurns())
            seed_generators(seeds, "fetched")  # a data set may have seeded them
            return batch
        if not seeds:
            return self.fetch(indices, self._turns)
        turns = GeneratorTurns(self._turns.held)
        turns.seed(seeds[0])
        turns.begin(seeds.__getitem__)
        return self.fetch(indices, turns)

    def fetch(self, indices: Tensor, turns: GeneratorTurns) -> Any:
        """Fetch one batch, the clients of a stack from given sequences of random numbers."""
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
        if isinstance(self._dataset, ClientDatasets):
            self._dataset.close_unused((indices if indices.dim() == 1 else indices[:, 0]).tolist())
        if indices.dim() == 1:
            return self._fetch_batch(indices.tolist())
        rows = []
        for index, row in enumerate(indices.tolist()):
            with turns.activate_all(index):
                rows.append(self._fetch_batch(row))
        return stacked(rows)

    def _fetch_batch(self, indices: list[int]) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        return self._collate(fetch(indices) if fetch else [self._dataset[index] for index in indices])


@dataclass(frozen=True)
class OnUsersData:
    """Start a worker process, in which `get_worker_info().dataset` is the user's data set.

    Args:
        begin: The user's `worker_init_fn`.
    """

    begin: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        """Begin in the worker of this number."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses to be assigned to
        if self.begin is not None:
            self.begin(number)


def worker_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Settings of a loader's worker processes, for those of another loader."""
    names = "num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor"
    own = {name: getattr(loader, name) for name in names}
    return {**own, "worker_init_fn": OnUsersData(loader.worker_init_fn)}


class ClientLoader:
    """Deals out the batches of one round after another, to the round loop alone.

    Args:
        loader: The user's own loader: dataset, collation and workers.
        work: What each client holds, and how it passes over it.
        stacks: Returns the stacks of the round to come, in the order in which they train.
        length: Number of its steps; None counts those of its stacks.

    Attributes:
        turns: The sequences of torch's random numbers of the present stack's clients, in its order.
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
        alike = len({len(held) for held in work.client_indices}) == 1
        self._table = torch.stack(list(work.client_indices)) if alike else None
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

    @property
    def dataset(self) -> Dataset[Any]:
        """All the clients' samples."""
        return self.loader.dataset

    @property
    def batch_size(self) -> int:
        """Samples of one client's whole batch."""
        return self._work.batch_size

    @property
    def num_workers(self) -> int:
        """Of the user's own loader, as are the rest of these."""
        return self.loader.num_workers

    @property
    def drop_last(self) -> bool:
        """Is the rest of a client's pass left out?"""
        return self._work.drop_last

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """Makes a batch of a list of samples."""
        return self.loader.collate_fn

    @property
    def sampler(self) -> Any:
        """Sampler of the user's own loader if it wants to know the epoch, so that Lightning tells it.

        No other is shown, for Lightning puts another one in place of a random sampler where it overfits.
        """
        if not hasattr(self.loader.sampler, "set_epoch"):
            raise AttributeError("the plan of the round says which samples a client draws")
        return self.loader.sampler

    def over(self, loader: DataLoader[Any]) -> ClientLoader:
        """The same split over a new loader.

        Raises:
            ValueError: If its dataset is of another length, or its batches of another size.
        """
        old, new = len(self.dataset), len(loader.dataset)  # type: ignore[arg-type]
        size = get_batching(loader).batch_size
        if new != old or size != self.batch_size:
            raise ValueError(
                f"the reloaded training loader has {new} samples in batches of {size}, and the "
                f"split over the clients was of {old} in batches of {self.batch_size}; return one of the "
                "same length and batch size, or leave reload_dataloaders_every_n_epochs at 0"
            )
        work = replace(self._work, sampling=get_sampling(loader)[0])  # its weights may be new
        return ClientLoader(loader, work, self._stacks, self._length)

    def __len__(self) -> int:
        """Number of steps of the round to come."""
        if self._length is not None:
            return self._length
        return sum(len(stack.batch_sizes) for stack in self._stacks())

    def indices(self, stack: Stack) -> Iterator[Tensor]:
        """Yield the sample indices of each batch: `(batch,)`, or `(clients, batch)` for two clients up."""
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
            order = self._table[clients, :total]  # nothing to shuffle or repeat: one gather
        else:
            order = torch.stack([self._order(c, s, total) for c, s in zip(clients, seeds, strict=True)])
        yield from torch.split_with_sizes(order, stack.batch_sizes, dim=-1)

    def _order(self, client: int, seed: int | None, total: int) -> Tensor:
        """Sample indices of one client, pass after pass, `(total,)`."""
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
        """One batch of given samples, to try something on. The clients' sequences do not move."""
        return self._batches.fetch(indices, GeneratorTurns())

    def round_indices(self) -> Iterator[tuple[Tensor, Sequence[int] | bytes]]:
        """Yield the sample indices of every batch of the round, and for workers a seed of each client's."""
        for stack in self._stacks():
            yield from self._asked(stack, self._workers is not None)

    def _asked(self, stack: Stack, seeded: bool) -> Iterator[tuple[Tensor, Sequence[int] | bytes]]:
        """Sample indices of a stack's batches, each with its secret, or a seed of each client's."""
        seeds = [stack.row_seed(row) for row in range(max(len(stack.clients), 1))] if seeded else []
        for number, indices in enumerate(self.indices(stack)):
            if stack.keys:
                yield indices, stack.keys[number]
            else:
                yield indices, [(seed + number * _APART) % 2**63 for seed in seeds]

    def iterate_stacks(self) -> Iterator[tuple[Stack, Iterator[Any]]]:
        """Yield the stacks of the round to come with their batches, which are drawn when they are asked for.

        The generators are seeded anew before each stack's first batch. What is not asked for is skipped.
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
            own = self._seeded(stack, islice(batches, len(stack.batch_sizes)))
            yield stack, own
            deque(own, maxlen=0)

    def stack_batches(self, stack: Stack) -> Iterator[Any]:
        """Yield the batches of one stack, drawn in this process and beside the round."""
        return self._seeded(stack, map(self._batches.__getitem__, self._asked(stack, False)))

    def _seeded(self, stack: Stack, batches: Iterator[Any]) -> Iterator[Any]:
        if stack.keys:
            for key, batch in zip(stack.keys, batches, strict=False):
                seed_generators(key, "handed over")  # hooks on the batch come before those of the step
                yield batch
            return
        self.turns.seed(stack.training_seed)
        self.turns.begin(stack.row_seed)
        yield from batches

    def __iter__(self) -> Iterator[Any]:
        """Refuse the first batch: only the rounds draw batches, and every client its own (`iterate_stacks`).

        Lightning asks whether there is an iterator, so it is the iterator that refuses.

        Raises:
            RuntimeError: If a batch is asked for.
        """
        raise RuntimeError(
            "the training loader was iterated by something else than a client's training: it deals out the "
            "batches of a round's clients, and what follows from all clients' data (class weights, means) "
            "would go past the mechanism; take it from public data, or from the dataset where that is no "
            "concern"
        )
        yield


class _Indices:
    """The sampler of the worker processes: the indices of whole batches, with seeds."""

    def __init__(self, loader: ClientLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[Tensor, Sequence[int]]]:
        return self._loader.round_indices()

    def __len__(self) -> int:
        return len(self._loader)
