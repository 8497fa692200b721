"""The short table: what was asked for first, then what else holds, then what holds if something fails."""

import pytest

from lightning_fedq.mechanisms import FedAvg, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.digest import ALSO, ASKED, FAILING, ORDER, WITH_MASKS, digest
from tests.privacy.test_report import report


def whole(secagg, mechanism=None, **settings):
    mechanism = mechanism or RotatedCoins(1.0, epsilon=0.3)
    return report(mechanism, 1000, 500, rounds=10, secure_aggregation=secagg, **settings)


def test_what_was_asked_for_comes_first_and_what_fails_last():
    lines = digest(whole(True), Adversary.SECAGG_SERVER, masked=True)
    assert [line.group for line in lines] == [ASKED, ALSO, ALSO, FAILING, FAILING, FAILING]
    assert lines[0].adversary == "SECAGG_SERVER" and lines[0].useful
    assert {line.adversary for line in lines[1:3]} == {"CLIENT", "OUTSIDER"}
    assert all("masks are broken" in line.when and not line.useful for line in lines[3:])


@pytest.mark.parametrize("counted", [False, True])
def test_without_masks_the_server_is_there_and_the_sum_is_hypothetical(counted):
    lines = {line.adversary: line for line in digest(whole(counted), None, masked=False)}
    groups = {name: line.group for name, line in lines.items()}
    assert groups["SERVER"] == groups["EAVESDROPPER"] == groups["CLIENT"] == groups["OUTSIDER"] == ALSO
    assert groups["SERVER_AND_PARTNER"] == FAILING and groups["SECAGG_SERVER"] == WITH_MASKS
    assert ("accounted" in lines["SECAGG_SERVER"].when) == counted


def test_every_adversary_has_one_line_and_the_epsilon_of_its_row():
    """The worst of the two relations, so that lines can be read side by side."""
    one = whole(True)
    lines = digest(one, None, masked=True)
    assert sorted(line.adversary for line in lines) == sorted(member.name for member in Adversary)
    assert set(ORDER) == set(Adversary)
    for line in lines:
        row = one.row(Adversary[line.adversary])
        shown = float("inf") if line.epsilon == "∞" else float(line.epsilon)
        assert line.verdict == row.verdict
        assert shown >= max(row.epsilon_run, row.epsilon_any_two) * (1 - 1e-9)


def test_no_guarantee_says_why():
    lines = digest(whole(False, FedAvg()), None, masked=False)
    assert {line.epsilon for line in lines} == {"∞", "not run"} and not any(line.useful for line in lines)
    assert all(line.when for line in lines)


def test_with_a_seed_the_lines_are_those_of_secret_keys():
    seeded, secret = whole(True, secure_keys=False), whole(True)
    assert digest(seeded, None, masked=True) == digest(secret, None, masked=True)
