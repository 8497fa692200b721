"""Top-k and random-k: a few coordinates as floats, the others not at all. Not private.

Sources: top-k with memory, Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018; random-k,
Konecny, McMahan et al., Federated Learning: Strategies for Improving Communication Efficiency, 2016.

`TopK` sends places and values of the largest coordinates: which they are is told, and follows from the data,
so that no noise on the values would make it private, and no private mechanism stands inside. What it leaves
out is lost, unless clients remember it: `algorithms.ErrorFeedback`. `RandomK` draws its places in public, the
same for all clients of a round, and sends no places; scaled up, the mean is right on average.

Sparsification that is private is elsewhere, each with a public choice: `RotatedCoins(share=)`,
`CPA(blocks_per_round=)`, `SIGM` and `CSGM`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.functional.segments import num_kept
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.scaled import widest
from lightning_fedq.mechanisms.interface import Mechanism, Message, PrivacyClaim, RoundContext, no_guarantee
from lightning_fedq.wire.coding import Code, FixedLength

_FLOATS = FixedLength(32, signed=True)


@dataclass(frozen=True)
class PlacesFirst(Code):
    """Places of a few bits, then as many float32 as 32 bits."""

    places: FixedLength

    def pack(self, symbols: Tensor) -> bytes:
        half = len(symbols) // 2
        return self.places.pack(symbols[:half]) + _FLOATS.pack(symbols[half:])

    def unpack(self, stream: bytes, count: int) -> Tensor:
        cut = self.places.max_bytes(count // 2)
        parts = self.places.unpack(stream[:cut], count // 2), _FLOATS.unpack(stream[cut:], count // 2)
        return torch.cat([part.long() for part in parts])

    def num_bits(self, symbols: Tensor) -> int:
        return symbols.numel() // 2 * (self.places.bits_per_symbol + 32)

    def max_bytes(self, count: int) -> int:
        return self.places.max_bytes(count // 2) + _FLOATS.max_bytes(count // 2)


@dataclass(frozen=True)
class _Sparse(Mechanism):
    """Base: the share that is sent, and no promise."""

    homomorphic = False

    share: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must be in (0, 1], got {self.share}")

    def lever(self, client: int, context: RoundContext) -> float:
        return math.inf

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """No guarantee against anybody."""
        return no_guarantee("coordinates that are sent are sent as they are", context.dim)


@dataclass(frozen=True)
class TopK(_Sparse):
    """The largest coordinates of every update with their positions. Biased without memory. Not private.

    Args:
        share: Share of the coordinates that is sent, in (0, 1].

    Example:
        >>> TopK(share=0.1).share
        0.1

    References:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018
    """

    unbiased = False

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are places in order, then float32 bit patterns
        rows = update.detach().reshape(len(rand.clients), context.dim).float()
        largest = rows.abs().topk(num_kept(self.share, context.dim), dim=1, sorted=False)
        places = largest.indices.sort(1).values
        symbols = torch.cat([places, rows.gather(1, places).view(torch.int32).long()], 1)
        shape = symbols.shape[1:] if update.dim() == 1 else symbols.shape
        return Message(symbols.reshape(shape), self.code(context).num_bits(symbols))

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        half = num_kept(self.share, context.dim)
        if tuple(symbols.shape) != (expected := (len(clients), 2 * half)):
            raise ValueError(f"messages must have shape {expected}, got {tuple(symbols.shape)}")
        received = symbols.detach().long()
        places, total = received[:, :half], torch.zeros(context.dim, dtype=torch.float64)
        if bool(((places < 0) | (places >= context.dim)).any()):
            raise ValueError(
                f"places must lie in [0, {context.dim}); drop the client that sent something else"
            )
        values = received[:, half:].int().view(torch.float32).double()
        return total.index_add_(0, places.reshape(-1), values.reshape(-1)).float()

    def num_sent(self, dim: int) -> int:
        return num_kept(self.share, dim)

    def num_symbols(self, context: RoundContext) -> int:
        """A place and a value each."""
        return 2 * self.num_sent(context.dim)

    def code(self, context: RoundContext) -> PlacesFirst:
        """log2(dim) bits a place, 32 a value."""
        return PlacesFirst(FixedLength(max((context.dim - 1).bit_length(), 1)))

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        # places in order, finite values
        places, patterns = symbols.long().chunk(2)
        rising = bool((places.diff() > 0).all()) and int(places[0]) >= 0 and int(places[-1]) < context.dim
        return rising and bool(patterns.int().view(torch.float32).isfinite().all())

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """No noise: what is left out is bias."""
        return torch.zeros_like(context.radius)


@dataclass(frozen=True)
class RandomK(_Sparse):
    """Coordinates of a public random choice, the same for all clients of a round. Unbiased. Not private.

    Args:
        share: Share of the coordinates that is sent, in (0, 1].

    Example:
        >>> RandomK(share=0.1).share
        0.1

    References:
        Konecny, McMahan, Yu, Richtarik, Suresh, Bacon, Federated Learning: Strategies for Improving
        Communication Efficiency, 2016
    """

    def _places(self, context: RoundContext, rand: PublicRandomness) -> Tensor:
        words = rand.public("random places").words64(context.dim)
        chosen = np.argpartition(words, num_kept(self.share, context.dim) - 1)
        return torch.from_numpy(np.sort(chosen[: num_kept(self.share, context.dim)]))

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # Symbols are float32 bit patterns. Nothing is clipped.
        rows = update.detach().reshape(len(rand.clients), context.dim).float()
        symbols = rows[:, self._places(context, rand)].contiguous().view(torch.int32)
        shape = symbols.shape[1:] if update.dim() == 1 else symbols.shape
        return Message(symbols.reshape(shape), 32 * symbols.numel())

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # the values, scaled by one over the share
        patterns = symbols.int().reshape(len(clients), self.num_symbols(context))
        total = torch.zeros(context.dim, dtype=torch.float64)
        sums = patterns.view(torch.float32).double().sum(0) * (context.dim / patterns.shape[1])
        total[self._places(context, rand)] = sums
        return total.float()

    def num_symbols(self, context: RoundContext) -> int:
        """Coordinates that are sent."""
        return num_kept(self.share, context.dim)

    def code(self, context: RoundContext) -> FixedLength:
        """32 bits a value."""
        return _FLOATS

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """(1 / share - 1) x^2 in the round's range, whoever answers: all leave out the same coordinates."""
        lost = context.dim / self.num_symbols(context) - 1.0
        return lost * widest(context).square()
