"""A run is described whole: a field that is forgotten is an error, never the weakest adversary."""

from dataclasses import MISSING, fields, replace

import pytest

from lightning_fedq import Cyclic, DisjointOnce, FixedSize
from lightning_fedq.mechanisms import LDPQ, FedAvg, RotatedAxes
from lightning_fedq.privacy.collusion import NOBODY
from lightning_fedq.privacy.planning import make_plan_context
from lightning_fedq.privacy.run import ASSUMED, Run, Sampling, SecureSum, ThreatModel
from lightning_fedq.secagg import SecAgg

RUN = Run.ideal(LDPQ(1.0), make_plan_context(LDPQ(1.0), 4, 10), 3, ASSUMED)
OF_THREE = replace(RUN.sampling, law=FixedSize(3))
PARTS = [RUN, RUN.sampling, RUN.threat, ASSUMED]
FIELDS = [(part, field.name) for part in PARTS for field in fields(part)]


def given(part):
    return {field.name: getattr(part, field.name) for field in fields(part)}


@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_a_forgotten_field_is_an_error(part, name):
    settings = given(part)
    type(part)(**settings)
    del settings[name]
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{name}'"):
        type(part)(**settings)


@pytest.mark.parametrize("kind", [Run, Sampling, SecureSum, ThreatModel])
def test_no_field_has_a_default(kind):
    assert all(f.default is MISSING and f.default_factory is MISSING and f.kw_only for f in fields(kind))
    with pytest.raises(TypeError):
        kind(*range(len(fields(kind))))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_nobody_changes_it(part):
    with pytest.raises(AttributeError):
        setattr(part, fields(part)[0].name, None)


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        (RUN.sampling, {"dropout_probability": 1.0}, r"dropout_probability must be in \[0, 1\), got 1.0"),
        (NOBODY, {"fraction": 1.0}, r"max_colluding_fraction must be in \[0, 1\), got 1.0"),
        (NOBODY, {"fraction": -0.1}, r"max_colluding_fraction must be in \[0, 1\), got -0.1"),
        (RUN.threat, {"num_byzantine": -1}, "num_byzantine must be >= 0, got -1"),
        (RUN, {"rounds": -1}, "rounds must be >= 0, got -1"),
        (RUN.sampling, {"num_clients": 3}, "cohorts must have 1 to num_clients = 3 clients"),
        (RUN, {"sampling": OF_THREE}, "a round of 4 clients does not fit FixedSize"),
    ],
)
def test_what_contradicts_itself_is_refused(part, change, why):
    with pytest.raises(ValueError, match=why):
        replace(part, **change)


@pytest.mark.parametrize("survivors", [0, 5])
def test_survivors_are_of_the_cohort(survivors):
    sums = replace(ASSUMED, min_survivors=survivors)
    with pytest.raises(ValueError, match=f"min_survivors must be in .* got {survivors}"):
        replace(RUN, threat=replace(RUN.threat, secure_sum=sums))


def test_what_follows_from_a_run():
    drawn = replace(RUN, sampling=replace(RUN.sampling, num_clients=8, dropout_probability=0.5))
    assert (drawn.participation, drawn.horizon, drawn.max_rounds) == (0.25, 3, None)
    charged = replace(drawn, charges=[1, 2, 0, 0, 0, 0, 0, 0])
    assert (charged.participation, charged.horizon) == (1.0, 2)
    turns = replace(drawn, sampling=replace(drawn.sampling, law=Cyclic(4)))
    assert (turns.participation, turns.horizon, turns.max_rounds) == (1.0, 2, 2)
    once = replace(drawn, sampling=replace(drawn.sampling, law=DisjointOnce(4)))
    assert (once.horizon, once.max_rounds) == (1, 1)
    assert RUN.min_answers is None
    silent = replace(RUN, sampling=replace(RUN.sampling, may_be_silent=True))
    assert silent.min_answers == 1


@pytest.mark.parametrize(
    ("part", "change", "name"),
    [
        ("sampling", {"dropout_probability": 0.5}, "dropout_probability"),
        ("sampling", {"may_be_silent": True}, "clients"),
        ("sampling", {"law": FixedSize(4, secret=True), "num_clients": 8}, "cohorts"),
        ("threat", {"secure_keys": False}, "keys"),
        ("threat", {"plain_sum": False}, "mean"),
        ("threat", {"secure_sum": None}, "secure_aggregation"),
        ("threat", {"secure_sum": SecAgg(active=True).guarantee(4, 4, 3)}, "secure_aggregation"),
        ("threat", {"num_byzantine": 1}, "num_byzantine"),
    ],
)
def test_what_a_price_hangs_on_is_a_term(part, change, name):
    """Ledgers, checkpoints and journals hold these names and values: other ones would refuse older files."""
    before, other = RUN.terms, Run.ideal(LDPQ(1.0), make_plan_context(LDPQ(1.0), 3, 10), 3, ASSUMED)
    terms = {"dropout_probability": "0.0", "keys": "secure", "mean": "plain", "num_byzantine": "0"}
    assert before == {"clients_per_round": "4", "secure_aggregation": "assumed", **terms}
    after = replace(RUN, **{part: replace(getattr(RUN, part), **change)}).terms
    assert other.terms == {**before, "clients_per_round": "3"}
    assert {key for key in {**before, **after} if before.get(key) != after.get(key)} == {name}


def test_a_price_of_nothing_has_no_terms():
    assert replace(RUN, mechanism=FedAvg()).terms == {"claims": "nothing"}
    short = replace(RUN, mechanism=RotatedAxes(4.0, clip_norm=1.0))
    assert short.terms["parameters"] == "10"
