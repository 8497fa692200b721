"""Secure aggregation of one simulated round, as the round engine calls it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.secagg import messages as wire
from lightning_fedq.secagg.client import Client
from lightning_fedq.secagg.errors import Stage, StageError, SymbolError, ThresholdError
from lightning_fedq.secagg.server import Server
from lightning_fedq.secagg.shamir import SHARE_BYTES
from lightning_fedq.secagg.terms import SecAgg, Terms


@dataclass
class Traffic:
    """Bits on the wire of one round by stage, summed over its clients.

    Args:
        uplink: Bits from clients to the server, by stage.
        downlink: Bits from the server to clients, by stage.
    """

    uplink: dict[Stage, int] = field(default_factory=dict)
    downlink: dict[Stage, int] = field(default_factory=dict)

    def sent(self, stage: Stage, up: int = 0, down: int = 0) -> None:
        """Add the bytes of messages to the bits of a stage.

        Args:
            stage: Stage of the messages.
            up: Bytes from clients to the server.
            down: Bytes from the server to clients.
        """
        self.uplink[stage] = self.uplink.get(stage, 0) + 8 * up
        self.downlink[stage] = self.downlink.get(stage, 0) + 8 * down

    @property
    def uplink_bits(self) -> int:
        """Bits that the clients sent, masked updates included."""
        return sum(self.uplink.values())

    @property
    def protocol_bits(self) -> int:
        """Uplink bits of keys, shares and confirmations, without masked updates."""
        return self.uplink_bits - self.uplink.get(Stage.MASK, 0)

    @property
    def downlink_bits(self) -> int:
        """Bits that the server sent for the protocol, without the model."""
        return sum(self.downlink.values())


def model_digest(weights: Tensor) -> bytes:
    """Return the SHA-256 of a model's type, shape and weights, by which clients compare models."""
    array = weights.detach().cpu().contiguous()
    head = f"{array.dtype} {tuple(array.shape)}\n".encode()
    return hashlib.sha256(head + array.view(torch.uint8).numpy().tobytes()).digest()


def expected_traffic(terms: Terms, num_survivors: int) -> Traffic:
    """Return the traffic of a round in which all clients share keys and `num_survivors` clients finish.

    The traffic is computed from the lengths of the messages. A masked run of such a round measures exactly
    the same number of bits.
    """
    traffic = _set_up_traffic(terms)
    traffic.sent(Stage.MASK, num_survivors * (wire.FRAME_BYTES + terms.layout.num_bytes))
    _count_unmasking(terms, num_survivors, traffic)
    return traffic


def _set_up_traffic(terms: Terms) -> Traffic:
    """Return the traffic of keys and shares for the whole cohort, including the delivery of shares."""
    size, active = len(terms.cohort), terms.active
    near = min(terms.degree, size - 1)
    # t - 1 neighbours need no corrections
    shares = near * wire.CONFIRMATION_BYTES + (near + 1 - terms.threshold) * wire.CORRECTION_BYTES
    bits, keys = (size + 7) // 8, 2 * wire.KEY_BYTES + (wire.SIGNATURE_BYTES if active else 0)
    frame, traffic = wire.FRAME_BYTES, Traffic()
    traffic.sent(Stage.ADVERTISE, size * (frame + wire.SHORT_BYTES + keys), size * (frame + wire.KEY_BYTES))
    listed = size if active else near + 1
    traffic.sent(
        Stage.SHARE,
        size * (frame + wire.SHORT_BYTES + shares),
        size * (frame + bits + wire.HASH_BYTES + listed * keys),
    )
    traffic.sent(Stage.MASK, down=size * (frame + bits + shares))
    return traffic


def _count_unmasking(terms: Terms, num_survivors: int, traffic: Traffic) -> None:
    """Add the traffic of confirmations and opened shares."""
    size, frame = len(terms.cohort), wire.FRAME_BYTES
    bits, holders = (size + 7) // 8, min(terms.degree + 1, size)
    if terms.active:
        traffic.sent(
            Stage.CONFIRM, num_survivors * (frame + wire.SIGNATURE_BYTES), num_survivors * (frame + bits)
        )
    signatures = num_survivors * wire.SIGNATURE_BYTES if terms.active else 0
    traffic.sent(
        Stage.UNMASK,
        num_survivors * (frame + holders * SHARE_BYTES),
        num_survivors * (frame + bits + signatures),
    )


