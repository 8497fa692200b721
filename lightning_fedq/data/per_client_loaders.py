"""Clients with loaders of their own: streams, batch samplers, or several loaders at once.

A client's batches are whatever its loader gives; a pass is over when the loader is. Each round starts it
anew, as every epoch of an ordinary training does, so a stream that should go on where it stopped has to do so
itself. Clients train one at a time, because nobody knows how to line up batches of different loaders.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset, WeightedRandomSampler

from lightning_fedq.data.batches import LocalWork, Stack
from lightning_fedq.data.generator_turns import GeneratorTurns, generators_in, reseed
from lightning_fedq.data.loader import ClientLoader, check_loader, partition_dataset, worker_settings
from lightning_fedq.data.partition import Partition
from lightning_fedq.data.sampling import OrderOfAll, RandomSampling, get_batching, get_collation, get_sampling

Passes = Sequence[Iterable[Any]]
"""For each client an iterable of batches; iterating it is one pass."""


class PerClientLoaders:
    """One loader for each client, in place of one training loader for all.

    Args:
        names: Names of the clients, for messages.
        loaders: One for each.
    """

    def __init__(self, names: Sequence[str], loaders: Sequence[DataLoader[Any]]) -> None:
        self.names, self.loaders = list(names), list(loaders)

    def num_batches(self, otherwise: int | None) -> list[int]:
        """Batches of each client in a pass, `otherwise` for a stream, which does not say.

        Raises:
            ValueError: If a stream needs a number and there is none.
        """
        numbers = []
        for name, loader in zip(self.names, self.loaders, strict=True):
            found = _length(loader)
            if found is None and otherwise is None:
                raise ValueError(
                    f"the data of client {name} are a stream without a length, so nobody knows when its "
                    "round is over; say how many batches with Federated(local_steps=...) or "
                    "Trainer(limit_train_batches=...) as an int"
                )
            numbers.append(otherwise if found is None else found)
        empty = [name for name, number in zip(self.names, numbers, strict=True) if not number]
        if empty:
            raise ValueError(f"the loaders of clients {', '.join(empty[:10])} have no batch; leave them out")
        return [number or 0 for number in numbers]

    def client_indices(self) -> list[Tensor]:
        """As many indices for each client as it has samples. None for a stream, which does not say."""
        sizes = [_length(loader.dataset) or 0 for loader in self.loaders]
        return list(torch.split(torch.arange(sum(sizes)), sizes))


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


class NoCommonDataset(ValueError, AttributeError):
    """Somebody looks for the one data set behind the loaders of all clients. To `hasattr` there is none."""


class PerClientRoundLoader(ClientLoader):
    """Yields the batches of one round after another, client by client from loaders of their own.

    Args:
        work: Counts a batch as one sample.
        stacks: Returns the stacks of the round to come, of one client each.
        length: Number of its steps.
    """

    def __init__(
        self, passes: Passes, work: LocalWork, stacks: Callable[[], Sequence[Stack]], length: int
    ) -> None:
        self._passes, self._work, self._stacks, self._length = passes, work, stacks, length
        self.turns = GeneratorTurns()

    @property
    def passes(self) -> Passes:
        """Passes of each client over its data."""
        return self._passes

    @property
    def loader(self) -> DataLoader[Any]:  # type: ignore[override]
        """Refused: there is not one.

        Raises:
            NoCommonDataset: Always.
        """
        raise NoCommonDataset(
            "every client has loaders of its own, so there is no one data set to take samples from by index; "
            "give each client a data set with a length: FederatedDataModule(clients=[dataset, ...])"
        )

    def over(self, loader: Any) -> ClientLoader:
        """The same clients over new passes."""
        return PerClientRoundLoader(loader, self._work, self._stacks, len(self))

    def fetch(self, indices: Tensor) -> Any:
        """Refused, as there are no indices."""
        return self.loader

    def iterate_stacks(self) -> Iterator[tuple[Stack, Iterator[Any]]]:
        """Yield the clients of the round to come with their batches."""
        for stack in self._stacks():
            own = self.stack_batches(stack)
            yield stack, own
            deque(own, maxlen=0)

    def stack_batches(self, stack: Stack) -> Iterator[Any]:
        """Yield the batches of one client. Nobody has none."""
        if not stack.clients:
            return iter(())
        return self._seeded(
            stack, self._client_batches(stack.clients[0], len(stack.batch_sizes), stack.training_seed)
        )

    def _client_batches(self, client: int, number: int, seed: int) -> Iterator[Any]:
        found = 0
        while found < number:
            _seed(self._passes[client], seed + found)
            before = found
            for batch in islice(self._passes[client], min(len(self._work.passes[client]), number - found)):
                yield batch
                found += 1
            if found == before:
                raise ValueError(f"the loader of client {client} gave no batch; leave the client out")


def _seed(loader: Any, seed: int) -> None:
    """Generators of a loader, sampler, data set or transform would go on from round to round, and client."""
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
    held = generators_in(getattr(loader, "dataset", None), getattr(loader, "collate_fn", None))
    for number, generator in enumerate(held, 1):
        reseed(generator, seed + number)


class _ClientCombinedLoader:
    """One client's share of several loaders. Each pass gives batches of the structure that the user's had."""

    def __init__(self, combined: Any, shares: Sequence[DataLoader[Any]]) -> None:
        self._combined = copy.copy(combined)
        self._combined.flattened = list(shares)

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in self._combined:
            yield batch

    def num_batches(self) -> int:
        counted = copy.copy(self._combined)
        counted.flattened = [range(len(share)) for share in self._combined.flattened]
        return len(iter(counted))


class SeveralLoaders:
    """Several loaders at once, each of which is dealt out to the clients.

    Args:
        combined: Lightning's `CombinedLoader` of them.
        partition: Deals each out.

    Raises:
        ValueError: If who holds what is given by indices, or the loaders follow one another.
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
                "the indices of each client say who holds what of one data set, and there are several "
                "loaders; use a partition, or give every client loaders of its own"
            )
        if partition.of_one_data_set:
            raise ValueError(
                f"{partition} deals out one data set, and there are several loaders, whose users might be "
                "numbered in different ways; give every client loaders of its own: "
                "FederatedDataModule(clients=[...])"
            )
        if getattr(combined, "_mode", None) == "sequential":
            raise ValueError(
                "loaders that follow one another (CombinedLoader mode 'sequential') are none that Lightning "
                "trains on; use 'max_size_cycle', 'max_size' or 'min_size'"
            )
        loaders = [check_loader(loader) for loader in combined.flattened]
        self._held = [partition_dataset(loader, partition, num_clients, generator) for loader in loaders]
        self._sizes = [len(loader.dataset) for loader in loaders]  # type: ignore[arg-type]
        self.together = self._deal(combined)

    def _deal(self, combined: Any) -> list[_ClientCombinedLoader]:
        return [
            _ClientCombinedLoader(
                combined, [_share(*one) for one in zip(combined.flattened, parts, strict=True)]
            )
            for parts in zip(*self._held, strict=True)
        ]

    def client_indices(self) -> list[Tensor]:
        """The samples of each client, counted through all data sets."""
        starts = [sum(self._sizes[:index]) for index in range(len(self._sizes))]
        parts = [[held[c] + start for held, start in zip(self._held, starts, strict=True)]
                 for c in range(len(self._held[0]))]  # fmt: skip
        return [torch.cat(own) for own in parts]

    def renew(self, combined: Any) -> Passes:
        """The same split of new loaders.

        Raises:
            ValueError: If they are of other lengths.
        """
        sizes = [len(check_loader(loader).dataset) for loader in combined.flattened]  # type: ignore[arg-type]
        if sizes != self._sizes:
            raise ValueError(
                f"the reloaded training loaders have {sizes} samples, and {self._sizes} were dealt out; "
                "return ones of the same lengths, or leave reload_dataloaders_every_n_epochs at 0"
            )
        return self._deal(combined)


