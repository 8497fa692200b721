"""Who masks with whom: the complete graph, or a ring of a few neighbours for large cohorts.

The sparse graph is the Harary graph of SecAgg+ (Bell, Bonawitz, Gascon, Lepoint, Raykova, CCS 2020):
the clients stand on a ring in an order drawn from the hash of all their keys, and each one shares keys
with `degree / 2` on either side. Its failure probabilities are bounded here for a finite cohort, by
hypergeometric tails and a union bound, in place of the asymptotic statement of the paper.

Let a cohort of n have c corrupt clients and at most d dropouts, and k = degree, t = threshold; a client's
secrets are shared with itself and its k neighbours. Against a *curious* server, c and d are fixed before the
order is drawn, so neighbours are a random sample. c itself is drawn with the cohort, of `Colluders.law`: each
bound below is that of one c, and what is stated is its mean (the expectation of min(1, bound), as a cohort
with many is as good as open). What must not happen:

* a client has t corrupt neighbours, who could open its secrets: P <= n P[Hyp(n - d - 1, c, k) >= t], the ring
  being shortest when all d are gone before it is drawn;
* the honest survivors fall into two parts, whose partial sums would show. That takes two disjoint runs of
  k / 2 clients on the ring that all are corrupt or gone: P <= C(n, 2) ((c + d) / n)^k;
* more than k - t neighbours of a client are gone, or the survivors are split without the corrupt ones' help,
  so that the sum is lost: P <= n P[Hyp(n - 1, d, k) > k - t] + C(n, 2) (d / n)^k.

An *active* server chooses the cohort, with all the corrupt clients in it, and who "drops out" after it saw
the order. Then only where the corrupt ones stand is random. If the honest survivors were split, some honest
survivor would have a run of k / 2 neighbours without any; at most k / 2 + 1 + (corrupt ones in the run)
holders of its secrets would answer, so with fewer than t of them its self-mask stays on the sum. It takes a
run with t - k / 2 - 1 corrupt clients: P <= 2 n P[Hyp(n - d - 1, c, k / 2) >= t - k / 2 - 1]. And as it can
try many rosters for a bad order, 80 bits are added to the security wanted.

With the complete graph c >= t opens every secret, and c < t none.

A run draws a new order in each attempt at each round, and what one ring shows stays shown. The union bound
over R attempts is R times that of one ring; so one ring is allowed 2^-50, and 2^10 attempts stay below
2^-40.

Degree and threshold are chosen together. t enters the first bound and the active one with a falling tail,
and the bound on lost sums with a rising one: for a degree the safe thresholds are an interval, and the
smallest degree whose interval is not empty is taken, with the lower end of it, as each share above t
corrects half a wrong one. With t fixed at more than half (two thirds if active) of k + 1, the degree had to
grow until that t happened to be safe: 548 where 234 do, for 1,000 clients of which 10% lie and 10% drop
out.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_fedq.functional.hypergeometric import log2_choose, log2_hypergeometric
from lightning_fedq.privacy.collusion import Colluders

SECURITY_BITS = 40
RUN_BITS = 10
"""Every attempt at a round draws a ring: 2^10 of them together stay below 2^-40."""
GRINDING_BITS = 80
"""An active server is given 2^80 tries, at each ring, at a roster whose order suits it."""
CORRECTNESS_BITS = 20
_ROUNDING = 1e-4
"""Above what float64 can add to log2 of a chance: logarithms of 10^9! have 12 digits before the point."""


def neighbours(order: Sequence[int], degree: int, place: int) -> tuple[int, ...]:
    """Return the neighbours, sorted, of the client at one place of the ring.

    Args:
        order: The clients around the ring.
        degree: Even, or at least len(order) - 1 for the complete graph.
        place: Position in `order`.

    Example:
        >>> neighbours([5, 1, 4, 2, 3], 2, 0)
        (1, 3)
    """
    size = len(order)
    steps = range(1, size) if degree >= size - 1 else [*range(-(degree // 2), 0), *range(1, degree // 2 + 1)]
    return tuple(sorted(order[(place + step) % size] for step in steps))


def is_free(size: int, degree: int, threshold: int, step: int) -> bool:
    """Whether a neighbour computes its shares of an owner's secrets without a correction.

    These are the first threshold - 1 neighbours that follow the owner on the ring, all round it.

    Args:
        size: Clients on the ring.
        degree: Neighbours of a client.
        threshold: Shares that open a secret.
        step: Places from the owner to this neighbour, either way round.
    """
    rank = step % size - 1  # 0 for the one right behind the owner
    if degree < size - 1 and rank >= degree // 2:  # it stands before the owner, beyond those in between
        rank -= size - 1 - degree
    return rank < threshold - 1


def is_connected(order: Sequence[int], degree: int, alive: Collection[int]) -> bool:
    """Do the `alive` clients hang together, so that their masks hide every partial sum?

    On the ring that fails iff two or more of the gaps between neighbouring survivors are wider than degree /
    2.

    Example:
        >>> is_connected([5, 1, 4, 2, 3], 2, {5, 1, 4})
        True
        >>> is_connected([5, 1, 4, 2, 3], 2, {5, 4, 2})
        False
    """
    if degree >= len(order) - 1:
        return True
    places = [place for place, client in enumerate(order) if client in alive]
    # the last gap goes round the ring
    following = [*places[1:], *(place + len(order) for place in places[:1])]
    # one wide gap leaves a line, which hangs together
    return sum(b - a > degree // 2 for a, b in zip(places, following, strict=True)) < 2


def log2_tail(population: int, marked: ArrayLike, drawn: int, at_least: int) -> NDArray[np.float64]:
    """log2 of P[Hyp(population, marked, drawn) >= at_least], for each of `marked`. -inf where it can't be.

    Raises:
        ValueError: If more are marked or drawn than there are.

    Example:
        >>> log2_tail(1000, 20, 60, 10).round(1).item()
        -24.9
    """
    numbers = np.asarray(marked)
    if not (numbers.min() >= 0 and numbers.max() <= population and 0 <= drawn <= population):
        raise ValueError(f"need 0 <= marked, drawn <= population, got {numbers}, {drawn}, {population}")
    counts = np.arange(max(at_least, 0), drawn + 1)
    terms = log2_hypergeometric(population, numbers[..., None], drawn, counts)
    return np.asarray(np.minimum(np.logaddexp2.reduce(terms, axis=-1), 0.0))  # rounding may exceed 1


def _log2_split(size: int, degree: int, gone: ArrayLike) -> NDArray[np.float64]:
    # (gone / n)^k is above the chance of k draws without replacement
    with np.errstate(divide="ignore"):  # nobody gone: -inf
        return np.asarray(log2_choose(size, 2) + degree * np.log2(np.minimum(gone, size) / size))


def security_log2(colluders: Colluders, degree: int, threshold: int, dropped: int) -> float:
    """log2 of the chance that one attempt lets the server and the corrupt clients see more than the sum.

    The module's docstring derives the bound. It holds for every client that does not collude, too.

    Example:
        >>> round(security_log2(Colluders(0.02, 1000, 1000, chosen=False), 60, 31, 20))
        -260
    """
    size, (corrupt, chances) = colluders.cohort, colluders.law
    others = size - dropped - 1
    if degree >= size - 1:
        bounds = np.where(corrupt < threshold, -math.inf, 0.0)
    else:
        few = np.minimum(corrupt, others)
        # n P[Hyp(n - d - 1, c, k) >= t]: a union bound; with few left, all are neighbours
        opened = math.log2(size) + log2_tail(others, few, min(degree, others), threshold)
        if colluders.chosen:
            run = degree // 2
            # two runs of k / 2 a client, one on either side
            split = math.log2(2 * size) + log2_tail(others, few, min(run, others), threshold - run - 1)
        else:
            # With nobody corrupt the survivors themselves see that they are split, and nothing is opened.
            split = np.where(corrupt > 0, _log2_split(size, degree, corrupt + dropped), -math.inf)
        bounds = np.where(corrupt > others, 0.0, np.minimum(np.logaddexp2(opened, split), 0.0))
    return min(float(np.logaddexp2.reduce(chances + bounds)) + _ROUNDING, 0.0)


def correctness_log2(size: int, degree: int, threshold: int, dropped: int) -> float:
    """log2 of the chance that the sum is lost although at most `dropped` clients, at random, drop out."""
    if degree >= size - 1:
        return -math.inf if size - dropped >= threshold else 0.0
    # the owner may be gone itself, so its neighbours alone must reach the threshold
    lost = math.log2(size) + log2_tail(size - 1, dropped, degree, degree - threshold + 1)
    return min(float(np.logaddexp2(lost, _log2_split(size, degree, dropped))), 0.0)


def default_threshold(holders: int, active: bool) -> int:
    """More than half of the holders of a secret. More than two thirds against an active server.

    Example:
        >>> default_threshold(100, False), default_threshold(100, True)
        (51, 67)
    """
    return (2 * holders) // 3 + 1 if active else holders // 2 + 1


def wanted_log2(active: bool) -> int:
    """log2 of the failure probability that one ring may have, so that those of a run stay below 2^-40."""
    return -(SECURITY_BITS + RUN_BITS + (GRINDING_BITS if active else 0))


@lru_cache(maxsize=1024)
def safe_threshold(colluders: Colluders, degree: int, dropped: int) -> int | None:
    """Smallest threshold at which a graph of this degree is safe and loses few sums. None is none.

    A higher threshold makes secrets harder to open, for those who may not and for those who should; so the
    highest one that loses few enough sums tells whether there is any.

    Example:
        >>> safe_threshold(Colluders(0.02, 1000, 1000, chosen=False), 60, 20)
        31
    """

    def first(low: int, high: int, holds: Callable[[int], bool]) -> int:
        """Smallest number in [low, high] from which on it holds, given that it holds at `high`."""
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return high

    def loses(threshold: int) -> bool:
        return correctness_log2(colluders.cohort, degree, threshold, dropped) > -CORRECTNESS_BITS

    def safe(threshold: int) -> bool:
        return security_log2(colluders, degree, threshold, dropped) <= wanted_log2(colluders.chosen)

    lowest = default_threshold(degree + 1, colluders.chosen)
    if loses(lowest):
        return None
    # degree + 2 always loses, so the search has an end
    highest = first(lowest, degree + 2, lambda threshold: threshold > degree + 1 or loses(threshold)) - 1
    # both bounds fall with t: if the highest is not safe, none is
    return first(lowest, highest, safe) if safe(highest) else None


@lru_cache(maxsize=256)
def smallest_graph(
    colluders: Colluders, dropped: int, threshold: int | None = None
) -> tuple[int, int | None]:
    """Smallest safe degree, and the smallest safe threshold at it. Else the complete graph, and None.

    The failure probability is below 2^-50 a ring (2^-130 if active), a sum is lost with less than 2^-20.

    Args:
        colluders: Those of a cohort.
        dropped: How many may drop out.
        threshold: One that is given; None searches it with the degree.

    Example:
        >>> smallest_graph(Colluders(0.02, 1000, 1000, chosen=False), 20)
        (20, 13)
        >>> smallest_graph(Colluders(0.02, 50000, 1000, chosen=False), 20)
        (22, 14)
    """
    size, wanted = colluders.cohort, wanted_log2(colluders.chosen)
    for degree in range(2, size - 1, 2):
        if threshold is None:
            found = safe_threshold(colluders, degree, dropped)
        else:
            fits = default_threshold(degree + 1, False) <= threshold <= degree + 1
            fits = fits and correctness_log2(size, degree, threshold, dropped) <= -CORRECTNESS_BITS
            fits = fits and security_log2(colluders, degree, threshold, dropped) <= wanted
            found = threshold if fits else None
        if found is not None:
            return degree, found
    return size - 1, threshold
