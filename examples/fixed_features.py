"""A head on fixed features at epsilon 8: `python examples/fixed_features.py --data FOLDER_WITH_MNIST`.

1,000 clients of five images train a linear head without a bias, behind masks. `--backbone resnet18` puts a
network of torchvision in front, frozen: with `--weights DEFAULT` its published weights (whose training data
nobody's epsilon here speaks of), else random ones, from the seed, which sees no data and needs no network.
"""

import argparse
import os

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models

import lightning_fedq as fedq
from lightning_fedq.data.datasets import MNISTDataModule
from lightning_fedq.data.models import Classifier, FixedFeatures, Linear

CLIENTS, SAMPLES, SIZE = 1000, 5, 128
TARGET = fedq.PrivacyTarget(epsilon=8.0, delta=1e-5, adversary="secagg_server")
MASKS = fedq.SecAgg(degree="auto", max_colluding_fraction=0.02, max_dropped_fraction=0.02)


class Frozen(nn.Module):
    """Features of a network that is not trained, of length 1; in eval mode, or its statistics would move."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.requires_grad_(False).eval()

    def train(self, mode: bool = True):
        return self

    def forward(self, images):
        if images.dim() == 2:  # features, made once
            return images
        return nn.functional.normalize(self.network(images.expand(-1, 3, -1, -1)).flatten(1))

    def kept(self, samples: TensorDataset) -> TensorDataset:
        images, labels = samples.tensors
        return TensorDataset(torch.cat([self(part) for part in images.split(200)]), labels)


def features_of(name: str | None, weights: str | None, pictures: str) -> tuple[nn.Module, int]:
    """What stands in front of the head, and how many numbers come out."""
    if name is None:
        norm = "log" if pictures == "strokes" else "group"
        return FixedFeatures(SIZE, 28, pictures=pictures, norm=norm, mean=0.1307, std=0.3081), SIZE
    network = models.get_model(name, weights=weights)
    width = network.fc.in_features
    network.fc = nn.Identity()
    return Frozen(network), width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data",
        default=os.environ.get("FEDQ_DATA") or "data",
        help="folder with MNIST/raw (default: %(default)s)",
    )
    parser.add_argument("--pictures", default="strokes", choices=("strokes", "leaves"), help="what whitens")
    parser.add_argument("--backbone", help="a ResNet of torchvision, in the place of fixed features")
    parser.add_argument("--weights", help="of the backbone: DEFAULT fetches them; random without")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches, not of keys")
    arguments = parser.parse_args()
    pl.seed_everything(arguments.seed, verbose=False)

    data = MNISTDataModule(arguments.data, num_train=SAMPLES * arguments.clients, num_val=1000)
    data.setup("fit")
    features, size = features_of(arguments.backbone, arguments.weights, arguments.pictures)
    model = Classifier(Linear(size, bias=False, features=features), lr=400.0)
    kept = features.compute_features(data.train_set)
    if isinstance(features, FixedFeatures):
        torch.save(features.state_dict(), "projection.pt")
        print(f"projection.pt has the sha256 {features.sha256}: FixedFeatures(file=, sha256=) at every site")

    mechanism = fedq.RotatedCoins(clip_norm=20.0)
    federated = fedq.Federated(
        mechanism, arguments.clients, privacy=TARGET, secure_aggregation=MASKS, clients_per_step=250
    )
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=arguments.rounds, callbacks=[federated], **quiet)
    trainer.fit(model, DataLoader(kept, batch_size=SAMPLES, shuffle=True))
    test = DataLoader(TensorDataset(*(part[:2000] for part in data.test_set.tensors)), batch_size=500)
    trainer.test(model, test)  # images, the first 2,000


if __name__ == "__main__":
    main()
