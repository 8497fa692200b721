"""Samples that every client keeps out of its training, to measure models on."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fedq.data.sampling import in_short


class HeldOut:
    """Takes the same fraction of every client's samples out of the training.

    Args:
        fraction: In (0, 1), rounded to whole samples, at least one.
        generator_of: Returns the randomness of a client's choice.

    Attributes:
        parts: Held-out sample indices of each client, once they are dealt out.
    """

    def __init__(self, fraction: float, generator_of: Callable[[int], torch.Generator]) -> None:
        self.fraction, self._generator_of = fraction, generator_of
        self.parts: list[Tensor] = []

    def take(self, held: Sequence[Tensor], least: int = 1) -> list[Tensor]:
        """Return what is left for training, each client's samples in their order.

        Args:
            held: Sample indices of each client.
            least: Fewest samples to train on.

        Raises:
            ValueError: If a client holds too few, naming the clients.
        """
        sizes = [num_held_out(self.fraction, len(part)) for part in held]
        pairs = enumerate(zip(held, sizes, strict=True))
        small = [client for client, (part, size) in pairs if len(part) - size < least]
        if small:
            raise ValueError(
                f"clients {in_short(small)} hold too few samples to keep {self.fraction:g} of them out of "
                f"the training and still train on {least}; use fewer clients, a partition with a larger "
                "least, such as Dirichlet(alpha, least=...), or "
                "ClientEvaluation(held_out=[dataset, ...]) with a data set for each client"
            )
        left = []
        self.parts = []
        for client, (part, size) in enumerate(zip(held, sizes, strict=True)):
            out = torch.zeros(len(part), dtype=torch.bool)
            out[torch.randperm(len(part), generator=self._generator_of(client))[:size]] = True
            self.parts.append(part[out])
            left.append(part[~out])
        return left


def num_held_out(fraction: float, num_samples: int) -> int:
    """Number of samples that a client with so many keeps out of its training.

    Example:
        >>> num_held_out(0.2, 7)
        1
    """
    return max(1, round(fraction * num_samples))
