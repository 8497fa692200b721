"""MNIST and CIFAR-10 through torchvision, normalised and in memory.

Departure: CIFAR-10 may also be read from a folder of images, for copies re-encoded as JPEG. JPEG
loses a little accuracy; say so beside a figure made with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fedq.datasets.tensors import TensorDataModule
from lightning_fedq.extras import extra


def _torchvision_datasets() -> Any:
    with extra("vision", "MNIST or CIFAR-10"):
        from torchvision import datasets  # slow to import, and only needed here
    return datasets


def _missing(what: str, root: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"no {what} in {root.resolve()}; set data.root to the folder that holds it, or data.download: true"
    )


class MNISTDataModule(TensorDataModule):
    """MNIST as `(1, 28, 28)` float images with mean 0 and standard deviation 1.

    Args:
        root: Folder that holds `MNIST/raw`, torchvision's own layout.
        download: Fetch what is missing.
        batch_size: Samples per training batch.
        pooled: Split all 70,000 images 80/20 at random, as CorBin-FL does; False keeps the official test set.
        num_train: Use only so many training samples; None is all.
        num_val: Use only so many validation samples; None is all.
        seed: Seed of the split.

    Raises:
        FileNotFoundError: On set-up, if the files are not there and `download` is off.
    """

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        batch_size: int = 64,
        pooled: bool = False,
        num_train: int | None = None,
        num_val: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, pooled, num_train, num_val, seed)
        self.root, self.download = Path(root), download

    def load(self) -> tuple[Tensor, Tensor, int]:
        """See `TensorDataModule.load`."""
        datasets = _torchvision_datasets()
        try:
            parts = [
                datasets.MNIST(self.root, train=train, download=self.download) for train in (True, False)
            ]
        except RuntimeError as error:
            raise _missing("MNIST/raw", self.root) from error
        images = torch.cat([part.data for part in parts]).float().div_(255)
        labels = torch.cat([part.targets for part in parts])
        return images.sub_(0.1307).div_(0.3081)[:, None], labels, len(parts[1])


class CIFAR10DataModule(TensorDataModule):
    """CIFAR-10 as `(3, 32, 32)` float images, each channel with mean 0 and standard deviation 1.

    Args:
        root: Folder that holds `cifar-10-batches-py` (torchvision's layout), or, with `image_folder`,
            `train/<class>/*` and `test/<class>/*`.
        download: Fetch what is missing; not with `image_folder`.
        image_folder: Read images from class folders.
        batch_size: Samples per training batch.
        pooled: Split all images 80/20 at random, as CorBin-FL does; False keeps the official test set.
        num_train: Use only so many training samples; None is all.
        num_val: Use only so many validation samples; None is all.
        seed: Seed of the split.

    Raises:
        ValueError: If `download` and `image_folder` are both set.
        FileNotFoundError: On set-up, if the files are not there and `download` is off.
    """

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        image_folder: bool = False,
        batch_size: int = 64,
        pooled: bool = False,
        num_train: int | None = None,
        num_val: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, pooled, num_train, num_val, seed)
        if download and image_folder:
            raise ValueError("download fetches no image folder; set only one of download and image_folder")
        self.root, self.download, self.image_folder = Path(root), download, image_folder

    def load(self) -> tuple[Tensor, Tensor, int]:
        """See `TensorDataModule.load`."""
        parts = [self._folder("train"), self._folder("test")] if self.image_folder else self._batches()
        images = torch.cat([part[0] for part in parts]).float().div_(255)
        mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
        std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
        return images.sub_(mean).div_(std), torch.cat([part[1] for part in parts]), len(parts[1][1])

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        datasets = _torchvision_datasets()
        try:
            parts = [
                datasets.CIFAR10(str(self.root), train=train, download=self.download)
                for train in (True, False)
            ]
        except RuntimeError as error:
            raise _missing("cifar-10-batches-py", self.root) from error
        return [(torch.from_numpy(p.data).permute(0, 3, 1, 2), torch.tensor(p.targets)) for p in parts]

    def _folder(self, part: str) -> tuple[Tensor, Tensor]:
        folder = self.root / part
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no folder {folder.resolve()}; data.root must hold train/<class>/* and test/<class>/*"
            )
        with extra("vision", "CIFAR10DataModule"):
            from torchvision.datasets import ImageFolder
            from torchvision.transforms.functional import pil_to_tensor
        samples = ImageFolder(str(folder))
        images = torch.stack([pil_to_tensor(image) for image, _ in samples])
        return images, torch.tensor(samples.targets)
