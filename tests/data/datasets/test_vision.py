import os
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from lightning_fedq.data.datasets import CIFAR10DataModule, MNISTDataModule

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")


@pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
def test_mnist_official_split():
    data = MNISTDataModule(FEDQ_DATA, num_train=500, num_val=100)
    data.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [500, 100, 10000]
    images, labels = data.test_set.tensors
    assert images.shape == (10000, 1, 28, 28) and labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert abs(images.mean()) < 0.02 and abs(images.std() - 1) < 0.02


def test_without_a_folder_the_environment_says_it(monkeypatch):
    for kind in (MNISTDataModule, CIFAR10DataModule):
        monkeypatch.setenv("FEDQ_DATA", "/somewhere")
        assert kind().root == Path("/somewhere") and kind("here").root == Path("here")
        monkeypatch.delenv("FEDQ_DATA")
        assert kind().root == Path("data")


def test_missing_files_name_the_cure(tmp_path):
    for data in (MNISTDataModule(str(tmp_path)), CIFAR10DataModule(str(tmp_path))):
        with pytest.raises(FileNotFoundError, match=r"Set data.root, or FEDQ_DATA .* or set data.download"):
            data.setup("fit")
    with pytest.raises(FileNotFoundError, match=r"Found no folder .* Put train/<class>"):
        CIFAR10DataModule(str(tmp_path), image_folder=True).setup("fit")


def test_cifar_from_an_image_folder(tmp_path):
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
    # an archive of the folder gives the same, whether the folder is named or found
    packed = tmp_path / "packed" / "cifar10"
    packed.mkdir(parents=True)
    with tarfile.open(packed / "images.tar.gz", "w:gz") as archive:
        for part in ("test", "train"):
            archive.add(tmp_path / part, part)
    for choice in (True, None):
        other = CIFAR10DataModule(str(tmp_path / "packed"), image_folder=choice)
        other.setup("fit")
        for part in ("train_set", "test_set"):
            assert all(map(torch.equal, getattr(other, part).tensors, getattr(data, part).tensors))
    assert [path.name for path in packed.iterdir()] == ["images.tar.gz"]  # nothing is written


def test_other_archives_are_not_taken_for_images(tmp_path):
    (tmp_path / "words.txt").write_text("x")
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "words.txt", "words.txt")
    with pytest.raises(FileNotFoundError, match=r"no cifar-10-batches-py in"):
        CIFAR10DataModule(str(tmp_path)).setup("fit")
    with tarfile.open(tmp_path / "train.tar.gz", "w:gz") as archive:
        (tmp_path / "a.png").write_bytes(b"")
        Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
        archive.add(tmp_path / "a.png", "train/cat/a.png")
    with pytest.raises(FileNotFoundError, match=r"has no test/<class>/\*. Put train/<class>"):
        CIFAR10DataModule(str(tmp_path)).setup("fit")
