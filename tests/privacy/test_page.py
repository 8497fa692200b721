"""The page speaks to both readers, and no number shrinks in print."""

import math

import pytest
from scipy import stats

from lightning_fedq.functional.divergences import gaussian_mu
from lightning_fedq.mechanisms import CPA, LDPQ, SIGM, FedAvg, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.digest import ALSO, ASKED, FAILING, ORDER, WITH_MASKS, digest
from lightning_fedq.privacy.losses import GaussianLoss
from lightning_fedq.privacy.page import markdown
from lightning_fedq.privacy.verdict import format_epsilon
from tests.privacy.test_report import report


def test_markdown_speaks_to_both_readers():
    text = markdown(report(LDPQ(0.01)))
    assert text.count("\n| --- |") == 2
    assert "as likely with a client's update as with any other one, plus 1e-05" in text
    assert "exact binomial composition" in text
    assert (
        "| server behind secure aggregation | the client's update, any other | coordinate | - | ∞ | not run |"
        in text
    )
    assert "Infinite mass: the chance, over the run, of an outcome that only one of the two worlds" in text
    assert not any(name in text for name in Adversary.__members__)
    assert all(f"| {who.title} |" in text for who in Adversary)  # one name each
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "# What was protected, and from whom",
        "## What has to hold",
        "## How to read the numbers",
    ]


def test_both_tables_say_which_worlds_are_compared():
    """A row about an update and zero says what it gives for any two updates, in both tables and in words."""
    result = report(SIGM(1.0, 8.0), dim=10, clients=20, rounds=1)
    text, outsider = markdown(result), result.row(Adversary.OUTSIDER)
    assert text.count("the client's update, zero") == 2 * len(Adversary)
    assert text.count("any other |") == 0
    zero, two = map(format_epsilon, (outsider.epsilon_run, outsider.epsilon_any_two))
    shown = f"{zero} from zero, {two} between any two"
    assert text.count(shown) == 2
    assert "as with an update of zero, plus 1e-05. Between any two updates:" in text
    (line,) = (line for line in digest(result, None, masked=False) if line.adversary == "OUTSIDER")
    assert line.epsilon == two and line.when == f"epsilon {zero} between an update and zero"


def test_an_update_may_be_two_steps_from_another():
    """Towards a client two Gaussian steps are one of half the noise; an outsider's are added up."""
    result = report(SIGM(1.0, 8.0, 0.5), dim=10, clients=20, rounds=3)
    client, outsider = result.row(Adversary.CLIENT), result.row(Adversary.OUTSIDER)
    exact = spent(GaussianLoss(8.0 * math.sqrt(0.5) / 2.0), 1e-5, compositions=10, rounds=3).epsilon
    assert exact <= client.epsilon_any_two <= exact * (1 + 1e-3)
    assert 2.0 * outsider.epsilon_run < outsider.epsilon_any_two < 3.0 * outsider.epsilon_run
    other = report(LDPQ(0.1)).row(Adversary.SERVER)
    assert other.epsilon_any_two == other.epsilon_run


def test_the_verdict_is_about_any_two_updates():
    """Claimed 4 from zero is about 9 between two updates: weak, beside rows that are about any two."""
    result = report(SIGM(1.0, 3.3), dim=10, clients=20, rounds=1)
    outsider = result.row(Adversary.OUTSIDER)
    assert 3.5 < outsider.epsilon_run < 4.5 and 8.0 < outsider.epsilon_any_two < 11.0
    assert outsider.verdict == "weak"


def test_epsilon_and_delta_are_explained_as_they_are():
    notes = " ".join(report(LDPQ(0.1)).notes)
    assert "times that under the other, plus delta = 1e-05" in notes
    assert "except with chance" not in notes
    for epsilon, times in ((0.1, 111), (1.0, 16), (4.0, 6)):
        mu = gaussian_mu(epsilon, 1e-5)
        assert stats.norm.sf(epsilon / mu - mu / 2) / 1e-5 == pytest.approx(times, rel=0.08)
        assert f"{times} delta" in notes


def test_weights_are_said_to_be_public():
    text = markdown(report(LDPQ(0.1), equal_weights=False))
    assert "weights (sample counts) are public" in text


def test_printed_numbers_round_up():
    assert format_epsilon(1.2301) == "1.24"
    assert format_epsilon(0.5) == "0.5"
    assert format_epsilon(0.0) == "0"
    assert format_epsilon(math.inf) == "∞"
    assert format_epsilon(None) == "-"


def test_figures_stand_apart_from_guarantees():
    result = report(CPA(1.0))
    name, value = result.figures[0]
    assert name.startswith("k-anonymity: codebook points") and value == "1 of 2, at least"
    nested = report(CPA(1.0, stages=2, nesting=8)).figures[0][1]
    assert nested == "4 of 16, at least (stage by stage 1 of 2, 4 of 8)"
    table = markdown(result).split("| Figure, and no guarantee | value |")[1]
    assert f"| {name} | {value} |" in table
    assert "anonymity" not in result.row(Adversary.SERVER).verdict
    assert report(LDPQ(1.0)).figures == () and "Figure" not in markdown(report(LDPQ(1.0)))


# ---- the short table -----------------------------------------------------------------------------------
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
