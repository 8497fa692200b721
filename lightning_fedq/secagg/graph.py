"""Graph of pairwise masks: complete, or a ring on which a client has few neighbours, for large cohorts.

The sparse graph is the Harary graph of SecAgg+ (Bell, Bonawitz, Gascon, Lepoint, Raykova, CCS 2020). The
clients stand on a ring in an order drawn from the hash of all their keys. Each client agrees on masks with
`degree / 2` clients on either side. The paper states failure probabilities asymptotically. This module bounds
them for a finite cohort, by hypergeometric tails and a union bound.

A cohort of n has c corrupt clients and at most d dropouts. Let k = degree and t = threshold. A client's
secrets are shared with itself and its k neighbours. Against a *curious* server, c and d are fixed before the
order is drawn, so neighbours are a random sample. c is random, because the cohort is drawn
(`Colluders.law`). Each bound below holds for one c, and the stated probability is the expectation of
min(1, bound) over c. The failures are:

* A client has t corrupt neighbours, who could open its secrets: P <= n P[Hyp(n - d - 1, c, k) >= t]. The
  worst case is the shortest ring, when all d clients dropped out before it was drawn.
* The honest survivors fall into two parts, so that the server sees partial sums. This takes two disjoint
  runs of k / 2 clients on the ring that are all corrupt or gone: P <= C(n, 2) ((c + d) / n)^k, and P = 0
  if c + d < k.
* The sum is lost, because more than k - t neighbours of a client are gone or dropouts alone split the
  survivors: P <= n P[Hyp(n - 1, d, k) > k - t] + C(n, 2) (d / n)^k.

An *active* server chooses the cohort, with all the corrupt clients in it. It chooses the dropouts after it
saw the order, so only the positions of the corrupt clients are random. If the honest survivors were split,
some honest survivor would have a run of k / 2 neighbours without honest survivors. At most k / 2 + 1 +
(corrupt clients in the run) holders of its secrets would then answer. If these are fewer than t, its
self-mask stays on the sum. So a failure takes a run with t - k / 2 - 1 corrupt clients:
P <= 2 n P[Hyp(n - d - 1, c, k / 2) >= t - k / 2 - 1]. An active server can also try many rosters to find a
bad order, so 80 bits are added to the security wanted.

With the complete graph, c >= t corrupt clients open every secret, and c < t open none.

A run draws a new order in each attempt at each round. The union bound over R attempts is R times the bound
of one ring. One ring is allowed 2^-50, so 2^10 attempts stay below 2^-40.

Degree and threshold are chosen together. If t grows, the first bound and the active bound fall, and the bound
on lost sums rises. So the safe thresholds of a degree are an interval. This module takes the smallest degree
whose interval is not empty, and the lower end of the interval, because each share above t corrects one wrong
share (two at most). With t fixed at more than half (two thirds if active) of k + 1, the degree would be 548
where 234 suffice, for 1,000 clients of which 10% lie and 10% drop out.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_fedq.functional.hypergeometric import log2_choose, log2_hypergeometric
from lightning_fedq.keys.randomness import Stream, hkdf_expand, hkdf_extract, pack_fields
from lightning_fedq.privacy.collusion import Colluders

SECURITY_BITS = 40
RUN_BITS = 10
"""Every attempt at a round draws a ring: 2^10 of them together stay below 2^-40."""
GRINDING_BITS = 80
"""Security bits for the 2^80 rosters that an active server may try at each ring to find a weak order."""
CORRECTNESS_BITS = 20
_ROUNDING = 1e-4
"""Upper bound of the float64 error in log2 of a probability: log2 of 10^9! has 11 digits before the point."""


@lru_cache(maxsize=8)
def ring_order(clients: tuple[int, ...], roster_digest: bytes) -> tuple[int, ...]:
    """Return the order of the clients around the ring, drawn from the hash of all their keys.

    All clients that one process simulates share the cached tuple.
    """
    stream = Stream(hkdf_expand(hkdf_extract(b"", roster_digest), pack_fields("ring order")))
    return tuple(clients[place] for place in stream.permutation(len(clients)))


def neighbours(order: Sequence[int], degree: int, place: int) -> tuple[int, ...]:
    """Return the neighbours, sorted, of the client at one place of the ring.

    Args:
        order: The clients around the ring.
        degree: Even, or at least len(order) - 1 for the complete graph.
        place: Position in `order`.

    Examples:
        >>> neighbours([5, 1, 4, 2, 3], 2, 0)
        (1, 3)
    """
    size = len(order)
    steps = range(1, size) if degree >= size - 1 else [*range(-(degree // 2), 0), *range(1, degree // 2 + 1)]
    return tuple(sorted(order[(place + step) % size] for step in steps))


def is_free(size: int, degree: int, threshold: int, step: int) -> bool:
    """Return whether a neighbour computes its shares of an owner's secrets without a correction.

    The first threshold - 1 neighbours that follow the owner on the ring do. The count goes round the whole
    ring, so it continues with neighbours that stand before the owner.

    Args:
        size: Clients on the ring.
        degree: Neighbours of a client.
        threshold: Shares that open a secret.
        step: Places from the owner to this neighbour. Negative if it stands before the owner.
    """
    rank = step % size - 1  # 0 for the neighbour right behind the owner
    if degree < size - 1 and rank >= degree // 2:  # before the owner: skip clients that are no neighbours
        rank -= size - 1 - degree
    return rank < threshold - 1


def is_connected(order: Sequence[int], degree: int, alive: Collection[int]) -> bool:
    """Return whether the `alive` clients form a connected graph, so that masks hide every partial sum.

    The ring is not connected if and only if two or more gaps between successive survivors are wider than
    degree / 2.

    Examples:
        >>> is_connected([5, 1, 4, 2, 3], 2, {5, 1, 4})
        True
        >>> is_connected([5, 1, 4, 2, 3], 2, {5, 4, 2})
        False
    """
    if degree >= len(order) - 1:
        return True
    places = [place for place, client in enumerate(order) if client in alive]
    # the last gap leads from the last survivor round the ring to the first
    following = [*places[1:], *(place + len(order) for place in places[:1])]
    # one wide gap leaves a line, which is still connected
    return sum(b - a > degree // 2 for a, b in zip(places, following, strict=True)) < 2


def log2_tail(population: int, marked: ArrayLike, drawn: int, at_least: int) -> NDArray[np.float64]:
    """Return log2 of P[Hyp(population, marked, drawn) >= at_least], for each entry of `marked`.

    The result is -inf where the probability is 0.

    Args:
        population: Number of items.
        marked: Numbers of marked items, of any shape.
        drawn: Number of items drawn without replacement.
        at_least: Smallest number of marked items among the drawn ones.

    Raises:
        ValueError: If more items are marked or drawn than the population has, or a number is negative.

    Examples:
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
    """Return log2 of the bound C(n, 2) (gone / n)^k on the probability that the ring is split.

    The result is -inf if fewer than k clients are gone, because a split takes two runs of k / 2.
    """
    # (gone / n)^k is an upper bound of the probability for k draws without replacement
    places = np.minimum(gone, size)
    with np.errstate(divide="ignore"):  # log2(0) = -inf is right if nobody is gone
        bounds = log2_choose(size, 2) + degree * np.log2(places / size)
    return np.asarray(np.where(places < degree, -math.inf, bounds))


