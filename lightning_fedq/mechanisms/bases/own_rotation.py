"""A rotation of each client's own, and a private choice among public directions.

A client rotates its update by signs that it shares with the server (two sign flips, two Walsh-Hadamard
transforms), so that errors of one codebook do not point the same way at every client.

Only the direction is sent, so the stated bias: the decoded sum estimates that of clip_norm x / |x| (0 for 0).
The epsilon rests on integers alone: which k options are preferred may follow from floats in any way, since k
of them are preferred for every update. Two updates are worst where they prefer disjoint ones, as opposite
ones do.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.axis_choice import AxisChoice
from lightning_fedq.functional.direction_choice import DirectionChoice
from lightning_fedq.functional.hadamard import flip, flip_over, padded_size, transform
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.interface import (
    Mechanism,
    Message,
    PmfPairs,
    PrivacyClaim,
    RoundContext,
    same_for_all,
)

_ROTATION = "rotation"
_CHUNK = 1 << 22
"""Coordinates of a stack that are rotated at once."""


def parts(count: int, size: int) -> list[tuple[int, int]]:
    """First and last row, exclusive, of each part of a stack that is rotated at once."""
    step = max(_CHUNK // size, 1)
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def _signs(clients: Sequence[int], size: int, rand: PublicRandomness) -> NDArray[np.uint8]:
    """The outer and the inner sign flips of each client, `(clients, 2, bytes)`, a bit for each."""
    words = np.empty((len(clients), 2, -(-size // 8)), np.uint8)
    for row, client in enumerate(clients):
        if row and client == clients[row - 1]:
            words[row] = words[row - 1]
        else:
            rand.shared_with_server(client, _ROTATION).fill(words[row])
    return words


def rotate_each(rows: Tensor, clients: Sequence[int], dim: int, rand: PublicRandomness) -> Tensor:
    """Rotate one row a client: `(clients, dim)` float64 to `(clients, D)`, D = padded_size(dim)."""
    size = padded_size(dim)
    rotated, root = np.empty((len(clients), size)), math.sqrt(size)
    for row, (outer, inner), out in zip(rows.numpy(), _signs(clients, size, rand), rotated, strict=True):
        flip(row, inner, 1.0, out)
        transform(out)
        flip_over(out, outer, root)
        transform(out)
        out /= root
    return torch.from_numpy(rotated)


def rotate_each_back(rows: Tensor, clients: Sequence[int], dim: int, rand: PublicRandomness) -> Tensor:
    """Inverse of `rotate_each`, in place: `(clients, D)` float64 to `(clients, dim)`."""
    size = rows.shape[1]
    for row, (outer, inner) in zip(rows.numpy(), _signs(clients, size, rand), strict=True):
        for signs in (outer, inner):
            transform(row)
            flip_over(row, signs, math.sqrt(size))
    return rows[:, :dim]


@dataclass(frozen=True)
class ChosenDirection(Mechanism):
    """Base of mechanisms whose message is the number of one public direction of the rotated update.

    Args:
        epsilon: Local budget of one message, > 0 and finite, in nats.
        clip_norm: Length that every decoded update is given, > 0, in units of the update.
    """

    homomorphic = False
    unbiased = False
    _coins: ClassVar[str]
    """Purpose of the stream of private coins."""
    _options: ClassVar[str]
    """What is chosen from, in words."""

    epsilon: float
    clip_norm: float

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("clip_norm", self.clip_norm)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {value}")

    @abstractmethod
    def choice(self, dim: int) -> AxisChoice | DirectionChoice:
        """Law of a message about `dim` coordinates."""

    @abstractmethod
    def num_options(self, dim: int) -> int:
        """Directions that a message can name."""

    @abstractmethod
    def _preferred(self, rotated: Tensor, dim: int, rand: PublicRandomness) -> NDArray[np.int64]:
        """The k options of every rotated update, in an order that does not follow the data."""

    @abstractmethod
    def _directions(self, options: Tensor, dim: int, rand: PublicRandomness) -> Tensor:
        """Directions by their numbers, as rotated updates."""

    def _size(self, dim: int) -> int:
        """Coordinates of a rotated update."""
        return padded_size(dim)

    def _width(self, dim: int) -> int:
        """Numbers that are worked on for one client."""
        return self._size(dim)

    def mean_length(self, dim: int) -> float:
        """Length of the mean of a vector that the server looks up, about a unit update."""
        return self.choice(dim).mean_length

    def at_level(self, level: float, context: RoundContext, max_dropped: int) -> ChosenDirection:
        return replace(self, epsilon=level)

    def num_symbols(self, context: RoundContext) -> int:
        """One direction."""
        return 1

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # One symbol. The rotation is done on the CPU in float64, so that devices agree. Updates longer than
        # `clip_norm` count as clipped.
        rows = update.detach().reshape(len(rand.clients), context.dim).float().cpu().double()
        dim, size, choice = context.dim, self._size(context.dim), self.choice(context.dim)
        symbols = torch.empty(len(rows), 1, dtype=torch.int64)
        for first, last in parts(len(rows), self._width(dim)):
            clients = rand.clients[first:last]
            padded = torch.nn.functional.pad(rows[first:last], (0, size - dim))
            preferred = self._preferred(rotate_each(padded, clients, size, rand), dim, rand)
            for row, (client, top) in enumerate(zip(clients, preferred, strict=True), first):
                coins = rand.private(client, self._coins)
                symbols[row, 0] = draw_preferred(top, self.num_options(dim), choice.threshold, coins)
        longer = torch.linalg.vector_norm(rows, dim=1) > self.clip_norm
        shape = (1,) if update.dim() == 1 else symbols.shape
        num_bits = self.code(context).num_bits(symbols)
        return Message(symbols.reshape(shape).to(update.device), num_bits, int(longer.sum()) * dim)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        count, sent, options = len(clients), symbols.detach().cpu(), self.num_options(context.dim)
        wrong = sent.is_floating_point() or tuple(sent.shape) != (count, 1)
        if wrong or (count and not 0 <= int(sent.min()) <= int(sent.max()) < options):
            raise ValueError(
                f"messages must be one integer in [0, {options}) each, shape {(count, 1)}, got "
                f"{tuple(sent.shape)} with values up to {sent.max().item() if sent.numel() else None}"
            )
        picked, total = sent[:, 0].to(torch.int64), torch.zeros(context.dim, dtype=torch.float64)
        for first, last in parts(count, self._size(context.dim)):
            rows = self._directions(picked[first:last], context.dim, rand)
            total += rotate_each_back(rows, clients[first:last], context.dim, rand).sum(0)
        return (total * (self.clip_norm / self.mean_length(context.dim))).float().to(symbols.device)

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """One message, one loss, the same in every view: whoever knows the directions learns no more."""
        choice = self.choice(context.dim)
        top, other = choice.top_probability, choice.other_probability
        rest = max(1.0 - top - other, 0.0)
        pair = (top, other, rest), (other, top, rest)
        loss = PmfPairs((pair,), f"one of k preferred {self._options}, or any other")
        return same_for_all(loss, 1, (ARBITRARY, FRESH))

    @property
    def covers_shorter(self) -> bool:
        # the choice of k follows from the length, and among few options the same epsilon composes worse
        return False

    def without_noise(self, context: RoundContext) -> ChosenDirection:
        # the closest one, always
        return replace(self, epsilon=500.0)

    def advice(self, claim: PrivacyClaim) -> str:
        return "fewer messages of a client: rounds in which it does not take part cost it nothing"


def draw_preferred(preferred: NDArray[np.int64], num_options: int, threshold: int, stream: Stream) -> int:
    """One option: a preferred one if a word is below the threshold, else one of the others.

    The coin and both draws below a bound are exact on the stream's words.

    Args:
        preferred: The preferred options, without repetition, in an order that does not follow the data.
        num_options: All options are 0 to `num_options - 1`.
        threshold: Chance of a preferred one times 2^64.
    """
    k = len(preferred)
    if int(stream.words64(1)[0]) < threshold:
        return int(preferred[int(stream.uniform_below(k, 1)[0])])
    drawn = int(stream.uniform_below(num_options - k, 1)[0])
    others = np.ones(num_options, bool)
    others[preferred] = False
    return int(np.flatnonzero(others)[drawn])
