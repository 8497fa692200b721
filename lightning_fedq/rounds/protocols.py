"""Interfaces of the exchangeable parts of a round, and the check of their combinations.

The round engine depends on these interfaces only. Robust rules, secure aggregation and Byzantine clients are
implemented in other packages.
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
    """Robust aggregation rule in place of the mean. It needs the decoded update of every client."""

    @property
    def min_clients(self) -> int:
        """Smallest number of answers. With fewer, the round is aborted."""

    def __call__(self, rows: Tensor, plan: RoundPlan) -> Tensor:
        """Aggregate the decoded rows `(n, dim)`, one per client, to one vector `(dim,)`."""


class Traffic(Protocol):
    """Bits that secure aggregation has sent so far in a round."""

    @property
    def uplink_bits(self) -> int:
        """Bits from clients to the server."""

    @property
    def protocol_bits(self) -> int:
        """Bits of `uplink_bits` that are keys, shares and confirmations, not masked updates."""

    @property
    def downlink_bits(self) -> int:
        """Bits from the server to clients, without the model."""


class SecureSum(Protocol):
    """Secure aggregation of one round: it takes messages and returns only their sum."""

    @property
    def traffic(self) -> Traffic:
        """Traffic of the protocol so far."""

    def add(self, clients: Sequence[int], symbols: Tensor) -> None:
        """Add the messages `(len(clients), m)` of some clients."""

    def finish(self) -> Tensor:
        """Return the sum `(m,)` int64 of all messages. Raises `AbortedRoundError` if no sum can be opened."""


class SecureSums(Protocol):
    """Factory that opens one `SecureSum` per round."""

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
        """Open a round for the cohort of `context`.

        Args:
            mechanism: Mechanism whose messages are summed.
            context: Public facts of the round.
            rand: Randomness that the server shares with each client.
            session: Name of the federation, at most 32 bytes.
            weights: `(dim,)` global model that all clients of the cohort received.
            num_clients: Clients in the federation.
        """


class UpdateTransform(Protocol):
    """Transformation of clients' updates before encoding, e.g. a momentum that each client keeps."""

    def __call__(self, clients: Sequence[int], updates: Tensor) -> Tensor:
        """Return the transformed updates, in the shape `(len(clients), dim)` of `updates`."""


class Tampering(Protocol):
    """Attack of Byzantine clients in a simulation, on updates before encoding or on encoded messages.

    A subclass overrides the methods of the steps that it attacks. The default methods are honest.
    """

    def begin(self, plan: RoundPlan, context: RoundContext) -> None:
        """Start a round, and discard the state of an abandoned round."""
        return

    def hold(self, clients: Sequence[int], updates: Tensor) -> tuple[Sequence[int], Tensor]:
        """Hold back the updates of Byzantine clients, and return the honest clients and their updates."""
        return clients, updates

    def release(self) -> tuple[Sequence[int], Tensor]:
        """Return the Byzantine clients and their false updates, after all honest clients have answered."""
        return [], torch.empty(0)

    def send(
        self,
        clients: Sequence[int],
        values: Tensor,
        message: Message,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> Message:
        """Return the message that is sent in place of `message`, the honest encoding of `values`."""
        return message


def check_aggregation(
    mechanism: Mechanism, cohort_size: int, weighted: bool, aggregator: Aggregator | None, secure: bool
) -> None:
    """Check that mechanism, weights, robust rule and secure aggregation can be combined.

    Args:
        mechanism: Mechanism that encodes updates.
        cohort_size: Clients per round.
        weighted: Whether clients have unequal weights in the mean.
        aggregator: Robust rule in place of the mean, or None.
        secure: Whether secure aggregation hides single messages from the server.

    Raises:
        ValueError: If two settings exclude each other, or a cohort is too small for the robust rule.
    """
    name = type(mechanism).__name__
    if mechanism.range_rule is not None and (weighted or aggregator is not None):
        raise ValueError(
            f"{name} adapts its range to the unweighted mean of all messages. "
            "Use weighting='uniform', and leave the aggregator out."
        )
    if mechanism.reuses_noise and (weighted or aggregator is not None):
        raise ValueError(
            f"The correlated noise of {name} cancels only in the unweighted sum. "
            "Use weighting='uniform', and leave the aggregator out."
        )
    if secure and aggregator is not None:
        raise ValueError(
            "Per-client filters are impossible with secure aggregation. "
            "Leave out the aggregator or secure_aggregation."
        )
    if secure and weighted:
        raise ValueError(
            "Client weights are impossible with secure aggregation. "
            "Use weighting='uniform', or leave out secure_aggregation."
        )
    if weighted and mechanism.fixed_cohort:
        raise ValueError(
            f"The noise of {name} is calibrated for a mean with equal weights. "
            "Leave client_weights out (weighting='uniform')."
        )
    if weighted and (aggregator is not None or mechanism.joint):
        raise ValueError("A robust rule or a vote takes no client weights. Leave client_weights out.")
    if aggregator is None:
        return
    if mechanism.joint or mechanism.fixed_cohort:
        raise ValueError(
            f"{name} decodes the whole cohort at once, but a robust rule needs one row per client. "
            "Leave the aggregator out."
        )
    if cohort_size < aggregator.min_clients:
        raise ValueError(
            f"{aggregator} needs at least {aggregator.min_clients} clients, a round has {cohort_size}. "
            "Choose fewer Byzantine clients, smaller buckets or a larger cohort."
        )
