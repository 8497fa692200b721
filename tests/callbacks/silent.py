"""A mechanism double that sends zeros whatever the update: what moves behind it went around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedq.keys.randomness import ClientRandomness
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Message, RoundContext


@dataclass(frozen=True)
class Silent(FedAvg):
    """Every message is a zero update."""

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        return super().encode(torch.zeros_like(update), context, rand)
