"""Who holds which samples: pure functions of labels, sizes and a generator.

Every rule deals out every sample exactly once. A rule may leave a client empty only by accident of
its law; what to do then is the caller's choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_fields, check_positive


class Partition(ABC):
    """Partition of samples over clients. Children are frozen dataclasses."""

    needs_labels: ClassVar[bool]
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
            num_samples: How many samples there are.
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
    """Sizes that differ by at most one and sum to `num_samples`."""
    size, rest = divmod(num_samples, num_parts)
    return [size + (part < rest) for part in range(num_parts)]


@dataclass(frozen=True)
class IID(Partition):
    """IID partition: a random permutation cut into equal parts. Sizes differ by at most one.

    A single client has the samples in their own order.
    """

    needs_labels = False

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        """See `Partition.split`."""
        _check(labels, num_samples, num_clients, self.needs_labels)
        if num_clients == 1:
            return [torch.arange(num_samples)]
        order = torch.randperm(num_samples, generator=generator)
        return list(torch.split(order, equal_shares(num_samples, num_clients)))


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Dirichlet partition: every class is shared out by its own draw from a symmetric Dirichlet law.

    Drawn again until nobody is empty, at most 100 times.

    Args:
        alpha: Concentration, > 0; small is skewed, large is close to IID.

    References:
        Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019.
    """

    needs_labels = True

    alpha: float

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(alpha=self.alpha)

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        """See `Partition.split`."""
        _check(labels, num_samples, num_clients, self.needs_labels)
        assert labels is not None
        for _ in range(100):
            parts = self._draw(labels, num_clients, generator)
            if all(len(part) for part in parts):
                break
        return parts

    def _draw(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        owners = torch.empty(len(labels), dtype=torch.int64)
        concentration = torch.full((num_clients,), self.alpha, dtype=torch.float64)
        for label in torch.unique(labels):
            members = (labels == label).nonzero().squeeze(1)
            members = members[torch.randperm(len(members), generator=generator)]
            gamma = torch._standard_gamma(concentration, generator=generator).clamp(min=1e-300)
            cuts = (gamma.cumsum(0) / gamma.sum() * len(members)).round().long()
            owners[members] = torch.bucketize(torch.arange(len(members)), cuts[:-1], right=True)
        order = owners.argsort(stable=True)
        return list(torch.split(order, torch.bincount(owners, minlength=num_clients).tolist()))


@dataclass(frozen=True)
class LabelShards(Partition):
    """Label shards: samples sorted by label and cut into equal shards. Every client gets some at random.

    Args:
        shards_per_client: >= 1; with 2 a client sees about two classes.

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
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
        """See `Partition.split`."""
        _check(labels, num_samples, num_clients, self.needs_labels)
        assert labels is not None
        num_shards = num_clients * self.shards_per_client
        if num_shards > num_samples:
            raise ValueError(
                f"{num_clients} clients with {self.shards_per_client} shards need {num_shards} samples, "
                f"got {num_samples}; use fewer shards_per_client"
            )
        shards = torch.split(labels.argsort(stable=True), equal_shares(num_samples, num_shards))
        order = torch.randperm(num_shards, generator=generator).view(num_clients, -1).tolist()
        return [torch.cat([shards[shard] for shard in row]) for row in order]
