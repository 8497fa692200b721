"""One client of one round of secure aggregation: a state machine from bytes to bytes.

The client masks its symbols twice: with a mask per neighbour that cancels in the sum, and with one of its
own, because a message that comes late, after the neighbours' masks were opened, would otherwise lie bare.
Every secret is shared among the neighbours. When the survivors are known, a client opens for every neighbour
*either* the self-mask (it survived) *or* the mask key (it did not), as it reads itself off the one list of
survivors that it ever accepts: the server can't ask for shares by name, nor ask twice.

Shares are made of keys that are there already. Owner i and holder j agree on a key k_ij of this attempt;
both compute r_ij from it, by a label of owner, holder and kind of secret. The polynomial f of a secret goes
through the secret at 0 and r_ij at t - 1 holders; the k - t + 1 others are sent f(j + 1) - r_ij in the
clear, and compute their share.

Why that is as good as sealed shares of a random polynomial. Let S be the corrupt holders, fewer than t
(`graph.py` says how likely not). For an honest j the key k_ij is that of two honest parties, fresh in this
attempt, so r_ij is uniform and independent over the labels for everybody else (X25519, HKDF, HMAC). (1)
With a of S among the t - 1 free holders, f is uniform among the polynomials of degree < t with the given
values at 0 and at these a points: the t - 1 - a honest free values determine it and are uniform. The values
at the |S| - a other corrupt points, at most t - 1 - a of them, are therefore uniform whatever f(0) is, and
S learns nothing of the secret. (2) The correction of an honest holder is f(j + 1) under a pad that is used
for it alone, so it is uniform, whatever f is. (3) The two kinds have labels and polynomials of their own:
all shares of the one kind, which are opened, say nothing of the other. (4) An attempt has a context of its
own, the salt of k_ij: terms with the attempt's number, roster of fresh keys, model. Nothing that was opened
in one attempt is a value of another. (5) The confirmation is an output under k_ij with a label of its own.
A corrupt owner may share what it likes, as with sealed shares; a corrupt server may change corrections and
then knows by how much the share is off, which is in no attempt both opened and of use: the holder drops it,
or with 2^-32 opens a wrong one, which is corrected like any other.

After any error but a `StageError` (a message out of turn changes nothing) the client is out of the round.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from lightning_fedq.keys.randomness import Stream, hkdf_expand, hkdf_extract, pack_fields
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
from lightning_fedq.secagg.graph import is_connected, is_free, neighbours
from lightning_fedq.secagg.messages import Kind, PublicKeys, Reader
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

_FIELDS = ("_channel_key", "_context", "_seed", "_mask_root")
_TABLES = ("_public", "_pair_keys", "_held")
_LISTS = ("_order", "_neighbours", "_sharing", "_partners", "_survivors", "unopened")
_KINDS = ("mask", "seed")
"""The two secrets of a client, in the order of their shares: one is opened, never both."""


@lru_cache(maxsize=8)
def ring_order(clients: tuple[int, ...], roster_digest: bytes) -> tuple[int, ...]:
    """Order of the clients around the ring, from the hash of their keys. One tuple for all in a process."""
    stream = Stream(hkdf_expand(hkdf_extract(b"", roster_digest), pack_fields("ring order")))
    return tuple(clients[place] for place in stream.permutation(len(clients)))


def self_mask_key(context: bytes, client: int, seed: bytes) -> bytes:
    """Key of the mask that a client's own seed stands for."""
    return hkdf_expand(hkdf_extract(context, seed), pack_fields("self mask", client))


