"""Noise that clients hand on: its matrix, its integers, its claim, and when it begins anew.

Numbers marked with their formula are those of the derivation in the mechanism's own docstring, worked out
here by other means: dense solves, enumeration, and the covariance of what an engine releases.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq import Cyclic, DisjointOnce, FixedSize
from lightning_fedq.callbacks import Federated
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.noise.discrete_gaussian import discrete_gaussian
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, RootKeys, SeededKeys
from lightning_fedq.mechanisms import HandedOnGaussian, handed_on_gaussian
from lightning_fedq.mechanisms.handed_on_gaussian import (
    KEPT,
    OWN,
    TAKEN_BACK,
    HandedOnLoss,
    _share,
    square_of_matrix,
    square_of_participations,
)
from lightning_fedq.mechanisms.interface import Adversary, HandOver, NonPrivate
from lightning_fedq.privacy.accounting import Rounds, spent, spent_together
from lightning_fedq.privacy.losses import ConcentratedLoss, concentrated_epsilon
from lightning_fedq.rounds import RoundPlanner
from tests.mechanisms.test_banded_gaussian import report_of_turns
from tests.one_round import encode, make_context

Array = np.ndarray


def small(num_cohorts=3, **settings):
    given = {"clip_norm": 1.0, "local_sigma": 1.0, "granularity": 0.01, "num_cohorts": num_cohorts}
    return HandedOnGaussian(**{**given, **settings})


def own_matrix(taken_back):
    """G of one share a round: `taken_back[t]` says whether that of round t - 1 is taken back in round t."""
    return np.eye(len(taken_back)) - KEPT * np.diag(taken_back[1:].astype(float), -1)


# ---- the matrix -----------------------------------------------------------------------------------------


def rms_of_prefix_sums(kept, rounds, participations, separation):
    """Noise of a model, root mean square over rounds, for a sensitivity of 1 over a client's whole run."""
    inverse = np.eye(rounds) - kept * np.eye(rounds, k=-1)
    there = np.zeros(rounds)
    there[: participations * separation : separation] = 1.0
    squares = (np.tri(rounds) @ inverse) ** 2
    return math.sqrt(squares.sum() / rounds) * float(np.linalg.norm(np.linalg.solve(inverse, there)))


@pytest.mark.parametrize(
    ("separation", "participations", "rounds", "exact", "bound"),
    [(10, 10, 100, 5.802733, 5.870312), (10, 3, 30, 3.090362, 3.215303), (5, 20, 100, 10.248044, 10.474238)],
)
def test_turns_of_a_client_cost_a_little_more_than_one_each(separation, participations, rounds, exact, bound):
    c = np.linalg.inv(own_matrix(np.ones(rounds)))
    there = np.zeros(rounds)
    there[: participations * separation : separation] = 1.0
    assert np.linalg.norm(c @ there) == pytest.approx(exact, abs=1e-6)
    assert math.sqrt(participations * square_of_matrix(separation)) == pytest.approx(bound, abs=1e-6)


def test_no_pattern_of_participation_moves_more_than_is_charged():
    """All subsets of ten rounds of fifty: with the separation within the bound, which some reach."""
    c, beyond = np.linalg.inv(own_matrix(np.ones(50))), 0
    for separation, size in itertools.product((2, 3, 4), range(1, 6)):
        bound, most = square_of_participations(separation, size), 0.0
        assert bound < size * square_of_matrix(separation)
        for rounds in itertools.combinations(range(10), size):
            moved = float(np.square(c[:, rounds].sum(1)).sum())
            if min(np.diff(rounds), default=separation) >= separation:
                assert moved <= bound
                most = max(most, moved)
            else:
                beyond += moved > bound
        if (size - 1) * separation < 10:
            assert most == pytest.approx(bound, rel=1e-5)
    assert beyond


