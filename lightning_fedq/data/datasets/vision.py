"""MNIST and CIFAR-10 through torchvision, normalised and in memory.

Departure: CIFAR-10 may also be read from a folder of images, for copies re-encoded as JPEG, or from an
archive of one, as it is. JPEG loses a little accuracy; say so beside a figure made with it.
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
    with extra("vision", "MNIST or CIFAR-10"):
        from torchvision import datasets  # slow to import, and only needed here
    return datasets


def data_root(root: str | None) -> Path:
    """Folder of data sets: what is named, else that of `FEDQ_DATA` in the environment, else `data`.

    Example:
        >>> data_root("mine")
        PosixPath('mine')
    """
    return Path(root or os.environ.get("FEDQ_DATA") or "data")


def _parts(kind: Any, what: str, root: Path, download: bool) -> list[Any]:
    """Training and official test set of torchvision's."""
    try:
        return [kind(str(root), train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        raise FileNotFoundError(
            f"no {what} in {root.resolve()}; set data.root, or FEDQ_DATA in the environment, to the folder "
            "that holds it, or data.download: true"
        ) from error


class MNISTDataModule(TensorDataModule):
    """MNIST as `(1, 28, 28)` float images with mean 0 and standard deviation 1.

    Args:
        root: Folder that holds `MNIST/raw`, torchvision's own layout; None is `FEDQ_DATA`, else `data`.
        download: Fetch what is missing.
        batch_size: Samples per training batch.
        pooled: Split all 70,000 images 80/20 at random, as CorBin-FL does; False keeps the official test set.
        num_train: Use only so many training samples; None is all.
        num_val: Use only so many validation samples; None is all.
        seed: Seed of the split.
        keep_features: Serve what the `FixedFeatures` of the Trainer's model make of the images, made once.

    Raises:
        FileNotFoundError: On set-up, if the files are not there and `download` is off.
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
    """CIFAR-10 as `(3, 32, 32)` float images, each channel with mean 0 and standard deviation 1.

    Args:
        root: Folder that holds `cifar-10-batches-py` (torchvision's layout) or its archive, or class folders
            `train/<class>/*` and `test/<class>/*`, or an archive of them, `*.tar.gz` or `cifar10/*.tar.gz`.
            None is `FEDQ_DATA`, else `data`.
        download: Fetch what is missing; not with `image_folder`.
        image_folder: Read images from class folders or their archive; None does so where they are all that
            `root` holds.
        batch_size: Samples per training batch.
        pooled: Split all images 80/20 at random, as CorBin-FL does; False keeps the official test set.
        num_train: Use only so many training samples; None is all.
        num_val: Use only so many validation samples; None is all.
        seed: Seed of the split.
        keep_features: Serve what the `FixedFeatures` of the Trainer's model make of the images, made once.

    Raises:
        ValueError: If `download` and `image_folder` are both set.
        FileNotFoundError: On set-up, if the files are not there and `download` is off.
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
            raise ValueError("download fetches no image folder; set only one of download and image_folder")
        self.root, self.download, self.image_folder = data_root(root), download, image_folder

    def load(self) -> tuple[Tensor, Tensor, int]:
        found = self.image_folder
        if found is None:
            found = not (self.root / "cifar-10-batches-py").is_dir() and (
                (self.root / "train").is_dir() or _image_archive(self.root) is not None
            )
        parts = self._folders() if found else self._batches()
        images = torch.cat([part[0] for part in parts]).float().div_(255)
        mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
        std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
        return images.sub_(mean).div_(std), torch.cat([part[1] for part in parts]), len(parts[1][1])

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        datasets = _torchvision_datasets()
        # torchvision unpacks an archive that is there and whole only where it may download
        archive = self.root / datasets.CIFAR10.filename
        whole = datasets.utils.check_integrity(str(archive), datasets.CIFAR10.tgz_md5)
        parts = _parts(datasets.CIFAR10, "cifar-10-batches-py", self.root, self.download or whole)
        return [(torch.from_numpy(p.data).permute(0, 3, 1, 2), torch.tensor(p.targets)) for p in parts]

    def _folders(self) -> list[tuple[Tensor, Tensor]]:
        archive = None if (self.root / "train").is_dir() else _image_archive(self.root)
        if archive is not None:
            return _from_archive(archive)
        return [self._folder("train"), self._folder("test")]

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


def _image_archive(root: Path) -> Path | None:
    """The first archive, by name, of which some member is `train/<class>/<image>`."""
    for path in sorted([*root.glob("*.tar.gz"), *root.glob("cifar10/*.tar.gz")]):
        with tarfile.open(path) as archive:
            # members come by folders: what is not of the two stands in front
            first = (member.name for member in archive if member.isfile())
            if next((name for name in first if _place(name)), None):
                return path
    return None


def _place(name: str) -> tuple[str, str, str] | None:
    """Part, class and file of an archive's member, or None."""
    words = PurePosixPath(name).parts[-3:]
    return (words[0], words[1], words[2]) if len(words) == 3 and words[0] in ("train", "test") else None


def _from_archive(path: Path) -> list[tuple[Tensor, Tensor]]:
    """Images and labels of both parts, in the order of class folders. Nothing is written to disk."""
    with extra("vision", "CIFAR10DataModule"):
        from PIL import Image
        from torchvision.transforms.functional import pil_to_tensor
    found: dict[tuple[str, str, str], Tensor] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            place, content = _place(member.name), archive.extractfile(member) if member.isfile() else None
            if place is not None and content is not None:
                found[place] = pil_to_tensor(Image.open(content).convert("RGB"))
    classes = sorted({label for _, label, _ in found})
    parts = []
    for part in ("train", "test"):
        places = sorted(place for place in found if place[0] == part)
        if not places:
            raise FileNotFoundError(
                f"{path.resolve()} has no {part}/<class>/*; data.root must hold train/<class>/* and "
                "test/<class>/*"
            )
        labels = torch.tensor([classes.index(label) for _, label, _ in places])
        parts.append((torch.stack([found[place] for place in places]), labels))
    return parts
