"""One round by hand: context, streams, encode, decode. Used by the tests of mechanisms."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedq.core import Mechanism, Message, RoundContext
from lightning_fedq.randomness import ClientRandomness, PublicRandomness, SeededKeys


def context_of(
    mechanism: Mechanism,
    clients: Sequence[int],
    segments: Sequence[int] = (5, 3),
    radius: float | Sequence[float] = 1.0,
    center: float | Sequence[float] = 0.0,
    round: int = 0,
    attempt: int = 0,
) -> RoundContext:
    """Context whose groups are `clients` in the given order, cut as the mechanism wants."""
    groups, start = [], 0
    for size in mechanism.group_sizes(len(clients)):
        groups.append(tuple(clients[start : start + size]))
        start += size

    def per_segment(value: float | Sequence[float]) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64).expand(len(segments)).clone()

    return RoundContext(
        round, tuple(groups), tuple(segments), per_segment(center), per_segment(radius), attempt
    )


def encode(
    mechanism: Mechanism,
    updates: Tensor,
    context: RoundContext,
    clients: Sequence[int] | None = None,
    seed: int = 0,
) -> Message:
    """Encode a stack of `clients` (the sorted cohort by default)."""
    clients = context.cohort if clients is None else clients
    rand = ClientRandomness(SeededKeys(seed), clients, context.round, context.attempt)
    return mechanism.encode(updates, context, rand)


def decode(
    mechanism: Mechanism, symbols: Tensor, clients: Sequence[int], context: RoundContext, seed: int = 0
) -> Tensor:
    """Decode with nothing but public randomness."""
    return mechanism.decode(
        symbols, clients, context, PublicRandomness(SeededKeys(seed), context.round, context.attempt)
    )
