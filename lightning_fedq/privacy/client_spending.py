"""Spending of a run's clients, by groups of clients with the same claims and the same number of charges.

Clients of a run spend different amounts: cohorts are drawn, rounds are repeated, and a mechanism may give
each client a different epsilon. Reports state the largest amount and list the others next to it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.account import Account

_MOST_LINES = 12
"""Largest number of lines in a report's list of clients. Adjacent lines are merged until it fits."""


@dataclass(frozen=True)
class ChargedClients:
    """Some clients of a finished run and the most that any of them has spent.

    Args:
        clients: Number of these clients.
        charges: Largest number of rounds that one of them was charged for, repetitions included.
        epsilons: Largest epsilon by name of the adversary, under replace-one adjacency. Infinite where there
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
    """The clients of a federation, grouped by their claims and by their number of charges.

    Args:
        account: Account of the run, whose charges are read.

    Attributes:
        num_groups: Number of groups of clients that the mechanism protects differently.
        finished: Whether the run has charges and no rounds to come.

    Raises:
        ValueError: If there is not one charge per client, or a charge is negative.
    """

    def __init__(self, account: Account) -> None:
        self._account, run = account, account.run
        mechanism, num_clients, charges = run.mechanism, run.num_clients, run.charges
        self.num_groups, self._kinds = 0, list[_ClientGroup]()
        counted = None if charges is None else torch.as_tensor(charges)
        if counted is not None and (counted.shape != (num_clients,) or bool((counted < 0).any())):
            raise ValueError(
                f"charges must be a number >= 0 for each of {num_clients} clients, got shape "
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
        """Return the claim and the charges of the client about whom an adversary has learned most."""
        kinds = [(kind.claims[adversary], kind.charges) for kind in self._kinds]
        unprotected = [kind for kind in kinds if isinstance(kind[0].loss, NonPrivate)]
        max_charges: dict[PrivacyClaim, int] = {}
        for claim, charges in unprotected or kinds:  # under one claim, more charges never cost less
            max_charges[claim] = max(charges, max_charges.get(claim, 0))
        if len(max_charges) == 1:
            return next(iter(max_charges.items()))
        return max(max_charges.items(), key=lambda kind: self._epsilon(*kind))

    def _epsilon(self, claim: PrivacyClaim, charges: int) -> float:
        """Return epsilon after a client's charges and the rounds to come, under replace-one adjacency."""
        if isinstance(claim.loss, NonPrivate):
            return math.inf if charges + self._account.run.max_rounds_to_come else 0.0
        if (claim, charges) not in self._epsilons:
            run, epsilon = self._account.run, self._account.epsilon_replace_one
            spent = epsilon(claim, run.max_rounds_to_come, run.participation, charges)
            self._epsilons[claim, charges] = spent
        return self._epsilons[claim, charges]

    def histogram(self) -> tuple[ChargedClients, ...]:
        """Return the spending of all clients of a finished run, largest first. Empty for a run to come."""
        if not self.finished:
            return ()
        kinds = self._kinds
        if self.num_groups == 1:  # more charges cost more, so groups are merged before any accounting
            kinds = sorted(kinds, key=lambda kind: -kind.charges)
            while len(kinds) > _MOST_LINES:
                place = _thinnest([kind.clients for kind in kinds])
                more, fewer = kinds[place : place + 2]  # more charges are an upper bound for both
                joined = _ClientGroup(more.clients + fewer.clients, more.charges, more.claims)
                kinds[place : place + 2] = [joined]
        lines: dict[tuple[float, ...], ChargedClients] = {}
        for kind in kinds:
            epsilons = {who.name: self._epsilon(claim, kind.charges) for who, claim in kind.claims.items()}
            key = (*epsilons.values(), kind.charges)
            before = lines[key].clients if key in lines else 0
            lines[key] = ChargedClients(before + kind.clients, kind.charges, epsilons)
        ordered = [lines[key] for key in sorted(lines, reverse=True)]
        while len(ordered) > _MOST_LINES:
            place = _thinnest([line.clients for line in ordered])
            one, other = ordered[place : place + 2]
            epsilons = {who: max(value, other.epsilons[who]) for who, value in one.epsilons.items()}
            charges, clients = max(one.charges, other.charges), one.clients + other.clients
            ordered[place : place + 2] = [ChargedClients(clients, charges, epsilons)]
        return tuple(ordered)


def current_epsilon(account: Account, adversary: Adversary, rounds: int, secret: bool) -> float:
    """Return epsilon of the client about whom an adversary has learned most, under replace-one adjacency.

    Args:
        account: Account of the run.
        adversary: Adversary of the statement.
        rounds: Rounds of the run. Used where the charges of clients are not known.
        secret: Whether the adversary never learns which clients took part.
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
    """Return the place of two adjacent groups with the fewest clients, except for the first group.

    The first group is the worst and is never merged.
    """
    return min(range(1, len(sizes) - 1), key=lambda place: sizes[place] + sizes[place + 1])
