import os

import pytest
import torch

from lightning_fedq.data.partition import IID
from reproductions.cpa.data import ClientImages, accuracy, network

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")
needs_mnist = pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")


@pytest.mark.parametrize(
    ("kind", "images", "parameters"),
    [
        *(("linear", "mnist", 7_850), ("mlp", "mnist", 25_818), ("cnn2", "mnist", 6_422)),
        *(("cnn2", "cifar10", 9_422), ("cnn3", "cifar10", 169_578)),
    ],
)
def test_networks_have_the_authors_sizes(kind, images, parameters):
    model = network(kind, 0, images)
    assert sum(p.numel() for p in model.parameters()) == parameters
    shape = (2, 1, 28, 28) if images == "mnist" else (2, 3, 32, 32)
    assert model(torch.zeros(shape)).shape == (2, 10)


def test_weights_are_seeded():
    first, again, other = (next(iter(network("mlp", seed).parameters())) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.abs().max() <= 1 / 28


@pytest.mark.parametrize(("kind", "images"), [("linear", "cifar10"), ("cnn3", "mnist")])
def test_a_network_that_does_not_fit_the_images(kind, images):
    with pytest.raises(ValueError, match="the paper has linear, mlp and cnn2 on MNIST"):
        network(kind, 0, images)


def test_accuracy_leaves_dropout_out_and_the_mode_as_it_was():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Identity()).train()
    scores = torch.eye(10).repeat(500, 1)
    labels = torch.arange(10).repeat(500)
    labels[:50] = (labels[:50] + 1) % 10
    assert accuracy(model, (scores, labels)) == pytest.approx(0.99)
    assert model.training


@needs_mnist
def test_five_samples_each_and_pixels_in_minus_one_to_one():
    data = ClientImages("mnist", FEDQ_DATA, False, 3, 5, 100, 0)
    data.setup("fit")
    assert data.train_set is not None
    inputs, _ = data.train_set.tensors
    assert len(inputs) == 15 and len(data.val_set) == 100 and len(data.test_set) == 10_000
    assert float(inputs.min()) == pytest.approx(-1, abs=1e-5)
    assert float(inputs.max()) == pytest.approx(1, abs=1e-5)


def test_cifar_images_are_shared_out_equally(monkeypatch):
    images = torch.zeros(60_000, 1), torch.arange(60_000) % 10, 10_000
    monkeypatch.setattr("reproductions.cpa.data.load_images", lambda *_: images)
    data = ClientImages("cifar10", "", False, 1_000, None, 10_000, 0)
    data.setup("fit")
    assert data.train_set is not None
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [40_000, 10_000, 10_000]
    shares = IID().split(None, 40_000, 1_000, torch.Generator().manual_seed(0))
    assert {len(share) for share in shares} == {40}
