import sys

import pytest

from lightning_fedq.data.datasets import MNISTDataModule
from lightning_fedq.imports import extra
from lightning_fedq.mechanisms import GaussianNoise


def test_a_missing_package_names_its_extra():
    message = r"^Pictures needs nowhere, which is not installed: pip install 'lightning-fedq\[all\]'$"
    with pytest.raises(ModuleNotFoundError, match=message) as error, extra("all", "Pictures"):
        import nowhere  # noqa: F401
    assert error.value.name == "nowhere"


def test_other_errors_pass():
    with pytest.raises(ValueError, match=r"^mine$"), extra("all", "Pictures"):
        raise ValueError("mine")


def test_the_optional_parts_name_their_extras(monkeypatch):
    for name in ("torchvision", "opacus"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"MNIST or CIFAR-10 needs torchvision.*\[vision\]"):
        MNISTDataModule().load()
    GaussianNoise(clip_norm=1.0, epsilon=8.0, delta=1e-5, rounds=3)  # a budget needs none of them
