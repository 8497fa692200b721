"""Local batches of a round: whole passes over a client's data, or what a rule draws for it.

A *stack* is a group of clients that train side by side in one step. `LocalWork` says how many batches of
which size a client has by default; a `BatchRule` draws the samples of every batch anew, such as Poisson
samples, whose sizes differ from client to client, so that clients then train one at a time.
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
    """Clients that train side by side, and what they train on.

    Args:
        clients: The clients; none at all stands for one idle step, the round of nobody.
        batch_sizes: Samples of each client's first, second, ... batch.
        training_seed: Seed of torch's generators while the stack's first client trains.
        order_seeds: Seed of each client's data order; empty where there is nothing to shuffle.
        samples: Indices of each batch of the only client, where a rule has drawn them.
        keys: Secret of the random draws of each batch, 32 bytes, where a rule has drawn them; otherwise
            they follow from `training_seed`.
        training_seed_of: Seed of torch's generators while any one client trains.
    """

    clients: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    training_seed: int
    order_seeds: tuple[int, ...]
    samples: tuple[Tensor, ...] = field(default=(), compare=False)
    keys: tuple[bytes, ...] = field(default=(), compare=False, repr=False)
    training_seed_of: Callable[[int], int] = field(default=int, compare=False)

    def row_seed(self, row: int) -> int:
        """Seed of torch's generators while the client of a row trains."""
        return self.training_seed_of(self.clients[row]) if row else self.training_seed


def pass_sizes(
    num_samples: int, batch_size: int, drop_last: bool, limit_batches: int | float = 1.0
) -> tuple[int, ...]:
    """Sizes of one client's batches in one pass over its data.

    Args:
        num_samples: Samples that the client holds.
        batch_size: Samples of a whole batch.
        drop_last: Is the rest of a pass left out?
        limit_batches: At most so many batches, or, a float, this fraction of them, rounded down.

    Example:
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
    """Sizes of one client's batches in a round: `local_epochs` passes, or exactly `local_steps` batches.

    Example:
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
    """Data that each client holds, and how it would pass over them in a round.

    Args:
        client_indices: Sample indices of each client.
        batch_size: Samples of a whole batch.
        drop_last: Is the rest of a pass left out?
        shuffle: Whether every pass has an order of its own.
        local_epochs: Passes in a round.
        local_steps: Batches in a round, instead of `local_epochs`.
        limit_batches: Trainer's `limit_train_batches`, of every pass of every client: an int is the most
            batches of a pass, a float in [0, 1] the fraction of them that is trained on, rounded down.
        sampling: How a pass is drawn, where that is no plain order or permutation.
        dataset: Data set that the indices are of; None where there are several.
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
        """With the settings of the user's own loader."""
        size, drop_last, sampler = get_batching(loader)
        shuffle, sampling = not isinstance(sampler, SequentialSampler), get_sampling(loader)[0]
        passes = local_epochs, local_steps, limit_batches
        return cls(held, size, drop_last, shuffle, *passes, sampling, loader.dataset)

    @cached_property
    def passes(self) -> list[tuple[int, ...]]:
        """Each client's batch sizes in one pass."""
        settings = (self.batch_size, self.drop_last, self.limit_batches)
        return [pass_sizes(self.pass_length(client), *settings) for client in range(len(self.client_indices))]

    def pass_length(self, client: int) -> int:
        """Samples of one pass of this client, without a limit."""
        held = len(self.client_indices[client])
        return held if self.sampling is None else self.sampling.size(held)

    @cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        """Each client's batch sizes in a round."""
        return [batch_sizes(one_pass, self.local_epochs, self.local_steps) for one_pass in self.passes]

    def shuffles(self, client: int) -> bool:
        """Is there anything to shuffle for this client?"""
        return self._shuffled[client]

    @cached_property
    def _shuffled(self) -> list[bool]:
        drawn = self.sampling is not None
        return [self.shuffle and (drawn or len(held) > self.batch_size) for held in self.client_indices]


class BatchRule(Protocol):
    """Rule that draws the samples of every local batch. Clients then train one at a time."""

    skips_empty: bool
    """Is an empty batch no step at all? Otherwise it arrives as one sample of zeros."""

    def begin(self, work: LocalWork) -> None:
        """The data are dealt out."""

    def draw(self, round: int, attempt: int, clients: Sequence[int]) -> Sequence[tuple[Tensor, ...]]:
        """Return the sample indices of each batch, for each of the clients of one round.

        Every client has as many batches as by passes over its data. Asked once for an attempt at a round.
        """

    def keys(self, client: int, steps: int) -> tuple[bytes, ...]:
        """Secret of the random draws of each of a client's batches in this round. None if they have a seed.

        Asked after `draw`.
        """
