"""Clients with separate loaders: streams, batch samplers, or several loaders at once.

A client's batches are those of its loader, and a pass ends when the loader ends. Each round starts the loader
again, like every epoch of an ordinary training. So a stream that should continue where it stopped has to do
this itself. Clients train one at a time, because batches of different loaders can't be aligned.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset, WeightedRandomSampler

from lightning_fedq.data.batches import LocalWork, Stack
from lightning_fedq.data.generator_turns import GeneratorTurns, generators_in, reseed
from lightning_fedq.data.loader import ClientLoader, check_loader, partition_dataset, worker_settings
from lightning_fedq.data.partition import Partition
from lightning_fedq.data.sampling import (
    OrderOfAll,
    RandomSampling,
    find_length,
    get_batching,
    get_collation,
    get_sampling,
)

Passes = Sequence[Iterable[Any]]
"""For each client an iterable of batches. One iteration is one pass over the client's data."""


class PerClientLoaders:
    """One loader for each client, in place of one training loader for all.

    Args:
        names: Names of the clients, for messages.
        loaders: Loader of each client, in the same order.
    """

    def __init__(self, names: Sequence[str], loaders: Sequence[DataLoader[Any]]) -> None:
        self.names, self.loaders = list(names), list(loaders)

    def num_batches(self, otherwise: int | None) -> list[int]:
        """Return the number of batches of each client in a pass.

        Args:
            otherwise: Number of batches for a stream without a length, or None.

        Raises:
            ValueError: If there is such a stream and `otherwise` is None, or if a loader is empty.
        """
        numbers = []
        for name, loader in zip(self.names, self.loaders, strict=True):
            length = find_length(loader)
            if length is None and otherwise is None:
                raise ValueError(
                    f"The data of client {name} are a stream without a length. Set the number of batches by "
                    "Federated(local_steps=...), or by Trainer(limit_train_batches=...) as an int."
                )
            numbers.append(otherwise if length is None else length)
        empty = [name for name, number in zip(self.names, numbers, strict=True) if not number]
        if empty:
            raise ValueError(f"The loaders of clients {', '.join(empty[:10])} have no batch. Leave them out.")
        return [number or 0 for number in numbers]

    def client_indices(self) -> list[Tensor]:
        """Return consecutive indices for each client, as many as it has samples. None for a stream."""
        sizes = [find_length(loader.dataset) or 0 for loader in self.loaders]
        return list(torch.split(torch.arange(sum(sizes)), sizes))


class NoCommonDataset(ValueError, AttributeError):
    """Error for access to a common data set of clients that have separate loaders.

    It is also an AttributeError, so that `hasattr` returns False.
    """


class PerClientRoundLoader(ClientLoader):
    """Training loader of a federation whose clients have separate loaders and train one at a time.

    Args:
        passes: Loader of each client.
        work: Number of batches of each client, where a batch counts as one sample.
        stacks: Returns the stacks of the coming round, of one client each.
        length: Number of steps of a round.

    Attributes:
        passes: Loader of each client, of which one iteration is one pass.
    """

    def __init__(
        self, passes: Passes, work: LocalWork, stacks: Callable[[], Sequence[Stack]], length: int
    ) -> None:
        self.passes, self._work, self._stacks, self._length = passes, work, stacks, length
        self.turns = GeneratorTurns()

    @property
    def loader(self) -> DataLoader[Any]:  # type: ignore[override]
        """Refused, because there is no common loader.

        Raises:
            NoCommonDataset: Always.
        """
        raise NoCommonDataset(
            "Every client has a separate loader, so samples of a common data set can't be taken by index. "
            "Give each client a data set with a length: FederatedDataModule(clients=[dataset, ...])."
        )

    def over(self, loader: Any) -> ClientLoader:
        """Return a loader of the same clients over reloaded passes."""
        return PerClientRoundLoader(loader, self._work, self._stacks, len(self))

    def fetch(self, indices: Tensor) -> Any:
        """Refuse to fetch samples, because there are no common indices."""
        return self.loader

    def iterate_stacks(self) -> Iterator[tuple[Stack, Iterator[Any]]]:
        """Yield the clients of the coming round, each with an iterator over its batches."""
        for stack in self._stacks():
            of_stack = self.stack_batches(stack)
            yield stack, of_stack
            deque(of_stack, maxlen=0)  # skip the remaining batches

    def stack_batches(self, stack: Stack) -> Iterator[Any]:
        """Return the batches of one client. A stack without clients has no batches."""
        if not stack.clients:
            return iter(())
        return self._seeded(
            stack, self._client_batches(stack.clients[0], len(stack.batch_sizes), stack.training_seed)
        )

    def _client_batches(self, client: int, number: int, seed: int) -> Iterator[Any]:
        """Yield `number` batches of a client, in as many passes as are needed, each with its own seed."""
        count = 0
        while count < number:
            _seed(self.passes[client], seed + count)
            before = count
            for batch in islice(self.passes[client], min(len(self._work.passes[client]), number - count)):
                yield batch
                count += 1
            if count == before:
                raise ValueError(f"The loader of client {client} gave no batch. Leave the client out.")


