"""Fixed features: the scattering by another road, no data, one projection everywhere, and what is refused."""

import copy
import math
import os
import re

import numpy as np
import pytest
import torch
from scipy.signal import convolve2d
from torch.func import vmap
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.data.datasets import MNISTDataModule, TensorDataModule
from lightning_fedq.data.models import Classifier, FixedFeatures, Linear, features as module
from lightning_fedq.data.repeats import max_repeats
from tests.digits_run import make_trainer

IMAGES = torch.rand(6, 1, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    """Two hundred in the place of 5,000: seconds."""
    monkeypatch.setattr(module, "_PICTURES", 200)


def wave(scale, angle):
    """A Morlet wavelet as its definition has it, in double precision."""
    std, reach = 0.8 * 2**scale, math.ceil(4 * 0.8 * 2**scale)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1].astype(float)
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    envelope = np.exp(-(along**2 + across**2 / 4) / (2 * std**2)) / (4 * np.pi * std**2)
    turning = np.exp(1j * 0.75 * np.pi / 2**scale * along)
    return envelope * (turning - (envelope * turning).sum() / envelope.sum())


def low(step):
    """Gaussian of deviation 1.6 of pixels that are `step` apart."""
    line = np.exp(-(np.arange(-6, 7, step) ** 2) / (2 * 1.6**2))
    return np.outer(line, line) / line.sum() ** 2