class Aggregation:
    """The secure sum of one simulated round.

    Call `Aggregation(...)`, then `add(clients, symbols)` for groups of clients of any size, then `finish()`.
    With `simulation="masked"` every message of the protocol is made, packed, tagged and read. With
    `simulation="counted"` symbols are checked and summed modulo the same moduli, and the traffic is computed
    message by message instead of measured.

    In both cases the whole cohort shares keys and clients drop out afterwards, which is the most expensive
    point. `traffic` counts the bits sent so far, even in a round that ends with an error.

    `functools.partial(Aggregation, secagg)` is a `rounds.SecureSums`.

    Args:
        secagg: Settings of secure aggregation.
        mechanism: Homomorphic mechanism.
        context: The round, with the cohort that is asked.
        rand: Public randomness of the round, on which symbol ranges may depend.
        session: Name of the federation, at most 32 bytes.
        weights: Model that was sent out, `(dim,)`.
        num_clients: Clients of the federation.

    Raises:
        TypeError: If the mechanism is not homomorphic.
        ValueError: If the cohort does not suit, or the modulus is too small.
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
    ) -> None:
        self.terms = secagg.round_terms(mechanism, context, rand, session, num_clients)
        self._received: set[int] = set()
        self._sum = self.terms.layout.zeros()
        self._server: Server | None = None
        if secagg.simulation == "masked":
            self.traffic = Traffic()
            self._set_up(model_digest(weights))
        else:
            self.traffic = _set_up_traffic(self.terms)

    def _set_up(self, model_hash: bytes) -> None:
        """Make server and clients, and run the protocol until all clients have accepted their shares."""
        terms = self.terms
        signing = terms.cohort if terms.active else ()
        identities = {client: Ed25519PrivateKey.generate() for client in signing}
        directory = {client: key.public_key() for client, key in identities.items()} if terms.active else None
        self._server = server = Server(terms, model_hash, directory=directory)
        self._clients = {
            c: Client(c, terms, model_hash, identity=identities.get(c), directory=directory)
            for c in terms.cohort
        }
        invited = {client: server.invitation(client) for client in terms.cohort}
        steps = (Stage.ADVERTISE, Client.advertise), (Stage.SHARE, Client.share_keys)
        for client, message in self._exchange(server, invited, *steps).items():
            self._clients[client].accept_shares(message)
            self.traffic.sent(Stage.MASK, down=len(message))

    def _exchange(
        self,
        server: Server,
        sent: Mapping[int, bytes],
        *steps: tuple[Stage, Callable[[Client, bytes], bytes]],
    ) -> Mapping[int, bytes]:
        """Let clients answer the server's messages, stage by stage. Return the server's last messages."""
        for stage, answer in steps:
            for client, message in sent.items():
                reply = answer(self._clients[client], message)
                self.traffic.sent(stage, len(reply), len(message))
                server.receive(reply)
            sent = server.close()
        return sent

    def add(self, clients: Sequence[int], symbols: Tensor) -> None:
        """Add the messages of some clients.

        Args:
            clients: Clients of the cohort that have not answered yet.
            symbols: `(len(clients), size)` integers.

        Raises:
            StageError: If a client is not expected.
            SymbolError: If a symbol is out of the mechanism's range.
        """
        rows = symbols.detach().cpu().numpy()
        for client, row in zip(clients, rows, strict=True):
            if client not in self.terms.members or client in self._received:
                raise StageError("this client is not expected, or answered already", Stage.MASK, client)
            if self._server is not None:
                message = self._clients[client].masked_input(row)
                self.traffic.sent(Stage.MASK, len(message))
                self._server.receive(message)
            else:
                try:
                    self.terms.layout.add(self._sum, self.terms.layout.split(row))
                except ValueError as error:
                    raise SymbolError(str(error), Stage.MASK, client) from error
                self.traffic.sent(Stage.MASK, wire.FRAME_BYTES + self.terms.layout.num_bytes)
            self._received.add(client)

    def finish(self) -> Tensor:
        """Unmask, and return the sum over the clients that answered, `(size,)` int64.

        Raises:
            SecAggError: If the round can't be finished. No partial sum is returned.
        """
        if (server := self._server) is not None:
            steps = [(Stage.CONFIRM, Client.confirm)] if self.terms.active else []
            self._exchange(server, server.close(), *steps, (Stage.UNMASK, Client.unmask))
            return torch.from_numpy(server.total)
        if len(self._received) < self.terms.min_summands:
            reason = f"{self.terms.min_summands} clients are needed, {len(self._received)} are left"
            raise ThresholdError(reason, Stage.MASK)
        _count_unmasking(self.terms, len(self._received), self.traffic)
        return torch.from_numpy(self.terms.layout.join(self._sum, len(self._received)))
