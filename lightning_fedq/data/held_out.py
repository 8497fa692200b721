"""Samples that are not trained on, to measure on: some of each client's own, or of another data set."""

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
    """Takes the same fraction of every client's samples out of the training.

    Args:
        fraction: In (0, 1), rounded to whole samples, at least one.
        generator_of: Returns the randomness of a client's choice.

    Attributes:
        parts: Held-out sample indices of each client, once they are dealt out.
    """

    def __init__(self, fraction: float, generator_of: Callable[[int], torch.Generator]) -> None:
        self.fraction, self._generator_of = fraction, generator_of
        self.parts: list[Tensor] = []

    def select_training(self, held: Sequence[Tensor], least: int = 1) -> list[Tensor]:
        """Return what is left for training, each client's samples in their order.

        Args:
            held: Sample indices of each client.
            least: Fewest samples to train on.

        Raises:
            ValueError: If a client holds too few, naming the clients.
        """
        sizes = [num_held_out(self.fraction, len(part)) for part in held]
        pairs = enumerate(zip(held, sizes, strict=True))
        small = [client for client, (part, size) in pairs if len(part) - size < least]
        if small:
            raise ValueError(
                f"clients {in_short(small)} hold too few samples to keep {self.fraction:g} of them out of "
                f"the training and still train on {least}; use fewer clients, a partition with a larger "
                "least, such as Dirichlet(alpha, least=...), or "
                "ClientEvaluation(held_out=[dataset, ...]) with a data set for each client"
            )
        left = []
        self.parts = []
        for client, (part, size) in enumerate(zip(held, sizes, strict=True)):
            out = torch.zeros(len(part), dtype=torch.bool)
            out[torch.randperm(len(part), generator=self._generator_of(client))[:size]] = True
            self.parts.append(part[out])
            left.append(part[~out])
        return left


class PartitionedHeldOut:
    """Deals a data set out as the training's: by writer, label or feature to whoever trains on such samples.

    Where a rule looks at nothing of a sample, as `IID`, it deals this one out with the draws of the other.

    Args:
        dataset: Map-style data set, none of which is trained on.
        generator: In the state in which the training's is dealt out.

    Attributes:
        parts: Sample indices of each client, once they are dealt out. A client may have none.
    """

    def __init__(self, dataset: Dataset[Any], generator: torch.Generator) -> None:
        self._dataset, self._generator = dataset, generator
        self.parts: list[Tensor] = []

    def partition(
        self, rule: Partition | Sequence[Sequence[int]], training: Any, held: Sequence[Tensor], labels: Labels
    ) -> None:
        """Deal it out.

        Args:
            rule: What has dealt out the training's samples.
            training: The data set that is trained on.
            held: Its samples that each client has.
            labels: Place of the labels, in both.

        Raises:
            ValueError: If there is no rule, or samples are of a kind that nobody trains on.
        """
        if not isinstance(rule, Partition):
            raise ValueError(
                "clients' samples are given by index, and no rule says who has which held-out ones; use "
                "ClientEvaluation([dataset, ...]) with a data set for each client"
            )
        if isinstance(rule, Natural):
            named = [
                number_groups(read_column(data, rule.by, "Natural")) for data in (training, self._dataset)
            ]
            names = {name: number for number, name in enumerate(named[0][1])}
            if strange := [name for name in named[1][1] if name not in names]:
                raise ValueError(_nobodys(strange))
            kinds, new = named[0][0], torch.tensor([names[name] for name in named[1][1]])[named[1][0]]
        elif rule.needs_labels:
            kinds, new = read_labels(training, labels), read_labels(self._dataset, labels)
        elif (values := rule.values(training)) is not None:
            kinds, new = values, rule.values(self._dataset)  # type: ignore[assignment]
        else:
            size: int = len(self._dataset)  # type: ignore[arg-type]
            self.parts = rule.split(None, size, len(held), self._generator)
            return
        owners = torch.repeat_interleave(torch.arange(len(held)), torch.tensor([len(part) for part in held]))
        self.parts = group_by_owner(
            _owners(kinds[torch.cat(list(held))], owners, new, self._generator), len(held)
        )


def _nobodys(kinds: Sequence[Any]) -> str:
    return (
        f"there are held-out samples of {', '.join(map(str, kinds[:10]))}, whom no client trains on; leave "
        "them out of the data set of ClientEvaluation"
    )


def _owners(kinds: Tensor, owners: Tensor, new: Tensor, generator: torch.Generator) -> Tensor:
    """Owner of each new sample: of its kind, everybody has as large a share as of the training's.

    Args:
        kinds: `(samples,)` label or value of each sample of the training; the next one counts for floats.
        owners: `(samples,)` client of each.
        new: `(new,)` kinds of the new samples.
        generator: CPU generator.
    """
    distinct = torch.unique(kinds)
    above = torch.searchsorted(distinct, new).clamp(max=len(distinct) - 1)
    if new.is_floating_point():
        below = (above - 1).clamp(min=0)
        above = torch.where((distinct[below] - new).abs() < (distinct[above] - new).abs(), below, above)
    elif len(strange := new[distinct[above] != new]):
        raise ValueError(_nobodys(torch.unique(strange).tolist()))
    # each kind's samples, of one client after the other; clients, and new samples, in a random order
    order = torch.randperm(int(owners.max()) + 1, generator=generator)[owners].argsort(stable=True)
    old = torch.searchsorted(distinct, kinds)[order]
    order, sizes = order[old.argsort(stable=True)], torch.bincount(old, minlength=len(distinct))
    turn = torch.randperm(len(new), generator=generator)
    turn = turn[above[turn].argsort(stable=True)]
    wanted = torch.bincount(above, minlength=len(distinct))
    rank = torch.arange(len(new)) - (wanted.cumsum(0) - wanted)[above[turn]]
    shift = torch.rand(len(distinct), dtype=torch.float64, generator=generator)[above[turn]]
    step = ((rank + shift) * sizes[above[turn]] / wanted[above[turn]]).long()
    found = torch.empty_like(above)
    found[turn] = owners[order[(sizes.cumsum(0) - sizes)[above[turn]] + step]]
    return found


def num_held_out(fraction: float, num_samples: int) -> int:
    """Number of samples that a client with so many keeps out of its training.

    Example:
        >>> num_held_out(0.2, 7)
        1
    """
    return max(1, round(fraction * num_samples))