def test_signs_gaps_and_ends_of_blocks_move_no_more():
    """2,000 random ones, updates in several coordinates included."""
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(2000):
        separation, count = int(rng.integers(2, 6)), int(rng.integers(1, 9))
        gaps = separation + (rng.random(count - 1) < 0.3) * rng.integers(0, 4, count - 1)
        there = np.concatenate([[0], np.cumsum(gaps)]).astype(int)
        taken = np.ones(there[-1] + 40)
        taken[rng.random(len(taken)) < rng.choice([0.0, 0.0, 0.2])] = 0.0
        rows = np.zeros((len(taken), 2))
        angles = rng.choice([0.0, math.pi, 0.3], count) if rng.random() < 0.7 else np.zeros(count)
        rows[there] = np.stack([np.cos(angles), np.sin(angles)], 1)
        moved = float(np.square(np.linalg.solve(own_matrix(taken), rows)).sum())
        worst = max(worst, moved / square_of_participations(separation, count))
    assert 0.999 < worst <= 1.0 + 1e-9


PARTICIPATIONS = {  # |C u|^2 of 1, 2, 3, 5, 10 and 50, by the specification
    2: (2.777778, 9.111111, 17.72, 38.782556, 99.424670, 605.281207),
    3: (2.777778, 8.4, 15.478578, 31.508816, 74.136140, 418.383648),
    5: (2.777778, 7.376, 12.570745, 23.415225, 50.827483, 270.246750),
    10: (2.777778, 6.152079, 9.590431, 16.481629, 33.711903, 171.554180),
    20: (2.777778, 5.619607, 8.462174, 14.147326, 28.360206, 142.063248),
}


@pytest.mark.parametrize("separation", PARTICIPATIONS)
def test_participations_cost_what_their_total_does(separation):
    loss = HandedOnLoss.from_limit(square_of_matrix(separation), separation, "")
    for count, wanted in zip((1, 2, 3, 5, 10, 50), PARTICIPATIONS[separation], strict=True):
        assert loss.composed(count).rho == pytest.approx(wanted, abs=2e-6)
        assert wanted <= loss.composed(count).standalone.rho


def test_charges_are_not_added_one_by_one():
    """27.8 for 99.4, if they were: every path of an accountant goes by the total."""
    one = HandedOnLoss.from_limit(1e-3 * square_of_matrix(2), 2, "")
    whole = concentrated_epsilon(one.composed(10).rho, 1e-5)
    assert one.composed(10).rho > 3.57 * 10 * one.rho
    joined = one.composed(3).plus(one.composed(7))
    assert joined is not None
    paths = [one.epsilon(1e-5, 10), one.composed(2).epsilon(1e-5, 5), joined.epsilon(1e-5, 1)]
    paths += [spent(one, 1e-5, rounds=10).epsilon, spent_together({Rounds(one): 10}, 1e-5)]
    assert paths == pytest.approx([whole] * 5, rel=1e-9)


def test_kinds_of_rounds_of_one_stream_cost_the_limit_each():
    """Cohorts of two sizes, and something independent between them, in any order."""
    one, other = (HandedOnLoss.from_limit(scale * square_of_matrix(2), 2, "") for scale in (1e-3, 2e-3))
    beside = ConcentratedLoss(5e-3)
    wanted = concentrated_epsilon(1e-3 * square_of_matrix(2) * (3 + 2 * 2) + 5e-3, 1e-5)
    for kinds in itertools.permutations([(one, 3), (other, 2), (beside, 1)]):
        rounds = {Rounds(loss): count for loss, count in kinds}
        assert spent_together(rounds, 1e-5) == pytest.approx(wanted, rel=1e-9)
    wanted = concentrated_epsilon(one.composed(3).rho + 5e-3, 1e-5)
    assert spent_together({Rounds(beside): 1, Rounds(one): 3}, 1e-5) == pytest.approx(wanted, rel=1e-9)


