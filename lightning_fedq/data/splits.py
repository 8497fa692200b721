"""Further partitions: by natural users, with unequal amounts, and with unequal inputs.

`QuantitySkew` and `FeatureShards` are the quantity skew and the feature skew of Li et al., Federated Learning
on Non-IID Data Silos, ICDE 2022. Departure: no noise is added to the samples.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fedq.data.columns import By, check_column, in_words, number_groups, read_column
from lightning_fedq.data.partition import (
    Partition,
    check_least,
    check_sizes,
    deal_shards,
    dirichlet_shares,
    group_by_owner,
    round_sizes,
)
from lightning_fedq.functional.checks import check_fields, check_positive

_NAMED = 10


@dataclass(frozen=True, repr=False)
class Natural(Partition):
    """Natural partition: all samples of one user go to one client.

    Users are numbered in the order of their names, so that client 0 is the first user. With `merge_users`,
    whole users are assigned to the clients with the fewest samples, the largest users first.

    Args:
        by: Source of the user of a sample: an index or key of an item of the sample, a column of a Hugging
            Face data set, a function of the sample, or a sequence with one value for each sample.
        merge_users: Whether a client may have several users, if there are more users than clients.

    Examples:
        >>> Natural("writer")  # FederatedDataModule(..., partition=this): a column of a Hugging Face data set
        Natural(by='writer', merge_users=False)
    """

    of_one_data_set = True

    by: By
    merge_users: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_column(self.by)

    def __repr__(self) -> str:
        return f"Natural(by={in_words(self.by)}, merge_users={self.merge_users})"

    def values(self, dataset: Dataset[Any]) -> Tensor:
        """Return the number of each sample's user, `(num_samples,)` int64."""
        return number_groups(read_column(dataset, self.by, "Natural"))[0]

    def users(self, dataset: Dataset[Any]) -> list[Any]:
        """Return the names of the users. Without merging, this is the order of the clients."""
        return number_groups(read_column(dataset, self.by, "Natural"))[1]

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        # `labels` are the user numbers that `values` returned
        check_sizes(num_samples, num_clients)
        assert labels is not None
        _, users, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
        if len(sizes) < num_clients or (len(sizes) > num_clients and not self.merge_users):
            more = ", or Natural(..., merge_users=True) for clients of several users"
            more = more if len(sizes) > num_clients else ""
            raise ValueError(
                f"The samples are of {len(sizes)} users, but num_clients is {num_clients}. Use "
                f"num_clients={len(sizes)}{more}."
            )
        owner = torch.arange(num_clients)
        if len(sizes) > num_clients:
            owner = _deal_whole(sizes.tolist(), num_clients, generator)
        return group_by_owner(owner[users], num_clients)


def _deal_whole(sizes: list[int], num_clients: int, generator: torch.Generator) -> Tensor:
    """Assign each user to the client with the fewest samples, the largest users first, ties at random.

    Args:
        sizes: Number of samples of each user.
        num_clients: Number of clients.
        generator: CPU generator.

    Returns:
        Client of each user, `(users,)` int64.
    """
    order = torch.randperm(len(sizes), generator=generator).tolist()
    order.sort(key=lambda user: -sizes[user])
    held, owner = [0] * num_clients, torch.empty(len(sizes), dtype=torch.int64)
    for user in order:
        client = min(range(num_clients), key=held.__getitem__)
        owner[user], held[client] = client, held[client] + sizes[user]
    return owner


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """Quantity skew: a random order of the samples, cut into parts of unequal sizes.

    The clients' shares are one draw from a symmetric Dirichlet distribution.

    Args:
        alpha: Concentration, > 0. Small values give very unequal sizes, large values nearly equal ones.
        min_partition_size: Smallest number of samples of a client, >= 1.

    Examples:
        >>> parts = QuantitySkew(0.5).split(None, 100, 4, torch.Generator().manual_seed(0))
        >>> [len(part) for part in parts]
        [1, 5, 28, 66]
    """

    alpha: float
    min_partition_size: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(alpha=self.alpha)
        if self.min_partition_size < 1:
            raise ValueError(f"min_partition_size must be >= 1, got {self.min_partition_size}")

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        check_sizes(num_samples, num_clients)
        check_least(num_samples, num_clients, self.min_partition_size)
        rest = num_samples - num_clients * self.min_partition_size
        shares = dirichlet_shares(self.alpha, num_clients, generator)
        sizes = round_sizes(shares, rest, 0) + self.min_partition_size
        return list(torch.split(torch.randperm(num_samples, generator=generator), sizes.tolist()))


@dataclass(frozen=True, repr=False)
class FeatureShards(Partition):
    """Feature skew: samples are sorted by a feature and cut into equal shards, some for every client.

    This is `LabelShards` with a feature in place of the label, such as brightness, length, age or a sensor.

    Args:
        by: Source of the feature of a sample: an index or key of an item of the sample, a column of a
            Hugging Face data set, a function of the sample, or a sequence with one number for each sample.
            None is the mean of the sample's first item.
        shards_per_client: Number of shards of each client, >= 1. With 1 shard every client has a separate
            range of the feature.

    Examples:
        >>> FeatureShards("brightness", shards_per_client=2)
        FeatureShards(by='brightness', shards_per_client=2)
    """

    by: By | None = None
    shards_per_client: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_column(0 if self.by is None else self.by)
        if self.shards_per_client < 1:
            raise ValueError(f"shards_per_client must be >= 1, got {self.shards_per_client}")

    def __repr__(self) -> str:
        return f"FeatureShards(by={in_words(self.by)}, shards_per_client={self.shards_per_client})"

    def values(self, dataset: Dataset[Any]) -> Tensor:
        """Return the feature of each sample, `(num_samples,)` float64.

        Raises:
            ValueError: If a value is not a finite number.
        """
        column = read_column(dataset, _mean_of_input if self.by is None else self.by, "FeatureShards")
        try:
            numbers = torch.tensor([float(value) for value in column], dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"FeatureShards sorts by numbers, got {column[0]!r}. Use Natural for names."
            ) from error
        if not bool(numbers.isfinite().all()):
            raise ValueError(
                "FeatureShards needs finite numbers, got NaN or infinity. Leave such samples out."
            )
        return numbers

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        check_sizes(num_samples, num_clients)
        assert labels is not None
        return deal_shards(labels, num_clients, self.shards_per_client, generator)


def _mean_of_input(sample: Any) -> float:
    """Return the mean of a sample's first item."""
    first = next(iter(sample.values())) if isinstance(sample, dict) else sample[0]
    return float(torch.as_tensor(first, dtype=torch.float64).mean())
