"""Partitions of a data set over clients: pure functions of labels, sizes and a generator.

Every partition assigns every sample to exactly one client. No client is empty, except with
`min_partition_size=0`. Rules that draw the clients' sizes have the smallest size `min_partition_size` as an
argument.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_fields, check_positive


class Partition(ABC):
    """Partition of samples over clients. Subclasses are frozen dataclasses."""

    needs_labels: ClassVar[bool] = False
    of_one_data_set: ClassVar[bool] = False
    """Whether the rule fits one data set only, because several could be partitioned inconsistently."""

    def values(self, dataset: Any) -> Tensor | None:
        """Return the values that `split` uses in place of labels, `(num_samples,)`, or None.

        Args:
            dataset: Map-style data set.
        """
        return None

    @abstractmethod
    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        """Assign each sample to one client.

        Args:
            labels: Integer classes `(num_samples,)`, or the values that `values` returned. None if
                `needs_labels` is false and there are no values.
            num_samples: Number of samples of the data set.
            num_clients: Number of clients, >= 1.
            generator: CPU generator. Equal states give equal partitions.

        Returns:
            Sample indices of each client: `num_clients` disjoint int64 tensors that cover all samples.

        Raises:
            ValueError: If there are more clients than samples, or if labels are missing.
        """


def check_sizes(num_samples: int, num_clients: int) -> None:
    """Refuse more clients than samples, or no client.

    Raises:
        ValueError: If `num_clients` is not in [1, num_samples].
    """
    if num_clients < 1:
        raise ValueError(f"num_clients must be >= 1, got {num_clients}")
    if num_clients > num_samples:
        raise ValueError(
            f"{num_clients} clients can't share {num_samples} samples. Use num_clients <= "
            f"{num_samples}, or more data."
        )


def _check_labels(labels: Tensor | None, num_samples: int, num_clients: int) -> Tensor:
    """Return the labels. Refuse missing ones, and invalid numbers of clients."""
    check_sizes(num_samples, num_clients)
    if labels is None or tuple(labels.shape) != (num_samples,):
        got = "none" if labels is None else f"shape {tuple(labels.shape)}"
        raise ValueError(
            f"The partition needs one integer label per sample, shape ({num_samples},), got {got}. "
            "Use IID() without labels."
        )
    return labels


def equal_shares(num_samples: int, num_parts: int) -> list[int]:
    """Return sizes that differ by at most one and sum to `num_samples`.

    Examples:
        >>> equal_shares(10, 3)
        [4, 3, 3]
    """
    size, rest = divmod(num_samples, num_parts)
    return [size + (part < rest) for part in range(num_parts)]


def larger_shares(partition: object, parts: Sequence[Tensor], least: int) -> str:
    """Return a cure, in words, for a partition in which a client has fewer than `least` samples.

    Args:
        partition: Partition, or the explicit sample indices of each client.
        parts: Sample indices of each client under this partition.
        least: Number of samples that each client needs, >= 1.
    """
    total = sum(map(len, parts))
    if total < len(parts) * least:
        return f"num_clients <= {total // least} or more data" if total >= least else "more data"
    names = {field.name for field in fields(partition)} if isinstance(partition, Partition) else {}  # type: ignore[arg-type]
    if "min_partition_size" in names and getattr(partition, "sizes", None) is None:
        return repr(replace(partition, min_partition_size=least))  # type: ignore[type-var]
    if isinstance(partition, Partition):
        return "partition=IID() or more data"
    return "indices that give every client as many, or leave these clients out"


@dataclass(frozen=True)
class IID(Partition):
    """IID partition: a random permutation cut into equal parts, whose sizes differ by at most one.

    A single client has all samples in their original order.

    Examples:
        >>> parts = IID().split(None, 10, 3, torch.Generator().manual_seed(0))
        >>> [len(part) for part in parts]
        [4, 3, 3]
    """

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        check_sizes(num_samples, num_clients)
        if num_clients == 1:
            return [torch.arange(num_samples)]
        order = torch.randperm(num_samples, generator=generator)
        return list(torch.split(order, equal_shares(num_samples, num_clients)))


def check_least(num_samples: int, num_clients: int, least: int) -> None:
    """Refuse a smallest size for which there are too few samples.

    Raises:
        ValueError: If there are fewer than `num_clients * least` samples.
    """
    if num_samples < num_clients * least:
        raise ValueError(
            f"{num_clients} clients of at least {least} samples need {num_clients * least}, got "
            f"{num_samples}. Use fewer clients, or a smaller min_partition_size."
        )


def dirichlet_shares(alpha: float, num_parts: int, generator: torch.Generator) -> Tensor:
    """Draw shares from the symmetric Dirichlet distribution: `(num_parts,)` float64 with sum 1."""
    concentration = torch.full((num_parts,), alpha, dtype=torch.float64)
    gamma = torch._standard_gamma(concentration, generator=generator).clamp(min=1e-300)
    return gamma / gamma.sum()


def round_sizes(shares: Tensor, num_samples: int, least: int) -> Tensor:
    """Round shares of all samples to integer sizes of at least `least` that sum to `num_samples`.

    Each size is a neighbouring integer of its share. If a share is below `least`, the other clients give up
    samples in proportion to their excess over `least`.

    Args:
        shares: Share of each client, `(num_clients,)` float64 with sum 1.
        num_samples: Number of samples of the data set.
        least: Smallest size of a client, with `least * num_clients <= num_samples`.
    """
    above = (shares * num_samples - least).clamp(min=0.0)
    rest = num_samples - least * len(shares)
    cuts = (above.cumsum(0) / above.sum().clamp(min=1e-300) * rest).round().long()
    cuts[-1] = rest
    return torch.diff(cuts, prepend=cuts.new_zeros(1)) + least


@dataclass(frozen=True)
class Sizes(Partition):
    """Partition with given sizes: a random order of the samples, cut into parts of these sizes.

    Sizes are never scaled to the data set. `Dirichlet` also accepts given sizes.

    Args:
        sizes: Size of each client, > 0: either numbers of samples, which sum to the size of the data set, or
            fractions, which sum to 1. A fraction is rounded to a neighbouring integer size, at least 1.

    Raises:
        ValueError: If a size is not positive.

    Examples:
        >>> parts = Sizes((10, 30, 60)).split(None, 100, 3, torch.Generator().manual_seed(0))
        >>> [len(part) for part in parts]
        [10, 30, 60]
        >>> Sizes((0.5, 0.3, 0.2)).counts(25, 3)
        tensor([13,  7,  5])
    """

    sizes: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        check_fields(self)
        if not self.sizes or not all(0 < size < math.inf for size in self.sizes):
            raise ValueError(f"sizes must be > 0, one for each client, got {self.sizes[:10]}")

    def counts(self, num_samples: int, num_clients: int) -> Tensor:
        """Return the number of samples of each client, `(num_clients,)` int64.

        Raises:
            ValueError: If the number of sizes is not `num_clients`, or if the sizes sum neither to
                `num_samples` nor to 1.
        """
        sizes, total = torch.tensor(self.sizes, dtype=torch.float64), math.fsum(self.sizes)
        if len(sizes) != num_clients:
            raise ValueError(
                f"There are {len(sizes)} sizes, but num_clients is {num_clients}. Give one for each client."
            )
        if total == num_samples and torch.equal(sizes, sizes.round()):
            return sizes.long()
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"sizes sum to {total:g}, but there are {num_samples} samples. Let integer sizes sum to the "
                "samples (torch.utils.data.Subset leaves samples out), or fractions to 1."
            )
        return round_sizes(sizes / total, num_samples, 1)

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        check_sizes(num_samples, num_clients)
        order = torch.randperm(num_samples, generator=generator)
        return list(torch.split(order, self.counts(num_samples, num_clients).tolist()))


@dataclass(frozen=True, repr=False)
class Dirichlet(Partition):
    """Dirichlet partition: the clients' shares of each class are one draw from a symmetric Dirichlet law.

    A client's size is its expected number of samples, rounded to a neighbouring integer and at least
    `min_partition_size`.
    Each sample draws its client by the shares of its class (multinomial). If a client has drawn more samples
    than its size, randomly chosen ones of them draw again among clients that have too few. With equal shares
    this is the distribution of `IID`, for any number of samples.

    Args:
        alpha: Concentration, > 0. Small values give skewed partitions, large values are close to IID.
        min_partition_size: Smallest number of samples of a client, >= 0. With 0 a skewed draw may leave
            clients empty, and empty clients can't train.
        sizes: Sizes of the clients as in `Sizes`. None takes the sizes that follow from the drawn shares.

    References:
        Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019.

    Examples:
        >>> labels = torch.arange(1440) % 10
        >>> generator = torch.Generator().manual_seed(0)
        >>> parts = Dirichlet(0.1, min_partition_size=2).split(labels, 1440, 479, generator)
        >>> min(map(len, parts))
        2
    """

    needs_labels = True

    alpha: float
    min_partition_size: int = 1
    sizes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            object.__setattr__(self, "sizes", Sizes(self.sizes).sizes)
        check_fields(self)
        check_positive(alpha=self.alpha)
        if self.min_partition_size < 0:
            raise ValueError(f"min_partition_size must be >= 0, got {self.min_partition_size}")
        if self.sizes is not None and self.min_partition_size != 1:
            raise ValueError(
                f"min_partition_size={self.min_partition_size} is for drawn sizes, but sizes are given. "
                "Leave it out."
            )

    def __repr__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={self.sizes}"
        return f"Dirichlet(alpha={self.alpha}, min_partition_size={self.min_partition_size}{sizes})"

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        labels = _check_labels(labels, num_samples, num_clients)
        check_least(num_samples, num_clients, self.min_partition_size)
        counts = torch.unique(labels, return_counts=True)[1]
        shares = torch.stack([dirichlet_shares(self.alpha, num_clients, generator) for _ in counts])
        if self.sizes is None:
            of_all = (counts.double() / num_samples) @ shares
            sizes = round_sizes(of_all, num_samples, self.min_partition_size)
        else:
            sizes = Sizes(self.sizes).counts(num_samples, num_clients)
        return group_by_owner(_owners(shares, labels, sizes, generator), num_clients)


_DRAWS = 30
"""Number of draws, after which the few remaining samples go to clients with too few."""


def _owners(shares: Tensor, labels: Tensor, sizes: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the client of each sample, so that client k has `sizes[k]` samples.

    Args:
        shares: Probability of each client for a sample of each class, `(classes, clients)`.
        labels: Label of each sample, `(samples,)`, with as many distinct values as `shares` has rows.
        sizes: Size of each client, `(clients,)` int64 with sum `samples`.
        generator: CPU generator.

    Returns:
        Client of each sample, `(samples,)` int64.
    """
    classes, num_clients = torch.unique(labels, return_inverse=True)[1], len(sizes)
    owners, places = torch.full_like(classes, -1), sizes.clone()
    free = torch.randperm(len(classes), generator=generator)  # samples without a client, in random order
    for draw in range(_DRAWS):
        weights = shares if draw == 0 else shares * places  # later draws prefer clients with many places
        drawn = _draw_clients(weights, classes[free], generator)
        keeps = _numbers_within_group(drawn, num_clients) < places[drawn]  # the first ones that drew a client
        owners[free[keeps]] = drawn[keeps]
        places -= torch.bincount(drawn[keeps], minlength=num_clients)
        free = free[~keeps]
        if not len(free):
            return owners
    owners[free] = torch.repeat_interleave(torch.arange(num_clients), places)
    return owners


