"""Privacy claims: the adversary, the loss, the adjacency, the unit and the assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from lightning_fedq.functional.checks import check_at_least
from lightning_fedq.privacy.losses import Loss, NonPrivate

if TYPE_CHECKING:
    from lightning_fedq.mechanisms.interface.context import RoundContext


class Adversary(Enum):
    """Adversary of a claim, by its view of one round.

    The member's name, in any case, is used in code and configurations. The value is for readers: tables,
    sentences and pictures use it, or `title`, which leaves out the article.

    Examples:
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
        """Name without its article, for rows of tables and entries of legends."""
        return self.value.partition(" ")[2]

    @property
    def sees(self) -> str:
        """Adversary's view: everything that it is shown."""
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
    """Adjacency: how two inputs may differ that the adversary tries to distinguish."""

    SUBSTITUTION = "one client's update is replaced by any other"
    ZERO_OUT = "one client's update is replaced by zero"


class Unit(Enum):
    """Unit that one loss of a claim is about: a coordinate, a block of coordinates or a whole message.

    A message consists of all units, and a run of all messages.
    """

    COORDINATE = "coordinate"
    BLOCK = "block"
    MESSAGE = "message"


@dataclass(frozen=True)
class Slack:
    """Distance of a released distribution from the one that a claim describes, for any input.

    Accountants charge it.

    Args:
        distance: Total variation, >= 0, of the part that `log_ratio` does not bound.
        log_ratio: Largest |ln| of the ratio of the two densities, >= 0.
        per_loss: Whether both values are sums over the losses of a round, whose outcomes are independent and
            equally far from their distributions. Then a pure loss stays finite in any number of compositions.

    Raises:
        ValueError: If a value is negative or not finite.
    """

    distance: float = 0.0
    log_ratio: float = 0.0
    per_loss: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {value}")


NO_SLACK = Slack()


ANY_NUMBER = math.inf
"""Number of colluding clients for claims about single messages, which nobody else's secrets weaken."""
_OWN_CLIENTS = {Adversary.SERVER_AND_PARTNER: 1, Adversary.CLIENT: 1}
"""Clients that belong to an adversary's own view."""


@dataclass(frozen=True)
class PrivacyClaim:
    """Privacy claim about one round: a loss, its number of compositions, and an adversary.

    Args:
        adversary: Adversary that the claim holds against.
        loss: Loss of one composition, worst case over inputs.
        compositions: Number of times that `loss` composes per client and round: `dim` for a mechanism that
            treats coordinates independently, 1 for a whole-vector mechanism.
        neighbours: Adjacency of the claim.
        assumptions: Conditions of the claim, in words.
        unit_losses: Number of these losses that one unit takes part in, >= 1.
        slack: Distance of the released distribution from the one that `loss` describes, over one round.
        unit: Subject of one loss: a coordinate, a block of coordinates, or the client's whole message.
        colluders: Number of clients that may pool all that they know with the adversary, >= 0, or
            `ANY_NUMBER`. None counts those of the adversary's own view: one for the curious client and for
            the server with a partner, none for the others.
    """

    adversary: Adversary
    loss: Loss
    compositions: int
    neighbours: Neighbours = Neighbours.SUBSTITUTION
    assumptions: tuple[str, ...] = field(default=())
    unit_losses: int = 1
    slack: Slack = NO_SLACK
    unit: Unit = Unit.MESSAGE
    colluders: float | None = None

    def __post_init__(self) -> None:
        check_at_least(1, compositions=self.compositions)
        if not 1 <= self.unit_losses <= self.compositions:
            raise ValueError(
                f"unit_losses must be in [1, compositions = {self.compositions}], got {self.unit_losses}"
            )
        least = _OWN_CLIENTS.get(self.adversary, 0)
        if self.colluders is not None and not self.colluders >= least:
            raise ValueError(
                f"colluders must be >= {least} against {self.adversary.value}, got {self.colluders}"
            )
        several = self.unit_losses != self.compositions and not isinstance(self.loss, NonPrivate)
        if self.unit is Unit.MESSAGE and several:
            raise ValueError(
                f"unit must be smaller than a message, as {self.compositions} losses make up one message. "
                "Set unit to Unit.COORDINATE or Unit.BLOCK."
            )

    @property
    def num_colluders(self) -> float:
        """Number of clients that may pool all that they know with the adversary, itself included."""
        own = _OWN_CLIENTS.get(self.adversary, 0)
        return float(own if self.colluders is None else self.colluders)


def same_for_all(
    loss: Loss, compositions: int, assumptions: tuple[str, ...] = (), **about: Any
) -> tuple[PrivacyClaim, ...]:
    """Return the same claim about every adversary, for any number of colluders.

    Args:
        loss: Loss of one composition.
        compositions: Number of compositions per client and round.
        assumptions: Conditions of the claim, in words.
        about: Further fields of `PrivacyClaim`.
    """
    about = {"assumptions": assumptions, "colluders": ANY_NUMBER, **about}
    return tuple(PrivacyClaim(who, loss, compositions, **about) for who in Adversary)


def single_message_claims(claims: tuple[PrivacyClaim, ...]) -> tuple[PrivacyClaim, ...]:
    """Return the claim about one message for every adversary, if messages are processed before sending."""
    alone = next(claim for claim in claims if claim.adversary is Adversary.EAVESDROPPER)
    return tuple(replace(alone, adversary=who, colluders=ANY_NUMBER) for who in Adversary)


def count_hidden_clients(
    context: RoundContext, max_dropped_clients: int = 0
) -> dict[Adversary, tuple[int, int]]:
    """Count known and hidden clients, for each adversary that sees a sum.

    Args:
        context: Public facts of the round.
        max_dropped_clients: Dropouts that the claims allow for.

    Returns:
        By adversary: the number of clients whose data and randomness it knows, and of other clients that
        answer. The second
        number includes the victim and is at least 1.
    """
    left = len(context.cohort) - max_dropped_clients
    known = {Adversary.CLIENT: 1, Adversary.SECAGG_SERVER: context.num_colluding, Adversary.OUTSIDER: 0}
    return {who: (count, max(left - count, 1)) for who, count in known.items()}


def no_guarantee(reason: str, compositions: int) -> tuple[PrivacyClaim, ...]:
    """Return claims of no guarantee against any adversary, with the reason."""
    return same_for_all(NonPrivate(reason), compositions)


class AbortedRoundError(Exception):
    """Error of a round that can't be finished. The model is unchanged, and the charge stands."""
