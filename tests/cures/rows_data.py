"""Cures that the split of the data over clients names."""

import tarfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fedq._lightning import pl
from lightning_fedq.data import ClientData, FederatedDataModule, QuantitySkew, Sizes
from lightning_fedq.data.datasets import CIFAR10DataModule
from lightning_fedq.data.datasets.tensors import split_indices
from lightning_fedq.data.partition import IID, Dirichlet, LabelShards
from tests.cures.rows import dpsgd, fed, fit, row
from tests.digits_run import Classifier, Digits, digits

INPUTS, LABELS = digits()


def part(size=80, start=0):
    return TensorDataset(INPUTS[start : start + size], LABELS[start : start + size])


def pictures(*parts, packed=False):
    """The data module of class folders with ten images each, or of their archive."""
    for part in parts:
        folder = Path("images", part, "cat")
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(10):
            Image.new("RGB", (32, 32)).save(folder / f"{number}.png")
    root = Path("images")
    if packed:
        root = Path("packed")
        root.mkdir(exist_ok=True)
        with tarfile.open(root / "images.tar.gz", "w:gz") as archive:
            for part in parts:
                archive.add(Path("images", part), part)
    CIFAR10DataModule(str(root), image_folder=True).setup("test")


def parts(count=4):
    return [part(20, 20 * client) for client in range(count)]


class Loads(pl.LightningDataModule):
    """A data module that returns this."""

    def __init__(self, *loaders: Any) -> None:
        super().__init__()
        self.loaders = list(loaders)

    def train_dataloader(self):
        return self.loaders.pop(0) if len(self.loaders) > 1 else self.loaders[0]


class Several(Classifier):
    """A training step for a list or a dict of batches."""

    def training_step(self, batch, batch_idx):
        found = list(batch.values()) if isinstance(batch, dict) else batch
        return sum(super(Several, self).training_step(one, batch_idx) for one in found if one is not None)


class Stream(IterableDataset):
    """Samples that nobody has counted."""

    def __init__(self, client: int = 0, batches: bool = False) -> None:
        self.client, self.batches = client, batches

    def __iter__(self):
        data = part(20, 20 * self.client)
        return iter(DataLoader(data, batch_size=5)) if self.batches else (data[i] for i in range(20))


def loader(data=None, **settings):
    return DataLoader(data or part(), **{"batch_size": 5, **settings})


def split(data=None, federation=None, *more, module=None, **trainer):
    """A fit with these training data."""
    return fit(federation or fed(), *more, module=module, data=data, **trainer)


def on(*loaders, federation=None, more=(), **trainer):
    """A fit with what a data module's `train_dataloader` returns."""
    return split(Loads(*loaders), federation, *more, **trainer)


def two(**settings):
    return [loader(part(), **settings), loader(part(80, 80), **settings)]


def of(*clients, **settings):
    return FederatedDataModule(clients=list(clients), **settings)


class Backwards(Sampler[int]):
    """An order of all samples."""

    def __init__(self, size: int = 80) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

    def __len__(self):
        return self.size


class Some(BatchSampler):
    """Batches by a rule of its own."""


class Labelled(torch.utils.data.Dataset):
    """Samples that are dicts; labels have a name."""

    def __init__(self, names: str = "label", targets: bool = False) -> None:
        self.names = names
        if targets:
            self.targets = LABELS[:80]

    def __len__(self):
        return 80

    def __getitem__(self, index):
        return {"pixels": INPUTS[index], self.names: LABELS[index]}


class OfDicts(Classifier):
    def training_step(self, batch, batch_idx):
        inputs, labels = batch.values()
        return super().training_step((inputs, labels), batch_idx)


IDS = TensorDataset(INPUTS[:80], LABELS[:80], torch.arange(80))
PAIRS = TensorDataset(INPUTS[:80], torch.stack([LABELS[:80], LABELS[:80]], 1))


class OfThree(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0], batch[1]), batch_idx)


class OfPairs(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0], batch[1][:, 0]), batch_idx)


WEIGHTS = torch.ones(80).double()
FEW = torch.cat([torch.ones(3), torch.zeros(77)]).double()


