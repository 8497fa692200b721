"""Trial of the smallest batch of all clients, before the first round.

The sizes of all clients' batches are known. Code that needs two samples (BatchNorm, a contrastive loss, a
standard deviation) fails on a batch of one sample. The error would come in the middle of some round, without
the client's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.snapshot import NotCopyableError
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.per_client_loaders import PerClientRoundLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.functional.batch_stack import map_tensors
from lightning_fedq.training.dry_round import DryWorker, in_a_line


def smallest_batches(loader: ClientLoader, sizes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Return the number of samples in each client's smallest batch. None where it is not known.

    Args:
        sizes: Batch sizes of each client in a round, if clients share one loader.
    """
    if not isinstance(loader, PerClientRoundLoader):
        return [min(own, default=None) for own in sizes]
    return [_smallest_loader_batch(own, len(steps)) for own, steps in zip(loader.passes, sizes, strict=True)]


def _smallest_loader_batch(loader: Any, steps: int) -> int | None:
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    samples, size = len(loader.sampler), loader.batch_sampler.batch_size  # type: ignore[arg-type]
    rest = samples % size
    cut = steps < len(loader) or loader.drop_last or not rest
    return size if cut else rest


class _Cut:
    """Loader whose batches are cut to a number of samples."""

    def __init__(self, loader: ClientLoader, size: int) -> None:
        self._loader, self._size = loader, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def stack_batches(self, stack: Stack) -> Iterator[Any]:
        """Yield the first samples of each batch."""
        for batch in self._loader.stack_batches(stack):
            yield map_tensors(lambda t: t[: self._size] if t.dim() else t, batch)


def check_smallest(
    worker: DryWorker,
    loader: ClientLoader,
    client_indices: Sequence[Tensor],
    sizes: Sequence[tuple[int, ...]],
    tried: Stack,
) -> None:
    """Refuse a partition in which a client has a last batch that is too small to train on.

    The smallest batch is tried, and if it fails, the largest one. If both fail, nothing is refused,
    because the size is not the cause.

    Args:
        client_indices: Sample indices of each client, `(num_samples,)` each.
        sizes: Batch sizes of each client in a round.
        tried: Stack of a client that has trained without an error.

    Raises:
        ValueError: If training fails on the smallest batch only. The message names the clients.
    """
    found = smallest_batches(loader, sizes)
    smallest = min((size for size in found if size), default=0)
    if isinstance(loader, PerClientRoundLoader):
        largest = max(
            (one.batch_size or 0 for one in loader.passes if isinstance(one, DataLoader)), default=0
        )
    else:
        largest = max((size for own in sizes for size in own), default=0)
    if smallest >= largest:
        return
    clients = [client for client, size in enumerate(found) if size == smallest]

    def failure(size: int) -> str:
        """Return the first line of the error on a batch of `size` samples. "" if there is none."""
        source: Any = loader
        if isinstance(loader, PerClientRoundLoader):
            stack, source = Stack(tried.clients, (1,), tried.training_seed, ()), _Cut(loader, size)
        else:
            owner = next(c for c, own in enumerate(sizes) if size in own)
            drawn = (client_indices[owner][:size],)
            stack = Stack((owner,), (size,), tried.training_seed, (), drawn)
        broken = list[str]()

        def look(client: Client) -> None:
            state = client.module.state_dict().items()
            broken.extend(name for name, tensor in state if not bool(torch.isfinite(tensor).all()))

        try:
            worker.try_out(stack, 1, look, loader=source)
        except NotCopyableError:
            raise
        except Exception as error:
            return in_a_line(error)
        return f"{', '.join(broken[:4])} is NaN or infinite" if broken else ""

    def only_smallest() -> str:
        first = failure(smallest)
        return "" if not first or failure(largest) else first

    if first := worker.run_in_fork(only_smallest):
        raise ValueError(
            f"The last batch of clients {in_short(clients)} has {smallest} of {largest} samples, and "
            f"training on it fails ({first}). Use drop_last=True in the DataLoader, another batch_size, or "
            "another number of clients"
        )
