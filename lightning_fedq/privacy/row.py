"""One row of a privacy report: the privacy of one client against one adversary."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, format_epsilon

SECRET_COHORTS = ", cohorts secret"
"""Suffix of the adversary's name in this row."""
_OTHER_WORLD = {
    Neighbours.SUBSTITUTION.value: "with any other one",
    Neighbours.ZERO_OUT.value: "with an update of zero",
}


def format_times(epsilon: float) -> str:
    """Return how many times as likely an outcome is at most, in words, rounded up."""
    odds = math.exp(min(epsilon, 300.0))
    if odds > 1e12:
        return "any number of times"
    return f"{math.ceil(odds):,} times" if odds >= 1000.0 else f"{format_epsilon(odds)} times"


@dataclass(frozen=True)
class Row:
    """Privacy of one client against one adversary.

    Args:
        adversary: Name of the `Adversary`.
        unit: Unit that one loss of the mechanism protects: a "coordinate", a "block" of them or the
            "message".
        epsilon_unit: Pure epsilon of one unit in one round. None where nothing is claimed. Infinite where
            some outcome excludes an input, or the loss is unbounded (Gaussian noise).
        epsilon_round: Epsilon of one round, at `delta`.
        epsilon_run: Epsilon of the whole run, at `delta`.
        delta: Delta of `epsilon_round` and `epsilon_run`.
        infinite_mass: Probability of a distinguishing event over the run: an outcome that only one of two
            neighbouring inputs can produce.
        neighbours: Adjacency: the difference between the two neighbouring inputs, in words.
        method: Name of the accounting method.
        assumptions: Assumptions that must hold, a sentence each.
        verdict: Verdict of one or two words.
        reason: Reason for a bad verdict.
        advice: Setting that would give a better verdict.
        epsilon_any_two: Epsilon of the run under replace-one adjacency. It equals `epsilon_run`, unless the
            adjacency is zero-out.
        cohorts: "secret" for a row that assumes that only the server knows who took part, otherwise "known".
        colluders: Number of clients that may pool all that they know with the adversary, or which it has by
            itself (one curious client). Infinite for any number.
    """

    adversary: str
    unit: str
    epsilon_unit: float | None
    epsilon_round: float
    epsilon_run: float
    delta: float
    infinite_mass: float
    neighbours: str
    method: str
    assumptions: tuple[str, ...]
    verdict: str
    reason: str = ""
    advice: str = ""
    epsilon_any_two: float = math.inf
    cohorts: str = "known"
    colluders: float = 0.0

    @property
    def name(self) -> str:
        """Name of the adversary, with a suffix for secret cohorts."""
        return f"{self.adversary}{SECRET_COHORTS}" if self.cohorts == "secret" else self.adversary

    @property
    def title(self) -> str:
        """Name of the adversary for a reader, with a suffix for secret cohorts."""
        return adversary_title(self.name)

    @property
    def epsilon(self) -> float:
        """Epsilon over the run under replace-one adjacency. All verdicts are about it."""
        return max(self.epsilon_run, self.epsilon_any_two)

    def refused(self, reason: str, advice: str = "") -> Row:
        """Return the row without a guarantee.

        Args:
            reason: Reason why there is no guarantee.
            advice: Setting that would give one.
        """
        return replace(
            self,
            epsilon_unit=None,
            epsilon_round=math.inf,
            epsilon_run=math.inf,
            epsilon_any_two=math.inf,
            infinite_mass=1.0,
            method="none",
            verdict=NO_GUARANTEE,
            reason=reason,
            advice=advice,
        )

    @property
    def sentence(self) -> str:
        """The row in one or two sentences."""
        if self.verdict == NO_GUARANTEE:
            return f"No guarantee: {self.reason}."
        if self.verdict == VACUOUS:
            return f"Vacuous: {self.reason}."
        words = (
            f"Any set of outcomes is at most {format_times(self.epsilon_run)} as likely with a client's "
            f"update as {_OTHER_WORLD[self.neighbours]}, plus {self.delta:g}."
        )
        if self.neighbours == Neighbours.ZERO_OUT.value:
            words += f" Between any two updates: {format_times(self.epsilon_any_two)}."
        return words


def adversary_title(name: str) -> str:
    """Return the name of an adversary for a reader, from the name of its row.

    Args:
        name: Name of a member of `Adversary`, which ", cohorts secret" may follow.

    Examples:
        >>> adversary_title("OUTSIDER, cohorts secret")
        'outsider, cohorts secret'
    """
    member, comma, counts_on = name.partition(",")
    return f"{Adversary[member].title}{comma}{counts_on}"


def is_met(row: Row, masked: bool) -> bool:
    """Return whether the run has this adversary as it runs, without a failure of an assumption."""
    if row.adversary == Adversary.SECAGG_SERVER.name:
        return masked
    if row.adversary in (Adversary.SERVER.name, Adversary.EAVESDROPPER.name):
        return not masked
    return row.adversary != Adversary.SERVER_AND_PARTNER.name
