"""Who knows what: clean mechanisms hide with all that an adversary holds fixed, planted ones do not."""

import numpy as np
import pytest
from scipy import stats

import lightning_fedq as fedq
from lightning_fedq import mechanisms
from lightning_fedq.audit import bench
from lightning_fedq.audit.cases import audit_cases
from lightning_fedq.audit.knowledge import SEGMENTS, audit_knowledge, estimates, mean_bounds
from lightning_fedq.commands.mechanism_row import example
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate
from tests.audit import plants
from tests.contract.test_mechanisms import ROWS
from tests.one_round import make_context

DIM = sum(SEGMENTS)
WHOLE = (fedq.RotatedAxes,)
EXAMPLES = [
    audit_cases(example(getattr(mechanisms, name)), DIM)[0].mechanism for name in mechanisms.__all__
] + [row for row in ROWS if isinstance(row, fedq.CPA)]


def claimed(mechanism, num_clients=4):
    context = make_context(mechanism, range(num_clients), (DIM,))
    return [c.adversary for c in mechanism.claims(context) if not isinstance(c.loss, NonPrivate)]


def some(mechanisms_):
    """One CPA that sends some of its blocks is enough."""

    def again(one):
        return getattr(one, "epsilon_scope", "") == "round"

    return [pytest.param(one, marks=[pytest.mark.slow] * again(one), id=repr(one)) for one in mechanisms_]


@pytest.mark.parametrize("mechanism", some(ROWS))
def test_what_is_not_held_is_enough_to_hide(mechanism):
    """A false alarm has probability 1e-4 a mechanism for any seed; none for this one.

    So few repetitions do for a stream that is held by mistake; `test_where_everything_is_held_nothing_hides`.
    """
    findings = audit_knowledge(mechanism, 16, cells=200, repetitions=20)
    assert [finding for finding in findings if finding.alarm] == []
    assert bool(findings) == bool(claimed(mechanism))


def granted(mechanism):
    """Adversaries whose claim grants as much as the coins themselves, so that nothing more can be seen.

    A coupled coin counts as known, but for the sums of AugCorBin; several bits behind one decoded coordinate
    add up to a claim that grants nearly everything, where one message is held to its bits.
    """
    if isinstance(mechanism, fedq.CorBin):
        return set(Adversary) - {Adversary.EAVESDROPPER}
    if isinstance(mechanism, fedq.CPA) and (mechanism.stages > 1 or mechanism.lattice != "Z"):
        return {Adversary.CLIENT, Adversary.OUTSIDER}
    if isinstance(mechanism, fedq.CPA) and mechanism.epsilon_scope != "bit":
        return {Adversary.CLIENT, Adversary.OUTSIDER}
    return set()


@pytest.mark.parametrize("mechanism", some(EXAMPLES))
def test_where_everything_is_held_nothing_hides(mechanism, monkeypatch):
    """The power of the test, mechanism by mechanism and claim by claim: nothing is left to hide behind."""
    monkeypatch.setattr(bench.HeldKeys, "_select_keys", lambda keys, known: keys._held)
    # a direction changes most between two worlds, and takes longest
    cells = 80 if isinstance(mechanism, WHOLE) else 400
    findings = audit_knowledge(mechanism, 16, cells=cells)
    found = {finding.view.split(", ")[-1] for finding in findings if finding.alarm}
    expected = set(claimed(mechanism)) - granted(mechanism)
    assert {who.name.lower() for who in expected} <= found


ALONE = {"num_clients": 1, "trials": 256, "cells": 1000}
"""A and B of the aggregate Gaussian are seen best in a cohort of one, whose noise is uniform given them."""
MANY = {"trials": 16, "cells": 2000}


@pytest.mark.parametrize(
    ("plant", "adversary", "options"),
    [
        (plants.NoiseSharedWithTheServer(1.0, 1 / 14), Adversary.SERVER, {}),
        (plants.PublicSelection(1.0, 1.0, 0.5), Adversary.OUTSIDER, MANY),
        (plants.PublicSelectionOfCSGM(1.0, 1.0, 0.5), Adversary.OUTSIDER, MANY),
        (plants.ModularNoiseSharedWithTheServer(1.0, 1 / 14, 0.01), Adversary.SERVER, {}),
        (plants.PublicMixture(1.0, 1 / 14, entropy_code="elias"), Adversary.OUTSIDER, ALONE),
        (plants.PublicNoise(1.0, 1.0, 0.5), Adversary.OUTSIDER, MANY),
    ],
    ids=["F", "G", "G, CSGM", "H", "I", "J"],
)
def test_streams_that_the_adversary_holds_are_caught(plant, adversary, options):
    """And the clean twin is silent under the same options."""
    (found,) = audit_knowledge(plant, against=[adversary], **options)
    assert "with all keys of the adversary fixed" in found.alarm
    clean = type(plant).__bases__[-1](**vars(plant))
    (found,) = audit_knowledge(clean, against=[adversary], **options)
    assert not found.alarm


def test_nothing_claimed_is_nothing_audited():
    assert audit_knowledge(fedq.FedAvg()) == ()
    with pytest.raises(ValueError, match="multiple of 4"):
        audit_knowledge(fedq.LDPQ(1.0), 6)


# ---- the bound -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hits", "cells"), [(0, 400), (200, 400), (400, 400), (13, 1000)])
def test_the_bounds_of_a_mean_are_chernoff_s_and_wider_than_exact_ones(hits, cells):
    """For zeros and ones the exact bounds are Clopper and Pearson's; equal at the ends."""
    alpha = 1e-4
    lower, upper = mean_bounds(hits / cells, -np.log(alpha) / cells)
    assert lower <= (stats.beta.ppf(alpha, hits, cells - hits + 1) if hits else 0.0) + 1e-12
    assert upper >= (stats.beta.ppf(1 - alpha, hits + 1, cells - hits) if hits < cells else 1.0) - 1e-12
    for bound in (lower, upper):
        if 0.0 < bound < 1.0 and 0 < hits < cells:
            rate = stats.entropy([hits / cells, 1 - hits / cells], [bound, 1 - bound])
            assert rate == pytest.approx(-np.log(alpha) / cells, rel=1e-6)
    assert mean_bounds(0.0, 0.01) == pytest.approx((0.0, 1 - np.exp(-0.01)))


def test_a_true_claim_on_the_average_is_never_refuted():
    """A word that is known half of the time, delta(0) = 1/2: 300 trials, none above the bound."""
    generator, above = np.random.default_rng(0), 0
    alpha, cells, trials = 1e-3, 500, 16
    labels = np.tile((np.arange(trials) % 2)[:, None], (1, cells))
    for _ in range(300):
        known = generator.random(cells) < 0.5
        values = np.where(known, labels, generator.integers(0, 2, (trials, cells))).astype(float)
        own, other = estimates(values, labels, [0.0])
        exponent = -np.log(alpha / 8) / cells
        for mine, theirs in zip(own.ravel(), other.ravel(), strict=True):
            above += mean_bounds(mine, exponent)[0] - mean_bounds(theirs, exponent)[1] > 0.5
        assert own.max() - other[own == own.max()].min() > 0.3  # it is no empty test
    assert above == 0
