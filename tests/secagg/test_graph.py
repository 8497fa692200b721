"""The ring of neighbours: its shape, when it falls apart, and how likely."""

import math
from itertools import combinations

import pytest
from scipy.stats import hypergeom

from lightning_fedq.keys.randomness import SeededKeys, Stream
from lightning_fedq.privacy.collusion import Colluders
from lightning_fedq.secagg.graph import (
    correctness_log2,
    default_threshold,
    is_connected,
    is_free,
    log2_tail,
    neighbours,
    safe_threshold,
    security_log2,
    smallest_graph,
    wanted_log2,
)


def whole(size, corrupt, active):
    """A cohort of everybody, so many of them corrupt."""
    return Colluders(corrupt / size, size, size, active)


ORDER = [7, 3, 11, 0, 5, 2, 9, 4, 1]


def edges(degree):
    return {client: neighbours(ORDER, degree, place) for place, client in enumerate(ORDER)}


@pytest.mark.parametrize("degree", [2, 4, 6])
def test_regular_and_symmetric(degree):
    graph = edges(degree)
    for client, near in graph.items():
        assert len(near) == degree
        assert list(near) == sorted(set(near) - {client})
        assert all(client in graph[other] for other in near)


@pytest.mark.parametrize("degree", [8, 9, 100])
def test_complete(degree):
    assert all(set(near) == set(ORDER) - {client} for client, near in edges(degree).items())


@pytest.mark.parametrize("degree", [2, 4, 6, 8])
def test_connectedness_of_every_subset(degree):
    """Against a search through the graph, for all 511 sets of survivors."""
    graph = edges(degree)
    for size in range(1, 10):
        for alive in map(set, combinations(ORDER, size)):
            reached, front = set(), [min(alive)]
            while front:
                client = front.pop()
                if client not in reached:
                    reached.add(client)
                    front += set(graph[client]) & alive
            assert is_connected(ORDER, degree, alive) == (reached == alive)


@pytest.mark.parametrize(
    ("population", "marked", "drawn"), [(50, 10, 20), (999, 100, 58), (20, 0, 5), (20, 20, 5)]
)
def test_tail_against_scipy(population, marked, drawn):
    for at_least in range(drawn + 2):
        expected = hypergeom.sf(at_least - 1, population, marked, drawn)
        got = 2.0 ** log2_tail(population, marked, drawn, at_least)
        assert math.isclose(got, expected, rel_tol=1e-8, abs_tol=1e-290)
    with pytest.raises(ValueError, match="need 0 <= marked"):
        log2_tail(5, 6, 1, 1)


def test_bounds_hold_in_simulation():
    """40 clients, 5 corrupt, 3 dropouts, degree 6: how often 4,000 random orders fail, against the bounds.

    A count whose mean is at its bound passes it by 4 standard deviations with probability below 1e-4.
    """
    size, corrupt, dropped, degree, threshold, runs = 40, 5, 3, 6, 4, 4000
    stream = Stream(SeededKeys(4).public())
    unsafe = lost = 0
    bad, gone = set(range(corrupt)), set(range(corrupt, corrupt + dropped))
    alive = set(range(size)) - bad - gone
    for _ in range(runs):
        ring = stream.permutation(size)
        near = {client: set(neighbours(ring, degree, place)) for place, client in enumerate(ring)}
        opened = any(len(near[client] & bad) >= threshold for client in ring if client not in bad)
        unsafe += opened or not is_connected(ring, degree, alive)
        lost += any(degree - len(near[client] & gone) < threshold for client in ring)
    for count, log2_bound in (
        (unsafe, security_log2(whole(size, corrupt, False), degree, threshold, dropped)),
        (lost, correctness_log2(size, degree, threshold, dropped)),
    ):
        bound = 2.0**log2_bound
        assert bound < 0.2
        assert runs * bound / 20 < count < runs * bound + 4 * math.sqrt(runs * bound)


@pytest.mark.parametrize(
    ("size", "corrupt", "dropped", "active"),
    [(60, 2, 2, False), (300, 30, 30, False), (300, 6, 6, True), (479, 9, 9, True), (1000, 50, 50, True)],
)
def test_smallest_graph_is_safe_and_smallest(size, corrupt, dropped, active):
    """Against a search through every degree and threshold."""
    degree, threshold = smallest_graph(whole(size, corrupt, active), dropped)
    wanted = wanted_log2(active)
    assert wanted == (-130 if active else -50)
    for k in range(max(degree - 6, 2), degree + 1, 2):
        holds = [
            t
            for t in range(default_threshold(k + 1, active), k + 2)
            if security_log2(whole(size, corrupt, active), k, t, dropped) <= wanted
            and correctness_log2(size, k, t, dropped) <= -20
        ]
        assert safe_threshold(whole(size, corrupt, active), k, dropped) == (holds[0] if holds else None)
        assert bool(holds) == (k == degree)
        if holds:
            assert holds[0] == threshold


def test_no_ring_is_safe_for_too_many_corrupt_clients():
    assert smallest_graph(whole(100, 40, True), 10) == (99, None)
    # 60 and 10 are gone or corrupt: from degree 72 on, they can't split the ring
    assert smallest_graph(whole(100, 60, False), 10, threshold=70) == (80, 70)
    assert smallest_graph(whole(100, 70, False), 10, threshold=70) == (99, 70)


@pytest.mark.parametrize("degree", [2, 4, 6, 8, 100])
@pytest.mark.parametrize("threshold", [1, 2, 3, 5])
def test_an_owner_has_threshold_less_one_free_holders(degree, threshold):
    """They are the next ones on the ring; owner and holder say the same, whichever way they count."""
    size, graph = len(ORDER), edges(degree)
    for place, owner in enumerate(ORDER):
        steps = sorted((ORDER.index(other) - place) % size for other in graph[owner])
        free = [step for step in steps if is_free(size, degree, threshold, step)]
        assert free == steps[: threshold - 1]
        assert all(is_free(size, degree, threshold, step - size) == (step in free) for step in steps)


def test_complete_graph_is_certain():
    assert security_log2(whole(10, 5, True), 9, 6, 0) == -math.inf
    assert security_log2(whole(10, 6, True), 9, 6, 0) == 0.0
    assert correctness_log2(10, 9, 6, 4) == -math.inf
    assert correctness_log2(10, 9, 6, 5) == 0.0
    # Nobody corrupt: the survivors themselves see whether they hang together.
    assert security_log2(whole(10, 0, False), 4, 3, 5) == -math.inf
    # More corrupt clients than a ring can hold.
    assert security_log2(whole(10, 9, False), 4, 3, 2) == 0.0