def _share(loader: DataLoader[Any], held: Tensor) -> DataLoader[Any]:
    """A loader like the user's, over one client's samples."""
    size, drop_last, sampler = get_batching(loader)
    data = Subset(loader.dataset, held.tolist())
    own: Any = RandomSampler(data)
    sampling = get_sampling(loader)[0]
    if isinstance(sampler, SequentialSampler):
        own = SequentialSampler(data)
    elif isinstance(sampling, OrderOfAll):
        raise ValueError(
            f"the sampler {type(sampler).__name__} orders all samples, and there are several loaders; give "
            "every client loaders of its own: FederatedDataModule(clients=[...])"
        )
    elif isinstance(sampling, RandomSampling) and sampling.weights is not None:
        sampling.check([held])
        weights = sampling.weights[held].tolist()
        own = WeightedRandomSampler(weights, sampling.size(len(held)), sampling.replacement)
    elif isinstance(sampling, RandomSampling):
        own = RandomSampler(data, sampling.replacement, sampling.size(len(held)))
    return DataLoader(
        data,
        batch_size=size,
        sampler=own,
        drop_last=drop_last,
        collate_fn=get_collation(loader),
        **worker_settings(loader),
    )


def count_work(
    numbers: Sequence[int], local_epochs: int, local_steps: int | None, limit: int | float
) -> LocalWork:
    """Passes of so many batches for each client, a batch counted as one sample."""
    held = [torch.arange(number) for number in numbers]
    return LocalWork(held, 1, False, False, local_epochs, local_steps, limit)
