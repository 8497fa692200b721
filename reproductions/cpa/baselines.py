"""The CPA paper's Laplace baseline as the authors' code computes it: a reproduction, private against nobody.

Each user's tensor is normalised by its own mean and 3 standard deviations (both then known to the server),
Laplace noise of scale 2 / epsilon is added without clipping, and the normalisation undone. Sensitivity is
unbounded, hence no claim; `mechanisms.PerCoordinateLaplace` is the private version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.keys.randomness import ClientRandomness
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary, Message, NonPrivate, PrivacyClaim, RoundContext


@dataclass(frozen=True)
class AuthorsLaplace(FedAvg):
    """Laplace noise in units of each user's own spread.

    Args:
        epsilon: The noise's scale is 2 / epsilon; no level of privacy.
    """

    epsilon: float

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be > 0, got {self.epsilon}")

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `FedAvg.encode`."""
        rows = update.detach().reshape(len(rand.clients), context.dim)
        noise = np.empty(rows.shape, np.float32)
        for row, client in enumerate(rand.clients):
            centered = rand.private(client, "laplace").uniforms(context.dim) - 0.5
            noise[row] = -2.0 / self.epsilon * np.sign(centered) * np.log1p(-2.0 * np.abs(centered))
        spread = [
            part.std(1, keepdim=True).expand_as(part) for part in torch.split(rows, list(context.segments), 1)
        ]
        noisy = rows + 3.0 * torch.cat(spread, 1) * torch.from_numpy(noise).to(rows)
        return super().encode(noisy.reshape(update.shape), context, rand)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """No guarantee against anybody."""
        reason = NonPrivate("updates are not clipped, and each user's standard deviation sets its own noise")
        return tuple(PrivacyClaim(adversary, reason, context.dim) for adversary in Adversary)