def _seed(loader: Any, seed: int) -> None:
    """Seed the generators of a loader, its sampler, data set and transforms.

    Otherwise they would continue from round to round and from client to client.
    """
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
    held = generators_in(getattr(loader, "dataset", None), getattr(loader, "collate_fn", None))
    for number, generator in enumerate(held, 1):
        reseed(generator, seed + number)


class _ClientCombinedLoader:
    """One client's part of several loaders, with batches of the same structure as the user's."""

    def __init__(self, combined: Any, shares: Sequence[DataLoader[Any]]) -> None:
        self._combined = copy.copy(combined)
        self._combined.flattened = list(shares)

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in self._combined:
            yield batch

    def num_batches(self) -> int:
        """Return the number of batches in a pass."""
        counted = copy.copy(self._combined)
        counted.flattened = [range(len(share)) for share in self._combined.flattened]
        return len(iter(counted))


class SeveralLoaders:
    """Several training loaders at once, each of which is partitioned over the clients.

    Args:
        combined: Lightning's `CombinedLoader` of the loaders.
        partition: Partition that is applied to each loader's data set.
        num_clients: Number of clients.
        generator: CPU generator of the partition's draws.

    Raises:
        ValueError: If the partition is given by indices, if it fits one data set only, or if the loaders
            follow one another.
    """

    def __init__(
        self,
        combined: Any,
        partition: Partition | Sequence[Sequence[int]],
        num_clients: int,
        generator: torch.Generator,
    ) -> None:
        if not isinstance(partition, Partition):
            raise ValueError(
                "Indices of each client refer to one data set, but there are several loaders. "
                "Use a partition, or give every client separate loaders."
            )
        if partition.of_one_data_set:
            raise ValueError(
                f"{partition} could number the users of several loaders differently. Give every client "
                "separate loaders: FederatedDataModule(clients=[...])."
            )
        if getattr(combined, "_mode", None) == "sequential":
            raise ValueError(
                "Lightning does not train on a CombinedLoader with mode 'sequential'. "
                "Use 'max_size_cycle', 'max_size' or 'min_size'."
            )
        loaders = [check_loader(loader) for loader in combined.flattened]
        self._held = [partition_dataset(loader, partition, num_clients, generator) for loader in loaders]
        self._sizes = [len(loader.dataset) for loader in loaders]  # type: ignore[arg-type]
        self.together = self._deal(combined)

    def _deal(self, combined: Any) -> list[_ClientCombinedLoader]:
        """Return each client's part of the loaders."""
        dealt = []
        for parts in zip(*self._held, strict=True):
            shares = [_share(*pair) for pair in zip(combined.flattened, parts, strict=True)]
            dealt.append(_ClientCombinedLoader(combined, shares))
        return dealt

    def client_indices(self) -> list[Tensor]:
        """Return the sample indices of each client, numbered consecutively over all data sets."""
        numbered = []
        for held, start in zip(self._held, accumulate(self._sizes, initial=0), strict=False):
            numbered.append([part + start for part in held])
        return [torch.cat(parts) for parts in zip(*numbered, strict=True)]

    def renew(self, combined: Any) -> Passes:
        """Return each client's part of reloaded loaders, with the same partition.

        Raises:
            ValueError: If the data sets have other lengths.
        """
        sizes = [len(check_loader(loader).dataset) for loader in combined.flattened]  # type: ignore[arg-type]
        if sizes != self._sizes:
            raise ValueError(
                f"The reloaded training loaders have {sizes} samples, but the partition has {self._sizes}. "
                "Keep the lengths, or set reload_dataloaders_every_n_epochs=0."
            )
        return self._deal(combined)


def _share(loader: DataLoader[Any], held: Tensor) -> DataLoader[Any]:
    """Return a loader like the user's, over one client's samples.

    Raises:
        ValueError: If the user's sampler can't be applied to one client.
    """
    size, drop_last, sampler = get_batching(loader)
    data = Subset(loader.dataset, held.tolist())
    client_sampler: Any = RandomSampler(data)
    sampling = get_sampling(loader)[0]
    if isinstance(sampler, SequentialSampler):
        client_sampler = SequentialSampler(data)
    elif isinstance(sampling, OrderOfAll):
        raise ValueError(
            f"The sampler {type(sampler).__name__} can't be applied to clients of several loaders. Give "
            "every client separate loaders: FederatedDataModule(clients=[...])."
        )
    elif isinstance(sampling, RandomSampling) and sampling.weights is not None:
        sampling.check([held])
        weights = sampling.weights[held].tolist()
        client_sampler = WeightedRandomSampler(weights, sampling.size(len(held)), sampling.replacement)
    elif isinstance(sampling, RandomSampling):
        client_sampler = RandomSampler(data, sampling.replacement, sampling.size(len(held)))
    return DataLoader(
        data,
        batch_size=size,
        sampler=client_sampler,
        drop_last=drop_last,
        collate_fn=get_collation(loader),
        **worker_settings(loader),
    )
