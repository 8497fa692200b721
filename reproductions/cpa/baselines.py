"""Two baselines of the CPA paper as the authors' code computes them: reproductions, private against nobody.

Each user's tensor is normalised by its own mean and 3 standard deviations (both then known to the server),
noise is added without clipping, and the normalisation undone. Sensitivity is unbounded, hence no claim;
`mechanisms.PerCoordinateLaplace` and `mechanisms.JoPEQ`, which clip to a public range, are private.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.keys.randomness import ClientRandomness
from lightning_fedq.mechanisms import FedAvg, JoPEQ
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
        return _no_claims(context)


@dataclass(frozen=True)
class AuthorsJoPEQ(FedAvg):
    """JoPEQ as published: Laplace noise and subtractive dither in units of each user's own spread.

    Args:
        epsilon: Asked for; the noise's scale is `mechanisms.JoPEQ`'s, which attains more (0.523 for 0.5).
        levels: Of the quantiser.
    """

    epsilon: float
    levels: int = 3

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `FedAvg.encode`; what the server makes of a message is sent, as floats."""
        law = JoPEQ(self.epsilon, self.levels)
        rows = update.detach().reshape(len(rand.clients), context.dim).double()
        noise, dither = np.empty(rows.shape), np.empty(rows.shape)
        for row, client in enumerate(rand.clients):
            centered = rand.private(client, "laplace").uniforms(context.dim) - 0.5
            noise[row] = -law.noise_scale * np.sign(centered) * np.log1p(-2.0 * np.abs(centered))
            dither[row] = law.step * (rand.shared_with_server(client, "dither").uniforms(context.dim) - 0.5)
        parts = torch.split(rows, list(context.segments), 1)
        middle = torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in parts], 1)
        spread = torch.cat([3.0 * part.std(1, keepdim=True).expand_as(part) for part in parts], 1)
        units = ((rows - middle) / spread.clamp_min(1e-30)).numpy() + noise + dither
        shift, most = 0.5 * ((self.levels - 1) % 2), 0.5 * (self.levels - 1)
        level = np.clip(np.round(units / law.step - shift) + shift, -most, most)
        decoded = middle + spread * torch.from_numpy(law.step * level - dither)
        return super().encode(decoded.to(update.dtype).reshape(update.shape), context, rand)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """No guarantee against anybody."""
        return _no_claims(context)


def _no_claims(context: RoundContext) -> tuple[PrivacyClaim, ...]:
    reason = NonPrivate("updates are not clipped, and each user's standard deviation sets its own noise")
    return tuple(PrivacyClaim(adversary, reason, context.dim) for adversary in Adversary)
