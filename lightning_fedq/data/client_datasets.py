"""Clients with separate data sets, by name, such as hospitals, writers or sites."""

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
    """Sources of the clients' data. A function is called once, when the data are first needed.

    Args:
        clients: Source of each client, by name or in order.
        batch_size: Number of samples per batch for data sets. None if all sources are loaders.
        num_workers: Number of worker processes for loaders that are made from data sets, >= 0.

    Raises:
        ValueError: If there is no client.
    """

    def __init__(
        self, clients: Mapping[str, Source] | Sequence[Source], batch_size: int | None, num_workers: int
    ) -> None:
        named = clients if isinstance(clients, Mapping) else dict(enumerate(clients))
        if not named:
            raise ValueError("clients must have one data set or loader for each client, got none")
        self.names = [str(name) for name in named]
        self._sources, self._batch_size, self._num_workers = list(named.values()), batch_size, num_workers
        self._loaded: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientSources":
        """Return this object itself, because all copies of a data module share the data sets."""
        return self

    def load(self) -> list[Any]:
        """Return the data sets or loaders, in the order of the clients."""
        if not self._loaded:
            self._loaded = [_load(source) for source in self._sources]
        return self._loaded

    def train_dataloader(self) -> DataLoader[Any] | PerClientLoaders:
        """Return one loader over all clients' data if they can share it, otherwise one for each client.

        Raises:
            TypeError: If a source is neither a data set nor a loader.
            ValueError: If data sets have no batch size.
        """
        sources = self.load()
        for name, data in zip(self.names, sources, strict=True):
            if not isinstance(data, DataLoader) and not hasattr(data, "__getitem__") and not _is_stream(data):
                raise TypeError(
                    f"The data of client {name} must be a Dataset, a DataLoader or a function that returns "
                    f"one of them, got {type(data).__name__}"
                )
        if all(isinstance(data, DataLoader) for data in sources):
            return _combine_loaders(sources) or PerClientLoaders(self.names, sources)
        if self._batch_size is None:
            raise ValueError("Data sets of clients need a batch_size, got None. Pass e.g. batch_size=32.")
        if not any(isinstance(data, DataLoader) or _is_stream(data) for data in sources):
            return DataLoader(
                ClientDatasets(sources),
                batch_size=self._batch_size,
                shuffle=True,
                num_workers=self._num_workers,
            )
        return PerClientLoaders(self.names, [self._make_loader(data) for data in sources])

    def _make_loader(self, one: Any) -> DataLoader[Any]:
        """Return a client's loader, or make one from its data set."""
        if isinstance(one, DataLoader):
            return one
        shuffle = None if _is_stream(one) else True
        return DataLoader(one, batch_size=self._batch_size, shuffle=shuffle, num_workers=self._num_workers)

    @property
    def split(self) -> list[range]:
        """Sample indices of each client in the common loader, or [] if clients have separate loaders."""
        if isinstance(self.train_dataloader(), PerClientLoaders):
            return []
        data = [source.dataset if isinstance(source, DataLoader) else source for source in self.load()]
        return ClientDatasets(data).clients


def _load(source: Any) -> Any:
    """Return the data of a source, which is called if it is a function."""
    plain = isinstance(source, Dataset | DataLoader) or not callable(source)
    return as_tensors(source if plain else source())


def _is_stream(data: object) -> bool:
    return isinstance(data, IterableDataset)


def _combine_loaders(loaders: Sequence[DataLoader[Any]]) -> DataLoader[Any] | None:
    """Return one loader over the data of all clients if their loaders have equal settings, else None.

    Clients of a common loader can train together in one step.
    """
    first = loaders[0]
    if any(loader.batch_sampler is None for loader in loaders):
        return None
    try:
        kinds = {(*get_batching(each)[:2], type(get_batching(each).sampler)) for each in loaders}
        plain = all(get_sampling(each) == (None, None) for each in loaders if not _is_stream(each.dataset))
    except ValueError:
        return None
    alike = len(kinds) == 1 and len({loader.collate_fn for loader in loaders}) == 1
    if not (alike and plain) or any(_is_stream(loader.dataset) for loader in loaders):
        return None
    if len({(each.num_workers, each.worker_init_fn, each.pin_memory) for each in loaders}) > 1:
        return None
    size, drop_last, sampler = get_batching(first)
    return DataLoader(
        ClientDatasets([loader.dataset for loader in loaders]),
        batch_size=size,
        shuffle=not isinstance(sampler, SequentialSampler),
        drop_last=drop_last,
        collate_fn=first.collate_fn,
        num_workers=first.num_workers,
        worker_init_fn=first.worker_init_fn,
        pin_memory=first.pin_memory,
    )
