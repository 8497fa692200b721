"""The claim of Poisson and of fixed secret cohorts against laws that are enumerated.

Outcomes are binned finely. Binning is post-processing, so every exact divergence of the bins is a lower bound
of the true divergence. The claim must not be below it, up to the rounding of floats.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import special

import lightning_fedq as fedq
from lightning_fedq.mechanisms.interface import Neighbours
from lightning_fedq.privacy.losses import GaussianLoss, PoissonGaussianLoss
from lightning_fedq.privacy.sampled import secret_epsilon

EPSILONS = np.array([-3.0, -1.0, -0.2, 0.0, 0.05, 0.3, 1.0, 2.0, 4.0])
UPDATES = (-1.0, -0.5, 0.0, 0.5, 1.0)


def cells(m, bins):
    edges = np.concatenate([[-np.inf], np.linspace(-4.5 - 3 * m, 4.5 + 3 * m, bins - 1), [np.inf]])
    return lambda mean: np.diff(special.ndtr(edges - m * mean))


def poisson(q, n):
    for there in itertools.product((0, 1), repeat=n):
        yield math.prod(q if t else 1 - q for t in there), there


def fixed(k, n):
    sets = list(itertools.combinations(range(n), k))
    for chosen in sets:
        yield 1 / len(sets), tuple(int(i in chosen) for i in range(n))


def law(cell, draws, updates):
    return sum(p * cell(sum(u for u, t in zip(updates, there, strict=False) if t)) for p, there in draws)


def claimed_epsilon(m, delta, law, clients, rounds):
    run = {"law": law, "num_clients": clients, "rounds": rounds, "neighbours": Neighbours.SUBSTITUTION}
    return secret_epsilon(GaussianLoss(0.5 / m), delta, **run)


def stick(p, q, epsilons=EPSILONS):
    return np.array([np.maximum(p - math.exp(e) * q, 0.0).sum() for e in epsilons])


@pytest.mark.parametrize("m", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("size", "clients"), [(1, 2), (1, 4), (2, 3), (3, 4)])
def test_one_poisson_round(m, size, clients):
    q = size / clients
    draws, cell = list(poisson(q, clients)), cells(m, 1500)
    alone = list(poisson(q, clients - 1))
    claimed, best = PoissonGaussianLoss(0.5 / m, q).curve(EPSILONS), np.zeros(len(EPSILONS))
    for others in itertools.product((-1.0, 0.0, 1.0), repeat=clients - 1):
        laws = [law(cell, draws, (x, *others)) for x in UPDATES] + [law(cell, alone, others)]
        for one, two in itertools.permutations(laws, 2):  # both orders; the last law is the client's absence
            found = stick(one, two)
            assert (found <= claimed + 1e-13).all()
            best = np.maximum(best, found)
    if clients == 2 or q > 0.5:
        return
    # the bound is for adversaries that know the others, so give their draws away: it is then attained
    found = stick(law(cell, list(poisson(q, 1)), (1.0,)), law(cell, list(poisson(q, 1)), (-1.0,)))
    seen = claimed > 1e-6  # the best event of smaller values lies beyond the bins
    assert (found <= claimed + 1e-13).all() and found[seen] == pytest.approx(claimed[seen], rel=2e-2)


@pytest.mark.parametrize("m", [0.7, 2.0])
@pytest.mark.parametrize("q", [0.2, 0.6])
def test_directions_in_the_plane(m, q):
    edges = np.concatenate([[-np.inf], np.linspace(-4.5 - m, 4.5 + m, 160), [np.inf]])

    def one(mean):
        return np.diff(special.ndtr(edges - mean))

    def two(x, y):
        return np.outer(one(m * x), one(m * y))

    claimed = PoissonGaussianLoss(0.5 / m, q).curve(EPSILONS)
    places = itertools.product((0.5, 1.0), np.arange(12) * math.pi / 6)
    points = [(0.0, 0.0), *((r * math.cos(a), r * math.sin(a)) for r, a in places)]
    laws = [(1 - q) * two(0, 0) + q * two(*p) for p in points]
    for a, b in itertools.permutations(laws, 2):
        assert (stick(a, b) <= claimed + 1e-13).all()


@pytest.mark.parametrize("m", [0.5, 1.5])
@pytest.mark.parametrize(("size", "clients"), [(1, 4), (2, 3)])
@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_two_adaptive_rounds(m, size, clients, kind):
    """In round two the adversary chooses, for each outcome of round one, the worst updates of all clients."""
    q = size / clients
    draws = list(poisson(q, clients) if kind == "poisson" else fixed(size, clients))
    if kind == "poisson":  # the others' draws are known to the adversary: their part is subtracted
        draws, clients_seen = list(poisson(q, 1)), 1
    else:
        clients_seen = clients
    cell = cells(m, 120)
    pairs = []
    for others in itertools.product((-1.0, 1.0) if kind == "fixed" else (0.0,), repeat=clients_seen - 1):
        laws = [law(cell, draws, (x, *others)) for x in (-1.0, 0.0, 1.0)]
        pairs += list(itertools.permutations(laws, 2))
    the_law = fedq.Poisson(size) if kind == "poisson" else fedq.FixedSize(size, secret=True)
    for epsilon in (0.2, 0.7, 1.5, 2.5):
        a, worst = math.exp(epsilon), 0.0
        for p, r in pairs:
            # (first outcome, best second pair): sum over second outcomes
            options = [np.maximum(np.outer(p, p2) - a * np.outer(r, r2), 0.0).sum(1) for p2, r2 in pairs]
            worst = max(worst, np.max(options, axis=0).sum())
        if worst < 1e-9:
            continue
        claimed = claimed_epsilon(m, worst, the_law, clients, 2)
        assert claimed >= epsilon
        if kind == "poisson":
            assert claimed <= epsilon * 1.03 + 0.01


@pytest.mark.parametrize("m", [0.5, 1.5])
@pytest.mark.parametrize("q", [(1, 4), (2, 3)])
def test_three_rounds_of_the_worst_pair(m, q):
    size, clients = q
    cell, draws = cells(m, 90), list(poisson(size / clients, 1))
    p, r = (law(cell, draws, (x,)) for x in (1.0, -1.0))

    def three(v):
        return np.einsum("i,j,k->ijk", v, v, v).ravel()

    for epsilon in (0.3, 1.0, 2.0):
        d = float(stick(three(p), three(r), [epsilon])[0])
        claimed = claimed_epsilon(m, d, fedq.Poisson(size), clients, 3)
        assert epsilon <= claimed <= epsilon * 1.05 + 0.01


def test_memory_of_the_victim_is_covered():
    """Its second update may depend on whether it took part before (the law is then no product)."""
    m, q = 1.0, 0.25
    cell = cells(m, 140)

    def joint(first, second):  # two values of the second, by the first draw
        return sum(
            (q if c else 1 - q) * np.outer(cell(first * c), (1 - q) * cell(0.0) + q * cell(second[c]))
            for c in (0, 1)
        )

    options = [joint(first, second) for first, *second in itertools.product((-1.0, 0.0, 1.0), repeat=3)]
    for epsilon in (0.2, 1.0, 2.0):
        worst = max(stick(a, b, [epsilon])[0] for a, b in itertools.permutations(options, 2))
        assert claimed_epsilon(m, worst, fedq.Poisson(1), 4, 2) >= epsilon


@pytest.mark.parametrize(("size", "clients"), [(1, 3), (2, 3), (1, 4)])
def test_cohorts_are_drawn_with_the_priced_probability(size, clients):
    """All words of the stream, one by one: the law of cohorts is the product of size / clients exactly."""
    counts = {}
    for coins in itertools.product(range(clients), repeat=clients):

        class Coins:
            def __init__(self, coins):
                self.coins = coins

            def uniform_below(self, count, bound):
                assert (count, bound) == (clients, clients)
                return np.array(self.coins)

        cohort = tuple(fedq.Poisson(size).draw_cohort(clients, 0, 0, lambda *_, coins=coins: Coins(coins)))
        counts[cohort] = counts.get(cohort, 0) + 1
    for there in itertools.product((0, 1), repeat=clients):
        members = tuple(i for i, t in enumerate(there) if t)
        assert counts.get(members, 0) == size ** len(members) * (clients - size) ** (clients - len(members))
