"""Client of one round of secure aggregation: a state machine that reads and writes messages in bytes.

The client adds two kinds of masks to its symbols. It agrees on one pairwise mask with each neighbour, and
pairwise masks cancel in the sum. It also adds a self-mask, because a message that arrives after the
neighbours' mask keys were opened would be readable without it. Both secrets, the mask key and the seed of
the self-mask, are shared among the neighbours. When the survivors are known, a client opens one share for
each neighbour: of the self-mask if the neighbour survived, of the mask key if it dropped out. The client
decides this from the only list of survivors that it ever accepts. So the server can't request shares by
name, and it can't request them twice.

Most shares need no message, because they are derived from keys that both sides have. Owner i and holder j
agree on a key k_ij of this attempt. Both compute r_ij from it and from a label of owner, holder and kind of
secret. The polynomial f of a secret goes through the secret at 0 and through r_ij at t - 1 holders, which
are called free. The k - t + 1 other holders are sent the correction f(j + 1) - r_ij without encryption and
add r_ij to it.

These shares are as secure as encrypted shares of a random polynomial. Let S be the corrupt holders, fewer
than t (`graph.py` bounds the probability of more). For an honest j the key k_ij belongs to two honest
parties and is fresh in this attempt. So r_ij is uniform and independent over the labels for everybody else
(X25519, HKDF, HMAC).

1. Let a of S be among the t - 1 free holders. The t - 1 - a honest free values are uniform and determine f,
   so f is uniform among the polynomials of degree < t with the given values at 0 and at these a points. The
   values at the |S| - a other corrupt points, at most t - 1 - a of them, are therefore uniform for every
   f(0), and S learns nothing about the secret.
2. The correction of an honest holder is f(j + 1) under a pad that encrypts nothing else. It is uniform for
   every f.
3. The two kinds of secrets have separate labels and separate polynomials. Opened shares of one kind carry
   no information about the other.
4. The salt of k_ij is the context of the attempt: terms with the attempt's number, roster of fresh keys,
   model. No value that was opened in one attempt appears in another.
5. The confirmation is an output under k_ij with a separate label.

A corrupt owner may share any values, which encrypted shares don't prevent either. A corrupt server may
change a correction, and it then knows the error of the share. The confirmation no longer fits, so the holder
drops the share. With probability 2^-32 the confirmation does fit, and the server corrects the wrong share
like any other.

After any error except a `StageError` the client is out of the round. A message out of turn changes nothing.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from lightning_fedq.keys.randomness import pack_fields
from lightning_fedq.secagg import messages as wire
from lightning_fedq.secagg.errors import (
    AuthenticationError,
    MessageError,
    RosterError,
    Stage,
    StageError,
    SymbolError,
    ThresholdError,
)
from lightning_fedq.secagg.graph import is_connected, is_free, neighbours, ring_order
from lightning_fedq.secagg.messages import Kind, PublicKeys, Reader, self_mask_key
from lightning_fedq.secagg.shamir import (
    NO_SHARE,
    PRIME,
    SHARE_BYTES,
    Entropy,
    element_bytes,
    free_element,
    interpolate_values,
    is_element,
    random_element,
)
from lightning_fedq.secagg.terms import Terms

_KINDS = ("mask", "seed")
"""The two secrets of a client, in the order of their shares. Only one of the two is ever opened."""


class _Format(NamedTuple):
    """Conversion of a value to JSON and back."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_BYTES = _Format(bytes.hex, bytes.fromhex)
_BYTES_BY_CLIENT = _Format(
    lambda values: {str(client): value.hex() for client, value in values.items()},
    lambda values: {int(client): bytes.fromhex(value) for client, value in values.items()},
)
_CLIENTS = _Format(list, tuple)
_STATE = {
    "_channel_secret": _Format(
        lambda key: key.private_bytes_raw().hex(),
        lambda value: X25519PrivateKey.from_private_bytes(bytes.fromhex(value)),
    ),
    "_keys": _Format(
        lambda keys: [keys.channel.hex(), keys.mask.hex(), keys.signature.hex()],
        lambda values: PublicKeys(*map(bytes.fromhex, values)),
    ),
    **dict.fromkeys(("_channel_key", "_context", "_seed", "_mask_root"), _BYTES),
    **dict.fromkeys(("_public", "_pair_keys", "_held"), _BYTES_BY_CLIENT),
    **dict.fromkeys(("_order", "_neighbours", "_sharing", "_partners", "_survivors", "unopened"), _CLIENTS),
}
"""What a client keeps between two messages, by attribute, and how it becomes JSON."""


