"""MNIST and CIFAR-10 from torchvision's files, normalised and in memory.

CIFAR-10 can also be read from a folder of images, such as a copy re-encoded as JPEG, or from an archive of
such a folder. JPEG loses a little accuracy, so mention it next to results.
"""

import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from lightning_fedq.data.datasets.tensors import TensorDataModule
from lightning_fedq.imports import extra


def _torchvision_datasets() -> Any:
    """Import `torchvision.datasets`, which is an optional dependency."""
    with extra("vision", "MNIST or CIFAR-10"):
        from torchvision import datasets  # slow to import, and only needed here
    return datasets


def data_root(root: str | None) -> Path:
    """Return the folder of data sets: `root`, or else the environment variable `FEDQ_DATA`, or else `data`.

    Examples:
        >>> data_root("mine")
        PosixPath('mine')
    """
    return Path(root or os.environ.get("FEDQ_DATA") or "data")


def _parts(kind: Any, what: str, root: Path, download: bool) -> list[Any]:
    """Return the training set and the official test set of a data set of torchvision.

    Raises:
        FileNotFoundError: If the files do not exist and `download` is off.
    """
    try:
        return [kind(str(root), train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        raise FileNotFoundError(
            f"Found no {what} in {root.resolve()}. Set data.root, or FEDQ_DATA in the environment, to its "
            "folder, or set data.download: true."
        ) from error


class MNISTDataModule(TensorDataModule):
    """MNIST as float images `(1, 28, 28)` with mean 0 and standard deviation 1.

    Args:
        root: Folder that contains `MNIST/raw` (the layout of torchvision). None uses the environment variable
            `FEDQ_DATA`, or else `data`.
        download: Whether to download missing files.
        batch_size: Number of samples per training batch, >= 1.
        pooled: Whether to split all 70,000 images at random, 80/20 into train and test, as CorBin-FL does.
            False keeps the official test set.
        num_train: Number of training samples to use, >= 1. None uses all.
        num_val: Number of validation samples to use, >= 1. None uses all.
        seed: Seed of the random split.
        keep_features: Whether to serve features in place of images, computed once by the `FixedFeatures` of
            the Trainer's model.

    Raises:
        FileNotFoundError: On set-up, if the files do not exist and `download` is off.
    """

    def __init__(
        self,
        root: str | None = None,
        download: bool = False,
        batch_size: int = 64,
        pooled: bool = False,
        num_train: int | None = None,
        num_val: int | None = None,
        seed: int = 0,
        keep_features: bool = False,
    ) -> None:
        super().__init__(batch_size, pooled, num_train, num_val, seed, keep_features)
        self.root, self.download = data_root(root), download

    def load(self) -> tuple[Tensor, Tensor, int]:
        parts = _parts(_torchvision_datasets().MNIST, "MNIST/raw", self.root, self.download)
        images = torch.cat([part.data for part in parts]).float().div_(255)
        labels = torch.cat([part.targets for part in parts])
        return images.sub_(0.1307).div_(0.3081)[:, None], labels, len(parts[1])


class CIFAR10DataModule(TensorDataModule):
    """CIFAR-10 as float images `(3, 32, 32)`, each channel with mean 0 and standard deviation 1.

    Args:
        root: Folder that contains `cifar-10-batches-py` (the layout of torchvision) or its archive, or class
            folders `train/<class>/*` and `test/<class>/*`, or an archive of these (`*.tar.gz` or
            `cifar10/*.tar.gz`). None uses the environment variable `FEDQ_DATA`, or else `data`.
        download: Whether to download missing files. It can't be combined with `image_folder`.
        image_folder: Whether to read images from class folders or their archive. None does so if `root` has
            these and no `cifar-10-batches-py`.
        batch_size: Number of samples per training batch, >= 1.
        pooled: Whether to split all images at random, 80/20 into train and test, as CorBin-FL does. False
            keeps the official test set.
        num_train: Number of training samples to use, >= 1. None uses all.
        num_val: Number of validation samples to use, >= 1. None uses all.
        seed: Seed of the random split.
        keep_features: Whether to serve features in place of images, computed once by the `FixedFeatures` of
            the Trainer's model.

    Raises:
        ValueError: If `download` and `image_folder` are both set.
        FileNotFoundError: On set-up, if the files do not exist and `download` is off.
    """

    def __init__(
        self,
        root: str | None = None,
        download: bool = False,
        image_folder: bool | None = None,
        batch_size: int = 64,
        pooled: bool = False,
        num_train: int | None = None,
        num_val: int | None = None,
        seed: int = 0,
        keep_features: bool = False,
    ) -> None:
        super().__init__(batch_size, pooled, num_train, num_val, seed, keep_features)
        if download and image_folder:
            raise ValueError("Image folders can't be downloaded. Set only one of download and image_folder.")
        self.root, self.download, self.image_folder = data_root(root), download, image_folder

    def load(self) -> tuple[Tensor, Tensor, int]:
        use_images = self.image_folder
        if use_images is None:
            use_images = not (self.root / "cifar-10-batches-py").is_dir() and (
                (self.root / "train").is_dir() or _image_archive(self.root) is not None
            )
        if use_images:
            archive = None if (self.root / "train").is_dir() else _image_archive(self.root)
            folders = ("train", "test")
            parts = [self._folder(part) for part in folders] if archive is None else _from_archive(archive)
        else:
            parts = self._batches()
        images = torch.cat([part[0] for part in parts]).float().div_(255)
        mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
        std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
        return images.sub_(mean).div_(std), torch.cat([part[1] for part in parts]), len(parts[1][1])

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return images and labels of train and test from torchvision's files."""
        datasets = _torchvision_datasets()
        # torchvision unpacks an intact archive only if it may download
        archive = self.root / datasets.CIFAR10.filename
        is_intact = datasets.utils.check_integrity(str(archive), datasets.CIFAR10.tgz_md5)
        parts = _parts(datasets.CIFAR10, "cifar-10-batches-py", self.root, self.download or is_intact)
        return [(torch.from_numpy(p.data).permute(0, 3, 1, 2), torch.tensor(p.targets)) for p in parts]

    def _folder(self, part: str) -> tuple[Tensor, Tensor]:
        """Return images and labels of the class folders of one part, "train" or "test"."""
        folder = self.root / part
        if not folder.is_dir():
            raise FileNotFoundError(
                f"Found no folder {folder.resolve()}. Put train/<class>/* and test/<class>/* into data.root."
            )
        with extra("vision", "CIFAR10DataModule"):
            from torchvision.datasets import ImageFolder
            from torchvision.transforms.functional import pil_to_tensor
        samples = ImageFolder(str(folder))
        images = torch.stack([pil_to_tensor(image) for image, _ in samples])
        return images, torch.tensor(samples.targets)


def _image_archive(root: Path) -> Path | None:
    """Return the first archive, by name, that has images `train/<class>/<image>`, or None."""
    for path in sorted([*root.glob("*.tar.gz"), *root.glob("cifar10/*.tar.gz")]):
        with tarfile.open(path) as archive:
            # read members until the first image, since other files come before the two folders
            first = (member.name for member in archive if member.isfile())
            if next((name for name in first if _place(name)), None):
                return path
    return None


def _place(name: str) -> tuple[str, str, str] | None:
    """Return part, class and file name of an image in an archive, or None for other members."""
    words = PurePosixPath(name).parts[-3:]
    return (words[0], words[1], words[2]) if len(words) == 3 and words[0] in ("train", "test") else None


def _from_archive(path: Path) -> list[tuple[Tensor, Tensor]]:
    """Return images and labels of train and test from an archive, in the order of class folders.

    Nothing is written to disk.
    """
    with extra("vision", "CIFAR10DataModule"):
        from PIL import Image
        from torchvision.transforms.functional import pil_to_tensor
    images: dict[tuple[str, str, str], Tensor] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            place, content = _place(member.name), archive.extractfile(member) if member.isfile() else None
            if place is not None and content is not None:
                images[place] = pil_to_tensor(Image.open(content).convert("RGB"))
    classes = sorted({label for _, label, _ in images})
    parts = []
    for part in ("train", "test"):
        places = sorted(place for place in images if place[0] == part)
        if not places:
            raise FileNotFoundError(
                f"{path.resolve()} has no {part}/<class>/*. Put train/<class>/* and test/<class>/* into "
                "data.root."
            )
        labels = torch.tensor([classes.index(label) for _, label, _ in places])
        parts.append((torch.stack([images[place] for place in places]), labels))
    return parts
