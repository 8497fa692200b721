"""Kinds of assumptions of a privacy report, in the field's terms, with the responsible party of each.

`assumptions.json` lists them. SECURITY.md has the same fragments with a longer explanation, and a test
compares the two files.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of assumption of a privacy report.

    Args:
        term: The field's term. If it ends in a colon, reports print the assumption's sentence behind it,
            because the sentence has a number.
        who: Responsible party: the library, you or nobody. "" for statements about the adversary's view,
            where nothing has to hold.
        words: Fragments of sentences. A sentence that contains one of them is of this kind.
    """

    term: str
    who: str
    words: tuple[str, ...]


@cache
def kinds() -> tuple[Kind, ...]:
    """Return all kinds of assumptions, from `assumptions.json`."""
    listed = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return tuple(Kind(entry["term"], entry["who"], tuple(entry["words"])) for entry in listed)


def find_kinds(sentence: str) -> list[Kind]:
    """Return the kinds of an assumption. An unknown sentence is its own kind, and you are responsible.

    Examples:
        >>> [kind.term for kind in find_kinds("the server colludes with 9 clients at most")]
        ['bounded collusion:']
    """
    known = [kind for kind in kinds() if any(words in sentence for words in kind.words)]
    return known or [Kind(sentence, "you", (sentence,))]
