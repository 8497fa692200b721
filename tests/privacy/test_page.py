"""The page speaks to both readers, and no number shrinks in print."""

import math

from lightning_fedq.core import Adversary
from lightning_fedq.mechanisms import CPA, LDPQ
from lightning_fedq.privacy.page import format_epsilon
from tests.privacy.test_report import report


def test_markdown_speaks_to_both_readers():
    text = report(LDPQ(0.01)).to_markdown()
    assert text.count("\n| --- |") == 2
    assert "Odds between two possible updates change at most" in text
    assert "exact binomial composition" in text
    assert "| SECAGG_SERVER | - | ∞ | ∞ |" in text


def test_printed_numbers_round_up():
    assert format_epsilon(1.2301) == "1.24"
    assert format_epsilon(0.5) == "0.5"
    assert format_epsilon(0.0) == "0"
    assert format_epsilon(math.inf) == "∞"
    assert format_epsilon(None) == "-"


def test_figures_stand_apart_from_guarantees():
    result = report(CPA(1.0))
    name, value = result.figures[0]
    assert name.startswith("anonymity set of one message") and int(value) == CPA(1.0).anonymity_set_size
    table = result.to_markdown().split("| Figure, and no guarantee | value |")[1]
    assert f"| {name} | {value} |" in table
    assert "anonymity" not in result.row(Adversary.SERVER).verdict
    assert report(LDPQ(1.0)).figures == () and "Figure" not in report(LDPQ(1.0)).to_markdown()
