"""Noise that is missing for some updates, clients, cohorts or rounds is seen, and the report says where."""

import re

import pytest

from lightning_fedq.audit import audit
from tests.audit import input_plants as plants

NEEDS_MANY = {"NothingFromCoordinate1000", "NothingFromOneClient"}
"""Faults of one coordinate or client in a hundred or more, which each round shows once."""
PLANTS = [
    kind
    for kind in vars(plants).values()
    if isinstance(kind, type) and issubclass(kind, plants.NoisyTernary) and kind is not plants.NoisyTernary
]


def played(mechanism, draws):
    plants.LAST.clear()
    return audit(mechanism, draws)


@pytest.mark.parametrize("kind", PLANTS, ids=lambda kind: kind.__name__)
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


def test_all_of_the_noise_holds_and_the_verdict_names_what_was_tried():
    found = {finding.view: finding for finding in played(plants.NoisyTernary(1.0), 200_000)}
    assert not any(finding.alarm for finding in found.values())
    message = found["one message"]
    assert re.fullmatch(
        r"holds in 121 pairs, 4 and 200 clients, rounds 0-193, 1000-1007, bound 0\.9\d of 1", message.report
    )
    assert "A fault that doubles the loss of such a pair would not be seen there." in message.blind_spots


@pytest.mark.parametrize(
    ("kind", "updates", "place"),
    [
        (plants.NothingOnZero, "all zero", "4 clients"),
        (plants.NothingBelowOnePercent, "0.3% of the range, up", "4 clients"),
        (plants.NothingOnMiddleValues, "half of the range, up", "4 clients"),
        (plants.OnlyWhereClipped, "99.9% of the range, up", "4 clients"),
        (plants.NothingInLargeCohorts, "4 times the range, up", "200 clients"),
    ],
)
def test_the_trial_of_the_right_pair_has_the_alarm(kind, updates, place):
    found = next(f for f in played(kind(1.0), 20_000) if f.view == "one message")
    alarms = [trial for trial in found.trials if trial.alarm]
    assert any(updates in trial.pair and place in trial.alarm for trial in alarms)
    epsilon = max(float(re.search(r"epsilon is at least ([\d.]+)", trial.alarm)[1]) for trial in alarms)
    assert epsilon > 2.0