def test_shares_that_are_not_taken_back_tell_no_more():
    """300 random patterns and mixtures, and updates in several coordinates: within the bound of the proof."""
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(300):
        rounds, shares, dim = rng.integers(2, 30), rng.integers(1, 6), rng.integers(1, 4)
        chance = rng.choice([0.1, 0.5, 0.9, 1.0])
        patterns = [own_matrix(rng.random(rounds) < chance) for _ in range(shares)]
        inverse = np.linalg.inv(sum(g @ g.T for g in patterns))
        lengths = rng.random(rounds) * (rng.random(rounds) < 0.5)
        rows = rng.normal(size=(rounds, dim))
        rows *= (lengths / np.maximum(np.linalg.norm(rows, axis=1), 1e-12))[:, None]
        rows = np.abs(rows) if rng.random() < 0.5 else rows
        told = float(np.trace(rows.T @ inverse @ rows))
        most = float(np.square(np.linalg.inv(own_matrix(np.ones(rounds))) @ lengths).sum()) / shares
        worst = max(worst, told / most if most else 0.0)
    assert 0.5 < worst <= 1.0 + 1e-9


# ---- integers --------------------------------------------------------------------------------------------


def gaussian_pmf(sigma):
    reach = math.ceil(13 * sigma)
    z = np.arange(-reach, reach + 1)
    weights = np.exp(-z * z / (2.0 * sigma**2))
    return dict(zip(z.tolist(), (weights / weights.sum()).tolist(), strict=True))


def law_of(*parts, reach):
    """Exact pmf on -reach .. reach of a sum of (factor, sigma) discrete Gaussians."""
    law = np.zeros(2 * reach + 1)
    law[reach] = 1.0
    for factor, sigma in parts:
        new = np.zeros_like(law)
        for value, mass in gaussian_pmf(sigma).items():
            if abs(shift := factor * value) <= reach:
                new += mass * shifted(law, shift)
        law = new
    return law


def shifted(law, by):
    found = np.zeros_like(law)
    if by >= 0:
        found[by:] = law[: len(law) - by]
    else:
        found[:by] = law[-by:]
    return found


def joint_law(share, fresh, taken, left, reach=260):
    """Exact pmf of the noise of two rounds: `taken` shares of round 0 are taken back, `left` are not."""
    number = taken + left
    first = law_of(*[(OWN, share)] * left, *[(1, fresh)] * number, reach=reach)
    second = law_of(*[(OWN, share)] * number, *[(1, fresh)] * number, reach=reach)
    wide = law_of(*[(1, share)] * taken, reach=reach)
    joint = np.zeros((2 * reach + 1, 2 * reach + 1))
    for place in np.nonzero(wide > 1e-30)[0]:
        u = int(place) - reach
        joint += wide[place] * np.outer(shifted(first, OWN * u), shifted(second, -TAKEN_BACK * u))
    return joint


def covariance(share, fresh, taken, left):
    g1, g0 = np.array([[5.0, 0.0], [-4.0, 5.0]]), 5.0 * np.eye(2)
    return share**2 * (taken * g1 @ g1.T + left * g0 @ g0.T) + (taken + left) * fresh**2 * np.eye(2)


def divergence(law, shift, order):
    """Renyi divergence of the shifted law from the law, inside of a window where nothing is cut off."""
    reach = len(law) // 2
    low = 60
    part = slice(low, 2 * reach + 1 - low)
    q = law[part, part]
    p = law[low - shift[0] : 2 * reach + 1 - low - shift[0], low - shift[1] : 2 * reach + 1 - low - shift[1]]
    kept = (q > 1e-40) & (p > 1e-40)
    return float(np.log(np.sum(p[kept] ** order * q[kept] ** (1.0 - order)))) / (order - 1.0)


def test_the_law_of_two_rounds_is_that_of_the_lattice_gaussian():
    """Enumerated: two shares, one of them not taken back. x^T Sigma^-1 x to eight digits, and the claim."""
    law, sigma = joint_law(3.0, 5.0, 1, 1), covariance(3.0, 5.0, 1, 1)
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    wanted = {
        (10, 0): (0.22237569, 0.36444444),
        (0, 10): (0.17265193, 0.22222222),
        (10, 10): (0.51933702, 0.94222222),
        (7, -3): (0.09839779, 0.27324444),
    }
    c = np.array([[1.0, 0.0], [KEPT, 1.0]])
    for shift, (exact, claimed) in wanted.items():
        x = np.array(shift, float)
        assert x @ np.linalg.solve(sigma, x) == pytest.approx(exact, abs=1e-8)
        assert divergence(law, shift, 2.0) == pytest.approx(exact, abs=2e-8)
        bound = float(np.square(c @ np.abs(x)).sum()) / (2 * 25 * 9)
        assert bound == pytest.approx(claimed, abs=1e-8) and bound > exact


