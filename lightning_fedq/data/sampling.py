"""The user's own sampler, within every client's samples."""

from __future__ import annotations

from collections.abc import Sequence
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


class Batching(NamedTuple):
    """Batch size and last batch of a loader, whether given as `batch_size` or as torch's `BatchSampler`."""

    batch_size: int
    drop_last: bool
    sampler: Sampler[int]


def batching_of(loader: DataLoader[Any]) -> Batching:
    """The batch size, and the sampler behind it.

    Raises:
        ValueError: If another batch sampler decides what goes into a batch.
    """
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler:
        found = "automatic batching off" if batches is None else f"the batch sampler {type(batches).__name__}"
        raise ValueError(
            f"a DataLoader with {found} can't be dealt out to clients, because what goes into a batch is not "
            "known; give it a batch_size, or every client a loader of its own: "
            "FederatedDataModule(clients=[loader, ...])"
        )
    return Batching(batches.batch_size, batches.drop_last, batches.sampler)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sampling:
    """Local sampler: a client's pass over its data, where that is no plain permutation.

    Args:
        weights: `(samples of the data set,)`, of which every client uses its own; None are equal ones.
        replacement: May a sample come twice in a pass?
        rate: Samples of a pass, as a share of those there are, > 0.
    """

    weights: Tensor | None
    replacement: bool
    rate: float

    def size(self, num_samples: int) -> int:
        """Samples of one pass of a client that holds `num_samples`."""
        return max(1, round(self.rate * num_samples))

    def draw(self, held: Tensor, generator: torch.Generator) -> Tensor:
        """The samples of one pass, `(size,)`."""
        size = self.size(len(held))
        if self.weights is not None:
            own = self.weights[held]
            return held[torch.multinomial(own, size, self.replacement, generator=generator)]
        if self.replacement:
            return held[torch.randint(len(held), (size,), generator=generator)]
        passes = [torch.randperm(len(held), generator=generator) for _ in range(-(-size // len(held)))]
        return held[torch.cat(passes)[:size]]

    def check(self, clients: Sequence[Tensor]) -> None:
        """Refuse a client that can't draw a pass.

        Raises:
            ValueError: Naming the clients.
        """
        if self.weights is None:
            return
        found = [int((self.weights[held] > 0).sum()) for held in clients]
        least = [1 if self.replacement else self.size(len(held)) for held in clients]
        unable = [client for client in range(len(clients)) if found[client] < least[client]]
        if unable:
            shown = ", ".join(map(str, unable[:10])) + (", ..." if len(unable) > 10 else "")
            raise ValueError(
                f"clients {shown} hold too few samples with a weight above zero to draw a pass from the "
                "WeightedRandomSampler; use another partition, fewer clients, or replacement=True"
            )


def sampling_of(loader: DataLoader[Any]) -> tuple[Sampling | None, Tensor | None]:
    """Local sampler that follows from the loader's, and the samples there are.

    Returns:
        None for a plain order or permutation; and None where all samples are dealt out.

    Raises:
        ValueError: If the sampler is one whose order can't be had for a part of the samples.
    """
    sampler = batching_of(loader).sampler
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
        return Sampling(
            torch.as_tensor(sampler.weights, dtype=torch.float64), sampler.replacement, rate
        ), None
    if type(sampler) is RandomSampler:
        if not sampler.replacement and sampler.num_samples == num_samples:
            return None, None
        return Sampling(None, sampler.replacement, sampler.num_samples / num_samples), None
    raise ValueError(
        f"the DataLoader's sampler {type(sampler).__name__} orders all samples at once and can't be asked "
        "for a client's; use shuffle=True or False, one of torch's random samplers, or give every client a "
        "loader of its own: FederatedDataModule(clients=[loader, ...])"
    )
