"""Kinds of assumptions of a privacy report, in the field's terms, and who sees to each.

`assumptions.json` lists them; SECURITY.md has the same words and says it at length, and a test compares the
two.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Kind(NamedTuple):
    """Assumptions of one kind.

    Args:
        term: What the field calls it; one that ends in a colon is told by its sentence, which has a number.
        who: Whoever sees to it, the library, you or nobody; "" where nothing has to hold, as it says what the
            adversary is given.
        words: A sentence that holds one of them is of this kind.
    """

    term: str
    who: str
    words: tuple[str, ...]


@cache
def kinds() -> tuple[Kind, ...]:
    """All kinds."""
    listed = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return tuple(Kind(one["term"], one["who"], tuple(one["words"])) for one in listed)


def find_kinds(sentence: str) -> list[Kind]:
    """Kinds that an assumption is of, itself where none knows it, which you see to then.

    Example:
        >>> [kind.term for kind in find_kinds("the server colludes with 9 clients at most")]
        ['bounded collusion:']
    """
    found = [kind for kind in kinds() if any(words in sentence for words in kind.words)]
    return found or [Kind(sentence, "you", (sentence,))]
