"""The page speaks to both readers, and no number shrinks in print."""

import math

import pytest
from scipy import stats

from lightning_fedq.functional.divergences import gaussian_mu
from lightning_fedq.mechanisms import LDPQ, SIGM
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.document import report_rows
from lightning_fedq.privacy.losses import GaussianLoss
from lightning_fedq.privacy.verdict import format_epsilon
from tests.described import page as markdown
from tests.privacy.test_report import report


def test_the_page_speaks_to_both_readers():
    text = markdown(report(LDPQ(0.01)))
    assert "exact binomial composition" in text
    assert "Infinite mass: the probability, over the run, of an outcome that only one of the two" in text
    assert "two inputs can produce" in text
    assert not any(name in text for name in Adversary.__members__)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "# What this run will protect, and from whom",
        "## Who learns how much",
        "## What has to hold",
        "## Of which run",
        "## The guarantee in detail",
        "## Figures to check",
        "## What each row means",
        "## What has to hold, in full",
        "## Who sees what",
        "## How to read the numbers",
    ]


def test_a_row_about_zero_says_what_it_gives_for_any_two_updates():
    result = report(SIGM(1.0, 8.0), dim=10, clients=20, rounds=1)
    text, outsider = markdown(result), result.row(Adversary.OUTSIDER)
    assert text.count("the client's update, zero") == len(Adversary)
    zero, two = map(format_epsilon, (outsider.epsilon_run, outsider.epsilon_any_two))
    (line,) = (line for line in report_rows(result) if line.row.adversary == "OUTSIDER")
    assert line.epsilon == two
    assert f"| {zero} | {two} |" in text


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
    assert "times its probability under the other, plus delta = 1e-05" in notes
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
