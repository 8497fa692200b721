"""The small reference models of the papers' experiments: backbones, and a LightningModule around any."""

from lightning_fedq.data.models.backbones import CNN2, CNN3, MLP, VGG2, Linear, ResNet18
from lightning_fedq.data.models.classifier import Classifier
from lightning_fedq.data.models.initial import seeded

__all__ = ["CNN2", "CNN3", "MLP", "VGG2", "Classifier", "Linear", "ResNet18", "seeded"]
