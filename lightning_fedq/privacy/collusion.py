"""Who colludes with the server: the one count of a run, for its noise, its masks and all that it says.

A cohort that is drawn holds more colluders now and then than its share: of 40 drawn from 1,000 of whom 20
collude, none only with chance 0.44. So the noise counts a quantile of the hypergeometric law, and delta pays
for what is above it, and the graph of masks averages over the law. A server that may lie may draw as it
likes: then as many count as there are. Who colludes is assumed to be settled before the draw is known.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.hypergeometric import hypergeometric_quantile, log2_hypergeometric, num_marked

CHANCE = 2.0**-24
"""Chance that more collude in a round than are counted, in units of delta."""
_LEFT_OUT = -100.0
"""log2 of the chance below which a number of colluders is lumped together with the worst."""


@dataclass(frozen=True)
class Colluders:
    """Clients that may collude with the server behind secure aggregation, in the cohorts of one run.

    Args:
        fraction: Fraction of the clients that may collude, in [0, 1).
        clients: Clients in the federation, >= `cohort`.
        cohort: Clients of a round.
        chosen: May the server choose the cohort, as it may lie? Else that is a uniformly random set.
        byzantine: Clients of a cohort, at most, that do not run the protocol. They may tell everything, their
            shares too, so they count as colluders of every cohort.

    Example:
        >>> Colluders(0.02, 1000, 100, chosen=False).max_in_cohort(CHANCE * 1e-9)
        17
    """

    fraction: float
    clients: int
    cohort: int
    chosen: bool
    byzantine: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction < 1.0:
            raise ValueError(f"max_corrupt must be in [0, 1), got {self.fraction}")

    @property
    def num_in_federation(self) -> int:
        """Clients of the federation that collude and are not Byzantine."""
        return num_marked(self.fraction, self.clients)

    @property
    def drawn(self) -> bool:
        """Is it chance how many are in a cohort?"""
        return bool(self.num_in_federation) and self.clients > self.cohort and not self.chosen

    def max_in_cohort(self, chance: float) -> int:
        """Colluders of a cohort with one that is none, the victim: with this chance there are more."""
        count = self.num_in_federation
        if self.drawn:
            marked = min(count, self.clients - 1)
            count = hypergeometric_quantile(self.clients - 1, marked, self.cohort - 1, chance)
        return min(count + self.byzantine, self.cohort)

    @cached_property
    def law(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Numbers of colluders in a cohort and log2 of their chances, whoever is in it.

        A victim that is known to be there makes fewer of them (in stochastic order). What is very unlikely
        counts as the worst number, so that sums of what grows with the number are no smaller than they are.
        """
        if not self.drawn:
            return np.array([min(self.num_in_federation + self.byzantine, self.cohort)]), np.zeros(1)
        drawn = np.arange(min(self.num_in_federation, self.cohort) + 1)
        chances = log2_hypergeometric(self.clients, self.num_in_federation, self.cohort, drawn)
        counts = np.minimum(drawn + self.byzantine, self.cohort)
        kept = chances > _LEFT_OUT
        rest = np.log2(len(counts)) + _LEFT_OUT
        return np.append(counts[kept], counts[-1]), np.append(chances[kept], rest)


NOBODY = Colluders(0.0, 0, 0, chosen=False)
"""None collude, in any run."""