class Client:
    """One client in one attempt at one round.

    Call, in this order: `advertise`, `share_keys`, `accept_shares`, `masked_input`, `confirm` (against an
    active server only), `unmask`. Each takes the server's message and returns the answer, except that
    `masked_input` takes the symbols and `accept_shares` answers nothing.

    Args:
        client: Id of the client, in `terms.cohort`.
        terms: Terms of the round, which the client does not take from the server.
        model_hash: SHA-256 of the model that the client received. Clients with different models agree on no
            key.
        identity: Signing key of the client. Required if and only if `terms.active`.
        directory: Verification key of each client, from a source that the server does not control. Required
            if and only if `terms.active`.
        entropy: Source of keys, seeds and shares.

    Attributes:
        unopened: Neighbours whose shares failed the check. This client goes on without these shares. It still
            adds the pairwise masks, and the secrets of these neighbours are opened from the shares of other
            holders, if there are enough.

    Raises:
        ValueError: If the client is not in the cohort, or identity and directory do not fit the terms.
    """

    def __init__(
        self,
        client: int,
        terms: Terms,
        model_hash: bytes,
        *,
        identity: Ed25519PrivateKey | None = None,
        directory: Mapping[int, Ed25519PublicKey] | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        if client not in terms.members:
            raise ValueError(f"client {client} is not in the cohort")
        if len(model_hash) != wire.HASH_BYTES:
            raise ValueError(f"model_hash must be {wire.HASH_BYTES} bytes (SHA-256), got {len(model_hash)}")
        if terms.active != (identity is not None and directory is not None):
            raise ValueError(
                "identity and directory are needed against an active server, and only there, got "
                f"active={terms.active}, {identity is not None=}, {directory is not None=}"
            )
        self.client, self.terms = client, terms
        self._model_hash, self._identity, self._directory = model_hash, identity, directory or {}
        self._entropy = entropy
        self._next = "advertise"
        self.unopened: tuple[int, ...] = ()

    # ---- between two processes --------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return the state that the next message needs, as JSON.

        The state contains the secrets of this client, so store it only where the client alone can read it.
        """
        fields = vars(self)
        state = {name: form.write(fields[name]) for name, form in _STATE.items() if name in fields}
        return json.dumps({"next": self._next, **state}).encode()

    def resume(self, state: bytes) -> None:
        """Continue from a state of `to_bytes`, with the same client, terms and model.

        Raises:
            ValueError: If this client has begun already.
        """
        if self._next != "advertise":
            raise ValueError("only a client that has not begun can resume from a state")
        fields = json.loads(state)
        self._next = fields.pop("next")
        for name, value in fields.items():
            setattr(self, name, _STATE[name].read(value))

    @contextmanager
    def _turn(self, name: str, stage: Stage, following: str) -> Iterator[None]:
        """Check that the step `name` is due, and make `following` due once the step succeeded."""
        if self._next != name:
            raise StageError(f"this client expects {self._next!r} now, not {name!r}", stage, self.client)
        # an error inside the step leaves this value, so the client stays out of the round
        self._next = "nothing any more"
        yield
        self._next = following

    def _read(self, message: bytes, kind: Kind, stage: Stage, key: bytes) -> Reader:
        """Check the header and the tag of a message, and return a reader of its body."""
        if wire.sender(message, self.terms, kind, stage) != self.client:
            raise MessageError("the message is for another client", stage, self.client)
        return Reader(wire.body(message, key, stage, self.client), stage, self.client)

    def _answer(self, kind: Kind, body: bytes) -> bytes:
        return wire.seal(kind, self.terms, self.client, body, self._channel_key)

    # ---- stage 0 ----------------------------------------------------------------------------------

    def advertise(self, invitation: bytes) -> bytes:
        """Answer the server's invitation with two fresh public keys.

        Raises:
            SecAggError: If the invitation is malformed or for another round.
        """
        with self._turn("advertise", Stage.ADVERTISE, "share_keys"):
            reader = self._read(invitation, Kind.INVITATION, Stage.ADVERTISE, wire.NO_KEY)
            server_key = reader.read_bytes(wire.KEY_BYTES)
            reader.end()
            self._channel_secret = X25519PrivateKey.from_private_bytes(self._entropy(wire.KEY_BYTES))
            self._mask_root = element_bytes(random_element(self._entropy))
            mask_secret = wire.mask_secret(self.terms, self.client, self._mask_root)
            secrets = self._channel_secret, mask_secret
            channel, mask = (key.public_key().public_bytes_raw() for key in secrets)
            self._keys = PublicKeys(channel, mask, b"")
            if self._identity is not None:
                statement = wire.keys_statement(self.terms, self.client, self._keys, self._model_hash)
                signature = self._identity.sign(statement)
                self._keys = PublicKeys(channel, mask, signature)
            self._channel_key = wire.channel_key(self._channel_secret, server_key, self.terms, self.client)
            return self._answer(Kind.KEYS, self._model_hash[: wire.SHORT_BYTES] + self._keys.encode())

    # ---- stage 1 ----------------------------------------------------------------------------------

    def share_keys(self, message: bytes) -> bytes:
        """Answer the roster with corrections, from which neighbours compute their shares of both secrets.

        Raises:
            RosterError: If this client or a neighbour is missing, changed, or named twice.
            ThresholdError: If the roster is too small.
            AuthenticationError: If a signature does not verify.
            LowOrderKeyError: If a neighbour's key has low order.
        """
        stage = Stage.SHARE
        with self._turn("share_keys", stage, "accept_shares"):
            reader = self._read(message, Kind.ROSTER, stage, self._channel_key)
            roster = reader.clients(self.terms)
            digest = reader.read_bytes(wire.HASH_BYTES)
            self._check_members(roster, self.terms.cohort, stage, self.terms.min_summands)
            self._order = ring_order(roster, digest)
            self._neighbours = neighbours(self._order, self.terms.degree, self._order.index(self.client))
            # an active round checks the hash of all keys, so its roster lists all of them
            listed = roster if self.terms.active else sorted((*self._neighbours, self.client))
            keys = {client: PublicKeys.read(reader, self.terms.active) for client in listed}
            reader.end()
            self._check_keys(keys, digest)
            # the context includes the digest, so clients that were shown different digests agree on no key
            self._context = wire.round_context(self.terms, digest, self._model_hash)
            self._public = {client: keys[client].mask for client in self._neighbours}
            pair_keys, own = {}, self._channel_secret
            for other in self._neighbours:
                info = pack_fields("channel", *sorted((self.client, other)))
                pair_keys[other] = wire.pair_key(own, keys[other].channel, self._context, info, stage, other)
            self._pair_keys = pair_keys
            return self._answer(Kind.SHARES, self._make_shares())

    def _check_members(
        self, clients: tuple[int, ...], among: tuple[int, ...], stage: Stage, fewest: int
    ) -> None:
        """Check that a list holds this client, no client from outside `among`, and at least `fewest`."""
        if self.client not in clients:
            raise RosterError("this client is missing from the list", stage, self.client)
        if strangers := set(clients) - set(among):
            reason = f"clients {sorted(strangers)} were not in the stage before"
            raise RosterError(reason, stage, min(strangers))
        if len(clients) < fewest:
            raise ThresholdError(f"{fewest} clients are needed, {len(clients)} are left", stage)

    def _check_keys(self, keys: dict[int, PublicKeys], digest: bytes) -> None:
        """Check that keys are distinct and, in an active round, that hash and signatures fit them."""
        if keys[self.client] != self._keys:
            raise RosterError("the roster holds another key for this client", Stage.SHARE, self.client)
        seen: dict[bytes, int] = {}
        for client, own in keys.items():
            for key in (own.channel, own.mask):
                if key in seen:
                    reason = f"clients {seen[key]} and {client} have a key in common"
                    raise RosterError(reason, Stage.SHARE, client)
                seen[key] = client
        if not self.terms.active:
            return
        # the ring's order is drawn from this hash, so the server can't pick an order freely
        if wire.roster_hash(self.terms, keys) != digest:
            raise RosterError("the roster's hash is not that of its keys", Stage.SHARE)
        for client, own in keys.items():
            statement = wire.keys_statement(self.terms, client, own, self._model_hash)
            wire.verify(self._directory.get(client), own.signature, statement, Stage.SHARE, client)

    def _make_shares(self) -> bytes:
        """Return the commitment to the seed, then each neighbour's corrections and confirmation.

        A polynomial of degree < t is fixed by t values. One is the secret at 0. The others are the shares of
        the t - 1 free holders, which those holders compute from the pair's key. So free holders get no
        correction.
        """
        threshold, order = self.terms.threshold, self._order
        if threshold > len(self._neighbours) + 1:
            reason = f"{threshold} holders are needed, {len(self._neighbours) + 1} are left"
            raise ThresholdError(reason, Stage.SHARE, self.client)
        self._seed = element_bytes(random_element(self._entropy))
        near, here = set(self._neighbours), order.index(self.client)
        free = {c for place, c in enumerate(order) if c in near and self._is_free(place - here)}
        corrections, own = dict.fromkeys(self._neighbours, b""), b""
        for kind, secret in zip(_KINDS, (self._mask_root, self._seed), strict=True):
            corrected, own_share = self._share_secret(kind, secret, free)
            for holder, correction in corrected.items():
                corrections[holder] += correction
            own += own_share
        self._held: dict[int, bytes] = {self.client: own}
        body = [wire.self_mask_commitment(self._context, self.client, self._seed)]
        for holder, sent in corrections.items():
            body += [sent, wire.confirmation(self._pair_keys[holder], self.client, holder, sent)]
        return b"".join(body)

    def _share_secret(
        self, kind: str, secret: bytes, free: Collection[int]
    ) -> tuple[dict[int, bytes], bytes]:
        """Return the corrections of one secret by holder, without the free holders, and the own share."""
        # a holder's point is its id + 1, because the secret is at point 0
        known = {0: int.from_bytes(secret, "big")}
        known |= {holder + 1: self._computed(kind, self.client, holder) for holder in sorted(free)}
        others = [client for client in self._neighbours if client not in free]
        # the secret and t - 1 free shares are t known values, which fix the polynomial
        *shares, own = interpolate_values(known, [client + 1 for client in (*others, self.client)])
        corrections = {}
        for holder, share in zip(others, shares, strict=True):
            # the correction looks uniform to others, because its pad is used for this share only
            missing = (share - self._computed(kind, self.client, holder)) % PRIME
            corrections[holder] = element_bytes(missing)
        return corrections, element_bytes(own)

    def _is_free(self, step: int) -> bool:
        return is_free(len(self._order), self.terms.degree, self.terms.threshold, step)

    def _computed(self, kind: str, owner: int, holder: int) -> int:
        """Return r_ij, which owner and holder both compute from their key. One of them is this client."""
        key = self._pair_keys[holder if owner == self.client else owner]
        return free_element(key, wire.share_label(kind, owner, holder))

    def _computed_shares(self, owner: int, corrections: bytes) -> bytes:
        """Return this client's shares of an owner's two secrets. `corrections` is empty for free shares."""
        pair = b""
        # no bytes stand for a correction of 0, in case the shares are free
        for kind, missing in zip(_KINDS, _halves(corrections), strict=True):
            share = self._computed(kind, owner, self.client) + int.from_bytes(missing, "big")
            pair += element_bytes(share % PRIME)
        return pair

    # ---- stage 2 ----------------------------------------------------------------------------------

    def accept_shares(self, message: bytes) -> None:
        """Take the neighbours' shares and the list of the clients that shared.

        Raises:
            AuthenticationError: If fewer shares than the threshold pass the check. The owners then have
                another roster or another model, or somebody changed the messages.
            RosterError: If the list is not a part of the roster.
            ThresholdError: If too few neighbours are left to open this client's secrets, or too few clients
                to hide it.
        """
        stage = Stage.MASK
        with self._turn("accept_shares", stage, "masked_input"):
            reader = self._read(message, Kind.DELIVERY, stage, self._channel_key)
            self._sharing = reader.clients(self.terms)
            self._check_members(self._sharing, self._order, stage, self.terms.min_summands)
            sharing = set(self._sharing)
            self._partners = tuple(client for client in self._neighbours if client in sharing)
            if len(self._partners) + 1 < self.terms.threshold:
                reason = f"{self.terms.threshold} holders are needed, {len(self._partners) + 1} are left"
                raise ThresholdError(reason, stage, self.client)
            unopened = []
            places = {client: place for place, client in enumerate(self._order)}
            for owner in self._partners:
                free = self._is_free(places[self.client] - places[owner])
                corrections = b"" if free else reader.read_bytes(wire.CORRECTION_BYTES)
                confirmed = reader.read_bytes(wire.CONFIRMATION_BYTES)
                wanted = wire.confirmation(self._pair_keys[owner], owner, self.client, corrections)
                if confirmed == wanted and (free or all(map(is_element, _halves(corrections)))):
                    self._held[owner] = self._computed_shares(owner, corrections)
                else:
                    # the pairwise mask is added anyway, or the owner's mask would stay in the sum
                    unopened.append(owner)
            if len(self._held) < self.terms.threshold:
                reason = (
                    f"its shares do not open, nor do those of {len(unopened) - 1} others. "
                    "They have another roster or model, or somebody changed the messages."
                )
                raise AuthenticationError(reason, stage, unopened[0])
            self.unopened = tuple(unopened)
            reader.end()
            del self._pair_keys  # together with recorded messages, these keys reveal every share

    def masked_input(self, symbols: NDArray[Any]) -> bytes:
        """Mask the symbols of this client's update and return the message to the server.

        Args:
            symbols: `(layout.size,)` integers in the range of the layout.

        Raises:
            SymbolError: If shape, type or range are different. The client is then out of the round, and
                nothing was sent.
        """
        with self._turn("masked_input", Stage.MASK, "confirm" if self.terms.active else "unmask"):
            layout = self.terms.layout
            try:
                masked = layout.split(np.asarray(symbols))
            except ValueError as error:
                raise SymbolError(str(error), Stage.MASK, self.client) from error
            layout.add_mask(masked, self_mask_key(self._context, self.client, self._seed))
            secret = wire.mask_secret(self.terms, self.client, self._mask_root)
            for other in self._partners:
                pair, public = (self.client, other), self._public[other]
                key = wire.mask_key(secret, public, self._context, pair, Stage.MASK, other)
                # the client with the smaller id adds the mask, the other one subtracts it
                layout.add_mask(masked, key, subtract=self.client > other)
            return self._answer(Kind.MASKED, layout.pack(masked))

    # ---- stages 3 and 4 ---------------------------------------------------------------------------

    def confirm(self, message: bytes) -> bytes:
        """Sign the list of survivors, so that the server can't show other clients a different list.

        Raises:
            RosterError: If this client is not in the list, or a client that shared nothing is.
            ThresholdError: If the list is too short, or its masks would not hide partial sums.
        """
        with self._turn("confirm", Stage.CONFIRM, "unmask"):
            self._accept_survivors(message, Stage.CONFIRM)
            assert self._identity is not None  # the constructor checked it
            statement = wire.survivors_statement(self._context, self._survivors, self.terms)
            return self._answer(Kind.CONFIRMATION, self._identity.sign(statement))

    def _accept_survivors(self, message: bytes, stage: Stage) -> None:
        reader = self._read(message, Kind.SURVIVORS, stage, self._channel_key)
        survivors = reader.clients(self.terms)
        reader.end()
        self._check_members(survivors, self._sharing, stage, self.terms.min_summands)
        if not is_connected(self._order, self.terms.degree, set(survivors)):
            reason = "the survivors are split into parts whose sums would show"
            raise ThresholdError(reason, stage, self.client)
        self._survivors = survivors

    def unmask(self, message: bytes) -> bytes:
        """Open one share for every neighbour: of the self-mask if it survived, of the mask key if not.

        Args:
            message: List of survivors. Against an active server, the confirmations of the list that this
                client signed.

        Raises:
            RosterError: If this client is not in the list, or a client is that was not in the stage before.
            ThresholdError: If too few clients are in the list, or its masks would not hide partial sums.
            AuthenticationError: If a confirmation is not a signature of the same list.
        """
        with self._turn("unmask", Stage.UNMASK, "nothing any more"):
            if self.terms.active:
                self._check_confirmations(message)
            else:
                self._accept_survivors(message, Stage.UNMASK)
            survivors = set(self._survivors)
            shares = []
            for owner in sorted((*self._partners, self.client)):
                # the server reads shares by position, so a missing share is sent as a placeholder
                of_mask, of_seed = _halves(self._held.get(owner, 2 * NO_SHARE))
                # both secrets together would reveal a message that arrives late, so only one is opened
                shares.append(of_seed if owner in survivors else of_mask)
            answer = self._answer(Kind.OPENING, b"".join(shares))
            # Forward secrecy: delete everything that could open this round later.
            del self._held, self._seed, self._mask_root, self._channel_secret, self._channel_key
            return answer

    def _check_confirmations(self, message: bytes) -> None:
        """Check that enough survivors signed the list that this client accepted."""
        stage = Stage.UNMASK
        reader = self._read(message, Kind.CONFIRMATIONS, stage, self._channel_key)
        confirming = reader.clients(self.terms)
        # not `min_summands`, because the messages are in the sum already
        self._check_members(confirming, self._survivors, stage, self.terms.min_survivors)
        statement = wire.survivors_statement(self._context, self._survivors, self.terms)
        for client in confirming:
            signature = reader.read_bytes(wire.SIGNATURE_BYTES)
            wire.verify(self._directory.get(client), signature, statement, stage, client)
        reader.end()


def _halves(pair: bytes) -> tuple[bytes, bytes]:
    """Split the shares of one holder, or their corrections, by secret: mask key, then seed."""
    return pair[:SHARE_BYTES], pair[SHARE_BYTES:]
