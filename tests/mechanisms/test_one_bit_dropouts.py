"""Sums of coupled bits when clients are silent: every set of silent clients, exactly, against the claims.

Six or seven clients, in pairs and alone. The law of a sum follows from the coins' thresholds and from what a
pair's words share, written down here once more; inputs are at both ends and in the centre.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_fedq.mechanisms import LDPQ, AugCorBin, CorBin
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.planning import make_plan_context

Array = NDArray[np.float64]
EPSILONS = np.array([0.0, 0.05, 0.3, 0.7, 1.5])
CASES = [
    (LDPQ(1.0), 6),
    (CorBin(1.0, None), 6),
    (CorBin(0.5, 1), 6),
    (CorBin(2.0, 3), 6),
    (AugCorBin(1.0, None, 0.4), 7),
    (AugCorBin(1.0, 2, 0.4), 6),
]


@dataclass(frozen=True)
class Pieces:
    """Shared words of a pair in pieces: the share of each, and the chance of a one of both, by value."""

    shares: Array
    first: Array
    second: Array


def pieces_of(mechanism):
    """Of words u and 1 - u, or of words whose first bits are complements of each other."""
    low, high = mechanism.coin.probabilities
    chances = np.array([low, high, 0.5])
    bits = getattr(mechanism, "shared_bits", 0)
    if bits is None:  # all that is random is shared
        ends = np.unique([0.0, *chances, *(1.0 - chances), 1.0])
        middles = 0.5 * (ends[1:] + ends[:-1])
        first = (middles < chances[:, None]).astype(float)
        return Pieces(np.diff(ends), first, (1.0 - middles < chances[:, None]).astype(float))
    cells = np.arange(2.0**bits)
    first = np.clip(chances[:, None] * len(cells) - cells, 0.0, 1.0)
    return Pieces(np.full(len(cells), 1.0 / len(cells)), first, first[:, ::-1])


def both(pieces, a, b):
    """`(pieces, 3)` mass of a piece and of the sum of two bits."""
    p, q = pieces.first[a], pieces.second[b]
    sums = [(1.0 - p) * (1.0 - q), p * (1.0 - q) + q * (1.0 - p), p * q]
    return pieces.shares[:, None] * np.stack(sums, 1)


def one(pieces, a):
    """`(pieces, 2)` mass of a piece and of one bit."""
    p = pieces.first[a]
    return pieces.shares[:, None] * np.stack([1.0 - p, p], 1)


def rest(pieces, pairs, alone):
    """Laws of what other pairs and lone clients add to a sum."""
    couples = [both(pieces, a, b).sum(0) for a, b in itertools.combinations_with_replacement(range(3), 2)]
    coins = [one(pieces, a).sum(0) for a in range(3)]
    for chosen in itertools.product(
        itertools.combinations_with_replacement(couples, pairs),
        itertools.combinations_with_replacement(coins, alone),
    ):
        law = np.ones(1)
        for other in itertools.chain(*chosen):
            law = np.convolve(law, other)
        yield law


def told(pieces, partner, pairs, alone):
    """Largest delta at every epsilon of two values of a client, whatever the others' are.

    Args:
        pieces: What a pair shares.
        partner: "there", "silent" or none, or "known": then the sum is of the others, and words are seen.
        pairs: Other pairs of which both answer.
        alone: Clients that work alone or whose partner is silent.
    """
    found = np.zeros(len(EPSILONS))
    for others in rest(pieces, pairs, alone):
        for mate in range(3) if partner == "there" else (0,):
            seen = [both(pieces, own, mate) if partner == "there" else one(pieces, own) for own in range(3)]
            if partner != "known":
                seen = [law.sum(0, keepdims=True) for law in seen]
            laws = [np.stack([np.convolve(row, others) for row in law]) for law in seen]
            for p, q in itertools.permutations(laws, 2):
                excess = np.maximum(p - np.exp(EPSILONS)[:, None, None] * q, 0.0).sum((1, 2))
                np.maximum(found, excess, out=found)
    return found


Told = dict[frozenset[int], Array]


@cache
def told_by(mechanism, num_clients, known):
    """By the set of silent clients, the most that a sum tells of anybody who answers, `known` colluding."""
    context, pieces = make_plan_context(mechanism, num_clients, 1), pieces_of(mechanism)
    mates = {c: next((d for d in g if d != c), None) for g in context.groups for c in g}
    worst = cache(lambda *setting: told(pieces, *setting))
    found = {}
    for silent in map(frozenset, subsets(num_clients)):
        there = [c for c in context.cohort if c not in silent]
        most = np.zeros(len(EPSILONS))
        for victim, curious in itertools.product(there, itertools.combinations(there, known)):
            if victim in curious:
                continue
            mate = mates[victim]
            partner = "silent" if mate is None or mate in silent else "there"
            partner = "known" if mate in curious else partner
            hiding = [c for c in there if c not in (victim, mate, *curious)]
            pairs = sum(mates[c] in hiding for c in hiding) // 2
            np.maximum(most, worst(partner, pairs, len(hiding) - 2 * pairs), out=most)
        found[silent] = most
    return found


def subsets(count):
    return itertools.chain(*(itertools.combinations(range(count), k) for k in range(count)))


def claimed(mechanism, num_clients, known):
    context = replace(make_plan_context(mechanism, num_clients, 1), num_colluding=known)
    who = Adversary.SECAGG_SERVER if known else Adversary.OUTSIDER
    return next(claim.loss for claim in mechanism.claims(context) if claim.adversary is who)


@pytest.mark.parametrize("known", [0, 1])
@pytest.mark.parametrize(("mechanism", "num_clients"), CASES, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_whoever_is_silent_a_sum_tells_no_more_than_is_claimed(mechanism, num_clients, count, known):
    loss = claimed(mechanism, num_clients, known).left_out(count)
    by_silent = told_by(mechanism, num_clients, known)
    most = np.max([found for silent, found in by_silent.items() if len(silent) <= count], 0)
    assert np.all(most <= loss.curve(EPSILONS) * (1.0 + 1e-9) + 1e-9)


@pytest.mark.parametrize(("mechanism", "num_clients"), CASES, ids=repr)
@pytest.mark.parametrize("failure", [1e-1, 1e-3])
def test_a_sum_with_random_silence_tells_no_more_than_is_claimed(mechanism, num_clients, failure):
    """Everybody is silent with chance 1/10; who is, is seen. What fails is paid for in delta."""
    sizes = [len(group) for group in make_plan_context(mechanism, num_clients, 1).groups]
    loss = claimed(mechanism, num_clients, 0).after_dropouts(sizes, 0.1, failure, 0)
    total = np.zeros(len(EPSILONS))
    for silent, found in told_by(mechanism, num_clients, 0).items():
        total += 0.1 ** len(silent) * 0.9 ** (num_clients - len(silent)) * found
    assert np.all(total <= (loss.curve(EPSILONS) + failure) * (1.0 + 1e-9))


@pytest.mark.parametrize(("mechanism", "num_clients"), [CASES[0], CASES[1], CASES[4]], ids=repr)
def test_the_claim_of_a_whole_cohort_is_met(mechanism, num_clients):
    """The comparison has teeth. With some shared bits other pairs hide a little, which no claim counts."""
    most, stated = told_by(mechanism, num_clients, 0)[frozenset()], claimed(mechanism, num_clients, 0)
    assert most[0] == pytest.approx(stated.curve(EPSILONS)[0], rel=1e-6)


@pytest.mark.parametrize(("mechanism", "num_clients"), [CASES[0], CASES[4], CASES[5]], ids=repr)
def test_a_claim_that_forgets_silence_is_below_what_a_sum_tells(mechanism, num_clients):
    """The plant: two clients are silent, and the claim is that of the whole cohort."""
    told = [most for silent, most in told_by(mechanism, num_clients, 0).items() if len(silent) == 2]
    assert np.any(np.max(told, 0) > 1.02 * claimed(mechanism, num_clients, 0).curve(EPSILONS))