def weighted(weights=WEIGHTS, replacement=True, num_samples=80):
    return loader(sampler=WeightedRandomSampler(weights, num_samples, replacement))


def combined(mode):
    return pl.utilities.CombinedLoader(two(), mode)


RELOAD = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}


def mixed(size):
    """Clients' own loaders of batches of 5 and of 4."""
    return of(*(loader(part(size, 20 * client), batch_size=5 - client % 2) for client in range(4)))


def reloading(later):
    """Clients' loaders that have this many samples from the second epoch on."""
    data, again = mixed(20), mixed(later)
    first = data.train_dataloader
    data.train_dataloader = lambda: (again.train_dataloader if data.trainer.current_epoch else first)()
    return data


class ReadsData(pl.Callback):
    """Looks at the training data, as many callbacks do."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        assert len(trainer.train_dataloader.dataset) == 80


def draws_itself():
    data = part(5)
    data.generator = torch.Generator()
    return data


row(
    "Found no folder {}. Put train/<class>/* and test/<class>/* into data.root",
    lambda: pictures("train"),
    lambda: pictures("train", "test"),
    error=FileNotFoundError,
)
row(
    "{} has no {}/<class>/*. Put train/<class>/* and test/<class>/* into",
    lambda: pictures("train", packed=True),
    lambda: pictures("train", "test", packed=True),
    error=FileNotFoundError,
)
row(
    "size must be >= 1, got {}. Leave clients without samples out.",
    lambda: ClientData(part, 0),
    lambda: ClientData(part, 80)[0],
)
row(
    "opened a data set of {} samples, but ClientData(size={}) was given. Give the true size of each client's",
    lambda: ClientData(part, 79)[0],
    lambda: ClientData(part, 80)[0],
)
row(
    "opened a data set with a {}, which restarts each time. Draw from torch's default generator, or give the",
    lambda: ClientData(draws_itself, 5)[0],
    lambda: ClientData(lambda: part(5), 5)[0],
    lambda: of(draws_itself(), part(5), batch_size=5),
)

row(
    "Data sets of clients need a batch_size, got None. Pass e.g. batch_size=32.",
    lambda: split(of(*parts())),
    lambda: split(of(*parts(), batch_size=32)),
)
row(
    "Both Federated(partition={}) and the FederatedDataModule define the partition. Give it in one place.",
    lambda: split(FederatedDataModule(part(), batch_size=5, partition=IID()), fed(partition=LabelShards(1))),
    lambda: split(FederatedDataModule(part(), batch_size=5), fed(partition=LabelShards(1))),
    lambda: split(FederatedDataModule(part(), batch_size=5, partition=LabelShards(1))),
)
row(
    "Got data sets of the clients in addition to data. Leave data out, or give the sample indices of each",
    lambda: FederatedDataModule(part(), clients=parts(), batch_size=5),
    lambda: split(of(*parts(), batch_size=5)),
    lambda: split(FederatedDataModule(part(), clients=[[0, 1], [2], [3], [4]], batch_size=5)),
    error=TypeError,
)
row(
    "clients are sample indices, but there are no data. Give data, or a data set for each client.",
    lambda: FederatedDataModule(clients=[[0, 1], [2]], batch_size=5),
    lambda: split(FederatedDataModule(part(), clients=[[0, 1], [2], [3], [4]], batch_size=5)),
    lambda: split(of(*parts(), batch_size=5)),
    error=TypeError,
)
row(
    "partition and clients both define the partition. Give one of them.",
    lambda: FederatedDataModule(part(), clients=[[0], [1]], partition=IID(), batch_size=5),
    lambda: split(FederatedDataModule(part(), clients=[[0], [1], [2], [3]], batch_size=5)),
    lambda: split(FederatedDataModule(part(), partition=IID(), batch_size=5)),
)
row(
    "val, test and predict come from the data module. Give them with a Dataset only.",
    lambda: FederatedDataModule(Digits(80), val=part()),
    lambda: split(FederatedDataModule(Digits(80))),
    lambda: split(FederatedDataModule(part(), batch_size=5, val=part())),
)
row(
    "A Dataset needs a batch_size, got None. Pass batch_size=32, or a DataLoader.",
    lambda: FederatedDataModule(part()),
    lambda: split(FederatedDataModule(part(), batch_size=32)),
    lambda: split(of(*map(loader, parts()), val=part(), batch_size=32)),
    lambda: split(of(*map(loader, parts()), val=loader())),
)
row(
    "draws samples from one data set, but there are several loaders. Give each client one data set with a",
    lambda: on(two(), more=[dpsgd()], module=Several()),
    lambda: split(of(*parts(), batch_size=5), None, dpsgd()),
)
row(
    "overfit_batches takes the first batches of one loader, but there are several. Use limit_train_batches,",
    lambda: on(two(shuffle=True), module=Several(), overfit_batches=2),
    lambda: on(two(), module=Several(), limit_train_batches=2),
)
row("loaders have other", lambda: split(reloading(10), **RELOAD), lambda: split(reloading(20), **RELOAD))
row(
    "labels must be one integer per sample, got {} of shape {}. Use IID() without labels.",
    lambda: on(loader(PAIRS), federation=fed(partition=Dirichlet(5.0)), module=OfPairs()),
    lambda: on(loader(PAIRS), federation=fed(partition=IID()), module=OfPairs()),
)
row(
    "The labels found in {} look like identifiers: {} of {} occur once. Give the item of the label, e.g.",
    lambda: on(loader(IDS), federation=fed(partition=Dirichlet(5.0)), module=OfThree()),
    lambda: on(loader(IDS), federation=fed(partition=Dirichlet(5.0), labels=1), module=OfThree()),
    lambda: on(loader(IDS), federation=fed(partition=Dirichlet(5.0), labels=LABELS[:80]), module=OfThree()),
    lambda: on(loader(IDS), federation=fed(partition=IID()), module=OfThree()),
)
row(
    "Found no integer labels in {}. Give the item of the label, e.g. Federated(labels='label'), or a",
    lambda: on(loader(Labelled("y")), federation=fed(partition=Dirichlet(5.0)), module=OfDicts()),
    lambda: on(loader(Labelled("y")), federation=fed(partition=Dirichlet(5.0), labels="y"), module=OfDicts()),
    lambda: on(loader(Labelled("y", True)), federation=fed(partition=Dirichlet(5.0)), module=OfDicts()),
    lambda: on(loader(Labelled("y")), federation=fed(), module=OfDicts()),
)
row(
    "train_dataloader must return one or several torch DataLoaders, got {}. Wrap batches in",
    lambda: on([1, 2]),
    lambda: on(loader()),
    lambda: on({"one": loader(), "other": loader()}, module=Several()),
    lambda: on(two(), module=Several()),
    lambda: split(
        of(*(DataLoader(Stream(client, batches=True), batch_size=None) for client in range(4))),
        fed(local_steps=2),
    ),
    error=TypeError,
)
row(
    "One stream can't be partitioned over clients, got the IterableDataset {}. Use a map-style Dataset, or",
    lambda: on(loader(Stream())),
    lambda: split(of(*map(Stream, range(4)), batch_size=5), fed(local_steps=2)),
    lambda: on(loader()),
    error=TypeError,
)
row(
    "The DataLoader has batch_size=None, but another rule must draw the samples of each batch. Give it a",
    lambda: on(loader(batch_size=None), more=[dpsgd()]),
    lambda: on(loader(batch_size=5), more=[dpsgd()]),
)
row(
    "The DataLoader's sampler {} would be replaced, because another rule draws the batches. Use shuffle=True",
    lambda: on(loader(sampler=Backwards()), more=[dpsgd()]),
    lambda: on(loader(shuffle=True), more=[dpsgd()]),
    lambda: on(loader(shuffle=False), more=[dpsgd()]),
)
row(
    "have fewer than {} samples. Use {}",
    lambda: split(Digits(80, 30, drop_last=True)),
    lambda: split(Digits(80, 30, drop_last=True), fed(num_clients=2)),
    lambda: split(Digits(80, 15, drop_last=True)),
    lambda: split(Digits(80, 30, drop_last=False)),
    lambda: split(Digits(160, 30, drop_last=True)),
)
row(
    "have fewer than {} samples. Use {}",
    lambda: split(Digits(80, 15, drop_last=True), fed(partition=Dirichlet(0.01))),
    lambda: split(Digits(80, 15, drop_last=True), fed(partition=Dirichlet(0.01, min_partition_size=15))),
    lambda: split(Digits(80, 15, drop_last=True), fed(partition=IID())),
)
row(
    "clients of at least {} samples need {}, got {}. Use fewer clients, or a smaller min_partition_size.",
    lambda: split(Digits(80), fed(partition=Dirichlet(0.1, min_partition_size=30))),
    lambda: split(Digits(80), fed(num_clients=2, partition=Dirichlet(0.1, min_partition_size=30))),
    lambda: split(Digits(80), fed(partition=Dirichlet(0.1, min_partition_size=20))),
)
row(
    "clients of at least {} samples need {}, got {}. Use fewer clients, or a smaller min_partition_size.",
    lambda: split(Digits(80), fed(partition=QuantitySkew(1.0, min_partition_size=30))),
    lambda: split(Digits(80), fed(num_clients=2, partition=QuantitySkew(1.0, min_partition_size=30))),
    lambda: split(Digits(80), fed(partition=QuantitySkew(1.0, min_partition_size=20))),
)
row(
    "There are {} sizes, but num_clients is {}. Give one for each client.",
    lambda: split(Digits(80), fed(partition=Sizes((40, 40)))),
    lambda: split(Digits(80), fed(partition=Sizes((10, 20, 20, 30)))),
)
row(
    "sizes sum to {}, but there are {} samples. Let integer sizes sum to the samples",
    lambda: split(Digits(80), fed(partition=Sizes((5, 10, 10, 15)))),
    lambda: split(Digits(80), fed(partition=Sizes((10, 20, 20, 30)))),
    lambda: split(Digits(40), fed(partition=Sizes((5, 10, 10, 15)))),
    lambda: split(Digits(80), fed(partition=Dirichlet(1.0, sizes=(0.1, 0.2, 0.3, 0.4)))),
)
row(
    "min_partition_size={} is for drawn sizes, but sizes are given. Leave it out.",
    lambda: Dirichlet(1.0, 2, (1, 3)),
    lambda: Dirichlet(1.0, sizes=(1, 3)),
)
row("sizes must be > 0, one for each client, got {}", lambda: Sizes((0, 4)), lambda: Sizes((1, 3)))
row(
    "The reloaded training loader has {} samples in batches of {}, but the partition has {} in batches of",
    lambda: on(loader(), loader(part(40)), max_epochs=2, reload_dataloaders_every_n_epochs=1),
    lambda: on(loader(), loader(part(80, 80)), max_epochs=2, reload_dataloaders_every_n_epochs=1),
    lambda: on(loader(), loader(part(40)), max_epochs=2, reload_dataloaders_every_n_epochs=0),
)
row(
    "The reloaded training loaders have {} samples, but the partition has {}. Keep the lengths, or set",
    lambda: on(two(), [*two()[:1], loader(part(40))], module=Several(), **RELOAD),
    lambda: on(two(), two(), module=Several(), **RELOAD),
    lambda: on(two(), [*two()[:1], loader(part(40))], module=Several(), max_epochs=2),
)
row(
    "Every client has a separate loader, so samples of a common data set can't be taken by index. Give each",
    lambda: split(mixed(20), None, ReadsData()),
    lambda: split(of(*parts(), batch_size=5), None, ReadsData()),
)
row(
    "The loaders of clients {} have no batch. Leave them out.",
    lambda: split(of(*map(loader, parts()), loader(part(3), drop_last=True)), fed(num_clients=5)),
    lambda: split(of(*map(loader, parts()))),
)
row(
    "Indices of each client refer to one data set, but there are several loaders. Use a partition, or give",
    lambda: split(FederatedDataModule(Loads(two()), clients=[[0], [1], [2], [3]]), module=Several()),
    lambda: on(two(), module=Several()),
    lambda: split(of(*map(loader, parts()))),
)
row(
    "Lightning does not train on a CombinedLoader with mode 'sequential'. Use 'max_size_cycle', 'max_size'",
    lambda: on(combined("sequential"), module=Several()),
    *(
        lambda mode=mode: on(combined(mode), module=Several())
        for mode in ("max_size_cycle", "max_size", "min_size")
    ),
)
row(
    "The sampler {} can't be applied to clients of several loaders. Give every client separate loaders:",
    lambda: on([loader(sampler=Backwards()), loader()], module=Several()),
    lambda: split(of(*(loader(one, sampler=Backwards(20)) for one in parts()))),
)
row(
    "The data of client {} are a stream without a length. Set the number of batches by",
    lambda: split(of(*map(Stream, range(4)), batch_size=5)),
    lambda: split(of(*map(Stream, range(4)), batch_size=5), fed(local_steps=2)),
    lambda: split(of(*map(Stream, range(4)), batch_size=5), limit_train_batches=2),
)
row(
    "clients can't share {} samples. Use num_clients <= {}, or more data.",
    lambda: split(None, fed(num_clients=100)),
    lambda: split(None, fed(num_clients=80)),
    lambda: split(Digits(100), fed(num_clients=100)),
)
row(
    "The partition needs one integer label per sample, shape ({},), got {}. Use IID() without labels.",
    lambda: Dirichlet(0.5).split(None, 80, 4, torch.Generator()),
    lambda: IID().split(None, 80, 4, torch.Generator()),
)
row(
    "clients with {} shards need {} samples, got {}. Use fewer shards_per_client.",
    lambda: split(None, fed(partition=LabelShards(30))),
    lambda: split(None, fed(partition=LabelShards(2))),
)
row(
    "A DataLoader with the batch sampler {} can't be partitioned. Give it a batch_size, or give every client",
    lambda: on(DataLoader(part(), batch_sampler=Some(RandomSampler(part()), 5, False))),
    lambda: on(DataLoader(part(), sampler=RandomSampler(part()), batch_size=5)),
    lambda: split(of(*(DataLoader(d, batch_sampler=Some(SequentialSampler(d), 5, False)) for d in parts()))),
)
row(
    "Clients {} have too few samples with positive weights for the WeightedRandomSampler. Use another",
    lambda: on(weighted(FEW, False, 3)),
    lambda: on(weighted(FEW, False, 3), federation=fed(num_clients=1)),
    lambda: on(weighted(WEIGHTS, True)),
)
row(
    "The sampler {} gives no sample of clients {}. Use another partition, or fewer clients.",
    lambda: on(loader(sampler=[0, 1])),
    lambda: split(
        FederatedDataModule(Loads(loader(sampler=[0, 1])), clients=[range(0, 80, 2), range(1, 80, 2)]),
        fed(num_clients=2),
    ),
    lambda: on(loader(sampler=[0, 1]), federation=fed(num_clients=1)),
)
row(
    "The WeightedRandomSampler has {} weights for {} samples. Give it one weight for each sample.",
    lambda: on(weighted(WEIGHTS[:40])),
    lambda: on(weighted(WEIGHTS)),
)
row("samples with {} for testing", lambda: split_indices(2, 1, 0), lambda: split_indices(200, 20, 0))
row(
    ", so clients can't train side by side, got clients_per_step={}. Use",
    lambda: on(two(), federation=fed(clients_per_step=2), module=Several()),
    lambda: on(two(), federation=fed(clients_per_step=1), module=Several()),
    lambda: on(two(), federation=fed(clients_per_step="auto"), module=Several()),
)
row(
    "are streams with an unknown number of samples. Use weighting='uniform'",
    lambda: split(of(*map(Stream, range(4)), batch_size=5), fed(local_steps=2, weighting="samples")),
    lambda: split(of(*map(Stream, range(4)), batch_size=5), fed(local_steps=2, weighting="uniform")),
)
