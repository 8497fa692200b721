"""Local sampling: apply the sampler of the user's loader to each client's samples."""

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
    """Batch size, treatment of the incomplete last batch (`drop_last`), and sampler of a loader."""

    batch_size: int
    drop_last: bool
    sampler: Sampler[int]


def get_batching(loader: DataLoader[Any]) -> Batching:
    """Return the batch size, `drop_last` and the sampler of a loader.

    Raises:
        ValueError: If the loader has a batch sampler of another class than torch's `BatchSampler`.
    """
    batches: Any = loader.batch_sampler
    if batches is None:  # without automatic batching every sample is a batch
        return Batching(1, False, loader.sampler)  # type: ignore[arg-type]
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"A DataLoader with the batch sampler {type(batches).__name__} can't be partitioned. "
            "Give it a batch_size, or give every client a loader: FederatedDataModule(clients=[loader, ...])."
        )
    return Batching(batches.batch_size, batches.drop_last, batches.sampler)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _OfOneSample:
    """Collation of a list of one sample, which is a batch already, by the loader's conversion."""

    convert: Callable[[Any], Any]

    def __call__(self, samples: list[Any]) -> Any:
        return self.convert(samples[0])


def get_collation(loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    """Return the function that makes a batch from a list of samples."""
    collate: Callable[[Any], Any] = loader.collate_fn
    return _OfOneSample(collate) if loader.batch_sampler is None else collate


class Sampling(ABC):
    """Rule by which a client draws a pass over its data, other than by a plain permutation."""

    rate: float
    """Length of a pass, as a fraction of the number of samples, > 0."""

    def size(self, num_samples: int) -> int:
        """Return the length of one pass of a client with `num_samples` samples."""
        return max(1, round(self.rate * num_samples))

    @abstractmethod
    def draw(self, held: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the sample indices of one pass, `(size,)`.

        Args:
            held: Sample indices of the client.
            generator: CPU generator of the client's data order.

        Raises:
            ValueError: If the sampler gives none of the client's samples.
        """

    @abstractmethod
    def check(self, clients: Sequence[Tensor]) -> None:
        """Refuse clients that can't draw a pass.

        Args:
            clients: Sample indices of each client.

        Raises:
            ValueError: If there are such clients. The message names them.
        """


@dataclass(frozen=True)
class RandomSampling(Sampling):
    """Local version of torch's `RandomSampler` and `WeightedRandomSampler`.

    Args:
        weights: Weight of each sample of the whole data set, `(num_samples,)`, of which every client uses
            those of its samples. None are equal weights.
        replacement: Whether a pass may contain a sample several times.
        rate: Length of a pass, as a fraction of the number of samples, > 0.
    """

    weights: Tensor | None
    replacement: bool
    rate: float

    def draw(self, held: Tensor, generator: torch.Generator) -> Tensor:
        size = self.size(len(held))
        if self.weights is not None:
            weights = self.weights[held]
            return held[torch.multinomial(weights, size, self.replacement, generator=generator)]
        if self.replacement:
            return held[torch.randint(len(held), (size,), generator=generator)]
        passes = [torch.randperm(len(held), generator=generator) for _ in range(-(-size // len(held)))]
        return held[torch.cat(passes)[:size]]

    def check(self, clients: Sequence[Tensor]) -> None:
        if self.weights is None:
            return
        available = [int((self.weights[held] > 0).sum()) for held in clients]
        needed = [1 if self.replacement else self.size(len(held)) for held in clients]
        unable = [client for client in range(len(clients)) if available[client] < needed[client]]
        if unable:
            raise ValueError(
                f"Clients {in_short(unable)} have too few samples with positive weights for the "
                "WeightedRandomSampler. Use another partition, fewer clients, or replacement=True."
            )


@dataclass(frozen=True)
class OrderOfAll(Sampling):
    """Order of a user-defined sampler over all samples, without the samples of other clients.

    If the sampler ends before it has given enough samples of a client, it is iterated again. Torch's
    generator is seeded for each pass. A sampler that draws from other generators is not reproducible.

    Args:
        order: The sampler, which gives indices of all samples.
        rate: Length of a pass, as a fraction of the number of samples, > 0.
    """

    order: Iterable[int]
    rate: float

    def draw(self, held: Tensor, generator: torch.Generator) -> Tensor:
        client_indices, size = set(held.tolist()), self.size(len(held))
        seed = int(torch.randint(2**62, (), generator=generator))
        indices: list[int] = []
        with torch.random.fork_rng([]):
            seed_everywhere(seed)
            while len(indices) < size:
                further = [int(index) for index in self.order if int(index) in client_indices]
                if not further:
                    raise ValueError(f"The sampler {type(self.order).__name__} gave no sample of a client")
                indices += further
        return torch.tensor(indices[:size])

    def check(self, clients: Sequence[Tensor]) -> None:
        sampled = torch.tensor([int(index) for index in self.order])
        unable = [client for client, held in enumerate(clients) if not torch.isin(held, sampled).any()]
        if unable:
            raise ValueError(
                f"The sampler {type(self.order).__name__} gives no sample of clients {in_short(unable)}. "
                "Use another partition, or fewer clients."
            )
        rank_zero_info(
            f"Each client uses the order of the sampler {type(self.order).__name__}, without the samples of "
            "other clients"
        )


def find_length(sized: Any) -> int | None:
    """Return the length, or None if there is none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def in_short(names: Sequence[object], most: int = 10) -> str:
    """Return the first `most` names or numbers in words, and how many more there are."""
    rest = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {rest} more" if rest > 0 else "")


def get_sampling(loader: DataLoader[Any]) -> tuple[Sampling | None, Tensor | None]:
    """Return the local sampling that corresponds to the loader's sampler, and the samples that it uses.

    Returns:
        The local sampling, or None for a plain order or permutation. Then the sample indices that are
        partitioned, or None for all samples.

    Raises:
        ValueError: If the number of the sampler's weights is not the number of samples.
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
                f"The WeightedRandomSampler has {len(sampler.weights)} weights for {num_samples} samples. "
                "Give it one weight for each sample."
            )
        weights = torch.as_tensor(sampler.weights, dtype=torch.float64)
        return RandomSampling(weights, sampler.replacement, rate), None
    if type(sampler) is RandomSampler:
        if not sampler.replacement and sampler.num_samples == num_samples:
            return None, None
        return RandomSampling(None, sampler.replacement, sampler.num_samples / num_samples), None
    length = len(sampler) if hasattr(sampler, "__len__") else num_samples
    return OrderOfAll(sampler, length / num_samples), None