def by_hand(image):
    """Order-2 scattering of one plane by scipy, plane by plane."""

    def filtered(plane, kernel, step):
        padded = np.pad(plane, kernel.shape[0] // 2, mode="reflect")
        return convolve2d(padded, kernel[::-1, ::-1], "valid")[::step, ::step]

    turns = np.pi / 8 * np.arange(8)
    fine = [np.abs(filtered(image, wave(0, turn), 1)) for turn in turns]
    coarse = [np.abs(filtered(image, wave(1, turn), 2)) for turn in turns]
    second = [np.abs(filtered(plane, wave(1, turn), 2)) for plane in fine for turn in turns]
    whole = [filtered(plane, low(1), 4) for plane in (image, *fine)]
    return np.stack([*whole, *(filtered(plane, low(2), 2) for plane in (*coarse, *second))])


def test_the_scattering_is_the_papers():
    for image, found in zip(IMAGES[:2], module._scattering(IMAGES[:2]), strict=True):
        np.testing.assert_allclose(found.numpy(), by_hand(image[0].double().numpy()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pictures", "norm"), [(None, "group"), ("leaves", "group"), ("strokes", "log")])
def test_they_have_length_one_and_see_no_data(pictures, norm):
    """Nothing that passes through them, training included, leaves a trace."""
    features = FixedFeatures(20, 16, pictures=pictures, norm=norm)
    before, first = features.sha256, features(IMAGES)
    assert torch.allclose(first.norm(dim=1), torch.ones(6))
    features.train()(torch.rand(300, 1, 16, 16))
    features.compute_features(TensorDataset(1 - IMAGES, torch.arange(6)))
    assert features.sha256 == before and torch.equal(features(IMAGES), first)
    assert not list(features.parameters()) and {*features.state_dict()} == {"centre", "axes"}


def test_the_pictures_are_white_behind_the_projection():
    """Up to the ridge: a tenth of the mean variance, so that no axis has more than 1."""
    features = FixedFeatures(20, 16)
    shown = module.drawn("leaves", 200, (1, 16, 16), torch.Generator().manual_seed(0))
    seen = (features._raw(shown) - features.centre) @ features.axes
    covariance = seen.T @ seen / 200
    variances = covariance.diag()
    assert (covariance - variances.diag()).abs().max() < 1e-3
    assert seen.mean(0).abs().max() < 1e-3 and 0.3 < variances.min() <= variances.max() < 1


def test_pictures_of_nothing_are_pictures():
    for kind, channels in (("strokes", 1), ("leaves", 3)):
        seen = module.drawn(kind, 300, (channels, 28, 28), torch.Generator().manual_seed(1))
        assert seen.shape == (300, channels, 28, 28) and 0 <= seen.min() <= seen.max() <= 1
        assert torch.equal(
            seen, module.drawn(kind, 300, (channels, 28, 28), torch.Generator().manual_seed(1))
        )
        assert len(seen.flatten(1).unique(dim=0)) == 300
    strokes = module.drawn("strokes", 100, (1, 28, 28), torch.Generator())
    assert 0.05 < strokes.mean() < 0.25 and strokes[:, :, 0].max() < 0.5  # about as much ink as a digit has


def test_kept_once_in_batches():
    class Counting(Dataset):
        asked = 0

        def __len__(self):
            return 450

        def __getitem__(self, index):
            self.asked += 1
            return IMAGES[index % 6], index % 10, float(index)

    data, features = Counting(), FixedFeatures(20, 16, pictures=None)
    state = torch.get_rng_state()
    kept = features.compute_features(data)
    assert data.asked == 450 and torch.equal(torch.get_rng_state(), state)
    assert [part.shape for part in kept.tensors] == [(450, 20), (450,), (450,)]
    assert kept.tensors[1].tolist() == [index % 10 for index in range(450)]
    torch.testing.assert_close(kept.tensors[0], features(IMAGES)[torch.arange(450) % 6])
    assert features(kept.tensors[0]) is kept.tensors[0]  # features pass


def test_kept_features_are_the_rows_that_they_are_made_of():
    """40 people three times each trained at epsilon 1.05 where a person pays 4.02."""
    features, people = FixedFeatures(20, 16, pictures=None), TensorDataset(IMAGES, torch.arange(6))
    kept = features.compute_features(Subset(people, [0, 1, 2, 0, 0]))
    assert max_repeats(kept, [torch.arange(4), torch.arange(4, 5)]) == (3, 2)
    both = ConcatDataset([features.compute_features(people), features.compute_features(people)])
    assert max_repeats(both, [torch.arange(12)]) == (2, 1)


def test_a_projection_is_the_same_everywhere():
    """Signs from a seed: no eigenvector, no last bit of a logarithm."""
    features = FixedFeatures(20, 16, pictures=None)
    assert features.sha256.startswith("7afc8001d48b9c6d")
    assert features.axes.unique().tolist() == pytest.approx([-1 / 36, 1 / 36])
    assert FixedFeatures(20, 16, pictures=None, seed=1).sha256 != features.sha256


def test_a_file_is_its_hash_or_nothing(tmp_path):
    made = FixedFeatures(20, 16)
    file = str(tmp_path / "projection.pt")
    torch.save(made.state_dict(), file)
    again = FixedFeatures(20, 16, file=file, sha256=made.sha256)
    assert torch.equal(again.axes, made.axes)  # whose products may round otherwise
    torch.testing.assert_close(again(IMAGES), made(IMAGES))
    words = rf"sha256 is {made.sha256}, but abc was expected. Give the file="
    with pytest.raises(ValueError, match=words):
        FixedFeatures(20, 16, file=file, sha256="abc")
    other = FixedFeatures(20, 16, seed=1)
    with pytest.raises(ValueError, match=f"sha256 is {other.sha256}, but {made.sha256} was expected"):
        again.load_state_dict(other.state_dict())  # a checkpoint
    with pytest.raises(RuntimeError, match="size mismatch for axes"):
        FixedFeatures(10, 16, file=file)
    for setting in ({"norm": "log"}, {"mean": 0.5}, {"std": 2.0}):  # of which the projection is not
        with pytest.raises(ValueError, match=f"but {made.sha256} was expected"):
            FixedFeatures(20, 16, file=file, sha256=made.sha256, **setting)
    copy.deepcopy(made).load_state_dict(other.state_dict())  # any


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.rand(2, 3, 16, 16), "got torch.float32 of shape (2, 3, 16, 16)"),
        (torch.rand(2, 21), "got torch.float32 of shape (2, 21)"),
        (
            torch.zeros(2, 1, 16, 16, dtype=torch.uint8),
            "images must be floats of shape (N, 1, 16, 16), got torch.u",
        ),
        (3 * torch.rand(2, 1, 16, 16) + 2, "images * std + mean must be in [0, 1], got 2"),
        (255 * torch.rand(2, 1, 16, 16), "Give FixedFeatures the mean and std by which the data set"),
        (IMAGES.log(), "got -"),
        (IMAGES * float("nan"), "got nan to nan"),
    ],
)
def test_images_of_another_kind(images, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        FixedFeatures(20, 16, pictures=None)(images)


@pytest.mark.parametrize(
    "setting",
    [{"side": 8}, {"side": 18}, {"channels": 2}, {"pool": 3}, {"pool": 0}, {"size": 0}, {"size": 1297}],
)
def test_settings_out_of_range(setting):
    with pytest.raises(ValueError, match=r"1 <= size <= .*, got .*. Resize the images"):
        FixedFeatures(**{"size": 20, "side": 16, **setting})


def test_of_normalised_colour_in_any_place():
    """Pooled, side by side under vmap, in 16 bits' autocast, in double precision."""
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
    features = FixedFeatures(30, 32, 3, pool=2, mean=mean, std=std, pictures=None)
    pixels = torch.rand(4, 2, 3, 32, 32)
    images = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    expected = FixedFeatures(30, 32, 3, pool=2, pictures=None)(pixels.flatten(0, 1)).view(4, 2, 30)
    torch.testing.assert_close(vmap(features)(images), expected, rtol=0, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(features(images[0]), expected[0], rtol=0, atol=1e-5)
    features.double()
    torch.testing.assert_close(features(images[1]).float(), expected[1], rtol=0, atol=1e-5)


class Images(TensorDataModule):
    """Sixty images that brighten with their class."""

    def __init__(self, **settings):
        super().__init__(2, False, 30, 6, 0, **settings)

    def load(self):
        labels = torch.arange(60) % 3
        images = torch.rand(60, 1, 16, 16, generator=torch.Generator().manual_seed(3)) * (labels + 1).view(
            -1, 1, 1, 1
        )
        return images / 3, labels, 6


quiet = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # few workers, seeded keys, a folder with a checkpoint


def trained(folder, rounds=2, pictures="leaves", seed=0, **settings):
    pl.seed_everything(0, verbose=False)
    features = FixedFeatures(20, 16, pictures=pictures, seed=seed)
    model, data = Classifier(Linear(20, 3, bias=False, features=features), lr=1.0), Images(**settings)
    federated = fedq.Federated(fedq.FedAvg(), 5, seed=0)
    keep = pl.callbacks.ModelCheckpoint(folder, filename="last", enable_version_counter=False)
    callbacks = [federated, keep]
    trainer = make_trainer(*callbacks, max_epochs=rounds, num_sanity_val_steps=0, enable_checkpointing=True)
    return trainer, model, data, federated


@quiet
def test_kept_or_not_is_the_same_training(tmp_path):
    """The checkpoint holds the projection and takes images; only the head travels."""
    found = []
    for keeps in (False, True):
        trainer, model, data, federated = trained(tmp_path, keep_features=keeps)
        trainer.fit(model, datamodule=data)
        assert federated.engine.weights.numel() == 60
        assert isinstance(data.train_set[0][0], torch.Tensor) and data.train_set[0][0].shape == (1, 16, 16)
        found.append(model.backbone[-1].weight.detach().clone())
        [tested] = trainer.test(model, datamodule=data, verbose=False)
        inputs, labels = data.test_set.tensors
        assert tested["test_acc"] == (model(inputs).argmax(1) == labels).float().mean()
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert state["backbone.0.axes"].shape == (1296, 20)


@quiet
def test_a_checkpoint_brings_its_projection(tmp_path):
    """Resumed where the projection would be made otherwise, features are kept by the checkpoint's."""
    whole, model, data, _ = trained(tmp_path / "whole", rounds=4, keep_features=True)
    whole.fit(model, datamodule=data)
    trainer, *fit, _ = trained(tmp_path, keep_features=True)
    trainer.fit(fit[0], datamodule=fit[1])
    resumed, other, elsewhere, _ = trained(tmp_path, rounds=4, seed=7, keep_features=True)
    resumed.fit(other, datamodule=elsewhere, ckpt_path=tmp_path / "last.ckpt")
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.skipif("FEDQ_DATA" not in os.environ, reason="FEDQ_DATA is not set: no MNIST here")
def test_mnist_separates_behind_a_random_projection():
    """No privacy, no federation, one ridge regression on 5,000 images: what pixels don't reach (about 85)."""
    data = MNISTDataModule(os.environ["FEDQ_DATA"], num_train=5000, num_val=1000)
    data.setup("fit")
    features = FixedFeatures(256, pictures=None, mean=0.1307, std=0.3081)
    (inputs, labels), (others, wanted) = (
        features.compute_features(part).tensors for part in (data.train_set, data.val_set)
    )
    head = torch.linalg.solve(inputs.T @ inputs + torch.eye(256), inputs.T @ torch.eye(10)[labels])
    assert ((others @ head).argmax(1) == wanted).float().mean() > 0.95
