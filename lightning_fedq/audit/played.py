"""Messages and released sum of one round of the audit, and what each adversary sees of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.audit.bins import Integers
from lightning_fedq.audit.views import Array
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext


@dataclass(frozen=True)
class Played:
    """Messages and released sum of one round in one world.

    Args:
        mechanism: Mechanism that encoded the messages.
        context: Public part of the round.
        clients: Clients that answered.
        victim: Client whose update differs between the worlds, one of `clients`.
        symbols: `(len(clients), m)` messages, in the order of `clients`.
        labels: `(dim,)` label of the input in each coordinate of the victim: 0, 1, or -1 for not counted.
        public: Public randomness of the round.
        decoded_sum: `(dim,)` sum that the engine released.
        everybody: Whether every client holds the victim's input.
        own_weight: Weight of the victim's round in a linear combination of several rounds.
        later: `(dim,)` weighted sum of later rounds, which cancel part of the noise of this round.
        behind: Number of symbols that follow those of the coordinates in a message, see `Mechanism.core`.
    """

    mechanism: Mechanism
    context: RoundContext
    clients: tuple[int, ...]
    victim: int
    symbols: Tensor
    labels: Integers
    public: PublicRandomness
    decoded_sum: Array
    everybody: bool = False
    own_weight: float = 1.0
    later: Array | float = 0.0
    behind: int = 0

    def position_labels(self, positions: int) -> Integers:
        """Return the labels of the positions of a view.

        If positions are not coordinates, all of them have the same label.
        """
        if positions == len(self.labels):
            return self.labels
        if positions == len(self.labels) + self.behind:
            return np.append(self.labels, np.full(self.behind, -1))
        return np.full(positions, max(self.labels[0], self.labels.max()))

    @property
    def curious(self) -> int:
        """Curious client: the client after the victim, which may be the victim's partner."""
        return self.clients[(self.clients.index(self.victim) + 1) % len(self.clients)]

    def row(self, client: int) -> Tensor:
        """Return the message of a client."""
        return self.symbols[self.clients.index(client)]

    def message(self) -> Array:
        """Return the victim's message, or the concatenated messages if every client is a victim."""
        if self.everybody:
            return np.asarray(self.symbols.flatten().numpy(), np.float64)
        return np.asarray(self.row(self.victim).numpy(), np.float64)

    def decoded_message(self) -> Array:
        """Return the victim's message as the server decodes it."""
        return self.decoded([self.victim])

    def total(self) -> Array:
        """Return the sum of all messages, modulo the mechanism's symbol modulus if it has one."""
        return self._total(self.symbols)

    def honest_total(self) -> Array:
        """Return the sum of all messages except the curious client's."""
        rows = [row for row, client in enumerate(self.clients) if client != self.curious]
        return self._total(self.symbols[rows])

    def _total(self, symbols: Tensor) -> Array:
        total = symbols.sum(0, dtype=torch.int64)
        if (modular := self.mechanism.symbol_modulus(self.context)) is not None:
            total = total % modular[0]
        return np.asarray(total.numpy(), np.float64)

    def released(self) -> Array:
        """Return the released sum, combined with the later rounds that cancel part of its noise."""
        return self.own_weight * self.decoded_sum + self.later

    def honest_sum(self) -> Array:
        """Return the decoded sum without the update of the curious client, which knows its own update."""
        silent = [client for client in self.context.cohort if client not in self.clients]
        known = [client for client in self.clients if client != self.curious]
        decoded = self.decoded(known)
        # a mechanism with a fixed cohort decodes only the whole cohort, so silent clients count as zeros
        if silent and self.mechanism.fixed_cohort:
            zero = torch.zeros(len(silent), self.symbols.shape[1], dtype=torch.int32)
            decoded = decoded + self._decode(zero, silent)
        return self.own_weight * decoded + self.later

    def group(self) -> Array:
        """Return the victim's message and the sum of its partners' messages, encoded in one number.

        Groups of different sizes get different numbers, so an unpaired victim is distinguished.
        """
        largest_group = max(len(group) for group in self.context.groups)
        group, _ = self.context.place(self.victim)
        partners = [client for client in group if client in self.clients and client != self.victim]
        own = self.row(self.victim).to(torch.int64)
        rows = [self.clients.index(partner) for partner in partners]
        partners_sum = self.symbols[rows].sum(0, dtype=torch.int64)
        missing = largest_group - 1 - len(partners)
        joint = own * largest_group + partners_sum + 4 * largest_group * missing
        return np.asarray(joint.numpy(), np.float64)

    def decoded(self, clients: list[int]) -> Array:
        """Return the decoded sum of the updates of some clients, not rounded to a grid."""
        return self._decode(torch.stack([self.row(client) for client in clients]), clients)

    def _decode(self, symbols: Tensor, clients: list[int]) -> Array:
        decoded = self.mechanism.decode(symbols, clients, self.context, self.public)
        return np.asarray(decoded.numpy(), np.float64)
