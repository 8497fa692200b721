"""The configuration: what it computes, and what it refuses with which cure."""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.secagg import SecAgg
from lightning_fedq.secagg.layout import sum_layout
from tests.one_round import make_context


def context(num_clients=6):
    return make_context(LDPQ(1.0), range(num_clients), (4,))


RAND = PublicRandomness(SeededKeys(0), 0)
NOBODY = {"max_colluding_fraction": 0, "max_dropped_fraction": 0}
TENTH = {"max_colluding_fraction": 0.1, "max_dropped_fraction": 0.1}
MISSING = "a sparse graph needs max_colluding_fraction and max_dropped_fraction"
TOO_MANY = r"6 corrupt clients of 10 could see .*threshold 6: up to 1\).* max_colluding_fraction <= 5 / 10$"


class Wide(LDPQ):
    """A stand-in with a stated range; only the layout is asked of it."""

    def symbol_range(self, context, rand):
        return -20, torch.tensor([20, 20, 2000, 20, 20])


class Modular(LDPQ):
    def symbol_modulus(self, context):
        return 2**12, 8


class Unbounded(LDPQ):
    def code(self, context):
        return object()


@pytest.mark.parametrize(
    ("num_clients", "active", "expected"),
    [
        (2, False, (1, 2, 2)),
        (3, False, (2, 2, 2)),
        (3, True, (2, 3, 3)),
        (10, False, (9, 6, 6)),
        (10, True, (9, 7, 7)),
        (31, True, (30, 21, 21)),
    ],
)
def test_complete_graph(num_clients, active, expected):
    assert SecAgg(active=active).rules(num_clients, num_clients) == expected


def test_sparse_graph():
    secagg = SecAgg(degree="auto", **TENTH)
    assert secagg.rules(1000, 1000) == (52, 31, 900)
    # In a small cohort six neighbours are more than the four clients that collude or are gone.
    assert secagg.rules(20, 20) == (6, 4, 18)
    assert SecAgg(degree="auto", max_colluding_fraction=0.3, max_dropped_fraction=0.3).rules(20, 20)[0] == 14
    active = SecAgg(degree="auto", active=True, **TENTH)
    assert active.rules(1000, 1000) == (234, 185, 900)  # a threshold of two thirds would take 548 neighbours
    assert SecAgg(degree=100, **TENTH).rules(1000, 1000) == (100, 51, 900)
    # One of the two is given: the other one is searched.
    assert SecAgg(degree=56, **TENTH).rules(1000, 1000) == (56, 33, 900)
    assert SecAgg(degree="auto", threshold=34, **TENTH).rules(1000, 1000)[:2] == (56, 34)


def test_the_default_is_the_smallest_graph_that_is_safe_for_what_is_said():
    """Both fractions said: the smallest for them. Else everybody, by the name that ledgers know."""
    said = {"max_colluding_fraction": 0.02, "max_dropped_fraction": 0.02}
    assert SecAgg(**said) == SecAgg(degree="auto", **said)
    assert SecAgg(**said).rules(1000, 1000) == (20, 13, 980)
    assert SecAgg(degree=None, **said).rules(1000, 1000) == (999, 501, 501)
    for unsaid in ({}, {"max_colluding_fraction": 0.02}, {"max_dropped_fraction": 0.02}):
        assert SecAgg(**unsaid) == SecAgg(degree=None, **unsaid) == replace(SecAgg(**unsaid))
        assert SecAgg(**unsaid).rules(1000, 1000)[0] == 999 and "degree=None" in repr(SecAgg(**unsaid))


@pytest.mark.parametrize(
    ("settings", "size", "match"),
    [
        ({"threshold": 1}, None, "threshold must be >= 2"),
        ({"degree": 3, **NOBODY}, None, "degree must be even"),
        ({"degree": 0, **NOBODY}, None, "degree must be even.* and >= 2, got 0"),
        ({"degree": "all", **NOBODY}, None, "must be an integer or 'auto' or None, got 'all'"),
        ({"degree": 4}, None, MISSING),
        ({"degree": 4, "max_colluding_fraction": 0.1}, None, MISSING),
        ({"max_colluding_fraction": 1.0}, None, r"max_colluding_fraction must be in \[0, 1\), got 1.0"),
        ({"max_dropped_fraction": -0.1}, None, r"max_dropped_fraction must be in \[0, 1\), got -0.1"),
        ({"simulation": "really"}, None, "simulation of SecAgg must be one of masked, counted, got"),
        ({}, 1, "cohort of 2 or more to hide in, got 1"),
        ({}, 0, "got 0"),
        ({"threshold": 11}, 10, r"threshold must be in \[6, 10\].*got 11"),
        ({"threshold": 5}, 10, "more than half of the 10 holders"),
        ({"threshold": 8, "max_dropped_fraction": 0.3}, 10, "8 of 10 clients must survive, which 3 dropouts"),
        ({"max_colluding_fraction": 0.6}, 10, TOO_MANY),
        ({"active": True, "max_colluding_fraction": 0.4}, 10, "could see .* above 1/2 .*_fraction <= 3 / 10"),
        ({"degree": 10, **TENTH}, 1000, r"above 2\^-50 a round, at degree 10"),
        ({"degree": 10, **NOBODY, "max_dropped_fraction": 0.3}, 1000, r"lose the sum.*2\^-20"),
        ({"degree": 58, "active": True, **TENTH}, 1000, r"above 2\^-130"),
    ],
)
def test_refused(settings, size, match):
    with pytest.raises(ValueError, match=match):
        SecAgg(**settings).rules(size, size)


