"""The smallest batch that any client will ever train on, tried before the first round.

Sizes are known when the data are dealt out, also of clients that are drawn late. What needs two samples, as
BatchNorm, a contrastive loss or a standard deviation does, fails on a batch of one, and would fail in the
middle of some round, without the client's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_fedq.clients.vector import BufferMode
from lightning_fedq.clients.world import NotCarriedError
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.own_loaders import OwnClientLoader
from lightning_fedq.functional.batch_stack import map_tensors
from lightning_fedq.training.rehearsal import Trial, prepare

_NAMED = 10


def smallest_of(loader: ClientLoader, sizes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Samples of each client's smallest batch, None where nobody knows.

    Args:
        sizes: Batch sizes of each client in a round, by its share of one loader.
    """
    if not isinstance(loader, OwnClientLoader):
        return [min(own, default=None) for own in sizes]
    return [_smallest_of_own(own, len(steps)) for own, steps in zip(loader.passes, sizes, strict=True)]


def _smallest_of_own(loader: Any, steps: int) -> int | None:
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    samples, size = len(loader.sampler), loader.batch_sampler.batch_size  # type: ignore[arg-type]
    rest = samples % size
    cut = steps < len(loader) or loader.drop_last or not rest
    return size if cut else rest


class _Cut:
    """A loader whose batches have so many samples."""

    def __init__(self, loader: ClientLoader, size: int) -> None:
        self._loader, self._size = loader, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def of_stack(self, stack: Stack) -> Iterator[Any]:
        """Yield the first samples of each batch."""
        for batch in self._loader.of_stack(stack):
            yield map_tensors(lambda t: t[: self._size] if t.dim() else t, batch)


def check_smallest(
    trial: Trial,
    loader: ClientLoader,
    held: Sequence[Tensor],
    sizes: Sequence[tuple[int, ...]],
    rehearsed: Stack,
    mode: BufferMode,
) -> None:
    """Refuse a split that leaves a client a batch on which the training fails, if a whole one does not.

    Args:
        trial: Trains a copy on one batch.
        held: Sample indices of each client.
        sizes: Batch sizes of each client in a round.
        rehearsed: A client that has been tried.
        mode: What happens to buffers.

    Raises:
        ValueError: Naming the clients, with the cure.
    """
    found = smallest_of(loader, sizes)
    smallest = min((size for size in found if size), default=0)
    if isinstance(loader, OwnClientLoader):
        largest = max(
            (one.batch_size or 0 for one in loader.passes if isinstance(one, DataLoader)), default=0
        )
    else:
        largest = max((size for own in sizes for size in own), default=0)
    if smallest >= largest:
        return
    clients = [client for client, size in enumerate(found) if size == smallest]

    def failure(size: int) -> str:
        """First line of what goes wrong on a batch of so many samples. Empty if nothing does."""
        source: Any = loader
        if isinstance(loader, OwnClientLoader):
            stack, source = Stack(rehearsed.clients, (1,), rehearsed.training_seed, ()), _Cut(loader, size)
        else:
            owner = next(c for c, own in enumerate(sizes) if size in own)
            drawn = (held[owner][:size],)
            stack = Stack((owner,), (size,), rehearsed.training_seed, (), drawn)
        try:
            client = trial.train(stack, 1, lambda client: prepare(client, mode), loader=source)
        except NotCarriedError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        broken = [n for n, t in client.module.state_dict().items() if not bool(torch.isfinite(t).all())]
        return f"{', '.join(broken[:4])} is NaN or infinite" if broken else ""

    if not (first := failure(smallest)) or failure(largest):
        return
    shown = ", ".join(map(str, clients[:_NAMED])) + (", ..." if len(clients) > _NAMED else "")
    raise ValueError(
        f"the last batch of clients {shown} has {smallest} of {largest} samples, and training on it fails "
        f"({first}); use drop_last=True in the DataLoader, which leaves these out, another batch_size, "
        "or another number of clients"
    )
