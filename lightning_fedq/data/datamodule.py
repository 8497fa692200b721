"""`FederatedDataModule`: full control of who holds what, around any data module, dataset or loader.

It behaves as an ordinary data module; the `Federated` callback deals its training set out to the
clients with the same code and the same loader as it does for any other data module. What it adds is
the split: a rule of its own, or the sample indices of every client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.data.client_datasets import ClientSources, Source
from lightning_fedq.data.columns import as_tensors
from lightning_fedq.data.partition import IID, Partition

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


class FederatedDataModule(pl.LightningDataModule):
    """Data for a federated run. Validation, test and prediction data pass through untouched.

    Args:
        data: A LightningDataModule, or the training Dataset, which may be one of Hugging Face's `datasets`;
            None where `clients` are data sets or loaders.
        batch_size: Samples per local batch, >= 1; None keeps the data module's own. A Dataset needs it.
        partition: Partition of the samples over the clients; None leaves it to the `Federated` callback.
        clients: Sample indices of each client, instead of `partition`. Without `data` the clients' own data,
            by name or in order: for each client a Dataset, with a length or iterable, a DataLoader, a
            function that returns one of them and is called when the training begins, or `ClientData`, which
            is opened in the client's turn.
        val: Validation set, where `data` is no data module; a loader is taken as it is.
        test: Test set, where `data` is a Dataset.
        predict: Prediction set, where `data` is a Dataset.
        num_workers: Worker processes of the loaders of datasets, >= 0.

    Raises:
        ValueError: If both `partition` and `clients` are given, or a dataset has no batch size.
        TypeError: If `clients` and `data` do not go together.

    Example:
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
        self.data = data
        super().__init__()
        if partition is not None and clients is not None:
            raise ValueError("partition and clients both say who holds what; give one of them")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        self.batch_size, self.num_workers = batch_size, num_workers
        check_clients(data, clients)
        self.sources = None if data is not None else ClientSources(clients, batch_size, num_workers)  # type: ignore[arg-type]
        own: Any = partition if clients is None else clients
        self.split: Partition | Sequence[Sequence[int]] | None = None if self.sources else own
        if isinstance(data, pl.LightningDataModule):
            if not (val is None and test is None and predict is None):
                raise ValueError(
                    "val, test and predict come from the data module; give them with a Dataset only"
                )
            self._adopt(data)
        elif self.sources is not None:
            self.train_dataloader = self.sources.train_dataloader  # type: ignore[method-assign]
            self._serve(val_dataloader=val, test_dataloader=test, predict_dataloader=predict)
        else:
            self._serve(
                train_dataloader=data, val_dataloader=val, test_dataloader=test, predict_dataloader=predict
            )

    @property
    def trainer(self) -> pl.Trainer | None:  # type: ignore[override]
        """The trainer, which the wrapped data module sees too."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        self._trainer = trainer
        if isinstance(self.data, pl.LightningDataModule):
            self.data.trainer = trainer

    @classmethod
    def from_loader(
        cls,
        train: DataLoader[Any],
        val: DataLoader[Any] | None = None,
        *,
        partition: Partition | None = None,
        clients: Sequence[Sequence[int]] | None = None,
    ) -> FederatedDataModule:
        """Wrap loaders that would otherwise go straight to `fit(...)`, which can't be federated.

        Args:
            train: Training loader; its dataset, batch size, collation, shuffling and workers are kept.
            val: Validation loader.
            partition: Partition of the samples over the clients.
            clients: Sample indices of each client.
        """
        return cls(_Loaders(train, val), partition=partition, clients=clients)

    def _adopt(self, data: pl.LightningDataModule) -> None:
        """Put the wrapped module's own hooks on this instance: Lightning sees exactly what it defines."""
        for name in _HOOKS:
            if is_overridden(name, data, pl.LightningDataModule):
                setattr(self, name, getattr(data, name))
        self.prepare_data_per_node = data.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            data.allow_zero_length_dataloader_with_multiple_devices
        )
        if self.batch_size is not None:
            self.train_dataloader = self._resized  # type: ignore[method-assign]

    def _serve(self, **datasets: Any) -> None:
        for name, dataset in datasets.items():
            if dataset is not None:
                setattr(self, name, self._make_loader(dataset, shuffle=name == "train_dataloader"))

    def _make_loader(
        self, dataset: Dataset[Any] | DataLoader[Any], shuffle: bool
    ) -> Callable[[], DataLoader[Any]]:
        if isinstance(dataset, DataLoader):
            return lambda: dataset
        if self.batch_size is None:
            raise ValueError("a Dataset needs a batch_size, got None; pass batch_size=32, or a DataLoader")
        samples = as_tensors(dataset)
        return lambda: DataLoader(
            samples, batch_size=self.batch_size, shuffle=shuffle, num_workers=self.num_workers
        )

    def _resized(self) -> DataLoader[Any]:
        """The wrapped module's training loader with this module's batch size."""
        assert isinstance(self.data, pl.LightningDataModule)
        loader = self.data.train_dataloader()
        if not isinstance(loader, DataLoader):
            raise TypeError(f"train_dataloader must return one torch DataLoader, got {type(loader).__name__}")
        return DataLoader(
            loader.dataset,
            batch_size=self.batch_size,
            sampler=loader.sampler,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            drop_last=loader.drop_last,
        )


def choose_partition(owner: object, partition: Partition) -> Partition | Sequence[Sequence[int]]:
    """Who holds what: what a `FederatedDataModule` says, else the callback's rule.

    Args:
        owner: The data module, or the module with its own loader.
        partition: The callback's.

    Raises:
        ValueError: If both say something.
    """
    if not isinstance(owner, FederatedDataModule) or (owner.split is None and owner.sources is None):
        return partition
    if partition != IID():
        raise ValueError(
            f"both Federated(partition={partition}) and the FederatedDataModule say who holds what; "
            "give it in one place"
        )
    if owner.sources is not None:
        return owner.sources.split
    assert owner.split is not None
    return owner.split


def check_clients(data: object, clients: Any) -> None:
    """Refuse clients that say who holds what of no data, or bring data beside other data.

    Raises:
        TypeError: Naming what is missing or too much.
    """
    if data is None and clients is None:
        raise TypeError(
            "FederatedDataModule needs data, or the data sets of its clients: "
            "FederatedDataModule(clients=[dataset, ...])"
        )
    members = list(clients.values() if isinstance(clients, Mapping) else clients or ())
    brought = isinstance(clients, Mapping) or any(
        isinstance(member, Dataset | DataLoader) or callable(member) for member in members
    )
    if data is not None and brought:
        raise TypeError(
            "clients bring data sets of their own, and there are other data beside them; leave data out, or "
            "give the sample indices of each client"
        )
    first: Any = members[0] if members else None
    if data is None and isinstance(first, list | tuple | range) and first and isinstance(first[0], int):
        raise TypeError(
            "clients are sample indices, and there are no data that they are of; give data, or a data set "
            "for each client"
        )


class _Loaders(pl.LightningDataModule):
    """Two loaders as a data module."""

    def __init__(self, train: DataLoader[Any], val: DataLoader[Any] | None) -> None:
        super().__init__()
        self.train_dataloader = lambda: train  # type: ignore[method-assign]
        if val is not None:
            self.val_dataloader = lambda: val  # type: ignore[method-assign]
