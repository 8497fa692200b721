"""Who masks with whom: the complete graph, or a ring of a few neighbours for large cohorts.

The sparse graph is the Harary graph of SecAgg+ (Bell, Bonawitz, Gascon, Lepoint, Raykova, CCS 2020):
the clients stand on a ring in an order drawn from the hash of all their keys, and each one shares keys
with `degree / 2` on either side. Its failure probabilities are bounded here for a finite cohort, by
hypergeometric tails and a union bound, in place of the asymptotic statement of the paper.

Let a cohort of n have at most c corrupt clients and d dropouts, and k = degree, t = threshold; a client's
secrets are shared with itself and its k neighbours. Against a *curious* server, c and d are fixed before the
order is drawn, so neighbours are a random sample. What must not happen:

* a client has t corrupt neighbours, who could open its secrets: P <= n P[Hyp(n - d - 1, c, k) >= t], the ring
  being shortest when all d are gone before it is drawn;
* the honest survivors fall into two parts, whose partial sums would show. That takes two disjoint runs of
  k / 2 clients on the ring that all are corrupt or gone: P <= C(n, 2) ((c + d) / n)^k;
* more than k - t neighbours of a client are gone, or the survivors are split without the corrupt ones' help,
  so that the sum is lost: P <= n P[Hyp(n - 1, d, k) > k - t] + C(n, 2) (d / n)^k.

An *active* server chooses who "drops out" after it saw the order. Then only corrupt clients are random. If
the honest survivors were split, some honest survivor would have a run of k / 2 neighbours without any; at
most k / 2 + 1 + (corrupt ones in the run) holders of its secrets would answer, so with fewer than t of them
its self-mask stays on the sum. It takes a run with t - k / 2 - 1 corrupt clients: P <= 2 n P[Hyp(n - d - 1,
c, k / 2) >= t - k / 2 - 1]. And as it can try many rosters for a bad order, 80 bits are added to the security
wanted.

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

SECURITY_BITS = 40
RUN_BITS = 10
"""Every attempt at a round draws a ring: 2^10 of them together stay below 2^-40."""
GRINDING_BITS = 80
"""An active server is given 2^80 tries, at each ring, at a roster whose order suits it."""
CORRECTNESS_BITS = 20


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


def _log2_choose(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def log2_tail(population: int, marked: int, drawn: int, at_least: int) -> float:
    """log2 of P[Hyp(population, marked, drawn) >= at_least]. -inf where it can't happen.

    Raises:
        ValueError: If more are marked or drawn than there are.

    Example:
        >>> round(log2_tail(1000, 20, 60, 10), 1)
        -24.9
    """
    if not (0 <= marked <= population and 0 <= drawn <= population):
        raise ValueError(f"need 0 <= marked, drawn <= population, got {marked}, {drawn}, {population}")
    low, high = max(at_least, 0, marked + drawn - population), min(marked, drawn)
    if at_least <= max(0, marked + drawn - population):
        return 0.0
    total = _log2_choose(population, drawn)
    terms = [
        _log2_choose(marked, i) + _log2_choose(population - marked, drawn - i) - total
        for i in range(low, high + 1)
    ]
    if not terms:
        return -math.inf
    top = max(terms)
    return min(top + math.log2(sum(2.0 ** (term - top) for term in terms)), 0.0)  # rounding may exceed 1


def _log2_add(*terms: float) -> float:
    top = max(terms)
    return top if top == -math.inf else top + math.log2(sum(2.0 ** (term - top) for term in terms))


def _log2_split(size: int, degree: int, gone: int) -> float:
    # (gone / n)^k is above the chance of k draws without replacement
    return _log2_choose(size, 2) + degree * math.log2(min(gone, size) / size) if gone else -math.inf


def security_log2(size: int, degree: int, threshold: int, corrupt: int, dropped: int, active: bool) -> float:
    """log2 of the chance that a graph lets the server and the corrupt clients see more than the sum.

    The module's docstring derives the bound; with the complete graph it is 0 or 1.

    Example:
        >>> round(security_log2(1000, 60, 31, 20, 20, False))
        -260
    """
    if degree >= size - 1:
        return -math.inf if corrupt < threshold else 0.0
    others = size - dropped - 1
    if corrupt > others or degree > others:
        return 0.0
    # n P[Hyp(n - d - 1, c, k) >= t]: a union bound
    opened = math.log2(size) + log2_tail(others, corrupt, degree, threshold)
    if active:
        run = degree // 2
        # two runs of k / 2 a client, one on either side
        split = math.log2(2 * size) + log2_tail(others, corrupt, run, threshold - run - 1)
    else:
        # With nobody corrupt the survivors themselves see that they are split, and nothing is opened.
        split = _log2_split(size, degree, corrupt + dropped) if corrupt else -math.inf
    return min(_log2_add(opened, split), 0.0)


def correctness_log2(size: int, degree: int, threshold: int, dropped: int) -> float:
    """log2 of the chance that the sum is lost although at most `dropped` clients, at random, drop out."""
    if degree >= size - 1:
        return -math.inf if size - dropped >= threshold else 0.0
    # the owner may be gone itself, so its neighbours alone must reach the threshold
    lost = math.log2(size) + log2_tail(size - 1, dropped, degree, degree - threshold + 1)
    return min(_log2_add(lost, _log2_split(size, degree, dropped)), 0.0)


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
def safe_threshold(size: int, degree: int, corrupt: int, dropped: int, active: bool) -> int | None:
    """Smallest threshold at which a graph of this degree is safe and loses few sums. None is none.

    A higher threshold makes secrets harder to open, for those who may not and for those who should; so the
    highest one that loses few enough sums tells whether there is any.

    Example:
        >>> safe_threshold(1000, 60, 20, 20, False)
        31
    """

    def first(low: int, high: int, holds: Callable[[int], bool]) -> int:
        """Smallest number in [low, high] from which on it holds, given that it holds at `high`."""
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return high

    def loses(threshold: int) -> bool:
        return correctness_log2(size, degree, threshold, dropped) > -CORRECTNESS_BITS

    def safe(threshold: int) -> bool:
        return security_log2(size, degree, threshold, corrupt, dropped, active) <= wanted_log2(active)

    lowest = default_threshold(degree + 1, active)
    if loses(lowest):
        return None
    # degree + 2 always loses, so the search has an end
    highest = first(lowest, degree + 2, lambda threshold: threshold > degree + 1 or loses(threshold)) - 1
    # both bounds fall with t: if the highest is not safe, none is
    return first(lowest, highest, safe) if safe(highest) else None


@lru_cache(maxsize=256)
def smallest_graph(
    size: int, corrupt: int, dropped: int, active: bool, threshold: int | None = None
) -> tuple[int, int]:
    """Smallest safe degree, and the smallest safe threshold at it. Else the complete graph's.

    The failure probability is below 2^-50 a ring (2^-130 if active), a sum is lost with less than 2^-20.

    Args:
        size: Clients of a cohort.
        corrupt: How many may collude with the server.
        dropped: How many may drop out.
        active: The server may lie.
        threshold: One that is given; None searches it with the degree.

    Example:
        >>> smallest_graph(1000, 20, 20, False)
        (20, 13)
    """
    for degree in range(2, size - 1, 2):
        if threshold is None:
            found = safe_threshold(size, degree, corrupt, dropped, active)
        else:
            fits = default_threshold(degree + 1, False) <= threshold <= degree + 1
            fits = fits and correctness_log2(size, degree, threshold, dropped) <= -CORRECTNESS_BITS
            fits = fits and (
                security_log2(size, degree, threshold, corrupt, dropped, active) <= wanted_log2(active)
            )
            found = threshold if fits else None
        if found is not None:
            return degree, found
    return size - 1, default_threshold(size, active) if threshold is None else threshold
