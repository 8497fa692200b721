"""Small reference models: backbones, and a LightningModule for any backbone."""

from lightning_fedq.data.models.backbones import CNN2, MLP, Linear
from lightning_fedq.data.models.classifier import Classifier
from lightning_fedq.data.models.features import FixedFeatures
from lightning_fedq.data.models.initial import seeded

__all__ = ["CNN2", "MLP", "Classifier", "FixedFeatures", "Linear", "seeded"]
