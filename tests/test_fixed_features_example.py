"""`examples/fixed_features.py`: features of this library, or of a frozen network, under a head."""

import os
import sys

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.loaded import loaded


def example():
    return loaded("examples/fixed_features.py")


def test_a_frozen_network_stays_what_it_was():
    """BatchNorm's statistics, too, in whatever mode the module around it trains."""
    torch.manual_seed(0)
    frozen, width = example().features_of("resnet18", None, "leaves")
    before = {name: value.clone() for name, value in frozen.state_dict().items()}
    images = torch.rand(4, 1, 28, 28)
    kept = torch.nn.Sequential(frozen).train()[0].kept(TensorDataset(images, torch.arange(4))).tensors[0]
    assert kept.shape == (4, width) and torch.allclose(kept.norm(dim=1), torch.ones(4))
    assert torch.equal(frozen(kept), kept) and not kept.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in frozen.state_dict().items())


@pytest.mark.slow
@pytest.mark.skipif("FEDQ_DATA" not in os.environ, reason="FEDQ_DATA is not set: no MNIST here")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_trains(tmp_path, monkeypatch, capsys):
    """Sixty clients, three rounds: better than chance, at the epsilon that is asked for."""
    monkeypatch.chdir(tmp_path)
    words = ["--data", os.environ["FEDQ_DATA"], "--clients", "60", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", ["fixed_features.py", *words])
    example().main()
    said = capsys.readouterr().out
    assert "sha256" in said and "met" in said and (tmp_path / "projection.pt").is_file()
    assert float(said.split("test_acc")[1].split()[1]) > 0.3
