"""The user's own sampler, within every client's samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fedq._lightning import rank_zero_info
from lightning_fedq.data.generator_turns import seed_everywhere


class Batching(NamedTuple):
    """Batch size and last batch of a loader, whether given as `batch_size` or as torch's `BatchSampler`."""

    batch_size: int
    drop_last: bool
    sampler: Sampler[int]


def get_batching(loader: DataLoader[Any]) -> Batching:
    """The batch size, and the sampler behind it.

    Raises:
        ValueError: If another batch sampler decides what goes into a batch.
    """
    batches: Any = loader.batch_sampler
    if batches is None:  # automatic batching off: every sample is a batch
        return Batching(1, False, loader.sampler)  # type: ignore[arg-type]
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"a DataLoader with the batch sampler {type(batches).__name__} can't be dealt out to clients, "
            "because what goes into a batch is not known; give it a batch_size, or every client a loader of "
            "its own: FederatedDataModule(clients=[loader, ...])"
        )
    return Batching(batches.batch_size, batches.drop_last, batches.sampler)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _OfOneSample:
    """The conversion of a sample that is a batch already, in the place of a collation."""

    convert: Callable[[Any], Any]

    def __call__(self, samples: list[Any]) -> Any:
        return self.convert(samples[0])


def get_collation(loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    """The function that makes a batch of a list of samples."""
    collate: Callable[[Any], Any] = loader.collate_fn
    return _OfOneSample(collate) if loader.batch_sampler is None else collate


class Sampling(ABC):
    """A client's way of drawing a pass over its data, where that is no plain permutation."""

    rate: float
    """Samples of a pass, as a share of those there are, > 0."""

    def size(self, num_samples: int) -> int:
        """Samples of one pass of a client that holds `num_samples`."""
        return max(1, round(self.rate * num_samples))

    @abstractmethod
    def draw(self, held: Tensor, generator: torch.Generator) -> Tensor:
        """The samples of one pass, `(size,)`.

        Raises:
            ValueError: If there are none of the client's.
        """

    @abstractmethod
    def check(self, clients: Sequence[Tensor]) -> None:
        """Refuse a client that can't draw a pass.

        Raises:
            ValueError: Naming the clients.
        """


@dataclass(frozen=True)
class RandomSampling(Sampling):
    """Draws of torch's own random samplers: with weights, with replacement, more or fewer than there are.

    Args:
        weights: `(samples of the data set,)`, of which every client uses its own; None are equal ones.
        replacement: May a sample come twice in a pass?
    """

    weights: Tensor | None
    replacement: bool
    rate: float

    def draw(self, held: Tensor, generator: torch.Generator) -> Tensor:
        size = self.size(len(held))
        if self.weights is not None:
            own = self.weights[held]
            return held[torch.multinomial(own, size, self.replacement, generator=generator)]
        if self.replacement:
            return held[torch.randint(len(held), (size,), generator=generator)]
        passes = [torch.randperm(len(held), generator=generator) for _ in range(-(-size // len(held)))]
        return held[torch.cat(passes)[:size]]

    def check(self, clients: Sequence[Tensor]) -> None:
        if self.weights is None:
            return
        found = [int((self.weights[held] > 0).sum()) for held in clients]
        least = [1 if self.replacement else self.size(len(held)) for held in clients]
        unable = [client for client in range(len(clients)) if found[client] < least[client]]
        if unable:
            raise ValueError(
                f"clients {in_short(unable)} hold too few samples with a weight above zero to draw a pass "
                "from the WeightedRandomSampler; use another partition, fewer clients, or replacement=True"
            )


@dataclass(frozen=True)
class OrderOfAll(Sampling):
    """The order of a sampler of the user's own, which knows all samples, without those of other clients.

    A pass has the client's share of the sampler's. Where its samples come too seldom, the sampler begins
    anew. Torch's generator is seeded for each pass; a sampler that draws otherwise is not reproducible.
    """

    order: Iterable[int]
    rate: float

    def draw(self, held: Tensor, generator: torch.Generator) -> Tensor:
        own, size = set(held.tolist()), self.size(len(held))
        seed = int(torch.randint(2**62, (), generator=generator))
        found: list[int] = []
        with torch.random.fork_rng([]):
            seed_everywhere(seed)
            while len(found) < size:
                again = [int(index) for index in self.order if int(index) in own]
                if not again:
                    raise ValueError(f"the sampler {type(self.order).__name__} gave no sample of a client")
                found += again
        return torch.tensor(found[:size])

    def check(self, clients: Sequence[Tensor]) -> None:
        given = torch.tensor([int(index) for index in self.order])
        unable = [client for client, held in enumerate(clients) if not torch.isin(held, given).any()]
        if unable:
            raise ValueError(
                f"the sampler {type(self.order).__name__} gives no sample of clients {in_short(unable)}; use "
                "another partition, or fewer clients"
            )
        rank_zero_info(
            f"the order of the sampler {type(self.order).__name__} holds for every client, without the "
            "samples of the others"
        )


def in_short(names: Sequence[object], most: int = 10) -> str:
    """The first of some names or numbers, and how many more there are."""
    rest = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {rest} more" if rest > 0 else "")


def get_sampling(loader: DataLoader[Any]) -> tuple[Sampling | None, Tensor | None]:
    """Local sampler that follows from the loader's, and the samples there are.

    Returns:
        None for a plain order or permutation; and None where all samples are dealt out.

    Raises:
        ValueError: If the sampler's weights are not the samples'.
    """
    sampler = get_batching(loader).sampler
    num_samples: int = len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler:
        return None, None
    if type(sampler) is SubsetRandomSampler:
        return None, torch.as_tensor(list(sampler.indices), dtype=torch.int64)
    if type(sampler) is WeightedRandomSampler:
        rate = sampler.num_samples / num_samples
        if len(sampler.weights) != num_samples:
            raise ValueError(
                f"the WeightedRandomSampler has {len(sampler.weights)} weights for {num_samples} samples; "
                "give it one a sample, so that every client finds those of its own"
            )
        return RandomSampling(
            torch.as_tensor(sampler.weights, dtype=torch.float64), sampler.replacement, rate
        ), None
    if type(sampler) is RandomSampler:
        if not sampler.replacement and sampler.num_samples == num_samples:
            return None, None
        return RandomSampling(None, sampler.replacement, sampler.num_samples / num_samples), None
    length = len(sampler) if hasattr(sampler, "__len__") else num_samples
    return OrderOfAll(sampler, length / num_samples), None