class Client:
    """One client in one attempt at one round.

    Call, in this order: `advertise`, `share_keys`, `accept_shares`, `masked_input`, `confirm` (against an
    active server only), `unmask`. Each takes the server's message and returns the answer.

    Args:
        client: Its id, in `terms.cohort`.
        terms: The round, as the client itself knows it.
        model_hash: SHA-256 of the model that the client received; clients with different models find no key.
        identity: Signing key; required iff `terms.active`.
        directory: Everybody's verification key, from a source that the server does not control; same
            condition.
        entropy: Source of keys, seeds and shares.

    Attributes:
        unopened: Neighbours whose shares did not open. This client goes on and holds none of them: it masks
            as with everybody else, and the shares of others open theirs, if they are enough.

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
                "identity and directory are needed against an active server, and only there; got "
                f"active={terms.active}, {identity is not None=}, {directory is not None=}"
            )
        self.client, self.terms = client, terms
        self._model_hash, self._identity, self._directory = model_hash, identity, directory or {}
        self._entropy = entropy
        self._next = "advertise"
        self.unopened: tuple[int, ...] = ()

    # ---- between two processes --------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """State that the next message needs, secrets included, for this client's own disk."""
        own = vars(self)
        state: dict[str, Any] = {"next": self._next}
        if "_channel_secret" in own:
            state["_channel_secret"] = self._channel_secret.private_bytes_raw().hex()
        state |= {name: own[name].hex() for name in _FIELDS if name in own}
        state |= {
            name: {str(who): value.hex() for who, value in own[name].items()}
            for name in _TABLES
            if name in own
        }
        state |= {name: list(own[name]) for name in _LISTS if name in own}
        if "_keys" in own:
            state["_keys"] = [self._keys.channel.hex(), self._keys.mask.hex(), self._keys.signature.hex()]
        return json.dumps(state).encode()

    def resume(self, state: bytes) -> None:
        """Go on where `to_bytes` was called, with the same client, terms and model.

        Raises:
            ValueError: If this client has begun already.
        """
        if self._next != "advertise":
            raise ValueError("only a client that has not begun can go on from another one's state")
        found = json.loads(state)
        self._next = found.pop("next")
        if "_keys" in found:
            self._keys = PublicKeys(*map(bytes.fromhex, found.pop("_keys")))
        for name, value in found.items():
            if name == "_channel_secret":
                self._channel_secret = X25519PrivateKey.from_private_bytes(bytes.fromhex(value))
            elif name in _FIELDS:
                setattr(self, name, bytes.fromhex(value))
            elif name in _TABLES:
                setattr(self, name, {int(who): bytes.fromhex(raw) for who, raw in value.items()})
            else:
                setattr(self, name, tuple(value))

    @contextmanager
    def _turn(self, name: str, stage: Stage, following: str) -> Iterator[None]:
        if self._next != name:
            raise StageError(f"this client expects {self._next!r} now, not {name!r}", stage, self.client)
        # until the step is done: an error inside leaves the client out of the round
        self._next = "nothing any more"
        yield
        self._next = following

    def _read(self, message: bytes, kind: Kind, stage: Stage, key: bytes) -> Reader:
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
            channel, mask = (
                key.public_key().public_bytes_raw() for key in (self._channel_secret, mask_secret)
            )
            self._keys = PublicKeys(channel, mask, b"")
            if self._identity is not None:
                statement = wire.keys_statement(self.terms, self.client, self._keys, self._model_hash)
                signature = self._identity.sign(statement)
                self._keys = PublicKeys(channel, mask, signature)
            self._channel_key = wire.channel_key(
                self._channel_secret, server_key, self.terms, self.client, None
            )
            return self._answer(Kind.KEYS, self._model_hash[: wire.SHORT_BYTES] + self._keys.encode())

    # ---- stage 1 ----------------------------------------------------------------------------------

    def share_keys(self, message: bytes) -> bytes:
        """Answer the roster with what each neighbour needs, to compute its share of either secret.

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
            # the hash that an active round checks is of all keys
            listed = roster if self.terms.active else sorted((*self._neighbours, self.client))
            keys = {client: PublicKeys.read(reader, self.terms.active) for client in listed}
            reader.end()
            self._check_keys(keys, digest)
            # clients that were shown different digests have no key in common
            self._context = wire.round_context(self.terms, digest, self._model_hash)
            self._public = {client: keys[client].mask for client in self._neighbours}
            self._pair_keys = {
                other: wire.pair_key(
                    self._channel_secret,
                    keys[other].channel,
                    self._context,
                    pack_fields("channel", *sorted((self.client, other))),
                    stage,
                    other,
                )
                for other in self._neighbours
            }
            return self._answer(Kind.SHARES, self._make_shares())

    def _check_members(
        self, clients: tuple[int, ...], among: tuple[int, ...], stage: Stage, fewest: int
    ) -> None:
        if self.client not in clients:
            raise RosterError("this client is missing from the list", stage, self.client)
        if strangers := set(clients) - set(among):
            raise RosterError(
                f"clients {sorted(strangers)} were not in the stage before", stage, min(strangers)
            )
        if len(clients) < fewest:
            raise ThresholdError(f"{fewest} clients are needed, {len(clients)} are left", stage)

    def _check_keys(self, keys: dict[int, PublicKeys], digest: bytes) -> None:
        if keys[self.client] != self._keys:
            raise RosterError("the roster holds another key for this client", Stage.SHARE, self.client)
        seen: dict[bytes, int] = {}
        for client, own in keys.items():
            for key in (own.channel, own.mask):
                if key in seen:
                    raise RosterError(
                        f"clients {seen[key]} and {client} have a key in common", Stage.SHARE, client
                    )
                seen[key] = client
        if not self.terms.active:
            return
        # the ring is drawn from it, so the server can't pick an order freely
        if wire.roster_hash(self.terms, keys) != digest:
            raise RosterError("the roster's hash is not that of its keys", Stage.SHARE)
        for client, own in keys.items():
            statement = wire.keys_statement(self.terms, client, own, self._model_hash)
            wire.verify(self._directory.get(client), own.signature, statement, Stage.SHARE, client)

    def _make_shares(self) -> bytes:
        """Commitment to the seed, then for each neighbour its corrections, if its shares are not free.

        Both polynomials are drawn by drawing t of their values: the secret itself, from the entropy, and the
        shares of the first t - 1 holders on the ring, which these compute from the pair's key.
        """
        threshold, order = self.terms.threshold, self._order
        if threshold > len(self._neighbours) + 1:
            reason = f"{threshold} holders are needed, {len(self._neighbours) + 1} are left"
            raise ThresholdError(reason, Stage.SHARE, self.client)
        self._seed = element_bytes(random_element(self._entropy))
        near, here = set(self._neighbours), order.index(self.client)
        free = {c for place, c in enumerate(order) if c in near and self._is_free(place - here)}
        others = [client for client in self._neighbours if client not in free]
        corrections, own = dict.fromkeys(self._neighbours, b""), b""
        for kind, secret in zip(_KINDS, (self._mask_root, self._seed), strict=True):
            known = {0: int.from_bytes(secret, "big")}
            # a holder's point is its id + 1, as 0 is the secret's
            known |= {holder + 1: self._computed(kind, self.client, holder) for holder in sorted(free)}
            # t values are known, the secret's and t - 1 free ones: the polynomial is fixed
            *values, last = interpolate_values(known, [client + 1 for client in (*others, self.client)])
            for holder, value in zip(others, values, strict=True):
                # uniform for others: the pad is used for this share alone
                missing = (value - self._computed(kind, self.client, holder)) % PRIME
                corrections[holder] += element_bytes(missing)
            own += element_bytes(last)
        self._held: dict[int, bytes] = {self.client: own}
        body = [wire.self_mask_commitment(self._context, self.client, self._seed)]
        for holder, sent in corrections.items():
            body += [sent, wire.confirmation(self._pair_keys[holder], self.client, holder, sent)]
        return b"".join(body)

    def _is_free(self, step: int) -> bool:
        return is_free(len(self._order), self.terms.degree, self.terms.threshold, step)

    def _computed(self, kind: str, owner: int, holder: int) -> int:
        """The number that owner and holder, one of them this client, both compute from their key."""
        key = self._pair_keys[holder if owner == self.client else owner]
        return free_element(key, wire.share_label(kind, owner, holder))

    def _computed_shares(self, owner: int, corrections: bytes) -> bytes:
        """This client's shares of an owner's two secrets. There are no corrections where they are free."""
        pair = b""
        for number, kind in enumerate(_KINDS):
            # empty, so 0, where shares are free
            missing = _halves(corrections)[number]
            share = self._computed(kind, owner, self.client) + int.from_bytes(missing, "big")
            pair += element_bytes(share % PRIME)
        return pair

    # ---- stage 2 ----------------------------------------------------------------------------------

    def accept_shares(self, message: bytes) -> None:
        """Take the neighbours' shares, and with them the list of those who shared.

        Raises:
            AuthenticationError: If fewer shares than the threshold open: another roster or model.
            RosterError: If the list is not a part of the roster.
            ThresholdError: If too few neighbours are left to open this client's secrets, or to hide it.
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
                    # it is masked with all the same, or the other one's mask would stay in the sum
                    unopened.append(owner)
            if len(self._held) < self.terms.threshold:
                reason = (
                    f"its shares do not open, nor do those of {len(unopened) - 1} others: another roster, "
                    "another model, or tampering"
                )
                raise AuthenticationError(reason, stage, unopened[0])
            self.unopened = tuple(unopened)
            reader.end()
            del self._pair_keys  # with what went over the wire they give every share away

    def masked_input(self, symbols: NDArray[Any]) -> bytes:
        """Mask a message.

        Args:
            symbols: `(layout.size,)` integers in the range of the layout.

        Raises:
            SymbolError: If they are not; the client is out of the round, and nothing was sent.
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
                key = wire.mask_key(
                    secret, self._public[other], self._context, (self.client, other), Stage.MASK, other
                )
                # the smaller id adds what the larger subtracts
                layout.add_mask(masked, key, subtract=self.client > other)
            return self._answer(Kind.MASKED, layout.pack(masked))

    # ---- stages 3 and 4 ---------------------------------------------------------------------------

    def confirm(self, message: bytes) -> bytes:
        """Sign the list of survivors, so that the server can't show another one to anybody else.

        Raises:
            RosterError: If the list does not hold this client, or holds one that shared nothing.
            ThresholdError: If it is too short, or would show partial sums.
        """
        with self._turn("confirm", Stage.CONFIRM, "unmask"):
            self._accept_survivors(message, Stage.CONFIRM)
            assert self._identity is not None  # the constructor made sure
            statement = wire.survivors_statement(self._context, self._survivors, self.terms)
            return self._answer(Kind.CONFIRMATION, self._identity.sign(statement))

    def _accept_survivors(self, message: bytes, stage: Stage) -> None:
        reader = self._read(message, Kind.SURVIVORS, stage, self._channel_key)
        survivors = reader.clients(self.terms)
        reader.end()
        self._check_members(survivors, self._sharing, stage, self.terms.min_summands)
        if not is_connected(self._order, self.terms.degree, set(survivors)):
            raise ThresholdError(
                "the survivors are split into parts whose sums would show", stage, self.client
            )
        self._survivors = survivors

    def unmask(self, message: bytes) -> bytes:
        """Open one share of every neighbour: of the self-mask if it survived, of the mask key if not.

        Args:
            message: The list of survivors, or, against an active server, the confirmations of the one signed.

        Raises:
            RosterError: As in `confirm`.
            ThresholdError: As in `confirm`, or if too few clients confirmed.
            AuthenticationError: If a confirmation is not of the same list.
        """
        with self._turn("unmask", Stage.UNMASK, "nothing any more"):
            if self.terms.active:
                self._check_confirmations(message)
            else:
                self._accept_survivors(message, Stage.UNMASK)
            survivors = set(self._survivors)
            nothing = 2 * NO_SHARE
            # the server reads shares by their place, so a missing one keeps its own
            held = [
                (owner, self._held.get(owner, nothing)) for owner in sorted((*self._partners, self.client))
            ]
            # never both: together they bare a message that comes late
            shares = [
                pair[SHARE_BYTES:] if owner in survivors else pair[:SHARE_BYTES] for owner, pair in held
            ]
            answer = self._answer(Kind.OPENING, b"".join(shares))
            # Forward secrecy: nothing that opens this round outlives it.
            del self._held, self._seed, self._mask_root, self._channel_secret, self._channel_key
            return answer

    def _check_confirmations(self, message: bytes) -> None:
        stage = Stage.UNMASK
        reader = self._read(message, Kind.CONFIRMATIONS, stage, self._channel_key)
        confirming = reader.clients(self.terms)
        # not `min_summands`: messages are in the sum
        self._check_members(confirming, self._survivors, stage, self.terms.min_survivors)
        statement = wire.survivors_statement(self._context, self._survivors, self.terms)
        for client in confirming:
            signature = reader.read_bytes(wire.SIGNATURE_BYTES)
            wire.verify(self._directory.get(client), signature, statement, stage, client)
        reader.end()


def _halves(corrections: bytes) -> tuple[bytes, bytes]:
    """Of each of the two secrets."""
    return corrections[:SHARE_BYTES], corrections[SHARE_BYTES:]
