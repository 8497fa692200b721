"""Colluders that count in a cohort, where a fraction of the federation's clients may collude.

A cohort that is drawn holds more of them now and then than its share: of 40 drawn from 1,000 of whom 20
collude, none only with chance 0.44. So a quantile of the hypergeometric law is counted, and delta pays for
what is above it. A server that may lie may draw as it likes: then as many count as there are.
"""

from lightning_fedq.functional.drawn import most_drawn, num_marked

CHANCE = 2.0**-24
"""Chance that more collude in a round than are counted, in units of delta."""


def num_corrupt_in_cohort(
    fraction: float, clients: int, cohort: int, delta: float, drawn_at_random: bool
) -> int:
    """Colluders that count in a cohort with one client, the victim, that does not collude.

    Args:
        fraction: Fraction of the clients that may collude, in [0, 1).
        clients: Clients in the federation, >= `cohort`.
        cohort: Clients of a round.
        delta: Delta of the guarantee; more collude in a round with chance `CHANCE * delta` at most.
        drawn_at_random: Is the cohort a uniformly random set, whoever colludes?

    Example:
        >>> num_corrupt_in_cohort(0.02, 1000, 100, 1e-9, True)
        17
    """
    marked = num_marked(fraction, clients)
    if clients == cohort or not marked or not drawn_at_random:
        return min(marked, cohort)
    return min(most_drawn(clients - 1, min(marked, clients - 1), cohort - 1, CHANCE * delta), cohort - 1)
