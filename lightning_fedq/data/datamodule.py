"""`FederatedDataModule`: set the partition over the clients for any data module, data set or loader.

It is an ordinary data module. The `Federated` callback partitions its training set with the same code and the
same loader as for any other data module. In addition it defines the partition: a rule, the sample indices of
every client, or the clients' own data sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.data.columns import as_tensors
from lightning_fedq.data.lazy_datasets import ClientDatasets
from lightning_fedq.data.partition import IID, Partition
from lightning_fedq.data.per_client_loaders import PerClientLoaders
from lightning_fedq.data.sampling import get_batching, get_sampling

Source = Dataset[Any] | DataLoader[Any] | Callable[[], Any]
"""A client's data: a data set, a loader, or a function without arguments that returns one of them."""

_HOOKS = (
    "prepare_data",
    "setup",
    "teardown",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_exception",
    "state_dict",
    "load_state_dict",
)

_ARGUMENTS = ("data", "batch_size", "num_workers", "split", "sources")


class FederatedDataModule(pl.LightningDataModule):
    """Data module with a partition over the clients. Only the training data are partitioned.

    All other attributes of a wrapped data module can be read and set here, such as `num_classes`.

    Args:
        data: LightningDataModule, or training Dataset (also a Hugging Face data set). None if `clients` are
            data sets or loaders.
        batch_size: Number of samples per local batch, >= 1. None keeps the batch size of the data module. It
            is required if `data` or `clients` are data sets.
        partition: Partition of the samples over the clients. None uses the partition of the `Federated`
            callback.
        clients: Sample indices of each client, instead of `partition`. Without `data`, the data of each
            client, by name or in order: a Dataset (map-style or iterable), a DataLoader, a function that
            returns one of them and is called when the training begins, or `ClientData`, which is opened when
            the client trains.
        val: Validation data as a Dataset or DataLoader, if `data` is no data module.
        test: Test data as a Dataset or DataLoader, if `data` is no data module.
        predict: Prediction data as a Dataset or DataLoader, if `data` is no data module.
        num_workers: Number of worker processes for each loader that is made from a Dataset, >= 0.

    Raises:
        ValueError: If both `partition` and `clients` are given, or if a Dataset has no batch size.
        TypeError: If `clients` does not fit `data`.

    Examples:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.zeros(6, 2), torch.zeros(6))
        >>> module = FederatedDataModule(data, batch_size=2, clients=[[0, 1, 2, 3], [4, 5]])
    """

    def __init__(
        self,
        data: pl.LightningDataModule | Dataset[Any] | None = None,
        *,
        batch_size: int | None = None,
        partition: Partition | None = None,
        clients: Sequence[Sequence[int]] | Mapping[str, Source] | Sequence[Source] | None = None,
        val: Dataset[Any] | DataLoader[Any] | None = None,
        test: Dataset[Any] | DataLoader[Any] | None = None,
        predict: Dataset[Any] | DataLoader[Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        self._data = data
        super().__init__()
        if isinstance(data, pl.LightningDataModule):
            del self._log_hyperparams  # the wrapped module's is found instead
        if partition is not None and clients is not None:
            raise ValueError("partition and clients both define the partition. Give one of them.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        self._batch_size, self._num_workers = batch_size, num_workers
        check_clients(data, clients)
        self._sources = None if data is not None else ClientSources(clients, batch_size, num_workers)  # type: ignore[arg-type]
        own: Any = partition if clients is None else clients
        self._split: Partition | Sequence[Sequence[int]] | None = None if self._sources else own
        if isinstance(data, pl.LightningDataModule):
            if not (val is None and test is None and predict is None):
                raise ValueError(
                    "val, test and predict come from the data module. Give them with a Dataset only."
                )
            self._adopt(data)
        else:
            if self._sources is not None:
                self.train_dataloader = self._sources.train_dataloader  # type: ignore[method-assign]
            self._serve(
                train_dataloader=data, val_dataloader=val, test_dataloader=test, predict_dataloader=predict
            )

    @property
    def trainer(self) -> pl.Trainer | None:  # type: ignore[override]
        """The trainer, which is also set on the wrapped data module."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        self._trainer = trainer
        if isinstance(self._data, pl.LightningDataModule):
            self._data.trainer = trainer

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped data module that this class does not have itself.

        Without a wrapped one, `data`, `batch_size`, `num_workers`, `split` and `sources` are the arguments.
        """
        own, wrapped = vars(self), vars(self).get("_data")
        if isinstance(wrapped, pl.LightningDataModule) and not name.startswith("__"):
            is_resized = name == "batch_size" and own["_batch_size"] is not None
            return own["_batch_size"] if is_resized else getattr(wrapped, name)
        if name in _ARGUMENTS and f"_{name}" in own:
            return own[f"_{name}"]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped data module if it has this attribute and this class does not."""
        wrapped = vars(self).get("_data")
        is_own = name in vars(self) or hasattr(type(self), name) or name.startswith("_")
        if isinstance(wrapped, pl.LightningDataModule) and not is_own and hasattr(wrapped, name):
            setattr(wrapped, name, value)
        else:
            super().__setattr__(name, value)

    @classmethod
    def from_loader(
        cls,
        train: DataLoader[Any],
        val: DataLoader[Any] | None = None,
        *,
        partition: Partition | None = None,
        clients: Sequence[Sequence[int]] | None = None,
    ) -> FederatedDataModule:
        """Wrap loaders, because loaders that are passed to `fit(...)` directly can't be federated.

        Args:
            train: Training loader. Its data set, batch size, collation, shuffling and workers are kept.
            val: Validation loader, or None.
            partition: Partition of the samples over the clients. None uses that of the `Federated` callback.
            clients: Sample indices of each client, instead of `partition`.
        """
        return cls(_Loaders(train, val), partition=partition, clients=clients)

    def _adopt(self, data: pl.LightningDataModule) -> None:
        """Copy the hooks that the wrapped module defines to this instance, so that Lightning calls them."""
        for name in _HOOKS:
            if is_overridden(name, data, pl.LightningDataModule):
                setattr(self, name, getattr(data, name))
        for name in ("prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices"):
            setattr(self, name, getattr(data, name))
        if self._batch_size is not None:
            self.train_dataloader = self._resized  # type: ignore[method-assign]

    def _serve(self, **datasets: Any) -> None:
        """Set the loader hooks of the given names, from data sets or loaders."""
        for name, dataset in datasets.items():
            if dataset is not None:
                setattr(self, name, self._make_loader(dataset, shuffle=name == "train_dataloader"))

    def _make_loader(
        self, dataset: Dataset[Any] | DataLoader[Any], shuffle: bool
    ) -> Callable[[], DataLoader[Any]]:
        """Return a function that makes the loader of a data set, or returns the given loader."""
        if isinstance(dataset, DataLoader):
            return lambda: dataset
        if self._batch_size is None:
            raise ValueError("A Dataset needs a batch_size, got None. Pass batch_size=32, or a DataLoader.")
        samples = as_tensors(dataset)
        return lambda: DataLoader(
            samples, batch_size=self._batch_size, shuffle=shuffle, num_workers=self._num_workers
        )

    def _resized(self) -> DataLoader[Any]:
        """Return the wrapped module's training loader with this module's batch size."""
        assert isinstance(self._data, pl.LightningDataModule)
        loader = self._data.train_dataloader()
        if not isinstance(loader, DataLoader):
            raise TypeError(f"train_dataloader must return one torch DataLoader, got {type(loader).__name__}")
        return DataLoader(
            loader.dataset,
            batch_size=self._batch_size,
            sampler=loader.sampler,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            drop_last=loader.drop_last,
        )


def choose_partition(owner: object, partition: Partition) -> Partition | Sequence[Sequence[int]]:
    """Return the partition of a `FederatedDataModule` if it has one, otherwise that of the callback.

    Args:
        owner: The data module, or a module with its own loader.
        partition: Partition of the `Federated` callback.

    Raises:
        ValueError: If both define a partition.
    """
    if not isinstance(owner, FederatedDataModule) or (owner._split is None and owner._sources is None):
        return partition
    if partition != IID():
        raise ValueError(
            f"Both Federated(partition={partition}) and the FederatedDataModule define the partition. "
            "Give it in one place."
        )
    if owner._sources is not None:
        return owner._sources.split
    assert owner._split is not None
    return owner._split


def check_clients(data: object, clients: Any) -> None:
    """Refuse sample indices without data, and clients' data sets in addition to other data.

    Args:
        data: Argument `data` of `FederatedDataModule`.
        clients: Argument `clients` of `FederatedDataModule`.

    Raises:
        TypeError: If `clients` does not fit `data`, or if both are None.
    """
    if data is None and clients is None:
        raise TypeError(
            "FederatedDataModule needs data, or the data sets of its clients: "
            "FederatedDataModule(clients=[dataset, ...])."
        )
    members = list(clients.values() if isinstance(clients, Mapping) else clients or ())
    have_data = isinstance(clients, Mapping) or any(
        isinstance(member, Dataset | DataLoader) or callable(member) for member in members
    )
    if data is not None and have_data:
        raise TypeError(
            "Got data sets of the clients in addition to data. Leave data out, or give the sample indices of "
            "each client."
        )
    first: Any = members[0] if members else None
    if data is None and isinstance(first, list | tuple | range) and first and isinstance(first[0], int):
        raise TypeError(
            "clients are sample indices, but there are no data. Give data, or a data set for each client."
        )


class _Loaders(pl.LightningDataModule):
    """Data module of a training loader and a validation loader."""

    def __init__(self, train: DataLoader[Any], val: DataLoader[Any] | None) -> None:
        super().__init__()
        self.train_dataloader = lambda: train  # type: ignore[method-assign]
        if val is not None:
            self.val_dataloader = lambda: val  # type: ignore[method-assign]


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

    def __deepcopy__(self, memo: dict[int, Any]) -> ClientSources:
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
            if not isinstance(data, DataLoader | IterableDataset) and not hasattr(data, "__getitem__"):
                raise TypeError(
                    f"The data of client {name} must be a Dataset, a DataLoader or a function that returns "
                    f"one of them, got {type(data).__name__}"
                )
        if all(isinstance(data, DataLoader) for data in sources):
            return _combine_loaders(sources) or PerClientLoaders(self.names, sources)
        if self._batch_size is None:
            raise ValueError("Data sets of clients need a batch_size, got None. Pass e.g. batch_size=32.")
        if not any(isinstance(data, DataLoader | IterableDataset) for data in sources):
            return self._make_loader(ClientDatasets(sources))
        return PerClientLoaders(self.names, [self._make_loader(data) for data in sources])

    def _make_loader(self, one: Any) -> DataLoader[Any]:
        """Return a client's loader, or make one from its data set."""
        if isinstance(one, DataLoader):
            return one
        shuffle = None if isinstance(one, IterableDataset) else True
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


def _combine_loaders(loaders: Sequence[DataLoader[Any]]) -> DataLoader[Any] | None:
    """Return one loader over the data of all clients if their loaders have equal settings, else None.

    Clients of a common loader can train together in one step.
    """
    first = loaders[0]
    if any(each.batch_sampler is None or isinstance(each.dataset, IterableDataset) for each in loaders):
        return None
    try:
        kinds = {(*get_batching(each)[:2], type(get_batching(each).sampler)) for each in loaders}
        plain = all(get_sampling(each) == (None, None) for each in loaders)
    except ValueError:
        return None
    others = {(one.collate_fn, one.num_workers, one.worker_init_fn, one.pin_memory) for one in loaders}
    if not plain or len(kinds) > 1 or len(others) > 1:
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
