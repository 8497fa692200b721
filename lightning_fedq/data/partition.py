"""Who holds which samples: pure functions of labels, sizes and a generator.

Every rule deals out every sample exactly once, and leaves no client empty unless it is asked to; a smallest
size is an argument of the rules that draw sizes.
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
    """Partition of samples over clients. Children are frozen dataclasses."""

    needs_labels: ClassVar[bool] = False
    of_one_data_set: ClassVar[bool] = False
    """Would several data sets at once be dealt out by rules that do not fit together?"""

    def values(self, dataset: Any) -> Tensor | None:
        """Values by which the samples are dealt out in place of labels, `(num_samples,)`, or None.

        Args:
            dataset: Map-style data set.
        """
        return None

    @abstractmethod
    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        """Deal out the samples.

        Args:
            labels: `(num_samples,)` integer classes, or what `values` returned; None where `needs_labels` is
                false and there are no values.
            num_clients: How many parts to make.
            generator: CPU generator; the same state gives the same parts.

        Returns:
            `num_clients` int64 tensors of sample indices, disjoint, together all samples.

        Raises:
            ValueError: If there are more clients than samples, or labels are missing.
        """


def check_sizes(num_samples: int, num_clients: int) -> None:
    """Refuse more clients than samples, and none.

    Raises:
        ValueError: With the cure.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients must be >= 1, got {num_clients}")
    if num_clients > num_samples:
        raise ValueError(
            f"{num_clients} clients can't share {num_samples} samples; use num_clients <= "
            f"{num_samples} or more data"
        )


def _check(labels: Tensor | None, num_samples: int, num_clients: int, needs_labels: bool) -> None:
    check_sizes(num_samples, num_clients)
    if needs_labels and (labels is None or tuple(labels.shape) != (num_samples,)):
        got = "none" if labels is None else f"shape {tuple(labels.shape)}"
        raise ValueError(
            f"this split needs one integer label a sample, shape ({num_samples},), got {got}; use IID()"
        )


def equal_shares(num_samples: int, num_parts: int) -> list[int]:
    """Sizes that differ by at most one and sum to `num_samples`.

    Example:
        >>> equal_shares(10, 3)
        [4, 3, 3]
    """
    size, rest = divmod(num_samples, num_parts)
    return [size + (part < rest) for part in range(num_parts)]


def larger_shares(partition: object, parts: Sequence[Tensor], least: int) -> str:
    """In words, what gives every client `least` samples: a cure for a split that does not.

    Args:
        partition: The rule, or explicit indices.
        parts: What each client holds by it.
        least: Fewest samples that are needed.
    """
    total = sum(map(len, parts))
    if total < len(parts) * least:
        return f"num_clients <= {total // least} or more data" if total >= least else "more data"
    names = {field.name for field in fields(partition)} if isinstance(partition, Partition) else {}  # type: ignore[arg-type]
    if "least" in names and getattr(partition, "sizes", None) is None:
        return repr(replace(partition, least=least))  # type: ignore[type-var]
    if isinstance(partition, Partition):
        return "partition=IID() or more data"
    return "indices that give every client as many, or leave these clients out"


@dataclass(frozen=True)
class IID(Partition):
    """IID partition: a random permutation cut into equal parts. Sizes differ by at most one.

    A single client has the samples in their own order.

    Example:
        >>> parts = IID().split(None, 10, 3, torch.Generator().manual_seed(0))
        >>> [len(part) for part in parts]
        [4, 3, 3]
    """

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        _check(labels, num_samples, num_clients, self.needs_labels)
        if num_clients == 1:
            return [torch.arange(num_samples)]
        order = torch.randperm(num_samples, generator=generator)
        return list(torch.split(order, equal_shares(num_samples, num_clients)))


def check_least(num_samples: int, num_clients: int, least: int) -> None:
    """Refuse a smallest size that there are too few samples for.

    Raises:
        ValueError: With the cure.
    """
    if num_samples < num_clients * least:
        raise ValueError(
            f"{num_clients} clients of at least {least} samples need {num_clients * least}, got "
            f"{num_samples}; use fewer clients, or a smaller least"
        )


