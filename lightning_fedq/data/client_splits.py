"""Partition the result of the user's `train_dataloader` over the clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.data.batches import LocalWork, Stack
from lightning_fedq.data.held_out import HeldOut, PartitionedHeldOut
from lightning_fedq.data.labels import Labels
from lightning_fedq.data.loader import ClientLoader, check_loader, check_plain, partition_dataset
from lightning_fedq.data.partition import Partition
from lightning_fedq.data.per_client_loaders import (
    Passes,
    PerClientLoaders,
    PerClientRoundLoader,
    SeveralLoaders,
)
from lightning_fedq.data.sampling import get_batching

Split = Partition | Sequence[Sequence[int]]


@dataclass(frozen=True)
class LocalPasses:
    """Settings of each client's passes over its data in a round.

    Args:
        local_epochs: Number of passes in a round.
        local_steps: Number of batches in a round, instead of `local_epochs`, or None.
        limit_batches: Limit of every pass: an int is the largest number of batches, a float their fraction.
        shuffle: Whether passes may be shuffled.
    """

    local_epochs: int
    local_steps: int | None
    limit_batches: int | float
    shuffle: bool


@dataclass(frozen=True)
class ClientSplits:
    """Partition of the training data over the clients, with functions to build the clients' loader.

    Args:
        client_indices: Sample indices of each client. Empty for streams.
        work: Samples of each client, and its passes over them in a round.
        loader: Function that makes the clients' loader, from a function that returns a round's stacks and
            the number of steps of a round.
        own_loaders: Whether every client has separate loaders. Clients then train one at a time.
        renew: Function that converts a reloaded loader of the user to the argument of `ClientLoader.over`.
    """

    client_indices: list[Tensor]
    work: LocalWork
    loader: Callable[[Callable[[], Sequence[Stack]], int], ClientLoader]
    own_loaders: bool
    renew: Callable[[Any], Any]


def split_loader(
    given: Any,
    split: Callable[[], Split],
    num_clients: int,
    generator: torch.Generator,
    labels: Labels,
    passes: LocalPasses,
    rule: object | None,
    held_out: HeldOut | PartitionedHeldOut | None = None,
) -> ClientSplits:
    """Partition one loader, several loaders, or the separate loaders of the clients.

    Args:
        given: Result of the user's `train_dataloader`.
        split: Returns the partition, or the sample indices of each client.
        num_clients: Number of clients.
        generator: CPU generator of the partition's draws.
        labels: Source of the labels. None looks in the usual places.
        passes: Settings of each client's passes over its data.
        rule: Rule that draws the batches in place of passes, or None.
        held_out: Selection of held-out samples from every client, or partition of a held-out data set.

    Raises:
        TypeError: If `given` has no loaders, or if a data set has no length.
        ValueError: If the data can't be partitioned in this way.
    """
    if isinstance(given, Mapping | list | tuple):
        given = pl.utilities.CombinedLoader(given, "max_size_cycle")  # as Lightning does
    if not isinstance(given, pl.utilities.CombinedLoader | PerClientLoaders):
        check = check_loader if rule is None else check_plain
        loader = check(given)
        partition = split()
        held = partition_dataset(loader, partition, num_clients, generator, labels)
        if isinstance(held_out, PartitionedHeldOut):
            held_out.partition(partition, loader.dataset, held, labels)
        elif held_out is not None:
            batching = get_batching(loader)
            held = held_out.select_training(held, batching.batch_size if batching.drop_last else 1)
        work = LocalWork.from_loader(
            loader, held, passes.local_epochs, passes.local_steps, passes.limit_batches
        )
        if not passes.shuffle:
            work = replace(work, shuffle=False)
        if work.sampling is not None:
            work.sampling.check(held)
        return ClientSplits(held, work, lambda *coming: ClientLoader(loader, work, *coming), False, check)
    if held_out is not None:
        raise ValueError(
            "Samples can be held out of one data set with a length only, not of several loaders or streams. "
            "Use ClientEvaluation(held_out=[loader, ...]) with a loader for each client."
        )
    if rule is not None:
        raise ValueError(
            f"{type(rule).__name__} draws samples from one data set, but there are several loaders. "
            "Give each client one data set with a length: FederatedDataModule(clients=[dataset, ...])."
        )
    if not passes.shuffle:
        raise ValueError(
            "overfit_batches takes the first batches of one loader, but there are several. "
            "Use limit_train_batches, and loaders that do not shuffle."
        )
    return _split_client_loaders(given, split, num_clients, generator, passes)


def _split_client_loaders(
    given: Any, split: Callable[[], Split], num_clients: int, generator: torch.Generator, passes: LocalPasses
) -> ClientSplits:
    """Return the splits for clients that iterate separate loaders: given ones, or parts of several loaders.

    Args:
        given: Lightning's loader of several loaders, or the separate loaders of the clients.
        split: Returns the partition, or the sample indices of each client.
        num_clients: Number of clients.
        generator: CPU generator of the partition's draws.
        passes: Settings of each client's passes over its data.
    """
    own: Passes
    renew: Callable[[Any], Passes]
    if isinstance(given, pl.utilities.CombinedLoader):
        shares = SeveralLoaders(given, split(), num_clients, generator)
        own, renew, held = shares.together, shares.renew, shares.client_indices()
        numbers = [together.num_batches() for together in shares.together]
    else:
        split()  # refuses a partition in addition to the clients' loaders
        if len(given.loaders) != num_clients:
            raise ValueError(
                f"There are loaders of {len(given.loaders)} clients, but num_clients is {num_clients}"
            )
        otherwise = passes.limit_batches if isinstance(passes.limit_batches, int) else passes.local_steps

        def renew_given(again: PerClientLoaders) -> Passes:
            if again.num_batches(otherwise) != given.num_batches(otherwise):
                raise ValueError("The clients' reloaded loaders have other lengths. Keep the lengths.")
            return again.loaders

        own, renew, held = given.loaders, renew_given, given.client_indices()
        numbers = given.num_batches(otherwise)
    batches = [torch.arange(number) for number in numbers]  # a batch counts as one sample
    limits = passes.local_epochs, passes.local_steps, passes.limit_batches
    work = LocalWork(batches, 1, False, False, *limits)

    def renew_loaders(again: Any) -> Passes:
        if isinstance(again, Mapping | list | tuple):
            again = pl.utilities.CombinedLoader(again, "max_size_cycle")
        return renew(again)

    return ClientSplits(
        held, work, lambda *coming: PerClientRoundLoader(own, work, *coming), True, renew_loaders
    )
