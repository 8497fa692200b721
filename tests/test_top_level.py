import subprocess
import sys

import pytest

import lightning_fedq as fedq
from lightning_fedq import callbacks, data, mechanisms
from lightning_fedq.data.datasets import MNISTDataModule
from lightning_fedq.imports import extra
from lightning_fedq.mechanisms import GaussianNoise


def test_names_are_those_of_their_modules():
    assert fedq.Federated is callbacks.Federated
    assert fedq.FederatedDataModule is data.FederatedDataModule
    assert all(getattr(fedq, name) is getattr(mechanisms, name) for name in mechanisms.__all__)
    assert all(getattr(fedq, name) is not None for name in fedq.__all__)
    assert {*mechanisms.__all__, "Federated"} <= set(fedq.__all__) <= set(dir(fedq))


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'lightning_fedq' has no attribute 'Federate'"):
        fedq.Federate  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'lightning_fedq.mechanisms' has no attribute 'LDP'"):
        mechanisms.LDP  # noqa: B018
    with pytest.raises(ImportError):
        from lightning_fedq import Federate  # noqa: F401


QUICK = [
    "import lightning_fedq",
    "from lightning_fedq.cli import main; main(['--help'])",
    "from lightning_fedq.cli import main; main(['configs'])",
    "from lightning_fedq.cli import main; main(['mechanisms'])",
    "import lightning_fedq.mechanisms as m; dir(m); assert 'LDPQ' in m.__all__",
    "import lightning_fedq.comparison.commands.compare",
]


@pytest.mark.parametrize("program", QUICK)
def test_names_and_lists_cost_no_torch(program):
    """Seconds are not asserted; what takes them is."""
    heavy = {"torch", "numba", "scipy", "pytorch_lightning", "jsonargparse"}
    check = f"import sys; {program}; found = {heavy} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- imports -------------------------------------------------------------------------------------------
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
    GaussianNoise(clip_norm=1.0, noise_multiplier=1.0)  # needs none of them
