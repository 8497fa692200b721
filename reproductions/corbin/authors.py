"""Clients as in the public code of CorBin-FL's authors (github.com/solidlabnetwork/CorbinFL).

One local epoch of Adam with learning rate 0.001 and an L2 penalty of 0.003, for CIFAR-10 and MNIST alike,
from torch's initial law. What else differs there from what runs here: BatchNorm's running statistics are
averaged as floats that no mechanism touches, hence without privacy, and a layer whose last global weights
are all equal (a norm's scale and shift at the start) has a range of no width and keeps them for ever. Here
statistics are coordinates like weights, and such a range is floored.

`LOG` is what they got with it: their `results.log` of 2026, test accuracy at the round of the best validation
accuracy, 50 clients, 100 rounds, mean of five seeds (two for LDP-FL at 0.5 on MNIST). "LDP-FL" is there under
the name of RQM with two levels, which has LDP-FL's law: the mean of two points alpha r apart from the middle.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from lightning_fedq.data.models import Classifier

LEARNING_RATE, WEIGHT_DECAY, ROUNDS = 1e-3, 3e-3, 100

LOG: Final[dict[str, dict[tuple[str, float], tuple[float, ...]]]] = {
    "MNIST": {
        ("CorBin-FL", 0.1): (93.13, 86.01, 79.73, 76.52, 71.64, 64.35, 58.65, 56.54, 49.56, 48.05),
        ("CorBin-FL", 0.3): (96.50, 95.21, 93.18, 91.61, 89.08, 85.61, 82.28, 80.21, 77.60, 75.78),
        ("CorBin-FL", 1.0): (96.90, 97.52, 97.35, 96.85, 96.41, 96.07, 95.55, 95.14, 94.85, 93.97),
        ("CorBin-FL", 3.0): (96.87, 97.67, 97.89, 97.98, 97.99, 97.93, 97.79, 97.72, 97.65, 97.45),
        ("LDP-FL", 0.1): (32.04, 24.12, 19.68, 18.39, 18.22, 14.75, 17.32, 16.19, 16.57, 15.33),
        ("LDP-FL", 0.3): (84.39, 71.98, 60.17, 55.66, 48.80, 42.50, 38.95, 35.62, 32.41, 29.70),
        ("LDP-FL", 0.5): (93.44, 88.00, 80.70, 74.57, 73.86, 68.51, 65.56, 59.16, 53.76, 49.22),
        ("LDP-FL", 1.0): (96.62, 96.05, 94.64, 93.38, 91.29, 88.62, 87.49, 85.88, 83.55, 81.29),
        ("LDP-FL", 3.0): (96.91, 97.68, 97.85, 97.83, 97.64, 97.38, 97.12, 97.02, 96.78, 96.70),
        ("one bit without privacy", math.inf): (
            *(96.70, 97.47, 97.78, 97.87, 97.97),
            *(98.02, 98.02, 98.05, 98.08, 98.11),
        ),
    },
    "CIFAR-10": {
        ("LDP-FL", 1.0): (20.10, 41.52, 30.14, 26.74, 20.67, 19.41, 17.82, 14.07, 12.66, 14.12),
        ("LDP-FL", 3.0): (16.62, 61.22, 65.42, 63.85, 60.91, 56.69, 51.74, 47.12, 44.42, 40.34),
        ("LDP-FL", 5.0): (12.28, 50.54, 65.97, 67.91, 68.07, 67.95, 68.16, 67.04, 65.81, 65.87),
        ("LDP-FL", 7.0): (12.50, 51.23, 65.92, 68.79, 68.70, 69.81, 70.85, 71.89, 71.32, 71.10),
        ("one bit without privacy", math.inf): (
            *(12.20, 52.36, 66.92, 69.03, 70.01),
            *(71.04, 71.94, 73.05, 73.55, 74.16),
        ),
    },
}
"""Percent at lambda = 0.1, 0.2, ..., 1.0, by images, method and epsilon (infinite: no privacy)."""


def logged(images: str, method: str, epsilon: float, smoothing: float) -> float | None:
    """What the authors' log has for a training, in percent, or None.

    Args:
        images: "MNIST" or "CIFAR-10".
        method: A method of `LOG`.
        epsilon: Per coordinate and round.
        smoothing: Lambda.
    """
    row = LOG[images].get((method, epsilon), ())
    place = round(10 * smoothing) - 1
    return row[place] if row and math.isclose(10 * smoothing, place + 1) else None


class AdamClassifier(Classifier):
    """A classifier whose clients run Adam, with the L2 penalty in the gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, fresh in every round."""
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