@pytest.mark.parametrize("fresh", [4.0, 6.0])
def test_the_noise_is_smooth_up_to_what_is_paid_for(fresh):
    """One share of parameter 8: the largest |ln| of the exact law's ratio to the discrete Gaussian."""
    law, sigma = joint_law(8.0, fresh, 1, 0, reach=400), covariance(8.0, fresh, 1, 0)
    reach, near = len(law) // 2, 60
    w = np.arange(-near, near + 1)
    grid = np.stack(np.meshgrid(w, w, indexing="ij"), -1).astype(float)
    exponents = -0.5 * np.einsum("abi,ij,abj->ab", grid, np.linalg.inv(sigma), grid)
    logs = np.log(law[reach - near : reach + near + 1, reach - near : reach + near + 1]) - exponents
    smooth = 1.0 / (8.0**-2 + 106.0 / fresh**2)
    spread = float(logs.max() - logs.min())
    assert 1e-13 < spread <= 8.1 * 2 * math.exp(-2.0 * math.pi**2 * smooth)


def test_every_divergence_of_two_rounds_is_within_the_claim():
    """Layer A: the exact law at the mechanism's own parameters, for all shifts of its sensitivity."""
    mechanism = small(2, local_sigma=0.2)  # shares of parameter 4, the least that there is
    context = make_context(mechanism, (0, 1), (1,))
    share, fresh = mechanism.share_std, mechanism.fresh_std(context)
    assert share == 4.0
    sensitivity = 2.0 * mechanism.bound(context)
    claim = {c.adversary: c for c in mechanism.claims(context)}[Adversary.OUTSIDER]
    for taken in (0, 1, 2):
        law = joint_law(share, fresh, taken, 2 - taken, reach=700)
        for x in (20, 50):
            for order in (1.25, 2.0, 4.0):
                scale = (x / sensitivity) ** 2
                for shift in ((x, 0), (0, x)):
                    told = divergence(law, shift, order)
                    assert 0.0 < told <= claim.loss.divergence(order) * scale
    # what two rounds of a client add up to is more than twice one of them: the bound pays for that
    one = divergence(law, (50, 0), 2.0)
    assert divergence(law, (50, 50), 2.0) > 1.5 * one


def handed(mechanism, round, dim, **hand_over):
    """Cohorts (0, 1), (2, 3), (4, 5) in turn, a block since round 0."""
    own = [2 * (round % 3), 2 * (round % 3) + 1]
    after = [2 * ((round + 1) % 3), 2 * ((round + 1) % 3) + 1]
    before = [2 * ((round - 1) % 3), 2 * ((round - 1) % 3) + 1] if round else []
    pairs = {
        "since": (0, 0),
        "before": tuple(zip(own, before, strict=False)),
        "after": tuple(zip(own, after, strict=True)),
        **hand_over,
    }
    return replace(make_context(mechanism, own, (dim,), round=round), hand_over=HandOver(**pairs))


class Written:
    """Randomness whose words are written down: shares by producer and successor, and what is fresh."""

    def __init__(self, shares: dict[tuple[int, int], Array], fresh: Array) -> None:
        self._shares, self._fresh = shares, fresh

    def for_round(self, round, attempt):
        return self

    def peer(self, clients, purpose):
        return SimpleNamespace(words64=lambda count: self._shares[clients])

    def private(self, client, purpose):
        return SimpleNamespace(words64=lambda count: self._fresh)


