"""The server's half of secure aggregation with real clients: a sum after four exchanges."""

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
"""Function that sends clients their messages of one stage, and returns the answers that arrive in time."""


_ASKED = {Stage.SHARE: "shares", Stage.MASK: "masked", Stage.CONFIRM: "confirm", Stage.UNMASK: "unmask"}


def session_id(federation: bytes, task: RoundTask) -> bytes:
    """Return the name of one round's session. Clients with different tasks then share no keys.

    Args:
        federation: Public key of the federation.
        task: Task of the client or of the server, including groups and ranges.
    """
    return hashlib.sha256(pack_fields("fedq round of", federation, task.to_bytes())).digest()


class RemoteSum:
    """Secure sum of one round. The server sees masked messages, and unmasks only their sum.

    Args:
        secagg: Settings of secure aggregation.
        mechanism: Homomorphic mechanism of the round.
        context: Context of the round.
        rand: Public random streams of the round.
        session: Public key of the federation.
        weights: `(dim,)` global model that clients receive.
        num_clients: Number of clients in the federation.
        directory: Verification key of each client, if the server may be active, else None.
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
        name = session_id(session, RoundTask.from_context(context))
        terms = secagg.round_terms(mechanism, context, rand, name, num_clients)
        self.machine = Server(terms, model_digest(weights), directory=directory)
        self.traffic = Traffic()

    def add(self, clients: Sequence[int], symbols: Tensor) -> None:
        """Refuse symbols, because a real server receives none.

        Raises:
            TypeError: Always.
        """
        raise TypeError("With secure aggregation, a server receives masked messages only")

    def finish(self) -> Tensor:
        """Return the sum of all messages, `(m,)` int64.

        Raises:
            AbortedRoundError: If secure aggregation has not reached its end.
        """
        if self.machine.stage is not Stage.DONE:
            raise AbortedRoundError("secure aggregation was not carried out to its end")
        return torch.from_numpy(self.machine.total)

    def invitation(self, client: int) -> bytes:
        """Return the first message to a client, which travels with the task of the round."""
        message = self.machine.invitation(client)
        self.traffic.sent(Stage.ADVERTISE, down=len(message))
        return message

    def run(
        self, first: dict[int, bytes], exchange: Exchange, warn: Callable[[str], None]
    ) -> tuple[int, ...]:
        """Run the protocol from the clients' first answers, and return the clients in the sum.

        Args:
            first: Answers to the invitations, by client.
            exchange: Function that sends the messages of one stage and returns the answers.
            warn: Function that is called with a text for each refused message. Its sender counts as dropped
                out.

        Raises:
            AbortedRoundError: If too few clients are left at some stage.
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
    """Return a function that opens a `RemoteSum` for each round.

    Args:
        secagg: Settings of secure aggregation.
        directory: Verification key of each client. It is used only if `secagg` is active.
    """
    return partial(RemoteSum, secagg, directory=directory if secagg.active else None)
