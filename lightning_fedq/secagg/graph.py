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
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache

SECURITY_BITS = 40
GRINDING_BITS = 80
"""An active server is given 2^80 tries at a roster whose order suits it."""
CORRECTNESS_BITS = 20


def neighbours(order: Sequence[int], degree: int, place: int) -> tuple[int, ...]:
    """Return the neighbours, sorted, of the client at one place of the ring.

    Args:
        order: The clients around the ring.
        degree: Even, or at least len(order) - 1 for the complete graph.
        place: Position in `order`.
    """
    size = len(order)
    steps = range(1, size) if degree >= size - 1 else [*range(-(degree // 2), 0), *range(1, degree // 2 + 1)]
    return tuple(sorted(order[(place + step) % size] for step in steps))


def is_connected(order: Sequence[int], degree: int, alive: Collection[int]) -> bool:
    """Do the `alive` clients hang together, so that their masks hide every partial sum?

    On the ring that fails iff two or more of the gaps between neighbouring survivors are wider than degree /
    2.
    """
    if degree >= len(order) - 1:
        return True
    places = [place for place, client in enumerate(order) if client in alive]
    following = [*places[1:], *(place + len(order) for place in places[:1])]
    return sum(b - a > degree // 2 for a, b in zip(places, following, strict=True)) < 2


def _log2_choose(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def log2_tail(population: int, marked: int, drawn: int, at_least: int) -> float:
    """log2 of P[Hyp(population, marked, drawn) >= at_least]. -inf where it can't happen.

    Raises:
        ValueError: If more are marked or drawn than there are.
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
    return min(top + math.log2(sum(2.0 ** (term - top) for term in terms)), 0.0)


def _log2_add(*terms: float) -> float:
    top = max(terms)
    return top if top == -math.inf else top + math.log2(sum(2.0 ** (term - top) for term in terms))


def _log2_split(size: int, degree: int, gone: int) -> float:
    return _log2_choose(size, 2) + degree * math.log2(min(gone, size) / size) if gone else -math.inf


def security_log2(size: int, degree: int, threshold: int, corrupt: int, dropped: int, active: bool) -> float:
    """log2 of the chance that a graph lets the server and the corrupt clients see more than the sum.

    The module's docstring derives the bound; with the complete graph it is 0 or 1.
    """
    if degree >= size - 1:
        return -math.inf if corrupt < threshold else 0.0
    others = size - dropped - 1
    if corrupt > others or degree > others:
        return 0.0
    opened = math.log2(size) + log2_tail(others, corrupt, degree, threshold)
    if active:
        run = degree // 2
        split = math.log2(2 * size) + log2_tail(others, corrupt, run, threshold - run - 1)
    else:
        # With nobody corrupt the survivors themselves see that they are split, and nothing is opened.
        split = _log2_split(size, degree, corrupt + dropped) if corrupt else -math.inf
    return min(_log2_add(opened, split), 0.0)


def correctness_log2(size: int, degree: int, threshold: int, dropped: int) -> float:
    """log2 of the chance that the sum is lost although at most `dropped` clients, at random, drop out."""
    if degree >= size - 1:
        return -math.inf if size - dropped >= threshold else 0.0
    lost = math.log2(size) + log2_tail(size - 1, dropped, degree, degree - threshold + 1)
    return min(_log2_add(lost, _log2_split(size, degree, dropped)), 0.0)


def default_threshold(holders: int, active: bool) -> int:
    """More than half of the holders of a secret. More than two thirds against an active server."""
    return (2 * holders) // 3 + 1 if active else holders // 2 + 1


@lru_cache(maxsize=256)
def smallest_degree(size: int, corrupt: int, dropped: int, active: bool) -> int:
    """Smallest safe degree: failure below 2^-40 (2^-120 if active), lost sums below 2^-20. Or size - 1."""
    wanted = -SECURITY_BITS - (GRINDING_BITS if active else 0)
    for degree in range(2, size - 1, 2):
        threshold = default_threshold(degree + 1, active)
        if (
            correctness_log2(size, degree, threshold, dropped) <= -CORRECTNESS_BITS
            and security_log2(size, degree, threshold, corrupt, dropped, active) <= wanted
        ):
            return degree
    return size - 1
