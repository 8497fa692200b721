"""Clients that collude with the server: one count per run, used by its noise, its masks and its report.

A random cohort can hold more than its share of colluders. Of 40 clients drawn from 1,000 of whom 20 collude,
no client colludes only with probability 0.44. So the noise counts a quantile of the hypergeometric law, and
delta covers the probability of more. The graph of masks averages over the law. A server that may lie can
choose the cohort, so then all colluders of the federation count. The set of colluders is assumed to be
settled before the draw is known.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.hypergeometric import hypergeometric_quantile, log2_hypergeometric, num_marked

CHANCE = 2.0**-24
"""Probability that more clients collude in a round than are counted, in units of delta."""
_LEFT_OUT = -100.0
"""log2 of a probability. Numbers of colluders less likely than this count as the largest number."""


@dataclass(frozen=True)
class Colluders:
    """Clients that may collude with the server behind secure aggregation, in the cohorts of one run.

    Args:
        fraction: Fraction of the clients that may collude, in [0, 1).
        clients: Number of clients in the federation, >= `cohort`.
        cohort: Number of clients of a round.
        chosen: Whether the server may choose the cohort, because it may lie. Otherwise the cohort is a
            uniformly random set.
        byzantine: Largest number of clients of a cohort that do not run the protocol. They may reveal
            everything, their shares included, so they count as colluders in every cohort.

    Examples:
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
            raise ValueError(f"max_colluding_fraction must be in [0, 1), got {self.fraction}")

    @property
    def num_in_federation(self) -> int:
        """Number of clients of the federation that collude and are not Byzantine."""
        return num_marked(self.fraction, self.clients)

    @property
    def drawn(self) -> bool:
        """Whether the number of colluders in a cohort is random."""
        return bool(self.num_in_federation) and self.clients > self.cohort and not self.chosen

    def max_in_cohort(self, chance: float) -> int:
        """Return a number of colluders that a cohort exceeds with at most this probability.

        The cohort contains the victim, who does not collude.

        Args:
            chance: Probability of more colluders, in (0, 1). Without a random cohort it is not used.
        """
        count = self.num_in_federation
        if self.drawn:
            marked = min(count, self.clients - 1)
            count = hypergeometric_quantile(self.clients - 1, marked, self.cohort - 1, chance)
        return min(count + self.byzantine, self.cohort)

    @cached_property
    def law(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Numbers of colluders in a cohort and log2 of their probabilities, without conditioning on a victim.

        A cohort that is known to contain the victim has fewer colluders (in stochastic order). Very unlikely
        numbers count as the largest one, so a sum of a function that grows with the number is not
        underestimated.
        """
        if not self.drawn:
            return np.array([min(self.num_in_federation + self.byzantine, self.cohort)]), np.zeros(1)
        drawn = np.arange(min(self.num_in_federation, self.cohort) + 1)
        chances = log2_hypergeometric(self.clients, self.num_in_federation, self.cohort, drawn)
        counts = np.minimum(drawn + self.byzantine, self.cohort)
        likely = chances > _LEFT_OUT
        rest = np.log2(len(counts)) + _LEFT_OUT
        return np.append(counts[likely], counts[-1]), np.append(chances[likely], rest)


NOBODY = Colluders(0.0, 0, 0, chosen=False)
"""No client colludes, in any run."""
