"""Local batches of a round: passes over a client's data, or batches that a rule draws.

A *stack* is a group of clients that train in one step, as one batch of clients. `LocalWork` determines the
number and the sizes of a client's batches by default. A `BatchRule` draws the samples of every batch instead,
such as Poisson samples. Their sizes differ from client to client, so clients then train one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from lightning_fedq.data.sampling import Sampling, get_batching, get_sampling


@dataclass(frozen=True)
class Stack:
    """Group of clients that train in one step, with their batches and seeds.

    Args:
        clients: The clients. An empty tuple stands for one idle step, in a round without clients.
        batch_sizes: Number of samples in each client's first, second, ... batch.
        training_seed: Seed of the generators while the stack's first client trains.
        order_seeds: Seed of each client's data order. Empty if nothing is shuffled.
        samples: Sample indices of each batch of the only client, if a rule has drawn them.
        keys: Secret key of 32 bytes for the random draws of each batch, if a rule provides them. Otherwise
            the draws follow from `training_seed`.
        training_seed_of: Returns the seed of the generators while a given client trains.
    """

    clients: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    training_seed: int
    order_seeds: tuple[int, ...]
    samples: tuple[Tensor, ...] = field(default=(), compare=False)
    keys: tuple[bytes, ...] = field(default=(), compare=False, repr=False)
    training_seed_of: Callable[[int], int] = field(default=int, compare=False)

    def row_seed(self, row: int) -> int:
        """Return the seed of the generators while the client of a row of the stack trains."""
        return self.training_seed_of(self.clients[row]) if row else self.training_seed


def pass_sizes(
    num_samples: int, batch_size: int, drop_last: bool, limit_batches: int | float = 1.0
) -> tuple[int, ...]:
    """Return the sizes of one client's batches in one pass over its data.

    Args:
        num_samples: Number of samples in a pass.
        batch_size: Number of samples in a full batch.
        drop_last: Whether an incomplete last batch is dropped.
        limit_batches: Largest number of batches (int), or their fraction, rounded down (float).

    Examples:
        >>> pass_sizes(7, 3, False)
        (3, 3, 1)
        >>> pass_sizes(7, 3, True)
        (3, 3)
    """
    whole, rest = divmod(num_samples, batch_size)
    sizes = (batch_size,) * whole + ((rest,) if rest and not drop_last else ())
    limit = limit_batches if isinstance(limit_batches, int) else int(len(sizes) * limit_batches)
    return sizes[:limit]


def batch_sizes(one_pass: tuple[int, ...], local_epochs: int, local_steps: int | None) -> tuple[int, ...]:
    """Return the sizes of one client's batches in a round.

    Args:
        one_pass: Sizes of the batches in one pass.
        local_epochs: Number of passes in a round, if `local_steps` is None.
        local_steps: Exact number of batches in a round, or None.

    Examples:
        >>> batch_sizes((3, 3, 1), 2, None)
        (3, 3, 1, 3, 3, 1)
        >>> batch_sizes((3, 3, 1), 1, 2)
        (3, 3)
    """
    if local_steps is None:
        return one_pass * local_epochs
    return (one_pass * -(-local_steps // len(one_pass)))[:local_steps]


@dataclass(frozen=True)
class LocalWork:
    """Samples of each client, and its passes over them in a round.

    Args:
        client_indices: Sample indices of each client.
        batch_size: Number of samples in a full batch.
        drop_last: Whether the incomplete last batch of a pass is dropped.
        shuffle: Whether every pass is shuffled.
        local_epochs: Number of passes in a round.
        local_steps: Number of batches in a round, instead of `local_epochs`, or None.
        limit_batches: Trainer's `limit_train_batches`, applied to every pass of every client: an int is the
            largest number of batches, a float in [0, 1] the fraction of them, rounded down.
        sampling: Rule that draws a pass, if it is no plain order or permutation.
        dataset: Data set to which the indices refer, or None if there are several.
    """

    client_indices: Sequence[Tensor]
    batch_size: int
    drop_last: bool
    shuffle: bool
    local_epochs: int
    local_steps: int | None
    limit_batches: int | float = 1.0
    sampling: Sampling | None = None
    dataset: Dataset[Any] | None = None

    @classmethod
    def from_loader(
        cls,
        loader: DataLoader[Any],
        held: Sequence[Tensor],
        local_epochs: int,
        local_steps: int | None,
        limit_batches: int | float = 1.0,
    ) -> LocalWork:
        """Build the local work with batch size, order and sampler of the user's loader.

        Args:
            loader: The user's loader.
            held: Sample indices of each client.
            local_epochs: Number of passes in a round.
            local_steps: Number of batches in a round, instead of `local_epochs`, or None.
            limit_batches: Limit of every pass: an int is the largest number of batches, a float their
                fraction.
        """
        size, drop_last, sampler = get_batching(loader)
        shuffle, sampling = not isinstance(sampler, SequentialSampler), get_sampling(loader)[0]
        passes = local_epochs, local_steps, limit_batches
        return cls(held, size, drop_last, shuffle, *passes, sampling, loader.dataset)

    @cached_property
    def passes(self) -> list[tuple[int, ...]]:
        """Batch sizes of each client in one pass."""
        settings = (self.batch_size, self.drop_last, self.limit_batches)
        return [pass_sizes(self.pass_length(client), *settings) for client in range(len(self.client_indices))]

    def pass_length(self, client: int) -> int:
        """Return the number of samples in one pass of a client, without a limit."""
        held = len(self.client_indices[client])
        return held if self.sampling is None else self.sampling.size(held)

    @cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        """Batch sizes of each client in a round."""
        return [batch_sizes(one_pass, self.local_epochs, self.local_steps) for one_pass in self.passes]

    def shuffles(self, client: int) -> bool:
        """Return whether the data order of a client depends on a seed."""
        has_several_batches = len(self.client_indices[client]) > self.batch_size
        return self.shuffle and (self.sampling is not None or has_several_batches)


class BatchRule(Protocol):
    """Rule that draws the samples of every local batch. Clients then train one at a time."""

    skips_empty: bool
    """Whether an empty batch is skipped. Otherwise it arrives as one sample of zeros."""

    def begin(self, work: LocalWork) -> None:
        """Prepare for a fit, once the data are partitioned."""

    def draw(self, round: int, attempt: int, clients: Sequence[int]) -> Sequence[tuple[Tensor, ...]]:
        """Return the sample indices of each batch, for each client of a round.

        Every client has as many batches as in passes over its data. Called once for an attempt at a round.
        """

    def keys(self, client: int, steps: int) -> tuple[bytes, ...]:
        """Return secret keys for the random draws of each of a client's batches in this round.

        An empty tuple means that the draws follow from a seed. Called after `draw`.
        """
