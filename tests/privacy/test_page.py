"""The page speaks to both readers, and no number shrinks in print."""

import math
import re
from dataclasses import replace

import pytest
from scipy import stats

from lightning_fedq.functional.divergences import gaussian_mu
from lightning_fedq.mechanisms import LDPQ, SIGM, FedAvg, GaussianNoise, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.document import PAGE, document
from lightning_fedq.privacy.losses import GaussianLoss
from lightning_fedq.privacy.planning import Problem
from lightning_fedq.privacy.report import Bits, privacy_report
from lightning_fedq.privacy.report_rows import report_rows
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.layouts import markdown as markdown_of
from lightning_fedq.secagg import SecAgg
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
        "## The guarantee",
        "## What has to hold",
        "## What is not covered",
        "## What only you know",
        "## Of which run",
        "## Ten words",
        "## Figures to check",
        "## What each row means",
        "## What has to hold, in full",
        "## Who sees what",
        "## How to read the numbers",
    ]


def test_the_page_has_two_printed_pages_without_bits_and_each_sentence_once():
    """The settings of README's run, with what its `RunFolder` lists. The page had 2,000 words, and bits."""
    target = PrivacyTarget(8.0, 1e-5, "secagg_server")
    masks = SecAgg(degree="auto", max_colluding_fraction=0.02, max_dropped_fraction=0.02)
    run = Problem(479, 4060, 25, target, masks).run(RotatedCoins(0.5, 0.603, fraction=0.5))
    made = privacy_report(run, 1e-5, "ended", target)
    assert made.smaller_delta == (pytest.approx(1e-6), pytest.approx(8.9, abs=0.2))
    leaves = ("Word " * 180).strip()  # what README's run lists
    text = markdown_of(*document(replace(made, leaves=(leaves,), bits=Bits(True, 4.6, 0.5)), PAGE))
    words = [word for word in text.split() if any(map(str.isalnum, word))]
    assert 700 < len(words) < 1100, len(words)
    assert not re.search(r"\bbits a parameter|\bR =|noise-to-signal", text, re.IGNORECASE)
    sentences = [s for s in re.split(r"(?<=[.:]) |\n|\| ", text) if len(s.split()) > 5]
    assert len(sentences) == len(set(sentences)) > 20
    for part in (
        "For one client with all its data, epsilon is",
        "under replace-one adjacency, against the server behind secure aggregation (with 9 colluders), over",
        "25 rounds and the model that each of them releases",
        "At the smaller delta 1e-06, it is",
        "of the time at even odds",
        f"Accountant: lightning_fedq {made.origin.version}, {made.about.method}.",
        "Not audited by an outside party",
        "library; you: no machine is copied",
        "People whose data several clients hold",
        "Tuned on the same data: unknown",
        "Purpose: not stated",
        "- epsilon: Privacy bound",
    ):
        assert part in text, part


def test_epsilon_at_a_smaller_delta_is_the_accounts():
    made = report(GaussianNoise(0.1, 4.0), dim=10, clients=20, rounds=3)
    again = report(GaussianNoise(0.1, 4.0), dim=10, clients=20, rounds=3, delta=1e-6)
    assert made.smaller_delta == (pytest.approx(1e-6), pytest.approx(again.about.epsilon))
    assert report(FedAvg()).smaller_delta is None


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