@pytest.mark.parametrize("clients", [(1, 1, 2), (1, -2)])
def test_clients_of_terms_are_distinct(clients):
    with pytest.raises(ValueError, match="clients must be distinct integers"):
        SecAgg().terms(b"s", 0, 0, clients, sum_layout(1, 0, 1, 3), 3)


def test_one_bit_symbols_need_the_bits_of_the_cohort():
    given = LDPQ(1.0), context(100), RAND
    layout = SecAgg().layout(*given)
    assert (layout.size, layout.low, layout.high, layout.blocks[0].modulus) == (4, 0, 1, 128)
    assert SecAgg(modulus=101).layout(*given).blocks[0].modulus == 101
    with pytest.raises(ValueError, match="modulus must be above 100 x 1 = 100"):
        SecAgg(modulus=100).layout(*given)


def test_stated_ranges_and_moduli():
    layout = SecAgg().layout(Wide(epsilon_per_coordinate=1.0), context(), RAND)
    assert (layout.size, [block.width for block in layout.blocks]) == (5, [8, 14])
    layout = SecAgg().layout(Modular(epsilon_per_coordinate=1.0), context(), RAND)
    assert (layout.size, layout.blocks[0].modulus) == (8, 4096)
    with pytest.raises(ValueError, match=r"Modular sums modulo 4096, got modulus=8192. Leave modulus out"):
        SecAgg(modulus=8192).layout(Modular(epsilon_per_coordinate=1.0), context(), RAND)


def test_terms_and_digest():
    layout = sum_layout(4, 0, 1, 3)
    terms = SecAgg().terms(b"s", 3, 1, (5, 2, 9), layout, 3)
    assert (terms.cohort, terms.degree, terms.threshold) == ((2, 5, 9), 2, 2)
    digests = {
        SecAgg().terms(session, number, attempt, cohort, layout, 3).digest
        for session, number, attempt, cohort in (
            (b"s", 3, 1, (5, 2, 9)),
            (b"t", 3, 1, (5, 2, 9)),
            (b"s", 4, 1, (5, 2, 9)),
            (b"s", 3, 2, (5, 2, 9)),
            (b"s", 3, 1, (5, 2, 8)),
        )
    }
    assert len(digests) == 5
    assert SecAgg(active=True).terms(b"s", 3, 1, (5, 2, 9), layout, 3).digest not in digests


def said(secagg, rounds, clients=1000, cohort=1000):
    return secagg.guarantee(clients, cohort, rounds).statement


def test_the_report_says_how_likely_the_run_shows_more_than_sums():
    secagg = SecAgg(degree="auto", **TENTH)
    assert said(secagg, 1024).endswith("of 1024 shows more than its sum is below 2^-40")
    assert said(secagg, 25).endswith("below 2^-45.3")
    assert said(secagg, 10**6).endswith("below 2^-30")  # more rounds are more chances
    lying = said(replace(secagg, active=True), 0)
    assert lying.endswith("below 2^-52.2, if the server tries at most 2^80 rosters for each")
    assert said(SecAgg(), 25) == SecAgg().statement  # the complete graph leaves nothing to chance
    # but whom it is drawn for
    assert said(SecAgg(max_colluding_fraction=0.4), 25) == SecAgg().statement
    some = said(SecAgg(max_colluding_fraction=0.3), 25, 10000, 100)
    assert some.endswith("the chance that 51 of any of 25 collude, who open all, is below 2^-12.2")


def test_configuration_pickles():
    secagg = SecAgg(degree="auto", active=True, simulation="counted", **TENTH)
    assert pickle.loads(pickle.dumps(secagg)) == secagg
    assert np.isfinite(secagg.rules(50, 50)).all()


def test_what_is_accepted_for_an_active_server_is_accepted_for_a_curious_one():
    """1,200 settings, from all-but-empty to large cohorts, with given and chosen degrees and thresholds."""
    draw, accepted = random.Random(5), 0
    for _ in range(1200):
        cohort = draw.choice([6, 9, 16, 24, 24, 40, 60, 100])
        clients = cohort * draw.choice([1, 1, 2, 10])
        given = {
            "max_colluding_fraction": draw.choice([0.0, 0.01, 0.02, 0.05, 0.1]),
            "max_dropped_fraction": draw.choice([0.0, 0.02, 0.05, 0.1]),
            "degree": draw.choice(["auto", None, 4, 6, 8, 14, 20]),
            "threshold": draw.choice([None, None, 4, 6, 7, 9, 13]),
        }
        try:
            active = SecAgg(active=True, **given).rules(clients, cohort)
        except ValueError:
            continue
        curious = SecAgg(**given).rules(clients, cohort)
        assert curious[0] <= active[0] and curious[1] <= active[1], (given, clients, cohort)
        accepted += 1
    assert accepted > 200, accepted


def test_a_split_that_is_impossible_has_no_bound():
    """24 clients of which none is gone or colludes beyond one: six neighbours can't all be gone."""
    few = {"max_colluding_fraction": 0.02, "max_dropped_fraction": 0.02}
    for active in (False, True):
        assert SecAgg(6, 6, active=active, **few).rules(24, 24)[:2] == (6, 6)
        assert SecAgg(active=active, **few).rules(24, 24)[0] <= 6
