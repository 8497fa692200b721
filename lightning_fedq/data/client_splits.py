"""From whatever `train_dataloader` returns to every client's share of it."""

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
    count_work,
)
from lightning_fedq.data.sampling import get_batching

Split = Partition | Sequence[Sequence[int]]


@dataclass(frozen=True)
class LocalPasses:
    """Each client's passes over its data in a round.

    Args:
        local_epochs: Passes in a round.
        local_steps: Batches in a round, instead of `local_epochs`.
        limit_batches: Limit of every pass: an int is the most batches, a float the fraction of them.
        shuffle: May a pass have an order of its own?
    """

    local_epochs: int
    local_steps: int | None
    limit_batches: int | float
    shuffle: bool


@dataclass(frozen=True)
class ClientSplits:
    """Who holds what.

    Args:
        client_indices: Samples of each client; of streams, which do not say, none.
        loader: Makes the clients' loader of what gives a round's stacks and its length.
        own_loaders: Whether every client has loaders of its own. Clients then train one at a time.
        renew: What the clients' loader takes for a new one of the user's.
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
    """Deal out one loader, several at once, or those that every client has already.

    Args:
        given: What the user's `train_dataloader` returns.
        labels: Place of the labels; None looks in the usual places.
        passes: Over each client's data.
        rule: What draws the batches instead, or None.
        held_out: Takes samples of every client out of the training, or deals others out.

    Raises:
        TypeError: If something else than loaders is given, or a data set has no length.
        ValueError: If the data can't be dealt out like this, naming why and the cure.
    """
    if isinstance(given, Mapping | list | tuple):
        given = pl.utilities.CombinedLoader(given, "max_size_cycle")  # as Lightning does
    several = isinstance(given, pl.utilities.CombinedLoader)
    if not several and not isinstance(given, PerClientLoaders):
        check = check_loader if rule is None else check_plain
        loader = check(given)
        by = split()
        held = partition_dataset(loader, by, num_clients, generator, labels)
        if isinstance(held_out, PartitionedHeldOut):
            held_out.partition(by, loader.dataset, held, labels)
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
            "samples are held out of one data set with a length, and clients have loaders or streams "
            "of their own, or several; use ClientEvaluation(held_out=[loader, ...]) with a loader for each "
            "client"
        )
    if rule is not None:
        raise ValueError(
            f"{type(rule).__name__} draws samples by index from one data set, and there are several loaders; "
            "give each client one data set with a length: FederatedDataModule(clients=[dataset, ...])"
        )
    if not passes.shuffle:
        raise ValueError(
            "overfit_batches takes the first batches of one loader, and there are several; "
            "use limit_train_batches, and loaders that do not shuffle"
        )
    if several:
        shares = SeveralLoaders(given, split(), num_clients, generator)
        numbers = [together.num_batches() for together in shares.together]
        return _split_client_loaders(shares.client_indices(), shares.together, shares.renew, numbers, passes)
    split()  # nothing else may say who holds what
    return _of_clients_loaders(given, num_clients, passes)


def _of_clients_loaders(given: PerClientLoaders, num_clients: int, passes: LocalPasses) -> ClientSplits:
    if len(given.loaders) != num_clients:
        raise ValueError(f"there are loaders of {len(given.loaders)} clients, num_clients is {num_clients}")
    limit = passes.limit_batches
    otherwise = limit if isinstance(limit, int) else passes.local_steps

    def renew(again: PerClientLoaders) -> Passes:
        if again.num_batches(otherwise) != given.num_batches(otherwise):
            raise ValueError("the clients' reloaded loaders have other lengths; return ones of the same")
        return again.loaders

    return _split_client_loaders(
        given.client_indices(), given.loaders, renew, given.num_batches(otherwise), passes
    )


def _split_client_loaders(
    held: list[Tensor],
    own: Passes,
    renew: Callable[[Any], Passes],
    numbers: Sequence[int],
    passes: LocalPasses,
) -> ClientSplits:
    work = count_work(numbers, passes.local_epochs, passes.local_steps, passes.limit_batches)

    def renew_loaders(given: Any) -> Passes:
        if isinstance(given, Mapping | list | tuple):
            given = pl.utilities.CombinedLoader(given, "max_size_cycle")
        return renew(given)

    return ClientSplits(
        held, work, lambda *coming: PerClientRoundLoader(own, work, *coming), True, renew_loaders
    )
