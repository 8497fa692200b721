"""SQKR: a few randomised signs of a rotated update in one symbol of k bits, under one epsilon a message.

Source: Chen, Kairouz, Ozgur, Breaking the Communication-Privacy-Accuracy Trilemma, NeurIPS 2020. The update
is clipped to a ball and rotated, which spreads it evenly. Each client samples k coordinates with coins it
shares with the server, rounds each to a sign, and sends the k signs as one symbol of 2^k, through randomised
response: the true symbol with probability e^epsilon / (e^epsilon + 2^k - 1).

Departures: a Hadamard rotation with public signs in place of Kashin's representation, with a radius of kappa
standard deviations, beyond which coordinates are clipped and counted; coordinates are drawn without
replacement. Chances are exact multiples of 2^-32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.audit import AuditCase, audit_cases
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.rotation import rotate, rotate_back, sign_words
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.interface import (
    Mechanism,
    Message,
    PmfPairs,
    PrivacyClaim,
    RoundContext,
    same_for_all,
)
from lightning_fedq.privacy.assumptions import SECRET_KEYS
from lightning_fedq.wire.coding import FixedLength

WORD = 2**32


@dataclass(frozen=True)
class SQKR(Mechanism):
    """A few signs of a rotated update in one symbol, under one epsilon for the message.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        epsilon: Of a client's message, > 0, in nats, against everybody.
        bits: k, signs in a message, 1 to 8; about epsilon / ln 2 is best.
        kappa: Range of a rotated coordinate in standard deviations, > 0.
    """

    homomorphic = False

    clip_norm: float
    epsilon: float
    bits: int = 1
    kappa: float = 4.5

    def __post_init__(self) -> None:
        if not (0 < self.clip_norm < math.inf and 0 < self.epsilon <= 15 and 0 < self.kappa < math.inf):
            raise ValueError(f"clip_norm > 0, 0 < epsilon <= 15 and kappa > 0 are needed, got {self}")
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits must be in [1, 8], got {self.bits}")

    @classmethod
    def example(cls) -> SQKR:
        """See `Mechanism.example`."""
        return cls(clip_norm=1.0, epsilon=4.0, bits=3)

    @property
    def true_words(self) -> int:
        """Of 2^32 words those that send the true symbol; rounded down, so that epsilon is not exceeded."""
        odds = math.exp(self.epsilon)
        return math.floor(WORD * odds / (odds + 2**self.bits - 1))

    def radius(self, context: RoundContext) -> float:
        """Range of a rotated coordinate, in units of the update."""
        return self.kappa * self.clip_norm / math.sqrt(padded_size(context.dim))

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `Mechanism.encode`; one symbol a client."""
        rows = update.detach().reshape(len(rand.clients), context.dim).cpu().double()
        factors, shortened = unit_ball_factors(rows, self.clip_norm, 2)
        rotated = rotate((rows * (self.clip_norm * factors[:, None])).numpy(), _words(context, rand))
        symbols, radius = np.empty((len(rows), 1), np.int32), self.radius(context)
        clipped = np.where(np.asarray(shortened), context.dim, 0)
        for row, client in enumerate(rand.clients):
            values, private = rotated[row, self._places(client, context, rand)], rand.private(client, "sqkr")
            if not clipped[row]:
                clipped[row] = min(int((np.abs(values) > radius).sum()), context.dim)
            ones = np.floor((1.0 + np.clip(values / radius, -1.0, 1.0)) * (WORD / 2)).astype(np.uint64)
            signs = private.words(self.bits) < ones
            symbol = int(signs @ (1 << np.arange(self.bits)))
            if int(private.words(1)[0]) >= self.true_words:  # one of the 2^k - 1 others
                symbol = (symbol + 1 + int(private.uniform_below(2**self.bits - 1, 1)[0])) % 2**self.bits
            symbols[row] = symbol
        out = torch.from_numpy(symbols).reshape(*update.shape[:-1], 1).to(update.device)
        return Message(out, self.bits * len(rows), int(clipped.sum()))

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """See `Mechanism.decode`; one message a row."""
        truth, size = self.true_words / WORD, padded_size(context.dim)
        shrink = truth - (1.0 - truth) / (2**self.bits - 1)
        total = np.zeros(size)
        for client, symbol in zip(clients, symbols.reshape(-1).tolist(), strict=True):
            chosen = 2.0 * ((symbol >> np.arange(self.bits)) & 1) - 1.0
            total[self._places(client, context, rand)] += chosen
        scale = self.radius(context) * size / (self.bits * shrink)
        back = rotate_back(total, _words(context, rand), context.dim)
        return torch.from_numpy(scale * back).float().to(symbols.device)

    def _places(self, client: int, context: RoundContext, rand: PublicRandomness) -> list[int]:
        return rand.shared_with_server(client, "sqkr places").choice(padded_size(context.dim), self.bits)

    def num_symbols(self, context: RoundContext) -> int:
        """One, however long the update is."""
        return 1

    def code(self, context: RoundContext) -> FixedLength:
        """k bits."""
        return FixedLength(self.bits)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """See `Mechanism.claims`: epsilon in every view, for the response is each client's own."""
        truth, others = self.true_words / WORD, 2**self.bits - 1
        other = (1.0 - truth) / others
        # symbols other than the two that are true in one world or the other are equally likely in both
        pair = ((truth, other, (others - 1) * other), (other, truth, (others - 1) * other))
        loss = PmfPairs((pair,), "randomised response over the symbols of a message")
        fresh = SECRET_KEYS(
            "the coins of a response are fresh in every round and attempt, by the client's own key"
        )
        return same_for_all(loss, 1, (fresh,))  # single messages: nobody else's secrets weaken the claim

    def with_level(self, level: float, context: RoundContext, max_dropped_clients: int) -> SQKR:
        """See `Mechanism.with_level`: epsilon."""
        return replace(self, epsilon=level)

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float:
        """See `Mechanism.mean_error`: every sign has variance one at most, before it is scaled."""
        truth, size = self.true_words / WORD, padded_size(context.dim)
        shrink = truth - (1.0 - truth) / (2**self.bits - 1)
        return (self.radius(context) * size / shrink) ** 2 / (self.bits * num_clients)

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        """Two updates that the rotation spreads evenly, all signs up or all down, wherever a client looks."""
        ones = np.ones(padded_size(context.dim))
        high = torch.from_numpy(rotate_back(ones, _words(context, public), context.dim))
        return 1e3 * self.clip_norm * high, -1e3 * self.clip_norm * high


@audit_cases.register
def _(mechanism: SQKR, dim: int) -> tuple[AuditCase, ...]:
    """Return the case that comes closest to the claim.

    One encoding is one draw. A short range, which no claim depends on, makes the signs certain.
    """
    return (AuditCase(replace(mechanism, kappa=0.1), concentrated=True),)


def _words(context: RoundContext, rand: PublicRandomness) -> np.ndarray:
    return rand.public("sqkr signs").words(sign_words(padded_size(context.dim)))
