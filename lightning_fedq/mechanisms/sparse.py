"""Top-k and random-k: some coordinates are sent as floats, the others not at all. Not private.

Sources: top-k with memory, Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, and random-k,
Konecny, McMahan et al., Federated Learning: Strategies for Improving Communication Efficiency, 2016.

`TopK` sends indices and values of the largest coordinates. The indices depend on the data and are sent in the
clear, so noise on the values would not make it private, and it can't wrap a private mechanism. Coordinates
that it leaves out are lost, unless clients keep them: `algorithms.ErrorFeedback`. `RandomK` draws its indices
publicly, the same for all clients of a round, and sends no indices. Its values are scaled up, so the mean is
unbiased.

For private sparsification with a public choice of coordinates take `RotatedCoins(fraction=)`,
`CPA(blocks_per_round=)`, `SIGM` or `CSGM`.
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
    """Code of a sparse message: indices of fixed length, then as many float32 of 32 bits."""

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
    """Base of top-k and random-k: the share that is sent, and no privacy."""

    homomorphic = False

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction}")

    def influence(self, client: int, context: RoundContext) -> float:
        return math.inf

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return no guarantee against any adversary."""
        return no_guarantee("coordinates are sent without noise", context.dim)


@dataclass(frozen=True)
class TopK(_Sparse):
    """The largest coordinates of every update, each with its index. Biased without memory. Not private.

    Take it for compression without privacy, together with `ErrorFeedback` of the same share.

    Args:
        fraction: Fraction of the coordinates that is sent, in (0, 1].

    Nothing is claimed against any adversary.

    A message has log2(dim) + 32 bits for each coordinate that is sent.

    References:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018

    Examples:
        >>> TopK(fraction=0.1).fraction
        0.1
    """

    unbiased = False

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are the sorted indices, then float32 bit patterns
        rows = update.detach().reshape(len(rand.clients), context.dim).float()
        largest = rows.abs().topk(num_kept(self.fraction, context.dim), dim=1, sorted=False)
        places = largest.indices.sort(1).values
        symbols = torch.cat([places, rows.gather(1, places).view(torch.int32).long()], 1)
        sent = symbols.reshape((*update.shape[:-1], symbols.shape[1]))
        return Message(sent, self.code(context).num_bits(symbols))

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        half = num_kept(self.fraction, context.dim)
        if tuple(symbols.shape) != (expected := (len(clients), 2 * half)):
            raise ValueError(f"messages must have shape {expected}, got {tuple(symbols.shape)}")
        received = symbols.detach().long()
        places, total = received[:, :half], torch.zeros(context.dim, dtype=torch.float64)
        if bool(((places < 0) | (places >= context.dim)).any()):
            raise ValueError(
                f"indices must be in [0, {context.dim}). Drop the client that sent something else."
            )
        values = received[:, half:].int().view(torch.float32).double()
        return total.index_add_(0, places.reshape(-1), values.reshape(-1)).float()

    def num_sent(self, dim: int) -> int:
        return num_kept(self.fraction, dim)

    def num_symbols(self, context: RoundContext) -> int:
        """Return the number of symbols: one index and one value per coordinate that is sent."""
        return 2 * self.num_sent(context.dim)

    def code(self, context: RoundContext) -> PlacesFirst:
        """Return log2(dim) bits per index and 32 per value."""
        return PlacesFirst(FixedLength(max((context.dim - 1).bit_length(), 1)))

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        # a client sends sorted indices and finite values
        places, patterns = symbols.long().chunk(2)
        rising = bool((places.diff() > 0).all()) and int(places[0]) >= 0 and int(places[-1]) < context.dim
        return rising and bool(patterns.int().view(torch.float32).isfinite().all())

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return zero, because coordinates that are left out are bias, not noise."""
        return torch.zeros_like(context.radius)


@dataclass(frozen=True)
class RandomK(_Sparse):
    """Coordinates that a public random draw selects, the same for all clients of a round. Not private.

    Take it as a baseline of unbiased compression without privacy.

    Args:
        fraction: Fraction of the coordinates that is sent, in (0, 1].

    Nothing is claimed against any adversary.

    A message has 32 bits for each coordinate that is sent.

    References:
        Konecny, McMahan, Yu, Richtarik, Suresh, Bacon, Federated Learning: Strategies for Improving
        Communication Efficiency, 2016

    Examples:
        >>> RandomK(fraction=0.1).fraction
        0.1
    """

    def _places(self, context: RoundContext, rand: PublicRandomness) -> Tensor:
        words = rand.public("random places").words64(context.dim)
        chosen = np.argpartition(words, num_kept(self.fraction, context.dim) - 1)
        return torch.from_numpy(np.sort(chosen[: num_kept(self.fraction, context.dim)]))

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are float32 bit patterns, and nothing is clipped
        rows = update.detach().reshape(len(rand.clients), context.dim).float()
        symbols = rows[:, self._places(context, rand)].contiguous().view(torch.int32)
        return Message(symbols.reshape((*update.shape[:-1], symbols.shape[1])), 32 * symbols.numel())

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # dividing by the share makes the sum unbiased
        patterns = symbols.int().reshape(len(clients), self.num_symbols(context))
        total = torch.zeros(context.dim, dtype=torch.float64)
        sums = patterns.view(torch.float32).double().sum(0) * (context.dim / patterns.shape[1])
        total[self._places(context, rand)] = sums
        return total.float()

    def num_symbols(self, context: RoundContext) -> int:
        """Return the number of coordinates that are sent."""
        return num_kept(self.fraction, context.dim)

    def code(self, context: RoundContext) -> FixedLength:
        """Return 32 bits per value."""
        return _FLOATS

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return (1 / share - 1) x^2 in the round's range, as all clients leave out the same coordinates."""
        lost = context.dim / self.num_symbols(context) - 1.0
        return lost * widest(context).square()
