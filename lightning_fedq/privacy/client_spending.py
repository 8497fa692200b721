"""Clients that are protected alike and were charged alike: what each kind of them has spent.

A cohort is drawn, rounds are repeated, and a mechanism may give each client an epsilon of its own. So
the clients of a run have spent different amounts; the worst is the figure, the others stand beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.account import Account

_MOST_LINES = 12
"""Kinds of clients that a report lists; neighbours in the list are joined until there are no more."""


@dataclass(frozen=True)
class ChargedClients:
    """Some clients of a finished run and what each of them has spent at most.

    Args:
        clients: How many.
        charges: Rounds that each of them was charged for, repetitions included; the largest of them.
        epsilons: By name of the adversary, the largest of them, between any two updates; infinite where there
            is no guarantee.
    """

    clients: int
    charges: int
    epsilons: dict[str, float]


@dataclass(frozen=True)
class _ClientGroup:
    clients: int
    charges: int
    claims: dict[Adversary, PrivacyClaim]


class Population:
    """The clients of a federation, by what protects them and by how often they were charged.

    Raises:
        ValueError: If there is not one charge a client, or one is negative.
    """

    def __init__(self, account: Account) -> None:
        self._account, run = account, account.run
        mechanism, num_clients, charges = run.mechanism, run.num_clients, run.charges
        self.num_groups, self._kinds = 0, list[_ClientGroup]()
        counted = None if charges is None else torch.as_tensor(charges)
        if counted is not None and (counted.shape != (num_clients,) or bool((counted < 0).any())):
            raise ValueError(
                f"charges needs a number >= 0 for each of {num_clients} clients, got shape "
                f"{tuple(counted.shape)}"
            )
        self.finished = counted is not None and not run.to_come
        for group in mechanism.protection_groups(num_clients):
            self.num_groups += 1
            claims = account.claims(group[0])
            if counted is None:
                self._kinds.append(_ClientGroup(len(group), 0, claims))
                continue
            values, sizes = torch.unique(counted[list(group)], return_counts=True)
            for charged, size in zip(values.tolist(), sizes.tolist(), strict=True):
                self._kinds.append(_ClientGroup(size, charged, claims))
        self._epsilons: dict[tuple[PrivacyClaim, int], float] = {}

    def worst_claim(self, adversary: Adversary) -> tuple[PrivacyClaim, int]:
        """The claim, and the charges so far, of the client that an adversary has learnt most about."""
        kinds = [(kind.claims[adversary], kind.charges) for kind in self._kinds]
        unprotected = [kind for kind in kinds if isinstance(kind[0].loss, NonPrivate)]
        most: dict[PrivacyClaim, int] = {}
        for claim, charges in unprotected or kinds:  # of one claim, more charges never cost less
            most[claim] = max(charges, most.get(claim, 0))
        if len(most) == 1:
            return next(iter(most.items()))
        return max(most.items(), key=lambda kind: self._epsilon(*kind))

    def _epsilon(self, claim: PrivacyClaim, charges: int) -> float:
        if isinstance(claim.loss, NonPrivate):
            return math.inf if charges + self._account.run.max_rounds_to_come else 0.0
        if (claim, charges) not in self._epsilons:
            run = self._account.run
            spent = self._account.epsilon_replace_one(
                claim, run.max_rounds_to_come, run.participation, charges
            )
            self._epsilons[claim, charges] = spent
        return self._epsilons[claim, charges]

    def histogram(self) -> tuple[ChargedClients, ...]:
        """Spending of every client of a finished run, the worst first.

        Empty for a run to come.
        """
        if not self.finished:
            return ()
        kinds = self._kinds
        if self.num_groups == 1:  # before anything is computed
            kinds = sorted(kinds, key=lambda kind: -kind.charges)
            while len(kinds) > _MOST_LINES:
                place = _thinnest([kind.clients for kind in kinds])
                joined = _ClientGroup(  # with the charges of the first, which are more
                    kinds[place].clients + kinds[place + 1].clients, kinds[place].charges, kinds[place].claims
                )
                kinds[place : place + 2] = [joined]
        lines: dict[tuple[float, ...], ChargedClients] = {}
        for kind in kinds:
            epsilons = {who.name: self._epsilon(claim, kind.charges) for who, claim in kind.claims.items()}
            key = (*epsilons.values(), kind.charges)
            before = lines[key].clients if key in lines else 0
            lines[key] = ChargedClients(before + kind.clients, kind.charges, epsilons)
        ordered = sorted(
            lines.values(), key=lambda line: (*line.epsilons.values(), line.charges), reverse=True
        )
        while len(ordered) > _MOST_LINES:
            place = _thinnest([line.clients for line in ordered])
            one, other = ordered[place : place + 2]
            epsilons = {who: max(value, other.epsilons[who]) for who, value in one.epsilons.items()}
            charges, clients = max(one.charges, other.charges), one.clients + other.clients
            ordered[place : place + 2] = [ChargedClients(clients, charges, epsilons)]
        return tuple(ordered)


def current_epsilon(account: Account, adversary: Adversary, rounds: int, secret: bool) -> float:
    """Epsilon of the client that an adversary has learnt most about, between any two updates.

    Args:
        rounds: Rounds where cohorts are secret, and charges are not known.
        secret: Does the adversary never learn who took part?
    """
    if secret:
        return account.epsilon(adversary, rounds, secret=True)
    population = Population(account)
    claim, charges = population.worst_claim(adversary)
    to_come = 0 if population.finished else rounds
    if isinstance(claim.loss, NonPrivate):
        return math.inf if charges + to_come else 0.0
    return account.epsilon_replace_one(claim, to_come, account.run.participation, charges)


def _thinnest(sizes: Sequence[int]) -> int:
    """Where two neighbours hold fewest clients. The first, the worst of all, stays on its own."""
    return min(range(1, len(sizes) - 1), key=lambda place: sizes[place] + sizes[place + 1])