def _draw_clients(weights: Tensor, classes: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a client for each sample, by the weights of its class.

    Args:
        weights: Weight of each client in each class, `(classes, clients)`, >= 0.
        classes: Class of each sample, `(samples,)`.
        generator: CPU generator.
    """
    drawn = torch.empty_like(classes)
    for row in torch.unique(classes).tolist():
        in_class = classes == row
        cuts = (weights[row] / weights[row].sum().clamp(min=1e-300)).cumsum(0)
        uniforms = torch.rand(int(in_class.sum()), dtype=torch.float64, generator=generator) * cuts[-1]
        drawn[in_class] = torch.searchsorted(cuts, uniforms, right=True).clamp(max=len(cuts) - 1)
    return drawn


def _numbers_within_group(groups: Tensor, num_groups: int) -> Tensor:
    """Return the number of earlier elements of the same group, for each element, `(elements,)`.

    Examples:
        >>> _numbers_within_group(torch.tensor([1, 0, 1, 1]), 2)
        tensor([0, 0, 1, 2])
    """
    order, counts = groups.argsort(stable=True), torch.bincount(groups, minlength=num_groups)
    starts = counts.cumsum(0) - counts
    numbers = torch.empty_like(groups)
    numbers[order] = torch.arange(len(groups)) - starts[groups[order]]
    return numbers


def group_by_owner(owners: Tensor, num_clients: int) -> list[Tensor]:
    """Return the sample indices of each client, in ascending order.

    Args:
        owners: Client of each sample, `(num_samples,)` int64.
        num_clients: Number of clients.

    Examples:
        >>> group_by_owner(torch.tensor([1, 0, 1]), 2)
        [tensor([1]), tensor([0, 2])]
    """
    order = owners.argsort(stable=True)
    return list(torch.split(order, torch.bincount(owners, minlength=num_clients).tolist()))


def deal_shards(
    values: Tensor, num_clients: int, shards_per_client: int, generator: torch.Generator
) -> list[Tensor]:
    """Sort samples by a value, cut them into equal shards, and give every client some shards at random.

    Args:
        values: Value of each sample, `(num_samples,)`.
        num_clients: Number of clients.
        shards_per_client: Number of shards of each client, >= 1.
        generator: CPU generator.

    Raises:
        ValueError: If there are fewer samples than shards.
    """
    num_samples, num_shards = len(values), num_clients * shards_per_client
    if num_shards > num_samples:
        raise ValueError(
            f"{num_clients} clients with {shards_per_client} shards need {num_shards} samples, got "
            f"{num_samples}. Use fewer shards_per_client."
        )
    shards = torch.split(values.argsort(stable=True), equal_shares(num_samples, num_shards))
    order = torch.randperm(num_shards, generator=generator).view(num_clients, -1).tolist()
    return [torch.cat([shards[shard] for shard in row]) for row in order]


@dataclass(frozen=True)
class LabelShards(Partition):
    """Label shards: samples are sorted by label and cut into equal shards, some for every client at random.

    Args:
        shards_per_client: Number of shards of each client, >= 1. With 2 shards a client has samples of about
            two classes.

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

    Examples:
        >>> labels = torch.arange(100) % 10
        >>> parts = LabelShards(2).split(labels, 100, 5, torch.Generator().manual_seed(0))
        >>> [labels[part].unique().tolist() for part in parts]
        [[1, 4], [5, 7], [3, 9], [0, 8], [2, 6]]
    """

    needs_labels = True

    shards_per_client: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.shards_per_client < 1:
            raise ValueError(f"shards_per_client must be >= 1, got {self.shards_per_client}")

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        labels = _check_labels(labels, num_samples, num_clients)
        return deal_shards(labels, num_clients, self.shards_per_client, generator)