def security_log2(colluders: Colluders, degree: int, threshold: int, dropped: int) -> float:
    """Return log2 of the probability that server and corrupt clients see more than the sum in one attempt.

    The module's docstring derives the bound. It also holds for each client that does not collude.

    Args:
        colluders: Colluders of a cohort, with the law of their number.
        degree: Neighbours of a client.
        threshold: Shares that open a secret.
        dropped: Largest number of clients that may drop out.

    Examples:
        >>> round(security_log2(Colluders(0.02, 1000, 1000, chosen=False), 30, 16, 20))
        -65
    """
    corrupt, log2_chances = colluders.law
    if degree >= colluders.cohort - 1:
        bounds = np.where(corrupt < threshold, -math.inf, 0.0)
    else:
        bounds = _log2_exposed(colluders, corrupt, degree, threshold, dropped)
    return min(float(np.logaddexp2.reduce(log2_chances + bounds)) + _ROUNDING, 0.0)


def _log2_exposed(
    colluders: Colluders, corrupt: NDArray[np.int64], degree: int, threshold: int, dropped: int
) -> NDArray[np.float64]:
    """Return log2 of the bound for a sparse ring and each number of corrupt clients, see the module."""
    size = colluders.cohort
    others = size - dropped - 1
    few = np.minimum(corrupt, others)
    # union bound n P[Hyp(n - d - 1, c, k) >= t]. If at most k others are left, all are neighbours.
    opened = math.log2(size) + log2_tail(others, few, min(degree, others), threshold)
    if colluders.chosen:
        run = degree // 2
        # each client has two runs of k / 2, one on either side
        split = math.log2(2 * size) + log2_tail(others, few, min(run, others), threshold - run - 1)
    else:
        # without corrupt clients, the survivors see themselves that they are split and open nothing
        split = np.where(corrupt > 0, _log2_split(size, degree, corrupt + dropped), -math.inf)
    return np.where(corrupt > others, 0.0, np.minimum(np.logaddexp2(opened, split), 0.0))


