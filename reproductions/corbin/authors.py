"""Clients as in the public code of CorBin-FL's authors (github.com/solidlabnetwork/CorbinFL).

One local epoch of Adam with learning rate 0.001 and an L2 penalty of 0.003, for CIFAR-10 and MNIST alike,
from torch's initial law. What else differs there from what runs here: BatchNorm's running statistics are
averaged as floats that no mechanism touches, hence without privacy, and a layer whose last global weights
are all equal (a norm's scale and shift at the start) has a range of no width and keeps them for ever. Here
statistics are coordinates like weights, and such a range is floored.
"""

from __future__ import annotations

import torch

from lightning_fedq.models import Classifier

LEARNING_RATE, WEIGHT_DECAY, ROUNDS = 1e-3, 3e-3, 100


class AdamClassifier(Classifier):
    """A classifier whose clients run Adam, with the L2 penalty in the gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, fresh in every round."""
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
