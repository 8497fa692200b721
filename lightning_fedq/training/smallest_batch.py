"""Trial of the smallest batch of all clients, before the first round.

The sizes of all clients' batches are known. Code that needs two samples (BatchNorm, a contrastive loss, a
standard deviation) fails on a batch of one sample. The error would come in the middle of some round, without
the client's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.snapshot import NotCopyableError
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.sampling import in_short
from lightning_fedq.training.dry_round import DryWorker, in_a_line


def check_smallest(
    worker: DryWorker, client_indices: Sequence[Tensor], sizes: Sequence[tuple[int, ...]]
) -> None:
    """Refuse a partition in which a client has a last batch that is too small to train on.

    The smallest batch is tried, and if it fails, the largest one. If both fail, nothing is refused,
    because the size is not the cause. Sizes of batches from clients' separate loaders are not known.

    Args:
        client_indices: Sample indices of each client, `(num_samples,)` each.
        sizes: Batch sizes of each client in a round. All equal if clients have separate loaders.

    Raises:
        ValueError: If training fails on the smallest batch only. The message names the clients.
    """
    known = {size for own in sizes for size in own}
    smallest, largest = min(known), max(known)
    if smallest == largest:
        return
    clients = [client for client, own in enumerate(sizes) if smallest in own]

    def failure(size: int) -> str:
        """Return the first line of the error on a batch of `size` samples. "" if there is none."""
        owner = next(client for client, own in enumerate(sizes) if size in own)
        stack = Stack((owner,), (size,), 0, (), (client_indices[owner][:size],))
        broken = list[str]()

        def look(client: Client) -> None:
            state = client.module.state_dict().items()
            broken.extend(name for name, tensor in state if not bool(torch.isfinite(tensor).all()))

        try:
            worker.try_out(stack, 1, look)
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