def test_messages_are_the_integers_of_the_formula(monkeypatch):
    """Shares 3 and -2, then 1 and 4; what is fresh 1 and 0, then 0 and -2."""
    monkeypatch.setattr(handed_on_gaussian, "discrete_gaussian", lambda std, count, words: words(count))
    mechanism = small()
    shares = {(0, 2): np.array([3, -2]), (2, 4): np.array([1, 4])}
    first = mechanism._client_noise(0, handed(mechanism, 0, 2), Written(shares, np.array([1, 0])))(2)
    second = mechanism._client_noise(2, handed(mechanism, 1, 2), Written(shares, np.array([0, -2])))(2)
    assert np.array_equal(first, [16, -10]) and np.array_equal(second, [-7, 26])
    assert np.array_equal(first + second, [9, 16])


def noise_of(mechanism, keys, context, client):
    rand = ClientRandomness(keys, [client], context.round)
    found = mechanism._client_noise(client, context, rand)(padded_size(context.dim))
    return np.asarray(found)


def test_a_successor_takes_back_four_fifths_of_the_share():
    """Round 0 of client 1, and round 1 of client 3, who comes after it: its own part is what is left."""
    mechanism, keys = small(granularity=0.001, bits=24), RootKeys()
    first, second = handed(mechanism, 0, 64), handed(mechanism, 1, 64)
    alone = replace(second, hand_over=replace(second.hand_over, before=()))
    taken = noise_of(mechanism, keys, alone, 3) - noise_of(mechanism, keys, second, 3)
    assert np.all(taken % TAKEN_BACK == 0)
    share = taken // TAKEN_BACK
    fresh = noise_of(mechanism, keys, first, 1) - OWN * share
    assert np.abs(fresh).max() < 8 * mechanism.fresh_std(first) < np.abs(share).max()
    other = noise_of(mechanism, keys, alone, 2) - noise_of(mechanism, keys, second, 2)
    assert not np.array_equal(other, taken)


def test_shares_of_other_rounds_blocks_and_pairs_are_other_shares():
    mechanism, keys = small(), SeededKeys(3)

    def taken(round, since, client, before):
        context = handed(mechanism, round, 64, since=since, before=((client, before),))
        alone = replace(context, hand_over=replace(context.hand_over, before=()))
        difference = noise_of(mechanism, keys, alone, client) - noise_of(mechanism, keys, context, client)
        return tuple(difference.tolist())

    places = [(1, (0, 0)), (1, (0, 1)), (4, (0, 0)), (4, (3, 0)), (4, (3, 2))]
    found = {taken(*place, 2, 0) for place in places} | {taken(*places[0], 2, 1), taken(*places[0], 3, 0)}
    assert len(found) == 7


def test_fresh_noise_hides_the_lattice():
    """The plant: without Y, or with a Y that the successor knows, a release modulo 5 is that of -4 H."""
    mechanism = small(local_sigma=0.5)
    first, second = handed(mechanism, 0, 4096), handed(mechanism, 1, 4096)
    keys = SeededKeys(0)
    alone = replace(second, hand_over=replace(second.hand_over, before=()))
    share = (noise_of(mechanism, keys, alone, 3) - noise_of(mechanism, keys, second, 3)) // TAKEN_BACK
    low = (noise_of(mechanism, keys, first, 1) - OWN * share) % OWN
    counts = np.bincount(low, minlength=OWN)
    assert stats.chisquare(counts).pvalue > 1e-4  # false alarm 1e-4
    with_share = np.array([np.bincount(low[share % OWN == r], minlength=OWN) for r in range(OWN)])
    assert stats.chi2_contingency(with_share).pvalue > 1e-4
    plant = (noise_of(mechanism, keys, second, 3) - 0) % OWN
    bare = (OWN * np.arange(4096) - TAKEN_BACK * share) % OWN
    assert np.array_equal(bare, (-TAKEN_BACK * share) % OWN) and not np.array_equal(plant, bare)


# ---- claims ----------------------------------------------------------------------------------------------


def claims_of(mechanism, num_colluding=0, size=100):
    context = replace(make_context(mechanism, range(size), (7850,)), num_colluding=num_colluding)
    return {claim.adversary: claim for claim in mechanism.claims(context)}


