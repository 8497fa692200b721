"""The server's part of secure aggregation with real clients: a sum that comes from their four exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_fedq.core import AbortedRoundError, Mechanism, RoundContext
from lightning_fedq.randomness import PublicRandomness
from lightning_fedq.rounds import RoundServer, SecureSums
from lightning_fedq.secagg import SecAgg, SecAggError, Server, Stage, model_digest
from lightning_fedq.secagg.simulation import Traffic

Exchange = Callable[[str, dict[int, bytes]], dict[int, bytes]]
"""Sends each client its message of one stage, and returns what came back in time."""


class RemoteSum:
    """One round behind secure aggregation: the server sees masked messages, and opens their sum.

    Args:
        secagg: The configuration.
        mechanism: Homomorphic.
        context: The round.
        rand: What the server knows.
        session: Names the federation.
        weights: The model that is sent out.
    """

    def __init__(
        self,
        secagg: SecAgg,
        mechanism: Mechanism,
        context: RoundContext,
        rand: PublicRandomness,
        *,
        session: bytes,
        weights: Tensor,
    ) -> None:
        layout = secagg.layout(mechanism, context, rand)
        terms = secagg.terms(session, context.round, context.attempt, context.cohort, layout)
        self.machine = Server(terms, model_digest(weights))
        self.traffic = Traffic()

    def add(self, clients: Sequence[int], symbols: Tensor) -> None:
        """No real server is given symbols.

        Raises:
            TypeError: Always.
        """
        raise TypeError("behind secure aggregation a server is given masked messages only")

    def finish(self) -> Tensor:
        """See `rounds.SecureSum`."""
        if self.machine.stage is not Stage.DONE:
            raise AbortedRoundError("secure aggregation was not carried out to its end")
        return torch.from_numpy(self.machine.total)

    def invitation(self, client: int) -> bytes:
        """The first message to a client, which travels with the round's task."""
        message = self.machine.invitation(client)
        self.traffic.sent(Stage.ADVERTISE, down=len(message))
        return message

    def run(
        self, first: dict[int, bytes], exchange: Exchange, warn: Callable[[str], None]
    ) -> tuple[int, ...]:
        """Carry the round through, from the clients' first answers on, and return who is in the sum.

        Args:
            first: Answers to the invitations.
            exchange: Of the following stages.
            warn: Told about messages that are refused; their senders count as dropped out.

        Raises:
            AbortedRoundError: If too few are left at some stage.
        """
        replies = first
        for stage, following in (
            (Stage.ADVERTISE, "shares"),
            (Stage.SHARE, "masked"),
            (Stage.MASK, "unmask"),
            (Stage.UNMASK, ""),
        ):
            for client, message in sorted(replies.items()):
                self.traffic.sent(stage, len(message))
                try:
                    self.machine.receive(message)
                except SecAggError as error:
                    warn(f"client {client}: {error}")
            outgoing = self.machine.close()
            if not following:
                break
            next_stage = {"shares": Stage.SHARE, "masked": Stage.MASK, "unmask": Stage.UNMASK}[following]
            for message in outgoing.values():
                self.traffic.sent(next_stage, down=len(message))
            replies = exchange(following, outgoing)
        return self.machine.survivors


def remote_sums(secagg: SecAgg) -> SecureSums:
    """Opens a `RemoteSum` a round."""
    return partial(RemoteSum, secagg)


def remote_sum(server: RoundServer) -> RemoteSum:
    """The open round's."""
    found = server.secure_sum
    assert isinstance(found, RemoteSum)
    return found
