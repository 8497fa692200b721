"""Promises: to whom, about what, between which neighbours, and the settings that an audit tries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from lightning_fedq.privacy.losses import Loss, NonPrivate

if TYPE_CHECKING:
    from lightning_fedq.mechanisms.interface.context import RoundContext


class Adversary(Enum):
    """Whom a claim is about: a view of one round.

    Each has one name in code and configurations, the member's in any case, and one for readers, its value
    (`title` without the article), which tables, sentences and pictures use.

    Example:
        >>> Adversary["SECAGG_SERVER"].title
        'server behind secure aggregation'
        >>> Adversary.SECAGG_SERVER.sees
        'sums of messages, released models'
    """

    EAVESDROPPER = "an eavesdropper on one uplink"
    SERVER = "the server that sees every message"
    SERVER_AND_PARTNER = "the server with a client's partner"
    CLIENT = "a curious client"
    SECAGG_SERVER = "the server behind secure aggregation"
    OUTSIDER = "an outsider"

    @property
    def title(self) -> str:
        """Name without its article: a table's row, a legend's entry."""
        return self.value.partition(" ")[2]

    @property
    def sees(self) -> str:
        """Everything that this adversary is shown."""
        return _SEES[self]


_SEES = {
    Adversary.EAVESDROPPER: "one client's messages",
    Adversary.SERVER: "every message, released models",
    Adversary.SERVER_AND_PARTNER: "every message, a client's shared randomness (its partner's, or leaked)",
    Adversary.CLIENT: "released models, its own messages, what it shares with others",
    Adversary.SECAGG_SERVER: "sums of messages, released models",
    Adversary.OUTSIDER: "released models",
}


class Neighbours(Enum):
    """Neighbouring relation: what may differ between the two worlds that the adversary tells apart."""

    SUBSTITUTION = "one client's update is replaced by any other"
    ZERO_OUT = "one client's update is replaced by zero"


class Unit(Enum):
    """Unit that one loss of a claim is about.

    A message is made of all units, a run of all messages.
    """

    COORDINATE = "coordinate"
    BLOCK = "block"
    MESSAGE = "message"


@dataclass(frozen=True)
class Slack:
    """Distance of a released law from the one that a claim describes, for any input.

    Accountants charge it.

    Args:
        distance: Total variation, >= 0, once `log_ratio` is set aside.
        log_ratio: Largest |ln| of the ratio of the two laws, >= 0.

    Raises:
        ValueError: If a value is negative or not finite.
    """

    distance: float = 0.0
    log_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {value}")


NO_SLACK = Slack()


@dataclass(frozen=True)
class PrivacyClaim:
    """One sentence of a privacy report: this loss, so many times a round, against this adversary.

    Args:
        loss: Loss of one composition, worst case over inputs.
        compositions: How many times `loss` composes per client and round; `dim` for a
            mechanism that treats coordinates independently, 1 for a whole-vector mechanism.
        assumptions: What has to hold for the claim to be true, in words.
        unit_losses: How many of the losses one unit has a part in, >= 1.
        slack: How far what is released may be from the law that `loss` describes, over one round.
        unit: What the loss is about: one coordinate, one block of them, or the client's whole message.
    """

    adversary: Adversary
    loss: Loss
    compositions: int
    neighbours: Neighbours = Neighbours.SUBSTITUTION
    assumptions: tuple[str, ...] = field(default=())
    unit_losses: int = 1
    slack: Slack = NO_SLACK
    unit: Unit = Unit.MESSAGE

    def __post_init__(self) -> None:
        if self.compositions < 1:
            raise ValueError(f"compositions must be >= 1, got {self.compositions}")
        if not 1 <= self.unit_losses <= self.compositions:
            raise ValueError(
                f"unit_losses must be in [1, compositions = {self.compositions}], got {self.unit_losses}"
            )
        several = self.unit_losses != self.compositions and not isinstance(self.loss, NonPrivate)
        if self.unit is Unit.MESSAGE and several:
            raise ValueError(
                f"{self.compositions} losses make up a message, so one of them is of a smaller unit; "
                "say which: Unit.COORDINATE or Unit.BLOCK"
            )


def same_for_all(
    loss: Loss, compositions: int, assumptions: tuple[str, ...] = (), **about: Any
) -> tuple[PrivacyClaim, ...]:
    """The same claim about every adversary.

    Args:
        about: Further fields of `PrivacyClaim`.
    """
    return tuple(PrivacyClaim(who, loss, compositions, assumptions=assumptions, **about) for who in Adversary)


def single_message_claims(claims: tuple[PrivacyClaim, ...]) -> tuple[PrivacyClaim, ...]:
    """The claim about one message, for everybody: where messages are worked on further before they go."""
    alone = next(claim for claim in claims if claim.adversary is Adversary.EAVESDROPPER)
    return tuple(replace(alone, adversary=who) for who in Adversary)


def count_hidden_clients(context: RoundContext, max_dropped: int = 0) -> dict[Adversary, tuple[int, int]]:
    """Views of a sum: clients that tell all they know, and how many do not and answer, the victim included.

    Args:
        max_dropped: Dropouts that the claims allow for.
    """
    left = len(context.cohort) - max_dropped
    known = {Adversary.CLIENT: 1, Adversary.SECAGG_SERVER: context.num_corrupt, Adversary.OUTSIDER: 0}
    return {who: (count, max(left - count, 1)) for who, count in known.items()}


def no_guarantee(reason: str, compositions: int) -> tuple[PrivacyClaim, ...]:
    """Nothing is claimed against anybody, and why."""
    return same_for_all(NonPrivate(reason), compositions)


class AbortedRoundError(Exception):
    """A round that can't be finished, and why. The model stays as it was and the charge stands."""
