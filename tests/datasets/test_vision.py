import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from lightning_fedq.datasets import CIFAR10DataModule, MNISTDataModule

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")


@pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
def test_mnist_official_split() -> None:
    data = MNISTDataModule(FEDQ_DATA, num_train=500, num_val=100)
    data.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [500, 100, 10000]
    images, labels = data.test_set.tensors
    assert images.shape == (10000, 1, 28, 28) and labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert abs(images.mean()) < 0.02 and abs(images.std() - 1) < 0.02


def test_missing_files_name_the_cure(tmp_path: Path) -> None:
    for data in (MNISTDataModule(str(tmp_path)), CIFAR10DataModule(str(tmp_path))):
        with pytest.raises(FileNotFoundError, match=r"set data.root to the folder .* or data.download"):
            data.setup("fit")
    with pytest.raises(FileNotFoundError, match=r"must hold train/<class>"):
        CIFAR10DataModule(str(tmp_path), image_folder=True).setup("fit")


def test_download_and_image_folder_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"set only one of download and image_folder"):
        CIFAR10DataModule(download=True, image_folder=True)


def test_cifar_from_an_image_folder(tmp_path: Path) -> None:
    for part, count in (("train", 6), ("test", 2)):
        for label in range(10):
            folder = tmp_path / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (20 * label, 128, 255)).save(folder / f"{number:04d}.png")
    data = CIFAR10DataModule(str(tmp_path), image_folder=True)
    data.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [48, 12, 20]
    images, labels = data.test_set.tensors
    assert images.shape == (20, 3, 32, 32)
    red = (images[:, 0, 0, 0] * 0.2470 + 0.4914) * 255
    torch.testing.assert_close(red, 20.0 * labels, atol=1e-3, rtol=0)
