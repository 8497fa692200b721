"""Small reference models: backbones, and a LightningModule around any."""

from typing import TYPE_CHECKING

from lightning_fedq import gone
from lightning_fedq.data.models.backbones import CNN2, MLP, Linear
from lightning_fedq.data.models.classifier import Classifier
from lightning_fedq.data.models.features import FixedFeatures
from lightning_fedq.data.models.initial import seeded

__all__ = ["CNN2", "MLP", "Classifier", "FixedFeatures", "Linear", "seeded"]

if not TYPE_CHECKING:  # to a type checker any other name is an error
    __getattr__ = gone.names_of(__name__)
