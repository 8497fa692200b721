"""Cures that fixed features name."""

import tempfile
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.data.datasets import TensorDataModule
from lightning_fedq.data.models import Classifier, FixedFeatures, Linear
from tests.cures.rows import row

IMAGES = torch.rand(4, 1, 16, 16)


def of(images=IMAGES, **settings):
    return FixedFeatures(**{"size": 8, "side": 16, "pictures": None, **settings})(images)


def from_file(seed, wanted=0):
    """Features of a file of one seed, that must have the hash of another."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(FixedFeatures(8, 16, pictures=None, seed=seed).state_dict(), Path(folder) / "own.pt")
        sha256 = FixedFeatures(8, 16, pictures=None, seed=wanted).sha256
        of(file=str(Path(folder) / "own.pt"), sha256=sha256)


class Endless(torch.utils.data.Dataset):
    def __len__(self):
        return 10**14


class Keeping(TensorDataModule):
    def load(self):
        return torch.rand(20, 1, 16, 16), torch.arange(20) % 2, 0


def kept(keeps, **settings):
    data = Keeping(2, False, None, None, 0, keep_features=keeps)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    features = FixedFeatures(8, 16, pictures=None)
    net = Linear(8, 2, features=features) if settings else Linear(256, 2)
    trainer.fit(Classifier(net), datamodule=data)


row(
    "channels must be 1 or 3, side >= 16 a multiple of 4 * pool, and 1 <= size <= {}, got channels={},",
    lambda: of(torch.rand(2, 1, 18, 18), side=18),
    lambda: of(torch.nn.functional.interpolate(torch.rand(2, 1, 18, 18), 16)),  # resize the images
)
row(
    "images must be floats of shape (N, {}, got {} of shape {}. Give FixedFeatures their side and channels,",
    lambda: of(torch.rand(2, 3, 32, 32)),
    lambda: of(torch.rand(2, 3, 32, 32), side=32, channels=3),
    lambda: of(torch.nn.functional.interpolate(torch.rand(2, 1, 32, 32), 16)),
)
row(
    "images * std + mean must be in [0, 1], got {} to {}. Give FixedFeatures the mean and std by which the",
    lambda: of((IMAGES - 0.5) / 0.25),
    lambda: of((IMAGES - 0.5) / 0.25, mean=0.5, std=0.25),
)
row(
    "Features of {} images need {} GB. Keep fewer images, use a smaller size, or train on the images, which",
    lambda: FixedFeatures(8, 16, pictures=None).compute_features(Endless()),
    lambda: FixedFeatures(8, 16, pictures=None).compute_features(TensorDataset(IMAGES)),
    lambda: FixedFeatures(4, 16, pictures=None).compute_features(TensorDataset(IMAGES)),
    lambda: kept(False, images=True),
    error=MemoryError,
)
row(
    "The projection's sha256 is {}, but {} was expected. Give the file= of the expected projection, because",
    lambda: from_file(1),
    lambda: from_file(0),
)
row(
    "keep_features needs a Trainer whose model has one FixedFeatures, got {}. Use",
    lambda: kept(True),
    lambda: kept(True, features=True),
    lambda: kept(False),
)