@pytest.mark.parametrize(("cohorts", "factor"), [(10, 1.723028), (2, 6.3272), (5, 2.742742)])
def test_a_charge_is_that_of_the_theorem(cohorts, factor):
    """(1 + l^b) / (2 (1 - l^2) (1 - l^b)) of Delta^2 / (N 25 tau^2), Delta = 2 of the rounded norm."""
    mechanism = small(cohorts)
    context = make_context(mechanism, range(100), (7850,))
    square = (2.0 * mechanism.bound(context) / (OWN * mechanism.share_std)) ** 2
    for who, corrupt, unknown in (
        (Adversary.OUTSIDER, 0, 100),
        (Adversary.CLIENT, 0, 99),
        (Adversary.SECAGG_SERVER, 0, 100),
        (Adversary.SECAGG_SERVER, 2, 96),
    ):
        claim = claims_of(mechanism, corrupt)[who]
        assert claim.loss.limit == pytest.approx(factor * square / unknown, rel=2e-5)
        assert claim.loss.rho == pytest.approx(square / (0.72 * unknown), rel=2e-5)
        assert claim.slack.distance == 0.0 and 0.0 < claim.slack.log_ratio < 1e-9
    dropped = claims_of(replace(mechanism, max_dropped_clients=10), 2)[Adversary.SECAGG_SERVER]
    assert dropped.loss.limit == pytest.approx(factor * square / 86, rel=2e-5)


def test_who_sees_messages_is_promised_nothing():
    claims = claims_of(small())
    for who in (Adversary.SERVER, Adversary.EAVESDROPPER, Adversary.SERVER_AND_PARTNER):
        assert isinstance(claims[who].loss, NonPrivate)


def test_too_many_who_collude_leave_no_claim_rather_than_a_rough_one():
    mechanism = small()
    assert not isinstance(claims_of(mechanism, 37)[Adversary.SECAGG_SERVER].loss, NonPrivate)
    few = claims_of(mechanism, 38)[Adversary.SECAGG_SERVER].loss
    assert isinstance(few, NonPrivate) and "24 shares of a round are unknown, 25 are needed" in few.reason


def test_ten_turns_cost_what_is_said():
    """Noise of a model over the sensitivity, epsilon 2 and 8 at 1e-5, in clipped updates of the sum: with the
    closed form a ledger may stop anywhere, 1.0006 times 21.5 and 6.39; two of every hundred collude: 22.0 and
    6.52 times that."""
    for epsilon, rho in ((2.0, 0.108256), (8.0, 1.229715)):
        for corrupt, rows in ((0, {2.0: 21.53, 8.0: 6.388}), (2, {2.0: 21.97, 8.0: 6.52})):
            sigma, context = 1.0, make_context(small(10), range(100), (7850,))
            mechanism = small(10, granularity=1e-4, bits=28, local_sigma=sigma)
            claim = claims_of(mechanism, corrupt)[Adversary.SECAGG_SERVER]
            scale = math.sqrt(claim.loss.composed(10).rho / rho)  # of the noise that costs epsilon in ten
            one = np.linalg.norm(np.linalg.inv(own_matrix(np.ones(100)))[:, ::10].sum(1))
            left = rms_of_prefix_sums(KEPT, 100, 10, 10) / float(one)
            unit = scale * sigma * math.sqrt(100) * left / (2.0 * mechanism.bound(context) * 1e-4)
            assert unit == pytest.approx(1.0006 * rows[epsilon] * 1.0, rel=3e-3)


