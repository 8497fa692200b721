"""Sentences that docs/corrections.md retracts stand on no page, in no docstring and in no help."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RETRACTED = (
    r"(?<!not\*\* the )(?<!not the )(chance|probability) (with which|that) the guarantee",
    r"guarantee (may )?fails? with (a )?(chance|probability)",
    r"odds between two (possible )?updates change at most",
    r"anybody who sees the released models",
    r"an early stop(ping)? (is free|costs nothing)",
    r"no stream is ever used twice",
    r"more clients collude than are counted with probability 6e-8",
)
QUOTED = {"docs/corrections.md": 99, "docs/guides/report_a_guarantee.md": 2}
"""Pages that quote sentences as wrong, and how many of them at most."""
FILES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "lightning_fedq").rglob("*.py"),
    *(ROOT / "lightning_fedq").rglob("*.json"),
    *(ROOT / "configs").rglob("*.yaml"),
    *(ROOT / "examples").rglob("*.py"),
]


@pytest.mark.parametrize("sentence", RETRACTED)
def test_a_retracted_sentence_is_gone(sentence):
    for path in FILES:
        text = " ".join(path.read_text(encoding="utf-8").replace('"\n', "").split())
        found = re.findall(sentence, text, re.IGNORECASE)
        assert len(found) <= QUOTED.get(str(path.relative_to(ROOT)), 0), path


def test_the_patterns_find_what_was_said():
    """The description of delta that stood in 13 places, and the sentence for reviewers."""
    said = "delta, the chance with which the guarantee may fail, of anybody who sees the released models"
    assert sum(bool(re.search(sentence, said)) for sentence in RETRACTED) == 2
    assert len(FILES) > 300
