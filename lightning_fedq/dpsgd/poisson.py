"""Poisson samples of every client's data: the batches of `DPSGD`, from the streams of their coins."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from lightning_fedq.data.batches import LocalWork
from lightning_fedq.data.repeats import max_repeats
from lightning_fedq.keys.randomness import Stream


def check_repeats(dataset: Dataset[Any], held: Sequence[Tensor], rows: int) -> None:
    """Refuse data in which a row stands in more samples than are charged for a person, as indices tell.

    Args:
        dataset: Training data.
        held: Sample indices of each client.
        rows: Samples of one person that are charged for.

    Raises:
        ValueError: With the number there is, and the cure.
    """
    samples, clients = max_repeats(dataset, held)
    if samples > rows:
        where = f", held by {clients} clients, which would each spend on it" if clients > 1 else ""
        raise ValueError(
            f"DPSGD charges a person for {rows} row{'s' * (rows > 1)} of the training data, and some row "
            f"stands in {samples} samples{where}; give every row once, to one client (a Subset without "
            "repeated indices, no data set twice in a ConcatDataset), or charge for all of them: "
            f"DPSGD(rows_per_person={samples})"
        )


class PoissonBatches:
    """Every step takes every sample of a client independently, with probability `threshold / 2^32`.

    A batch has the loader's size on average.

    Args:
        work: Samples of each client; data that nobody has dealt out are those of client 0.
        stream: Gives the stream of the coins of a client's step.
    """

    def __init__(self, work: LocalWork, stream: Callable[[int, int], Stream]) -> None:
        self._held, self._stream = work.client_indices, stream
        # rounded down, and charged at the rate of the integer
        self.thresholds = [min((work.batch_size << 32) // len(part), 1 << 32) for part in work.client_indices]
        self.steps = [len(sizes) for sizes in work.sizes]
        """Steps of each client in a round: as many as by passes over its data."""

    def sample_rate(self, client: int) -> float:
        """The exact probability that a sample is taken."""
        return self.thresholds[client] / 2.0**32

    def num_samples(self, client: int) -> int:
        """Number of samples that a client holds."""
        return len(self._held[client])

    def draw_samples(self, client: int, step: int) -> Tensor:
        """The samples of one step."""
        held = self._held[client]
        coins = self._stream(client, step).words(len(held)) < self.thresholds[client]
        return held[torch.from_numpy(np.flatnonzero(coins))]


class PoissonEpoch(Sampler[tuple[Tensor, bytes]]):
    """The batches of client 0, one pass over the data on average, with the secrets of their random draws.

    Args:
        next_step: Returns the number of the epoch's first step.
        key: Returns the secret of a step's random draws.

    Attributes:
        drawn: Step and size of each batch that has not been trained on.
        keys: Secrets of all batches of this epoch.
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
