"""The server's part of secure aggregation with real clients: a sum that comes from their four exchanges."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from torch import Tensor

from lightning_fedq.keys.randomness import PublicRandomness, pack_fields
from lightning_fedq.mechanisms.interface import AbortedRoundError, Mechanism, RoundContext
from lightning_fedq.rounds import RoundTask, SecureSums
from lightning_fedq.secagg import SecAgg, SecAggError, Server, Stage, model_digest
from lightning_fedq.secagg.simulation import Traffic

Exchange = Callable[[str, dict[int, bytes]], dict[int, bytes]]
"""Sends each client its message of one stage, and returns what came back in time."""


_ASKED = {Stage.SHARE: "shares", Stage.MASK: "masked", Stage.CONFIRM: "confirm", Stage.UNMASK: "unmask"}


def session_id(federation: bytes, task: RoundTask) -> bytes:
    """Name of one round's session: clients that were told different tasks have no key in common.

    Args:
        federation: The key that everybody knows.
        task: Task as the client, or the server, has it: groups and ranges included.
    """
    return hashlib.sha256(pack_fields("fedq round of", federation, task.to_bytes())).digest()


class RemoteSum:
    """One round behind secure aggregation: the server sees masked messages, and opens their sum.

    Args:
        mechanism: Homomorphic.
        weights: The model that is sent out.
        num_clients: Clients of the federation.
        directory: Everybody's verification key, where the configuration is active; else None.
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
        num_clients: int,
        directory: Mapping[int, Ed25519PublicKey] | None = None,
    ) -> None:
        layout, name = (
            secagg.layout(mechanism, context, rand),
            session_id(session, RoundTask.from_context(context)),
        )
        silent = mechanism.tolerated_dropouts(context)
        terms = secagg.terms(
            name, context.round, context.attempt, context.cohort, layout, num_clients, silent
        )
        self.machine = Server(terms, model_digest(weights), directory=directory)
        self.traffic = Traffic()

    def add(self, clients: Sequence[int], symbols: Tensor) -> None:
        """No real server is given symbols.

        Raises:
            TypeError: Always.
        """
        raise TypeError("behind secure aggregation a server is given masked messages only")

    def finish(self) -> Tensor:
        """The sum of all messages, `(m,)` int64. Raises `AbortedRoundError` where there is none."""
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
            warn: Told about messages that are refused; their senders count as dropped out.

        Raises:
            AbortedRoundError: If too few are left at some stage.
        """
        replies = first
        while True:
            for client, message in sorted(replies.items()):
                self.traffic.sent(self.machine.stage, len(message))
                try:
                    self.machine.receive(message)
                except SecAggError as error:
                    warn(f"client {client}: {error}")
            outgoing = self.machine.close()
            stage = self.machine.stage
            if stage is Stage.DONE:
                return self.machine.survivors
            for message in outgoing.values():
                self.traffic.sent(stage, down=len(message))
            replies = exchange(_ASKED[stage], outgoing)


def remote_sums(secagg: SecAgg, directory: Mapping[int, Ed25519PublicKey] | None) -> SecureSums:
    """Opens a `RemoteSum` a round. The directory is used where the configuration is active."""
    return partial(RemoteSum, secagg, directory=directory if secagg.active else None)
