"""Parts that stay the same in every trial of an attack: the adversary's keys, the plan and the wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_fedq.keys.randomness import ClientRandomness, Keys
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, Message, RoundContext, group_clients
from lightning_fedq.rounds import RoundPlan, RoundPlanner, Tampering

_FAR_APART = 1 << 20
_SERVERS = (Adversary.SERVER, Adversary.SERVER_AND_PARTNER, Adversary.SECAGG_SERVER)


class HeldKeys(Keys):
    """Keys from two sources: keys that an adversary holds, and all other keys.

    Args:
        adversary: Adversary that decides which keys are held. Every adversary holds the public key. Clients
            and servers hold the members' key. Servers also hold the keys that they share with clients.
        held: Source of the keys that the adversary holds.
        fresh: Source of all other keys.
        insiders: Clients that tell the adversary all their keys.
    """

    mode = "reproducible"

    def __init__(
        self, adversary: Adversary, held: Keys, fresh: Keys, insiders: frozenset[int] = frozenset()
    ) -> None:
        self._held, self._fresh, self._insiders = held, fresh, insiders
        self._server = adversary in _SERVERS
        self._member = self._server or adversary is Adversary.CLIENT
        self.setup_bits_per_client = held.setup_bits_per_client

    def _select_keys(self, known: bool) -> Keys:
        return self._held if known else self._fresh

    def public(self) -> bytes:
        return self._held.public()

    def members(self) -> bytes:
        return self._select_keys(self._member).members()

    def client(self, client: int) -> bytes:
        return self._select_keys(self._server or client in self._insiders).client(client)

    def server(self) -> bytes:
        return self._select_keys(self._server).server()

    def peer(self, group: tuple[int, ...]) -> bytes:
        return self._select_keys(not self._insiders.isdisjoint(group)).peer(group)

    def private(self, client: int) -> bytes:
        return self._select_keys(client in self._insiders).private(client)


@dataclass(frozen=True)
class FixedPlanner(RoundPlanner):
    """Planner whose cohort is the same in every round, in groups of neighbouring clients.

    With a `dropout_probability` clients drop out for two rounds at a time. The victim of a round always
    answers, because a round without its message would show nothing.

    For mechanisms that hand noise on, several cohorts take turns and one turn of all cohorts is a block.

    Args:
        num_dropped: Number of clients at the end of the cohort that never answer.
        turns: Number of cohorts that take turns.
    """

    num_dropped: int = 0
    turns: int = 1

    @property
    def separation(self) -> int:
        # a large value passes `check_mechanism`: a client that takes part early starts a new block of noise
        return _FAR_APART if self.turns > 1 else 1

    def cohort(self, round: int, attempt: int = 0) -> list[int]:
        size = self.cohort_size
        first = round % self.turns * size
        return list(range(first, first + size))

    @cached_property
    def _groups(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Groups of every cohort so far, by the cohort's first client."""
        return {}

    def plan(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        cohort = self.cohort(round)
        if (groups := self._groups.get(cohort[0])) is None:
            groups = group_clients(mechanism, cohort)
            self._groups[cohort[0]] = groups
        silent = frozenset(cohort[len(cohort) - self.num_dropped :])
        if self.dropout_probability:
            silent = super().plan(round // 2, mechanism).dropped
            silent -= {(round // 2) % self.num_clients}
        return RoundPlan(round, groups, silent, self.seed)


class Wire(Tampering):
    """Recorder between encoder and wire (`rounds.Tampering`) that stores messages and context unchanged."""

    def __init__(self) -> None:
        self.symbols = torch.empty(0)
        self.context: RoundContext

    def send(
        self,
        clients: Sequence[int],
        values: Tensor,
        message: Message,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> Message:
        self.symbols, self.context = message.symbols.clone(), context
        return message
