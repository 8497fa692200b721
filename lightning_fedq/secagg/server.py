"""Server of one round of secure aggregation: a state machine that reads and writes messages in bytes.

Each stage takes one message from every remaining client. `close` ends the stage, drops the clients that did
not answer, and returns the next message to each remaining client. A refused message raises an error and
changes nothing, so the caller may count its sender as dropped and continue. A round that can't be finished
raises an error in `close`.

The server stores one running sum, and for each client two keys, its shares in transit and a commitment. It
never stores a second masked message.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from lightning_fedq.secagg import messages as wire
from lightning_fedq.secagg.errors import (
    MessageError,
    ModelError,
    RosterError,
    ShareError,
    Stage,
    StageError,
    SymbolError,
    ThresholdError,
)
from lightning_fedq.secagg.graph import is_connected, is_free, neighbours, ring_order
from lightning_fedq.secagg.messages import Kind, PublicKeys, Reader, self_mask_key
from lightning_fedq.secagg.shamir import NO_SHARE, SHARE_BYTES, Entropy, correctable, is_element, reconstruct
from lightning_fedq.secagg.terms import Terms


class Server:
    """The server's part of one attempt at one round.

    Args:
        terms: Terms of the attempt.
        model_hash: SHA-256 of the model that was sent out.
        directory: Verification key of each client. Required if and only if `terms.active`.
        entropy: Source of the server's private key.

    Attributes:
        stage: Current stage of the round.
        wrong_shares: Pairs (holder, owner) of wrong shares. One of the two clients has lied.
        broken: Clients whose secret can't be opened although enough shares came. Either the owner shared
            other values than it committed to, or more holders lied than the shares can correct. If more
            secrets are broken than that number of holders, both are equally likely, and the set is empty.

    Raises:
        ValueError: If the directory does not fit the terms.
    """

    def __init__(
        self,
        terms: Terms,
        model_hash: bytes,
        *,
        directory: Mapping[int, Ed25519PublicKey] | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        if terms.active != (directory is not None):
            raise ValueError("the directory is needed iff the round is active")
        self.terms, self._model_hash, self._directory = terms, model_hash, directory or {}
        self.stage = Stage.ADVERTISE
        self._secret = X25519PrivateKey.from_private_bytes(entropy(wire.KEY_BYTES))
        self._expected: tuple[int, ...] = terms.cohort
        self._answered: set[int] = set()
        self._roster: dict[int, PublicKeys] = {}
        self._known_keys: set[bytes] = set()
        self._channel_keys: dict[int, bytes] = {}
        self._commitments: dict[int, bytes] = {}
        self._relayed: dict[int, dict[int, bytes]] = {}
        self._partners: dict[int, tuple[int, ...]] = {}
        self._confirmations: dict[int, bytes] = {}
        self._openings: dict[int, dict[int, bytes]] = {}
        self.wrong_shares: list[tuple[int, int]] = []
        self.broken: frozenset[int] = frozenset()
        self._sum = terms.layout.zeros()
        self._total: NDArray[np.int64] | None = None

    @property
    def survivors(self) -> tuple[int, ...]:
        """Clients whose symbols are in the sum, sorted. Known after the stage of masked messages."""
        if self.stage in (Stage.ADVERTISE, Stage.SHARE, Stage.MASK):
            raise StageError("the survivors are not known yet", self.stage)
        return self._survivors

    @property
    def total(self) -> NDArray[np.int64]:
        """Sum of the survivors' symbols, `(size,)`. Known after the last stage."""
        if self._total is None:
            raise StageError("the sum is not known yet", self.stage)
        return self._total

    def partners(self, client: int) -> set[int]:
        """Return the neighbours with which a client exchanged shares. Empty before the shares are sent."""
        return set(self._partners.get(client, ()))

    def invitation(self, client: int) -> bytes:
        """Return the first message to a client, which contains the server's public key."""
        key = self._secret.public_key().public_bytes_raw()
        return wire.seal(Kind.INVITATION, self.terms, client, key, wire.NO_KEY)

    def receive(self, message: bytes) -> int:
        """Take one message of the current stage and return its sender.

        Raises:
            SecAggError: If the message is refused. The state is then unchanged.
        """
        if self.stage is Stage.DONE:
            raise StageError("the round is over", self.stage)
        kind, take, _ = _STEPS[self.stage]
        client = wire.sender(message, self.terms, kind, self.stage)
        if client in self._answered:
            raise StageError("this client has answered already", self.stage, client)
        if client not in self._expected:
            raise StageError("this client is not expected: it missed an earlier stage", self.stage, client)
        if kind is Kind.KEYS:
            take(self, message, client)
        else:
            body = wire.body(message, self._channel_keys[client], self.stage, client)
            take(self, Reader(body, self.stage, client), client)
        self._answered.add(client)
        return client

    def close(self) -> dict[int, bytes]:
        """End the stage and return the next message to every remaining client.

        Raises:
            ThresholdError: If too few clients are left.
            ShareError: If shares do not reconstruct a secret.
            SymbolError: If the sum is outside the range of this mechanism's messages.
            StageError: If the round is over.
        """
        if self.stage is Stage.DONE:
            raise StageError("the round is over", self.stage)
        stage, left = self.stage, tuple(client for client in self._expected if client in self._answered)
        self.stage = Stage.DONE  # stays so if an error below ends the round
        after = stage in (Stage.CONFIRM, Stage.UNMASK)  # the masked messages are in the sum already
        fewest = self.terms.min_survivors if after else self.terms.min_summands
        if len(left) < fewest:
            raise ThresholdError(f"{fewest} clients are needed, {len(left)} are left", stage)
        _, _, send = _STEPS[stage]
        following, outgoing = send(self, left)
        self.stage, self._expected, self._answered = following, left, set()
        return outgoing

    def _seal(self, kind: Kind, client: int, body: bytes) -> bytes:
        return wire.seal(kind, self.terms, client, body, self._channel_keys[client])

    # ---- stage 0 ----------------------------------------------------------------------------------

    def _take_keys(self, message: bytes, client: int) -> None:
        # the tag is made with a key that the message itself contains, so the fields are read first
        size = wire.SHORT_BYTES + 2 * wire.KEY_BYTES + (wire.SIGNATURE_BYTES if self.terms.active else 0)
        reader = Reader(message[-wire.TAG_BYTES - size : -wire.TAG_BYTES], self.stage, client)
        if len(message) != wire.FRAME_BYTES + size:
            reason = f"keys take {wire.FRAME_BYTES + size} bytes, got {len(message)}"
            raise MessageError(reason, self.stage, client)
        model_hash, keys = reader.read_bytes(wire.SHORT_BYTES), PublicKeys.read(reader, self.terms.active)
        channel_key = wire.channel_key(self._secret, keys.channel, self.terms, client)
        wire.body(message, channel_key, self.stage, client)
        if model_hash != self._model_hash[: wire.SHORT_BYTES]:
            raise ModelError("this client trained another model", self.stage, client)
        if keys.channel == keys.mask or not self._known_keys.isdisjoint((keys.channel, keys.mask)):
            raise RosterError("this client's key is used twice", self.stage, client)
        # this call only refuses keys of low order, and its result is not used
        wire.pair_key(self._secret, keys.mask, self.terms.digest, b"order check", self.stage, client)
        if self.terms.active:
            statement = wire.keys_statement(self.terms, client, keys, self._model_hash)
            wire.verify(self._directory.get(client), keys.signature, statement, self.stage, client)
        self._roster[client], self._channel_keys[client] = keys, channel_key
        self._known_keys |= {keys.channel, keys.mask}

    def _send_roster(self, left: tuple[int, ...]) -> tuple[Stage, dict[int, bytes]]:
        digest = wire.roster_hash(self.terms, self._roster)
        self._context = wire.round_context(self.terms, digest, self._model_hash)
        self._order = ring_order(left, digest)
        self._places = {client: place for place, client in enumerate(self._order)}
        places, degree = self._places.items(), self.terms.degree
        self._neighbours = {client: neighbours(self._order, degree, place) for client, place in places}
        head = wire.client_bits(left, self.terms) + digest
        encoded = {client: self._roster[client].encode() for client in left}
        whole = b"".join(encoded.values()) if self.terms.active else b""
        outgoing = {}
        for client in left:
            near = sorted((*self._neighbours[client], client))
            keys = whole or b"".join(encoded[other] for other in near)
            outgoing[client] = self._seal(Kind.ROSTER, client, head + keys)
        return Stage.SHARE, outgoing

    # ---- stage 1 ----------------------------------------------------------------------------------

    def _take_shares(self, reader: Reader, client: int) -> None:
        commitment = reader.read_bytes(wire.SHORT_BYTES)
        here, rules = self._places[client], (len(self._order), self.terms.degree, self.terms.threshold)
        relayed = {}
        for holder in self._neighbours[client]:
            corrections = 0 if is_free(*rules, self._places[holder] - here) else wire.CORRECTION_BYTES
            relayed[holder] = reader.read_bytes(wire.CONFIRMATION_BYTES + corrections)
        reader.end()
        self._commitments[client] = commitment
        self._relayed[client] = relayed

    def _send_shares(self, left: tuple[int, ...]) -> tuple[Stage, dict[int, bytes]]:
        there = set(left)
        self._partners = {c: tuple(filter(there.__contains__, self._neighbours[c])) for c in left}
        head, outgoing = wire.client_bits(left, self.terms), {}
        for client in left:
            relayed = b"".join(self._relayed[owner][client] for owner in self._partners[client])
            outgoing[client] = self._seal(Kind.DELIVERY, client, head + relayed)
        self._relayed.clear()
        return Stage.MASK, outgoing

    # ---- stage 2 ----------------------------------------------------------------------------------

    def _take_masked(self, reader: Reader, client: int) -> None:
        layout = self.terms.layout
        packed = reader.read_bytes(layout.num_bytes)
        reader.end()
        try:
            values = layout.unpack(packed)
        except ValueError as error:
            raise MessageError(str(error), self.stage, client) from error
        layout.add(self._sum, values)

    def _send_survivors(self, left: tuple[int, ...]) -> tuple[Stage, dict[int, bytes]]:
        if not is_connected(self._order, self.terms.degree, set(left)):
            raise ThresholdError("the survivors are split into parts whose sums would show", Stage.MASK)
        self._survivors = left
        body = wire.client_bits(left, self.terms)
        following = Stage.CONFIRM if self.terms.active else Stage.UNMASK
        return following, {client: self._seal(Kind.SURVIVORS, client, body) for client in left}

    # ---- stage 3, active only ---------------------------------------------------------------------

    def _take_confirmation(self, reader: Reader, client: int) -> None:
        signature = reader.read_bytes(wire.SIGNATURE_BYTES)
        reader.end()
        statement = wire.survivors_statement(self._context, self._survivors, self.terms)
        wire.verify(self._directory.get(client), signature, statement, self.stage, client)
        self._confirmations[client] = signature

    def _send_confirmations(self, left: tuple[int, ...]) -> tuple[Stage, dict[int, bytes]]:
        body = wire.client_bits(left, self.terms) + b"".join(self._confirmations[client] for client in left)
        return Stage.UNMASK, {client: self._seal(Kind.CONFIRMATIONS, client, body) for client in left}

    # ---- stage 4 ----------------------------------------------------------------------------------

    def _take_opening(self, reader: Reader, client: int) -> None:
        owners = sorted((*self._partners[client], client))
        opened = {owner: reader.read_bytes(SHARE_BYTES) for owner in owners}
        reader.end()
        if strange := [o for o, share in opened.items() if share != NO_SHARE and not is_element(share)]:
            raise MessageError(f"the share of client {strange[0]} is no element", self.stage, client)
        for owner, share in opened.items():
            if share != NO_SHARE:
                self._openings.setdefault(owner, {})[client + 1] = share  # the secret is at point 0

    def _finish(self, left: tuple[int, ...]) -> tuple[Stage, dict[int, bytes]]:
        """Open the secrets, remove the remaining masks from the sum, and check the range of the sum."""
        layout, survivors = self.terms.layout, set(self._survivors)
        seeds, gone = self._open_all(survivors)  # all secrets are opened before the sum changes
        for client, seed in seeds.items():
            layout.add_mask(self._sum, self_mask_key(self._context, client, seed), subtract=True)
        for client, secret in gone.items():
            for other in self._partners[client]:
                if other in survivors:
                    public = self._roster[other].mask
                    key = wire.mask_key(secret, public, self._context, (client, other), Stage.UNMASK, other)
                    # the survivor added the mask if its id is smaller, so it is subtracted here
                    layout.add_mask(self._sum, key, subtract=other < client)
        total, count = layout.join(self._sum, len(self._survivors)), len(self._survivors)
        if bool(((total < layout.low * count) | (total > layout.high * count)).any()):
            reason = (
                f"the sum of {count} messages lies in [{total.min()}, {total.max()}]. A client has sent "
                "impossible symbols, and masks hide which client."
            )
            raise SymbolError(reason, Stage.UNMASK)
        self._total = total
        return Stage.DONE, {}

    def _open_all(self, survivors: set[int]) -> tuple[dict[int, bytes], dict[int, X25519PrivateKey]]:
        """Return the seeds of the survivors' self-masks, and the mask keys of the dropouts."""
        opened: dict[int, bytes] = {}
        failed: dict[int, ShareError] = {}
        limit = len(self.terms.cohort)
        for owner, partners in self._partners.items():
            if owner not in survivors and survivors.isdisjoint(partners):  # no mask of it is in the sum
                continue
            try:
                opened[owner] = self._open(owner, owner in survivors)
            except ShareError as error:
                failed[owner] = error
                limit = min(limit, correctable(len(self._openings[owner]), self.terms.threshold))
                if len(failed) > limit:  # then lying holders are as likely, and nobody is named as broken
                    raise
        if failed:
            self.broken = frozenset(failed)
            raise next(iter(failed.values()))
        seeds = {owner: secret for owner, secret in opened.items() if owner in survivors}
        roots = {owner: secret for owner, secret in opened.items() if owner not in survivors}
        return seeds, {owner: wire.mask_secret(self.terms, owner, root) for owner, root in roots.items()}

    def _open(self, owner: int, survived: bool) -> bytes:
        """Return the seed of a survivor, or the mask root of a dropout.

        Shares of holders that were wrong for several owners are used last.
        """
        name, shares = "self-mask" if survived else "mask key", self._openings.get(owner, {})
        if len(shares) < self.terms.threshold:
            reason = f"{self.terms.threshold} shares of its {name} are needed, {len(shares)} came"
            raise ThresholdError(reason, Stage.UNMASK, owner)

        def is_right(secret: bytes) -> bool:
            # the owner's commitment tests its seed, its public key tests its mask root
            if survived:
                commitment = wire.self_mask_commitment(self._context, owner, secret)
                return commitment == self._commitments[owner]
            public = wire.mask_secret(self.terms, owner, secret).public_key()
            return public.public_bytes_raw() == self._roster[owner].mask

        wrong = Counter(holder + 1 for holder, _ in self.wrong_shares)
        # one wrong share may be the owner's lie, but several wrong shares had several owners
        doubted = {point for point, times in wrong.items() if times > 1}
        opened = reconstruct(shares, self.terms.threshold, is_right, doubted)
        if opened is None:
            reason = f"the shares of its {name} do not give back what it committed to. The round is lost."
            raise ShareError(reason, Stage.UNMASK, owner)
        self.wrong_shares += [(point - 1, owner) for point in opened.wrong]
        return opened.secret


_Outgoing = tuple[Stage, dict[int, bytes]]
_STEPS: dict[Stage, tuple[Kind, Callable[..., None], Callable[[Server, tuple[int, ...]], _Outgoing]]] = {
    Stage.ADVERTISE: (Kind.KEYS, Server._take_keys, Server._send_roster),
    Stage.SHARE: (Kind.SHARES, Server._take_shares, Server._send_shares),
    Stage.MASK: (Kind.MASKED, Server._take_masked, Server._send_survivors),
    Stage.CONFIRM: (Kind.CONFIRMATION, Server._take_confirmation, Server._send_confirmations),
    Stage.UNMASK: (Kind.OPENING, Server._take_opening, Server._finish),
}
"""For each stage: kind of the clients' messages, method that takes one, and method that ends the stage."""