def test_hand_over_with_random_cohorts_is_refused_with_the_cure():
    with pytest.raises(ValueError, match=r"Use Cyclic\(5\) or fewer, or Di"):
        Federated(small(4), 20, cohort=4)
    with pytest.raises(ValueError, match=r"this plan has 3. Use .*5.* num_cohorts=3"):
        Federated(small(4), 20, cohort=Cyclic(6))
    with pytest.raises(ValueError, match="fixed disjoint cohorts, got FixedSize"):
        RoundPlanner(20, 0, FixedSize(5)).successors(0)
    for law in (DisjointOnce(5), Cyclic(5)):
        Federated(small(4), 20, cohort=law)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_second_attempt_with_the_same_shares_is_refused_with_the_cure(attempt):
    mechanism = small()
    context = handed(mechanism, 1, 64)
    assert context.hand_over is not None
    with pytest.raises(ValueError, match=r"Begin a new block: since=\(1, 1\) and no predecessors"):
        replace(context, attempt=1)
    cured = replace(context.hand_over, since=(1, attempt), before=())
    fresh = replace(context, attempt=attempt, hand_over=cured)
    assert encode(mechanism, torch.zeros(2, 64), fresh).symbols.shape == (2, 64)
    with pytest.raises(ValueError, match="first of its block"):
        replace(fresh, hand_over=replace(cured, before=context.hand_over.before))


def test_one_share_goes_to_one_client_of_another_cohort():
    with pytest.raises(ValueError, match="each client may be in one pair"):
        HandOver((0, 0), (), ((0, 2), (1, 2)))
    with pytest.raises(ValueError, match="each client may be in one pair"):
        HandOver((0, 0), ((0, 2), (0, 3)))
    with pytest.raises(ValueError, match="a pair must have one client of this cohort, got client"):
        handed(small(), 1, 64, after=((2, 3), (3, 4)))
    with pytest.raises(ValueError, match="a pair must have one client of this cohort, got client"):
        handed(small(), 1, 64, before=((5, 0),))


# ---- plants ----------------------------------------------------------------------------------------------


def test_what_a_share_is_named_by():
    """Producer, block, round and attempt, and the pair: with any of them left out two shares would be one."""
    mechanism, keys, seen = small(), SeededKeys(9), set()
    rand = {r: ClientRandomness(keys, [0], r) for r in (0, 1)}
    rand[2] = ClientRandomness(keys, [0], 0, 1)
    for producer, successor in ((0, 1), (1, 0), (0, 2)):
        for since in ((0, 0), (0, 1)):
            for stream in rand.values():
                seen.add(_share(producer, successor, since, stream)(2).tobytes())
    assert len(seen) == 3 * 2 * 3
    assert mechanism.reuses_noise
    draws = discrete_gaussian(4.0, 8, _share(0, 1, (0, 0), rand[0]))
    assert np.array_equal(draws, discrete_gaussian(4.0, 8, _share(0, 1, (0, 0), rand[0])))


def test_a_report_pays_for_the_turns_of_a_client():
    mechanism = small(10)
    report = report_of_turns(mechanism)
    rho = claims_of(mechanism)[Adversary.OUTSIDER].loss.composed(10).rho
    orders = np.linspace(1.01, 60, 20000)
    bounds = rho * orders + np.log1p(-1 / orders) - (math.log(1e-5) + np.log(orders)) / (orders - 1)
    wanted = float(bounds.min())
    assert report.row(Adversary.OUTSIDER).epsilon_run == pytest.approx(wanted, rel=1e-4)
    assert report.row(Adversary.SERVER).verdict == "no guarantee"


def test_public_randomness_decodes_the_sum():
    """Behind masks the server holds the modular sum and public streams, and nothing else."""
    mechanism, keys = small(granularity=0.001, bits=24), SeededKeys(2)
    context = handed(mechanism, 1, 50)
    update = torch.full((2, 50), 0.05)
    rand = ClientRandomness(keys, context.cohort, 1)
    symbols = mechanism.encode(update, context, rand).symbols.long()
    total = symbols.sum(0) % (1 << 24)
    decoded = mechanism.decode(total, context.cohort, context, PublicRandomness(keys, 1))
    each = mechanism.decode(symbols, context.cohort, context, PublicRandomness(keys, 1))
    assert torch.equal(decoded, each)
    assert float((decoded - 0.1).abs().mean()) < 5 * mechanism.local_sigma * math.sqrt(2 * 1.64)
