"""Noise that is missing for some updates, clients, cohorts or rounds is seen, and the report says where."""

import re

import pytest

from lightning_fedq.audit import audit
from lightning_fedq.mechanisms.contract_suite import RULES, BrokenContractError, check_mechanism
from tests.audit import input_plants as plants

NEEDS_MANY = {
    "NothingFromCoordinate1000",
    "NothingFromOneClient",
    "NothingInEvery30thRound",
    "NoiseOfTheRoundBefore10",
    "OppositeNoiseOfNeighbours",
}
"""Faults of few coordinates, clients, rounds or pairs of clients, which a round shows once."""
WHOLE = plants.NoisyTernary, plants.NoisySum
PLANTS = [
    kind
    for kind in vars(plants).values()
    if isinstance(kind, type) and issubclass(kind, plants.NoisyTernary) and kind not in WHOLE
]


def played(mechanism, draws):
    plants.LAST.clear()
    return audit(mechanism, draws)


OFTEN = PLANTS[:5] + PLANTS[6:12] + [plants.SameNoiseForAll, plants.ForgetsTheRange, plants.NothingOnLateSums]
"""Plants of the fast tests. The first seven are those of a report of November 2026."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in OFTEN)) for kind in PLANTS],
    ids=lambda kind: kind.__name__,
)
def test_noise_that_is_missing_somewhere_is_refuted(kind):
    findings = played(kind(1.0), 400_000 if kind.__name__ in NEEDS_MANY else 20_000)
    reports = [finding.report for finding in findings if finding.alarm]
    assert reports
    # two updates, the outputs, both frequencies, and what follows from them
    sentence = (
        r"refuted: .*update '[^']+' gives .+ with frequency [01]\.\d{4}, update '[^']+' with frequency "
        r"[01]\.\d{4} \(\d+ and \d+ draws\)\. So (epsilon|delta).* is at least [\d.e-]+, and the claim is"
    )
    assert all(re.match(sentence, report) for report in reports), reports


def test_all_of_the_noise_of_a_sum_holds():
    assert {finding.verdict for finding in audit(plants.NoisySum(1.0), 20_000)} == {"holds"}


def test_all_of_the_noise_holds_and_the_verdict_names_what_was_tried():
    found = {finding.view: finding for finding in played(plants.NoisyTernary(1.0), 50_000)}
    assert not any(finding.alarm for finding in found.values())
    message = found["one message"]
    assert re.fullmatch(
        r"holds in 172 pairs, 1, 4 and 201 clients, rounds 0-47, 1000-1007, bound 0\.9\d of 1", message.report
    )
    assert "A fault that doubles the loss of such a pair would not be seen there." in message.blind_spots


@pytest.mark.parametrize(
    ("kind", "updates", "place"),
    [
        (plants.NothingOnZero, "all zero", "clients"),
        (plants.NothingBelowOnePercent, "0.3% of the range, up", "clients"),
        (plants.NothingOnMiddleValues, "half of the range, up", "clients"),
        (plants.OnlyWhereClipped, "99.9% of the range, up", "clients"),
        (plants.NothingInLargeCohorts, "4 times the range, up", "201 clients"),
    ],
)
def test_the_trial_of_the_right_pair_has_the_alarm(kind, updates, place):
    found = next(f for f in played(kind(1.0), 20_000) if f.view == "one message")
    alarms = [trial for trial in found.trials if trial.alarm]
    assert any(updates in trial.pair and place in trial.alarm for trial in alarms)
    epsilon = max(float(re.search(r"epsilon is at least ([\d.]+)", trial.alarm)[1]) for trial in alarms)
    assert epsilon > 2.0


UNSEEN_BY_THE_CONTRACT = {
    "NothingFromCoordinate1000",
    "NothingFromOneClient",
    "NothingInASecondAttempt",
    "NothingForOneClientAlone",
    "ForgetsTheRange",
    "NothingOnShortLayers",
    "NothingInEvery30thRound",
    "OppositeNoiseOfNeighbours",
}
"""The rules play 96 coordinates, two cohorts and four rounds, and count clients and layers together."""


@pytest.mark.parametrize(
    "kind",
    [plants.NoisyTernary, *(kind for kind in PLANTS if not issubclass(kind, plants.NoisySum))],
    ids=lambda kind: kind.__name__,
)
def test_the_contract_names_the_inputs_and_the_output(kind):
    plants.LAST.clear()
    rules = "noise_for_every_input", "noise_is_never_reused"
    if kind is plants.NoisyTernary or kind.__name__ in UNSEEN_BY_THE_CONTRACT:
        check_mechanism(kind(1.0), rules)
        return
    with pytest.raises(BrokenContractError) as told:
        check_mechanism(kind(1.0), rules)
    if kind in (plants.NoiseFromTheUpdate, plants.NoiseOfTheRoundBefore10):
        assert re.search(r"rounds 0 and 1(000)?, \d\d\.\d+% of all symbols are equal", str(told.value))
        return
    assert re.search(
        r"with \d+ clients, round \d+, update '.+' gives symbol -?\d+ with frequency [01]\.\d{4}, and update "
        r"'.+' with frequency [01]\.\d{4}\. This is epsilon [\d.]+ or more, and the claim is epsilon 1\.",
        str(told.value),
    )


def test_the_plants_meet_all_other_rules():
    """So the rules about noise are those that see them."""
    others = [name for name in RULES if not name.startswith("noise_")]
    for kind in (plants.NoisyTernary, plants.NothingOnZero, plants.NothingForSmallClients):
        check_mechanism(kind(1.0), others)
