"""Images, split and networks of the CPA paper's experiments, as its public code has them.

Pixels are (x - 0.5) / 0.5, 10,000 training images are held out for validation, each client has 5 samples of
its own and trains on batches of 16, hence on all five at once. With `samples_per_client=None` the clients
share out the whole training part instead. The paper's section 5.1: five a user on MNIST, all on CIFAR-10.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

import torch
from torch import Tensor, nn

from lightning_fedq.data.datasets import CIFAR10DataModule, MNISTDataModule
from lightning_fedq.data.datasets.tensors import TensorDataModule
from lightning_fedq.data.models import MLP, Linear
from reproductions.bench import torchs_law

Network = Literal["linear", "mlp", "cnn2", "cnn3"]
Images = Literal["mnist", "cifar10"]
CIFAR_NETWORKS: Final = ("cnn2", "cnn3")
"""Those that the tables train on CIFAR-10, whose images the clients share out."""
BATCH = 16


@lru_cache(maxsize=2)
def load_images(name: Images, root: str, download: bool) -> tuple[Tensor, Tensor, int]:
    """Images with pixels in [-1, 1], labels, and how many of the last are the official test set.

    Raises:
        FileNotFoundError: If they are not there and are not to be downloaded.
    """
    if name == "mnist":
        images, labels, official = MNISTDataModule(root, download).load()
        return images.mul_(2 * 0.3081).add_(2 * 0.1307 - 1.0), labels, official
    images, labels, official = CIFAR10DataModule(root, download).load()
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    )
    return images.mul_(2 * std).add_(2 * mean - 1.0), labels, official


class ClientImages(TensorDataModule):
    """Images with pixels in [-1, 1], and as many of them as the clients will hold.

    Args:
        name: "mnist" or "cifar10".
        root: Folder that holds `MNIST/raw`, `cifar-10-batches-py`, or CIFAR-10 as `train/` and `test/`.
        download: Fetch what is missing.
        num_clients: Clients to come.
        samples_per_client: Of each client; None shares out the whole training part.
        val_samples: Validation samples, at most a fifth of the training images.
        seed: Of who holds what.
    """

    def __init__(
        self,
        name: Images,
        root: str,
        download: bool,
        num_clients: int,
        samples_per_client: int | None,
        val_samples: int,
        seed: int,
    ) -> None:
        num_train = None if samples_per_client is None else samples_per_client * num_clients
        super().__init__(BATCH, False, num_train, val_samples, seed)
        self.name, self.root, self.download = name, root, download

    def load(self) -> tuple[Tensor, Tensor, int]:
        """See `TensorDataModule.load`; read from disk once a process."""
        return load_images(self.name, self.root, self.download)


@torch.no_grad()
def accuracy(model: nn.Module, samples: tuple[Tensor, ...]) -> float:
    """Share of the samples that the model gets right; in slices, which is faster than a loader."""
    was_training = model.training
    model.eval()
    pairs = zip(*(torch.split(part, 2_000) for part in samples), strict=True)
    right = sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in pairs)
    model.train(was_training)
    return right / len(samples[1])


def _cnn2(channels: int, side: int) -> nn.Module:
    """Two 5x5 convolutions to 6 maps, each with ReLU and a 2x2 maximum, and 50 hidden units.

    6,422 parameters on MNIST, 9,422 on CIFAR-10.
    """
    flat = 6 * (((side - 4) // 2 - 4) // 2) ** 2
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(flat, 50), nn.ReLU(), nn.Linear(50, 10)),
    )


def _cnn3(channels: int) -> nn.Module:
    """Three 3x3 convolutions (32, 64, 128 maps) with maxima and dropout, then 128-64-32-10; 32 x 32 images.

    169,578 parameters on CIFAR-10.
    """
    layers: list[nn.Module] = []
    for width in (32, 64, 128):
        layers += [nn.Conv2d(channels, width, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)]
        channels = width
    return nn.Sequential(*layers, MLP(512, (128, 64, 32)))


def network(kind: Network, seed: int, images: Images = "mnist") -> nn.Module:
    """A network of the paper; weights from torch's default law and a generator of their own.

    Args:
        kind: "linear" 784-10, "mlp" 784-32-16-10 with ReLU, "cnn2", or "cnn3" (CIFAR-10 only).
        seed: Of the weights.
        images: What it will see.

    Raises:
        ValueError: If the network does not fit the images.
    """
    if (kind == "cnn3") != (images == "cifar10") and kind != "cnn2":
        raise ValueError(
            f"the paper has linear, mlp and cnn2 on MNIST, cnn2 and cnn3 on CIFAR-10; got {kind}"
        )
    if kind == "cnn2":
        model = _cnn2(1, 28) if images == "mnist" else _cnn2(3, 32)
    elif kind == "cnn3":
        model = _cnn3(3)
    else:
        model = Linear() if kind == "linear" else MLP(784, (32, 16))
    return torchs_law(model, seed)
