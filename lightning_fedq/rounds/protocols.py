"""Pluggable parts of a round, and which of them go together.

The engine knows these shapes only; robust rules, secure aggregation and lying clients stand elsewhere.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism, Message, RoundContext
from lightning_fedq.rounds.plan import RoundPlan

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]


class Aggregator(Protocol):
    """A robust rule in place of the mean, where the server sees every message."""

    @property
    def min_clients(self) -> int:
        """With fewer answers the round is aborted."""

    def __call__(self, rows: Tensor, plan: RoundPlan) -> Tensor:
        """Return `(dim,)` from the decoded rows `(n, dim)`, one a client."""


class Traffic(Protocol):
    """Bits that a round has cost so far."""

    @property
    def uplink_bits(self) -> int:
        """From clients to the server."""

    @property
    def protocol_bits(self) -> int:
        """Part of `uplink_bits` that is keys, shares and confirmations, not masked updates."""

    @property
    def downlink_bits(self) -> int:
        """From the server to clients, the model not included."""


class SecureSum(Protocol):
    """One round behind secure aggregation: messages go in, and only their sum comes out."""

    @property
    def traffic(self) -> Traffic:
        """Traffic of the protocol so far."""

    def add(self, clients: Sequence[int], symbols: Tensor) -> None:
        """Take the messages `(len(clients), m)` of some clients."""

    def finish(self) -> Tensor:
        """Return the sum of all messages, `(m,)` int64. Raises `AbortedRoundError` where there is none."""


class SecureSums(Protocol):
    """Opens one `SecureSum` a round."""

    def __call__(
        self,
        mechanism: Mechanism,
        context: RoundContext,
        rand: PublicRandomness,
        *,
        session: bytes,
        weights: Tensor,
        num_clients: int,
    ) -> SecureSum:
        """Open a round for the clients of `context`, some of `num_clients`, who all received `weights`."""


class UpdateTransform(Protocol):
    """Transformation of clients' updates before anything else, e.g. a momentum that they keep."""

    def __call__(self, clients: Sequence[int], updates: Tensor) -> Tensor:
        """Return what takes the place of `updates` `(len(clients), dim)`, of the same shape."""


class Tampering(Protocol):
    """Byzantine tampering: clients that lie, put between training, encoding and the wire of a simulation.

    A subclass overrides what it tampers with. The rest is honest.
    """

    def begin(self, plan: RoundPlan, context: RoundContext) -> None:
        """A round starts. What an abandoned one left behind is void."""
        return

    def hold(self, clients: Sequence[int], updates: Tensor) -> tuple[Sequence[int], Tensor]:
        """Keep the Byzantine clients' rows back, and return the others."""
        return clients, updates

    def release(self) -> tuple[Sequence[int], Tensor]:
        """Return the Byzantine clients, once everybody else has answered, and what they feed the encoder."""
        return [], torch.empty(0)

    def send(
        self,
        clients: Sequence[int],
        values: Tensor,
        message: Message,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> Message:
        """Return what goes on the wire in place of `message`, the honest encoding of `values`."""
        return message


def check_aggregation(
    mechanism: Mechanism, cohort_size: int, weighted: bool, aggregator: Aggregator | None, secure: bool
) -> None:
    """Refuse settings that don't fit each other.

    Raises:
        ValueError: Naming them and the cure.
    """
    name = type(mechanism).__name__
    if mechanism.range_rule is not None and (weighted or aggregator is not None):
        raise ValueError(
            f"{name} moves by the plain mean of what clients send; use weighting='uniform', and leave the "
            "aggregator out"
        )
    if mechanism.hands_on and (weighted or aggregator is not None):
        raise ValueError(
            f"what clients of {name} hand on cancels in the plain sum only; use weighting='uniform', and "
            "leave the aggregator out"
        )
    if secure and aggregator is not None:
        raise ValueError(
            "Where SecAgg is on, per-client filters are impossible; "
            "leave out the aggregator or secure_aggregation"
        )
    if secure and weighted:
        raise ValueError(
            "behind secure aggregation the server sees the plain sum, so no client can be weighted; "
            "use weighting='uniform' or leave out secure_aggregation"
        )
    if weighted and mechanism.fixed_cohort:
        raise ValueError(
            f"the noise of {name} is made for a mean with equal weights; "
            "leave client_weights out (weighting='uniform')"
        )
    if weighted and (aggregator is not None or mechanism.joint):
        raise ValueError("a robust rule or a vote has no weights; leave client_weights out")
    if aggregator is None:
        return
    if mechanism.joint or mechanism.fixed_cohort:
        raise ValueError(
            f"{name} is decoded for the whole cohort at once, so there are no rows "
            "for a robust rule; leave the aggregator out"
        )
    if cohort_size < aggregator.min_clients:
        raise ValueError(
            f"{aggregator} needs {aggregator.min_clients} clients or more, a round has {cohort_size}; "
            "take fewer Byzantine clients, smaller buckets or a larger cohort"
        )