def dirichlet_shares(alpha: float, num_parts: int, generator: torch.Generator) -> Tensor:
    """Draw `(num_parts,)` float64 shares, of sum 1, from the symmetric Dirichlet law."""
    concentration = torch.full((num_parts,), alpha, dtype=torch.float64)
    gamma = torch._standard_gamma(concentration, generator=generator).clamp(min=1e-300)
    return gamma / gamma.sum()


def round_sizes(shares: Tensor, num_samples: int, least: int) -> Tensor:
    """Whole sizes, `least` up, that sum to `num_samples`: shares of all samples, rounded to a neighbour.

    Where a share is less than `least`, the others pay for it in proportion to what they have above that.

    Args:
        shares: `(num_clients,)` float64, of sum 1.
        least: Smallest size, `least x num_clients <= num_samples`.
    """
    above = (shares * num_samples - least).clamp(min=0.0)
    rest = num_samples - least * len(shares)
    cuts = (above.cumsum(0) / above.sum().clamp(min=1e-300) * rest).round().long()
    cuts[-1] = rest
    return torch.diff(cuts, prepend=cuts.new_zeros(1)) + least


@dataclass(frozen=True)
class Sizes(Partition):
    """Given sizes: a random order of the samples, cut where the sizes say. `Dirichlet` takes them, too.

    Nothing is scaled in silence: sizes of a smaller set would be those of nobody.

    Args:
        sizes: One a client: numbers of samples, which sum to all there are, or fractions, which sum to 1 and
            become the whole numbers next to them, 1 at least.

    Raises:
        ValueError: If one is not positive.

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
            raise ValueError(f"sizes must be > 0, one a client, got {self.sizes[:10]}")

    def counts(self, num_samples: int, num_clients: int) -> Tensor:
        """Numbers of samples, `(num_clients,)`.

        Raises:
            ValueError: If there are other clients or samples, with the cure.
        """
        given, total = torch.tensor(self.sizes, dtype=torch.float64), math.fsum(self.sizes)
        if len(given) != num_clients:
            raise ValueError(
                f"there are {len(given)} sizes, and num_clients is {num_clients}; give one a client"
            )
        if total == num_samples and torch.equal(given, given.round()):
            return given.long()
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"sizes sum to {total:g}, there are {num_samples} samples; let them sum to that, in whole "
                "numbers (torch.utils.data.Subset leaves samples out), or to 1, as fractions"
            )
        return round_sizes(given / total, num_samples, 1)

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        check_sizes(num_samples, num_clients)
        order = torch.randperm(num_samples, generator=generator)
        return list(torch.split(order, self.counts(num_samples, num_clients).tolist()))


@dataclass(frozen=True, repr=False)
class Dirichlet(Partition):
    """Dirichlet partition: every class is shared out by its own draw from a symmetric Dirichlet law.

    A client's size is its expected number of samples, a whole number next to it and `least` at least. Each
    sample draws its owner by the shares of its class (multinomial); where a client has drawn more than its
    size, some of its samples, taken at random, draw again among the clients that have fewer. With equal
    shares this is the law of `IID`, whatever the number of samples.

    Args:
        alpha: Concentration, > 0; small is skewed, large is close to IID.
        least: Fewest samples of a client, >= 0. With 0 a skewed draw leaves clients empty, who can't train.
        sizes: Sizes of the clients as in `Sizes`; None takes those that are drawn.

    References:
        Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019.

    Examples:
        >>> labels = torch.arange(1440) % 10
        >>> parts = Dirichlet(0.1, least=2).split(labels, 1440, 479, torch.Generator().manual_seed(0))
        >>> min(map(len, parts))
        2
    """

    needs_labels = True

    alpha: float
    least: int = 1
    sizes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            object.__setattr__(self, "sizes", Sizes(self.sizes).sizes)
        check_fields(self)
        check_positive(alpha=self.alpha)
        if self.least < 0:
            raise ValueError(f"least must be >= 0, got {self.least}")
        if self.sizes is not None and self.least != 1:
            raise ValueError(f"least={self.least} is for drawn sizes, and sizes are given; leave it out")

    def __repr__(self) -> str:
        given = "" if self.sizes is None else f", sizes={self.sizes}"
        return f"Dirichlet(alpha={self.alpha}, least={self.least}{given})"

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        _check(labels, num_samples, num_clients, self.needs_labels)
        check_least(num_samples, num_clients, self.least)
        assert labels is not None
        counts = torch.unique(labels, return_counts=True)[1]
        shares = torch.stack([dirichlet_shares(self.alpha, num_clients, generator) for _ in counts])
        if self.sizes is None:
            sizes = round_sizes((counts.double() / num_samples) @ shares, num_samples, self.least)
        else:
            sizes = Sizes(self.sizes).counts(num_samples, num_clients)
        return group_by_owner(_owners(shares, labels, sizes, generator), num_clients)


_DRAWS = 30
"""Draws by the shares, after which the few samples that nobody wants go to whoever has too few."""


def _owners(shares: Tensor, labels: Tensor, sizes: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the owner of each sample, so that client k has `sizes[k]` of them.

    Args:
        shares: `(classes, clients)` chances of an owner.
        labels: `(samples,)` of as many values as `shares` has rows.
        sizes: `(clients,)` int64, of sum `samples`.
        generator: CPU generator.
    """
    classes, num_clients = torch.unique(labels, return_inverse=True)[1], len(sizes)
    owners, places = torch.full_like(classes, -1), sizes.clone()
    free = torch.randperm(len(classes), generator=generator)
    for draw in range(_DRAWS):
        weights = shares if draw == 0 else shares * places  # who has too few, and by how much
        drawn = torch.empty_like(free)
        for row in torch.unique(classes[free]).tolist():
            own = classes[free] == row
            cuts = (weights[row] / weights[row].sum().clamp(min=1e-300)).cumsum(0)
            coins = torch.rand(int(own.sum()), dtype=torch.float64, generator=generator) * cuts[-1]
            drawn[own] = torch.searchsorted(cuts, coins, right=True).clamp(max=num_clients - 1)
        # of those who drew one client, the first as many as it has places for: `free` is in random order
        order = drawn.argsort(stable=True)
        taken = torch.bincount(drawn, minlength=num_clients)
        rank = torch.arange(len(free)) - (taken.cumsum(0) - taken)[drawn[order]]
        stays = order[rank < places[drawn[order]]]
        owners[free[stays]] = drawn[stays]
        places -= torch.bincount(drawn[stays], minlength=num_clients)
        free = free[owners[free] < 0]
        if not len(free):
            return owners
    owners[free] = torch.repeat_interleave(torch.arange(num_clients), places)
    return owners


