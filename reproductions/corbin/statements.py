"""What CorBin-FL says of its experiments 1 to 6, as data, and the verdict on it.

Statements (i) to (iv) stand at the head of the paper's section V, figure 3a's claim in its appendix F.
A verdict is on what the paper says, never on its opposite: "does not fall significantly" is held where a fall
is less than a margin, and not where it is more. The paper gives no margin for "not significantly" and
"almost equal"; `MARGIN` is the loss that it calls small in experiment 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from reproductions.bench import Claim, Row, every
from reproductions.corbin.tuning import Gap, gap

MARGIN = 1.5
"""Points of accuracy."""

Judge = Callable[[Gap], "bool | None"]


class Statement(NamedTuple):
    """A statement about differences between methods.

    Args:
        paper: What the paper says, in our words.
        parts: First method, second method, and what the difference must be.
        rows: Rows of docs/papers.md that it is.
    """

    paper: str
    parts: tuple[tuple[str, str, Judge], ...]
    rows: tuple[int, ...] = ()

    def verdict(self, chosen: Mapping[str, Sequence[Row]], test_images: int) -> Claim:
        """Judge it by trainings with the same seeds.

        Args:
            chosen: Rows of each method, one a seed.
            test_images: How many a test accuracy is of.
        """
        gaps = [(gap(a, chosen[a], b, chosen[b], test_images), judge) for a, b, judge in self.parts]
        words = "; ".join(found.words for found, _ in gaps)
        return Claim(self.paper, words, every(judge(found) for found, judge in gaps), self.rows)


def above(first: str, second: str) -> tuple[str, str, Judge]:
    """The first method is above the second."""
    return first, second, lambda found: found.above


def loses_little(first: str, second: str) -> tuple[str, str, Judge]:
    """The first method is at most a margin below the second."""
    return first, second, lambda found: found.loses_less(MARGIN)


def almost_equal(first: str, second: str) -> tuple[str, str, Judge]:
    """The two methods are at most a margin apart."""
    return first, second, lambda found: found.almost_equal(MARGIN)


OURS = ("CorBin-FL", "AugCorBin-FL")


def outperform() -> Statement:
    """Statement (i)."""
    rivals = ("LDP-FL", "Laplace", "Gaussian")
    return Statement(
        "statement (i), figure 1: at equal epsilon CorBin-FL and AugCorBin-FL are above LDP-FL, Laplace and "
        "Gaussian",
        tuple(above(ours, rival) for ours in OURS for rival in rivals),
        (25, 26),
    )


def shared_bits(few: str, some: str, many: str) -> Statement:
    """Statement (ii), for the names of 3, 5 and 7 shared bits."""
    return Statement(
        "statement (ii), figure 2a: accuracy gains with shared bits, and the gain saturates at 5 of them",
        (above(some, few), almost_equal(many, some)),
        (27,),
    )


def robust_to_dropouts(without: str, names: Sequence[str]) -> Statement:
    """Statement (iii), for the names of no dropouts and of growing ones."""
    return Statement(
        "statement (iii), figure 2b: accuracy does not fall significantly with dropouts, even at 0.5",
        tuple(loses_little(name, without) for name in names),
        (28,),
    )


def any_number_of_clients(pairs: Sequence[tuple[str, str]]) -> Statement:
    """Statement (iv), for the names of CorBin-FL and LDP-FL at each number of clients."""
    return Statement(
        "statement (iv), figure 2c: CorBin-FL is above LDP-FL for every number of clients from 50 to 500",
        tuple(above(*pair) for pair in pairs),
        (29,),
    )


def as_good_as_no_privacy(ours: str, others: Sequence[str]) -> Statement:
    """Figure 3a, for CorBin-FL at epsilon 10, and the quantiser without privacy and LDP-FL at 50."""
    return Statement(
        "figure 3a: CorBin-FL at epsilon 10 is almost equal to correlated quantisation without privacy and "
        "to LDP-FL at epsilon 50",
        tuple(almost_equal(ours, other) for other in others),
        (30,),
    )


def above_at_every_budget(pairs: Sequence[tuple[str, str]]) -> Statement:
    """Statement (i) at the budgets of figure 3b, which has no claim of its own in the text."""
    return Statement(
        "figure 3b, statement (i): at epsilon 1, 3 and 5 CorBin-FL and AugCorBin-FL are above LDP-FL",
        tuple(above(*pair) for pair in pairs),
        (26, 31),
    )
