"""Held-out samples for evaluation: a fraction of each client's samples, or samples of another data set."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fedq.data.columns import number_groups, read_column
from lightning_fedq.data.labels import Labels, read_labels
from lightning_fedq.data.partition import Partition, group_by_owner
from lightning_fedq.data.sampling import in_short
from lightning_fedq.data.splits import Natural


class HeldOut:
    """Random selection of held-out samples: the same fraction of every client's samples.

    Args:
        fraction: Fraction of held-out samples, in (0, 1), rounded to at least one sample.
        generator_of: Returns the generator for a client's selection.

    Attributes:
        parts: Held-out sample indices of each client, after `select_training`.
    """

    def __init__(self, fraction: float, generator_of: Callable[[int], torch.Generator]) -> None:
        self.fraction, self._generator_of = fraction, generator_of
        self.parts: list[Tensor] = []

    def select_training(self, held: Sequence[Tensor], least: int = 1) -> list[Tensor]:
        """Select the held-out samples, and return each client's remaining training samples in their order.

        Args:
            held: Sample indices of each client.
            least: Smallest number of training samples of a client, >= 1.

        Raises:
            ValueError: If clients have too few samples. The message names them.
        """
        sizes = [num_held_out(self.fraction, len(part)) for part in held]
        pairs = enumerate(zip(held, sizes, strict=True))
        small = [client for client, (part, size) in pairs if len(part) - size < least]
        if small:
            raise ValueError(
                f"Clients {in_short(small)} have too few samples to hold out {self.fraction:g} of them and "
                f"train on {least}. Use fewer clients, a larger min_partition_size, e.g. Dirichlet(alpha, "
                "min_partition_size=...), or "
                "ClientEvaluation(held_out=[dataset, ...])."
            )
        training = []
        self.parts = []
        for client, (part, size) in enumerate(zip(held, sizes, strict=True)):
            is_held_out = torch.zeros(len(part), dtype=torch.bool)
            is_held_out[torch.randperm(len(part), generator=self._generator_of(client))[:size]] = True
            self.parts.append(part[is_held_out])
            training.append(part[~is_held_out])
        return training


class PartitionedHeldOut:
    """Partition of a held-out data set that follows the partition of the training data.

    Each held-out sample goes to a client that trains on samples of the same user, label or feature. A rule
    that does not look at samples, such as `IID`, partitions the held-out data set with the same draws.

    Args:
        dataset: Map-style data set without training samples.
        generator: Generator in the state with which the training data set was partitioned.

    Attributes:
        parts: Sample indices of each client, after `partition`. A client may have none.
    """

    def __init__(self, dataset: Dataset[Any], generator: torch.Generator) -> None:
        self._dataset, self._generator = dataset, generator
        self.parts: list[Tensor] = []

    def partition(
        self, rule: Partition | Sequence[Sequence[int]], training: Any, held: Sequence[Tensor], labels: Labels
    ) -> None:
        """Partition the held-out data set.

        Args:
            rule: Partition of the training data, or its sample indices for each client.
            training: Training data set.
            held: Training sample indices of each client.
            labels: Source of the labels in both data sets. None looks in the usual places.

        Raises:
            ValueError: If the training data are given by indices, or if a held-out sample has a user or label
                without training samples.
        """
        if not isinstance(rule, Partition):
            raise ValueError(
                "Clients' samples are given by index, so held-out samples can't follow a partition. "
                "Use ClientEvaluation([dataset, ...]) with a data set for each client."
            )
        if isinstance(rule, Natural):
            kinds, known = number_groups(read_column(training, rule.by, "Natural"))
            users, names = number_groups(read_column(self._dataset, rule.by, "Natural"))
            numbers = {name: number for number, name in enumerate(known)}
            if unknown := [name for name in names if name not in numbers]:
                raise ValueError(_nobodys(unknown))
            new = torch.tensor([numbers[name] for name in names])[users]
        elif rule.needs_labels:
            kinds, new = read_labels(training, labels), read_labels(self._dataset, labels)
        elif (values := rule.values(training)) is not None:
            kinds, new = values, rule.values(self._dataset)  # type: ignore[assignment]
        else:
            size: int = len(self._dataset)  # type: ignore[arg-type]
            self.parts = rule.split(None, size, len(held), self._generator)
            return
        owners = torch.repeat_interleave(torch.arange(len(held)), torch.tensor([len(part) for part in held]))
        of_new = _owners(kinds[torch.cat(list(held))], owners, new, self._generator)
        self.parts = group_by_owner(of_new, len(held))


def _nobodys(kinds: Sequence[Any]) -> str:
    """Return the error message for held-out users or labels that no client trains on."""
    return (
        f"No client trains on {', '.join(map(str, kinds[:10]))}, but there are held-out samples of them. "
        "Leave them out of the data set of ClientEvaluation."
    )


def _owners(kinds: Tensor, owners: Tensor, new: Tensor, generator: torch.Generator) -> Tensor:
    """Choose the client of each new sample, so that its shares of each kind are those of the training data.

    The kind of a sample is its user, its label or its feature. A float feature counts as the nearest feature
    of the training data.

    Args:
        kinds: Kind of each training sample, `(samples,)`.
        owners: Client of each training sample, `(samples,)`.
        new: Kinds of the new samples, `(new,)`.
        generator: CPU generator.

    Returns:
        Client of each new sample, `(new,)` int64.

    Raises:
        ValueError: If a new sample has a kind without training samples.
    """
    distinct = torch.unique(kinds)
    kind_of_new, kind_of_old = _find_kinds(distinct, new), torch.searchsorted(distinct, kinds)
    # a list of the training samples: by kind, then by client, with clients in a random order
    by_client = torch.randperm(int(owners.max()) + 1, generator=generator)[owners].argsort(stable=True)
    old_samples = by_client[kind_of_old[by_client].argsort(stable=True)]
    num_old = torch.bincount(kind_of_old, minlength=len(distinct))
    first_old = num_old.cumsum(0) - num_old
    # the new samples by kind, in a random order
    shuffled = torch.randperm(len(new), generator=generator)
    new_samples = shuffled[kind_of_new[shuffled].argsort(stable=True)]
    num_new = torch.bincount(kind_of_new, minlength=len(distinct))
    first_new = num_new.cumsum(0) - num_new
    # within each kind, spread the new samples evenly over the training samples, from a random start
    kind = kind_of_new[new_samples]
    number = torch.arange(len(new)) - first_new[kind]
    start = torch.rand(len(distinct), dtype=torch.float64, generator=generator)[kind]
    step = ((number + start) * num_old[kind] / num_new[kind]).long()
    new_owners = torch.empty_like(kind_of_new)
    new_owners[new_samples] = owners[old_samples[first_old[kind] + step]]
    return new_owners


def _find_kinds(distinct: Tensor, new: Tensor) -> Tensor:
    """Return the index of each new sample's kind among the distinct kinds. The nearest one for floats.

    Raises:
        ValueError: If an integer kind is not among them.
    """
    above = torch.searchsorted(distinct, new).clamp(max=len(distinct) - 1)
    if new.is_floating_point():
        below = (above - 1).clamp(min=0)
        return torch.where((distinct[below] - new).abs() < (distinct[above] - new).abs(), below, above)
    if len(unknown := new[distinct[above] != new]):
        raise ValueError(_nobodys(torch.unique(unknown).tolist()))
    return above


def num_held_out(fraction: float, num_samples: int) -> int:
    """Return the number of held-out samples of a client with `num_samples` samples.

    Examples:
        >>> num_held_out(0.2, 7)
        1
    """
    return max(1, round(fraction * num_samples))
