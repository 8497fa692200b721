"""One data set for each client, by name: as many data sets as there are hospitals, writers or sites."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from lightning_fedq.data.columns import as_tensors
from lightning_fedq.data.lazy_datasets import ClientDatasets
from lightning_fedq.data.per_client_loaders import PerClientLoaders
from lightning_fedq.data.sampling import get_batching, get_sampling

Source = Dataset[Any] | DataLoader[Any] | Callable[[], Any]
"""A client's data: a data set, a loader, or a function without arguments that returns one of them."""


class ClientSources:
    """Where each client's data come from. A function is called once, when the data are asked for.

    Args:
        clients: One source for each client, by name or in order.
        batch_size: Batch size for data sets; None where loaders say it themselves.
        num_workers: Worker processes of the loaders of data sets.

    Raises:
        ValueError: If there is no client.
    """

    def __init__(
        self, clients: Mapping[str, Source] | Sequence[Source], batch_size: int | None, num_workers: int
    ) -> None:
        named = clients if isinstance(clients, Mapping) else dict(enumerate(clients))
        if not named:
            raise ValueError("clients must be one data set or loader for each client, got none")
        self.names = [str(name) for name in named]
        self._sources, self._batch_size, self._num_workers = list(named.values()), batch_size, num_workers
        self._loaded: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientSources":
        """Itself: as data sets are, it is the same for all clients, however many there are."""
        return self

    def load(self) -> list[Any]:
        """The data sets or loaders, in the order of the clients."""
        if not self._loaded:
            self._loaded = [_load(source) for source in self._sources]
        return self._loaded

    def train_dataloader(self) -> DataLoader[Any] | PerClientLoaders:
        """One loader over all clients' data where they are alike, else one for each client.

        Raises:
            TypeError: If a source is neither a data set nor a loader.
            ValueError: If data sets have no batch size.
        """
        found = self.load()
        for name, one in zip(self.names, found, strict=True):
            if not isinstance(one, DataLoader) and not hasattr(one, "__getitem__") and not _is_stream(one):
                raise TypeError(
                    f"the data of client {name} must be a Dataset, a DataLoader or a function that returns "
                    f"one of them, got {type(one).__name__}"
                )
        if all(isinstance(one, DataLoader) for one in found):
            return _combine_loaders(found) or PerClientLoaders(self.names, found)
        if self._batch_size is None:
            raise ValueError("data sets of clients need a batch_size, got None; pass batch_size=32, say")
        if not any(isinstance(one, DataLoader) or _is_stream(one) for one in found):
            return DataLoader(
                ClientDatasets(found),
                batch_size=self._batch_size,
                shuffle=True,
                num_workers=self._num_workers,
            )
        return PerClientLoaders(self.names, [self._make_loader(one) for one in found])

    def _make_loader(self, one: Any) -> DataLoader[Any]:
        if isinstance(one, DataLoader):
            return one
        shuffle = None if _is_stream(one) else True
        return DataLoader(one, batch_size=self._batch_size, shuffle=shuffle, num_workers=self._num_workers)

    @property
    def split(self) -> list[range]:
        """The indices of each client's samples in the one loader over all of them. Else nothing to say."""
        if isinstance(self.train_dataloader(), PerClientLoaders):
            return []
        data = [one.dataset if isinstance(one, DataLoader) else one for one in self.load()]
        return ClientDatasets(data).clients


def _load(source: Any) -> Any:
    plain = isinstance(source, Dataset | DataLoader) or not callable(source)
    return as_tensors(source if plain else source())


def _is_stream(data: object) -> bool:
    return isinstance(data, IterableDataset)


def _combine_loaders(loaders: Sequence[DataLoader[Any]]) -> DataLoader[Any] | None:
    """One loader over the data of all, if they are alike: clients can then train side by side."""
    first = loaders[0]
    if any(one.batch_sampler is None for one in loaders):
        return None
    try:
        kinds = {(*get_batching(one)[:2], type(get_batching(one).sampler)) for one in loaders}
        plain = all(get_sampling(one) == (None, None) for one in loaders if not _is_stream(one.dataset))
    except ValueError:
        return None
    alike = len(kinds) == 1 and len({one.collate_fn for one in loaders}) == 1
    if not (alike and plain) or any(_is_stream(one.dataset) for one in loaders):
        return None
    if len({(one.num_workers, one.worker_init_fn, one.pin_memory) for one in loaders}) > 1:
        return None
    size, drop_last, sampler = get_batching(first)
    return DataLoader(
        ClientDatasets([one.dataset for one in loaders]),
        batch_size=size,
        shuffle=not isinstance(sampler, SequentialSampler),
        drop_last=drop_last,
        collate_fn=first.collate_fn,
        num_workers=first.num_workers,
        worker_init_fn=first.worker_init_fn,
        pin_memory=first.pin_memory,
    )