def group_by_owner(owners: Tensor, num_clients: int) -> list[Tensor]:
    """Samples of each client, in their order, of the owner of each sample.

    Example:
        >>> group_by_owner(torch.tensor([1, 0, 1]), 2)
        [tensor([1]), tensor([0, 2])]
    """
    order = owners.argsort(stable=True)
    return list(torch.split(order, torch.bincount(owners, minlength=num_clients).tolist()))


def deal_shards(
    values: Tensor, num_clients: int, shards_per_client: int, generator: torch.Generator
) -> list[Tensor]:
    """Sort samples by a value, cut them into equal shards, and give every client some at random.

    Args:
        values: `(num_samples,)`.
        shards_per_client: >= 1.
        generator: CPU generator.

    Raises:
        ValueError: If there are fewer samples than shards.
    """
    num_samples, num_shards = len(values), num_clients * shards_per_client
    if num_shards > num_samples:
        raise ValueError(
            f"{num_clients} clients with {shards_per_client} shards need {num_shards} samples, got "
            f"{num_samples}; use fewer shards_per_client"
        )
    shards = torch.split(values.argsort(stable=True), equal_shares(num_samples, num_shards))
    order = torch.randperm(num_shards, generator=generator).view(num_clients, -1).tolist()
    return [torch.cat([shards[shard] for shard in row]) for row in order]


@dataclass(frozen=True)
class LabelShards(Partition):
    """Label shards: samples sorted by label and cut into equal shards. Every client gets some at random.

    Args:
        shards_per_client: >= 1; with 2 a client sees about two classes.

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

    Example:
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
        _check(labels, num_samples, num_clients, self.needs_labels)
        assert labels is not None
        return deal_shards(labels, num_clients, self.shards_per_client, generator)