def correctness_log2(size: int, degree: int, threshold: int, dropped: int) -> float:
    """Return log2 of the probability that the sum is lost if at most `dropped` random clients drop out."""
    if degree >= size - 1:
        return -math.inf if size - dropped >= threshold else 0.0
    # the owner may have dropped out, so its neighbours alone must reach the threshold
    lost = math.log2(size) + log2_tail(size - 1, dropped, degree, degree - threshold + 1)
    return min(float(np.logaddexp2(lost, _log2_split(size, degree, dropped))), 0.0)


def default_threshold(holders: int, active: bool) -> int:
    """Return the smallest threshold above half of a secret's holders, or above two thirds if `active`.

    Examples:
        >>> default_threshold(100, False), default_threshold(100, True)
        (51, 67)
    """
    return (2 * holders) // 3 + 1 if active else holders // 2 + 1


def wanted_log2(active: bool) -> int:
    """Return log2 of the failure probability that one ring may have.

    1,024 such rings in a run stay below 2^-40.
    """
    return -(SECURITY_BITS + RUN_BITS + (GRINDING_BITS if active else 0))


@lru_cache(maxsize=1024)
def safe_threshold(colluders: Colluders, degree: int, dropped: int) -> int | None:
    """Return the smallest threshold at which a graph of this degree is safe and loses few sums.

    A higher threshold makes secrets harder to open, for colluders and for the protocol. So this function
    first finds the highest threshold that loses few enough sums. If that one is not safe, no threshold is,
    and the result is None.

    Examples:
        >>> safe_threshold(Colluders(0.02, 1000, 1000, chosen=False), 60, 20)
        31
    """

    def first(low: int, high: int, holds: Callable[[int], bool]) -> int:
        """Return the smallest number in [low, high] from which on `holds` is true. It is true at `high`."""
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
    # both security bounds fall with t: if the highest threshold is not safe, none is
    return first(lowest, highest, safe) if safe(highest) else None


@lru_cache(maxsize=256)
def smallest_graph(
    colluders: Colluders, dropped: int, threshold: int | None = None
) -> tuple[int, int | None]:
    """Return the smallest safe degree and its smallest safe threshold.

    The failure probability of a ring is at most 2^-50 (2^-130 if active), and a sum is lost with probability
    at most 2^-20. If no sparse graph is safe, the result is the degree of the complete graph and `threshold`
    unchanged.

    Args:
        colluders: Colluders of a cohort.
        dropped: Number of clients that may drop out.
        threshold: Threshold of the user. None searches it together with the degree.

    Examples:
        >>> smallest_graph(Colluders(0.02, 1000, 1000, chosen=False), 20)
        (20, 13)
        >>> smallest_graph(Colluders(0.02, 50000, 1000, chosen=False), 20)
        (22, 14)
    """
    size, wanted = colluders.cohort, wanted_log2(colluders.chosen)
    for degree in range(2, size - 1, 2):
        if threshold is None:
            safe = safe_threshold(colluders, degree, dropped)
        else:
            fits = default_threshold(degree + 1, False) <= threshold <= degree + 1
            fits = fits and correctness_log2(size, degree, threshold, dropped) <= -CORRECTNESS_BITS
            fits = fits and security_log2(colluders, degree, threshold, dropped) <= wanted
            safe = threshold if fits else None
        if safe is not None:
            return degree, safe
    return size - 1, threshold
