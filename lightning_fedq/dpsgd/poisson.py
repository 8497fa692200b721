"""Poisson batches of `DPSGD`: every sample is drawn independently, from a random stream for each step."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_fedq.data.batches import LocalWork
from lightning_fedq.data.generator_turns import seed_generators
from lightning_fedq.data.loader import ClientBatches
from lightning_fedq.data.repeats import max_equal_rows, max_repeats
from lightning_fedq.keys.randomness import Stream


def check_repeats(dataset: Dataset[Any], held: Sequence[Tensor], rows: int, read: bool) -> None:
    """Refuse data in which one row appears in more samples than the accounts charge for a person.

    Args:
        dataset: Training data.
        held: Sample indices of each client.
        rows: Number of samples of one person that the accounts charge for, >= 1.
        read: Whether to compare the content of all samples. Otherwise only repeated indices are found.

    Raises:
        ValueError: If a row appears in more than `rows` samples of all clients together.
    """
    samples, clients = max_repeats(dataset, held)
    if samples > rows:
        where = f" of {clients} clients" if clients > 1 else ""
        raise ValueError(
            f"DPSGD charges {rows} row{'s' * (rows > 1)} per person, and one row appears in {samples} "
            f"samples{where}. Remove repeated indices from Subset or ConcatDataset, or use "
            f"DPSGD(rows_per_person={samples})."
        )
    samples, clients = max_equal_rows(dataset, held) if read else (0, 0)
    if samples > rows:
        where = f" of {clients} clients" if clients > 1 else ""
        raise ValueError(
            f"DPSGD charges {rows} row{'s' * (rows > 1)} per person, and one row appears in {samples} "
            f"samples{where} of equal content. Use DPSGD(rows_per_person={samples}), or "
            "DPSGD(count_equal_rows=False) if equal rows are of different people."
        )


class PoissonBatches:
    """Poisson sampling for each client: a step takes each sample with probability `threshold / 2^32`.

    The expected size of a batch is the batch size of the user's loader.

    Args:
        work: Sample indices and batch size of each client. Without a federation, client 0 has all samples.
        stream: Returns the random stream for a client and a step.

    Attributes:
        thresholds: Sampling threshold of each client, in units of 2^-32.
    """

    def __init__(self, work: LocalWork, stream: Callable[[int, int], Stream]) -> None:
        self._held, self._stream = work.client_indices, stream
        # the rate is rounded down to a multiple of 2^-32, and the account charges this exact rate
        self.thresholds = [min((work.batch_size << 32) // len(part), 1 << 32) for part in work.client_indices]
        self.steps = [len(sizes) for sizes in work.sizes]
        """Steps of each client in a round, as many as ordinary passes over its data would take."""

    def sample_rate(self, client: int) -> float:
        """Return the exact probability with which a step takes a sample of a client."""
        return self.thresholds[client] / 2.0**32

    def num_samples(self, client: int) -> int:
        """Return the number of samples that a client holds."""
        return len(self._held[client])

    def draw_samples(self, client: int, step: int) -> Tensor:
        """Return the sample indices of one step of a client. They may be none."""
        indices = self._held[client]
        is_drawn = self._stream(client, step).words(len(indices)) < self.thresholds[client]
        return indices[torch.from_numpy(np.flatnonzero(is_drawn))]


class PoissonEpoch(Sampler[tuple[Tensor, bytes]]):
    """Sampler of one epoch without a federation: Poisson batches, each with a key for its random draws.

    An epoch has as many steps as one pass over the data takes on average.

    Args:
        batches: Poisson sampling, in which client 0 holds all samples.
        next_step: Returns the number of the epoch's first step.
        key: Returns the secret key from which a step's random draws are seeded.

    Attributes:
        drawn: Step number and size of each batch that is drawn and not yet trained on.
        keys: Secret keys of all batches of this epoch.
    """

    def __init__(
        self, batches: PoissonBatches, next_step: Callable[[], int], key: Callable[[int], bytes]
    ) -> None:
        self._batches, self._next_step, self._key = batches, next_step, key
        self.drawn: deque[tuple[int, int]] = deque()
        self.keys: list[bytes] = []

    def __len__(self) -> int:
        return max(round(1.0 / self._batches.sample_rate(0)), 1)

    def __iter__(self) -> Iterator[tuple[Tensor, bytes]]:
        self.drawn.clear()
        self.keys = []
        first = self._next_step()
        for step in range(first, first + len(self)):
            taken = self._batches.draw_samples(0, step)
            self.drawn.append((step, len(taken)))
            self.keys.append(self._key(step))
            yield taken, self.keys[-1]


class _HandedOver(DataLoader[Any]):
    """Loader that seeds this process from each batch's secret key, before hooks on the batch draw from it."""

    def __iter__(self) -> Any:
        epoch: Any = self.sampler
        for number, batch in enumerate(super().__iter__()):
            seed_generators(epoch.keys[number], "handed over")
            yield batch


def make_poisson_loader(loader: DataLoader[Any], epoch: PoissonEpoch) -> DataLoader[Any]:
    """Return a loader of Poisson batches, with data set, collation and workers of the user's loader."""
    return _HandedOver(
        ClientBatches(loader.dataset, loader.collate_fn),
        sampler=epoch,
        batch_size=None,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )
