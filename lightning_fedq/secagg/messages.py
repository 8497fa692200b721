"""Framing of the messages: typed, bound to the terms of the round, length-checked and authenticated.

    magic "FQSA" | kind u8 | digest of the terms, 16 | client u64 | body | HMAC-SHA256, 16

Digest and tag are cut to the first 16 of 32 bytes, because 128 bits suffice to distinguish messages and to
prevent forgery. Keys and shares depend on the whole digest. Client and server share a channel key from
X25519. The tag detects corruption, truncation and replay. It does not prove the identity behind a key: the
signatures of the active variant do, or else the transport must. The invitation comes before there is a key,
so its tag (under the zero key) is only a checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from lightning_fedq.keys.randomness import agree, hkdf_expand, hkdf_extract, pack_fields
from lightning_fedq.secagg.errors import (
    AuthenticationError,
    LowOrderKeyError,
    MessageError,
    Stage,
    StageError,
    TermsError,
)
from lightning_fedq.secagg.shamir import SHARE_BYTES
from lightning_fedq.secagg.terms import Terms

_HEADER = struct.Struct(">4sB16sQ")
_MAGIC = b"FQSA"
KEY_BYTES, TAG_BYTES, SIGNATURE_BYTES, HASH_BYTES = 32, 16, 64, 32
SHORT_BYTES = 16
"""Length of a shortened hash, which only distinguishes terms, models or seeds of self-masks."""
FRAME_BYTES = _HEADER.size + TAG_BYTES
CONFIRMATION_BYTES = 4
"""Length of the check by which a holder sees that key and corrections are the owner's."""
CORRECTION_BYTES = 2 * SHARE_BYTES
"""Length of the two corrections for a holder whose shares are not free."""
NO_KEY = bytes(KEY_BYTES)


class Kind(IntEnum):
    """Message types. Messages with odd numbers go to a client, those with even numbers to the server."""

    INVITATION = 1
    KEYS = 2
    ROSTER = 3
    SHARES = 4
    DELIVERY = 5
    MASKED = 6
    SURVIVORS = 7
    CONFIRMATION = 8
    CONFIRMATIONS = 9
    OPENING = 10


def seal(kind: Kind, terms: Terms, client: int, body: bytes, key: bytes) -> bytes:
    """Frame and authenticate the body of a message from or to `client`."""
    message = _HEADER.pack(_MAGIC, kind, terms.digest[:SHORT_BYTES], client) + body
    return message + hmac.digest(key, message, "sha256")[:TAG_BYTES]


def sender(message: bytes, terms: Terms, expected: Kind, stage: Stage) -> int:
    """Read the header and return the client that it names. `body` authenticates the message later.

    Raises:
        MessageError: If it is no message of this protocol, or names a client outside the cohort.
        TermsError: If it belongs to another round.
        StageError: If it is of another kind.
    """
    if len(message) < FRAME_BYTES:
        raise MessageError(f"a message has {FRAME_BYTES} bytes or more, got {len(message)}", stage)
    magic, kind, digest, client = _HEADER.unpack_from(message)
    if magic != _MAGIC or kind not in Kind._value2member_map_:
        raise MessageError(f"not a message of this protocol: magic {magic!r}, kind {kind}", stage)
    if digest != terms.digest[:SHORT_BYTES]:
        reason = "the message belongs to another session, round, attempt, cohort or modulus"
        raise TermsError(reason, stage, client)
    if client not in terms.members:
        raise MessageError(f"client {client} is not in the cohort", stage)
    if kind != expected:
        raise StageError(f"expected {expected.name}, got {Kind(kind).name}", stage, client)
    return int(client)


def body(message: bytes, key: bytes, stage: Stage, client: int) -> bytes:
    """Check the tag and return the body.

    Raises:
        AuthenticationError: If the tag does not verify.
    """
    tag = hmac.digest(key, message[:-TAG_BYTES], "sha256")[:TAG_BYTES]
    if not hmac.compare_digest(tag, message[-TAG_BYTES:]):
        reason = "the message's tag does not verify: corrupted, truncated or forged"
        raise AuthenticationError(reason, stage, client)
    return message[_HEADER.size : -TAG_BYTES]


@lru_cache(maxsize=8)
def _listed(cohort: tuple[int, ...], raw: bytes) -> tuple[int, ...] | None:
    """Return the clients of a bit field, or None if bits beyond the cohort are set.

    All parties that one process simulates share the cached tuple.
    """
    bits = np.unpackbits(np.frombuffer(raw, np.uint8))
    if bits[len(cohort) :].any():  # so that each set has exactly one encoding
        return None
    return tuple(cohort[place] for place in np.flatnonzero(bits[: len(cohort)]))


class Reader:
    """Reader that cuts the body of a message into fields of exact length.

    Args:
        data: Body of the message.
        stage: Stage of the round, for errors.
        client: Client of the message, for errors.
    """

    def __init__(self, data: bytes, stage: Stage, client: int) -> None:
        self._data, self._at, self._stage, self._client = data, 0, stage, client

    def read_bytes(self, size: int) -> bytes:
        """Return the next `size` bytes.

        Raises:
            MessageError: If fewer bytes are left.
        """
        self._at += size
        if self._at > len(self._data):
            reason = f"the message ends early: {len(self._data)} bytes of body"
            raise MessageError(reason, self._stage, self._client)
        return self._data[self._at - size : self._at]

    def clients(self, terms: Terms) -> tuple[int, ...]:
        """Read a set of clients, which is stored as one bit per client of the cohort.

        Raises:
            MessageError: If bits beyond the cohort are set, or the message is too short.
        """
        listed = _listed(terms.cohort, self.read_bytes((len(terms.cohort) + 7) // 8))
        if listed is None:
            raise MessageError("a list of clients has bits beyond the cohort", self._stage, self._client)
        return listed

    def end(self) -> None:
        """Check that no bytes are left.

        Raises:
            MessageError: If bytes are left.
        """
        if left := len(self._data) - self._at:
            raise MessageError(f"the message has {left} bytes too many", self._stage, self._client)


def client_bits(clients: Iterable[int], terms: Terms) -> bytes:
    """Write a set of clients as one bit per client of the cohort."""
    chosen = frozenset(clients)
    return np.packbits(np.array([client in chosen for client in terms.cohort], bool)).tobytes()


@dataclass(frozen=True)
class PublicKeys:
    """Public keys that a client advertises.

    Args:
        channel: X25519 key for the channels to the server and to the neighbours.
        mask: X25519 key for pairwise masks. The private key is opened if the client drops out.
        signature: Ed25519 signature of both keys, against an active server. Empty otherwise.
    """

    channel: bytes
    mask: bytes
    signature: bytes

    def encode(self) -> bytes:
        """Return the bytes on the wire."""
        return self.channel + self.mask + self.signature

    @classmethod
    def read(cls, reader: Reader, active: bool) -> PublicKeys:
        """Read public keys from a message."""
        return cls(
            reader.read_bytes(KEY_BYTES),
            reader.read_bytes(KEY_BYTES),
            reader.read_bytes(SIGNATURE_BYTES if active else 0),
        )


def keys_statement(terms: Terms, client: int, keys: PublicKeys, model_hash: bytes) -> bytes:
    """Return the statement that a client signs about its keys."""
    return pack_fields("fedq secagg keys", terms.digest, client, keys.channel, keys.mask, model_hash)


def survivors_statement(context: bytes, survivors: Sequence[int], terms: Terms) -> bytes:
    """Return the statement that a client signs about the survivors."""
    return pack_fields("fedq secagg survivors", context, client_bits(survivors, terms))


def verify(
    key: Ed25519PublicKey | None, signature: bytes, statement: bytes, stage: Stage, client: int
) -> None:
    """Check one signature.

    Raises:
        AuthenticationError: If the directory has no key for this client, or the signature does not fit it.
    """
    if key is None:
        raise AuthenticationError("the directory holds no identity of this client", stage, client)
    try:
        key.verify(signature, statement)
    except InvalidSignature as error:
        reason = "the signature does not verify: other keys, another model or another list of survivors"
        raise AuthenticationError(reason, stage, client) from error


def pair_key(
    own: X25519PrivateKey, other: bytes, salt: bytes, info: bytes, stage: Stage, client: int
) -> bytes:
    """Agree on a key with the owner of the public key `other`.

    Raises:
        LowOrderKeyError: If the public key has low order. The error names `client` as its owner.
    """
    try:
        return agree(own, X25519PublicKey.from_public_bytes(other), salt, info)
    except ValueError as error:
        raise LowOrderKeyError("the public key has low order", stage, client) from error


def channel_key(own: X25519PrivateKey, other: bytes, terms: Terms, client: int) -> bytes:
    """Return the key between a client and the server, computed on either side.

    Args:
        own: Private key of this side.
        other: Public key of the other side.
        terms: Terms of the attempt.
        client: Client at one end of the channel.
    """
    return pair_key(own, other, terms.digest, pack_fields("server channel", client), Stage.ADVERTISE, client)


def mask_key(
    own: X25519PrivateKey, other: bytes, context: bytes, pair: tuple[int, int], stage: Stage, owner: int
) -> bytes:
    """Return the key of the mask between two clients, computed on either side.

    `owner` is the owner of the public key `other`, for errors.
    """
    return pair_key(own, other, context, pack_fields("pairwise mask", *sorted(pair)), stage, owner)


def roster_hash(terms: Terms, roster: dict[int, PublicKeys]) -> bytes:
    """Return the hash of all advertised keys, from which the order on the ring is drawn."""
    state = hashlib.sha256(pack_fields("fedq secagg roster", terms.digest))
    for client in sorted(roster):
        state.update(pack_fields(client, roster[client].encode()))
    return state.digest()


def round_context(terms: Terms, roster_digest: bytes, model_hash: bytes) -> bytes:
    """Return the salt of all keys between clients.

    Clients agree on keys only if they have the same terms, the same roster and the same model.
    """
    fields = pack_fields("fedq secagg context", terms.digest, roster_digest, model_hash)
    return hashlib.sha256(fields).digest()


def self_mask_commitment(context: bytes, client: int, seed: bytes) -> bytes:
    """Return the hash by which the server recognises the right seed of a self-mask.

    The hash does not reveal the seed, which has 127 bits.
    """
    return hashlib.sha256(pack_fields("fedq secagg self mask", context, client, seed)).digest()[:SHORT_BYTES]


def self_mask_key(context: bytes, client: int, seed: bytes) -> bytes:
    """Return the key of a client's self-mask, derived from the seed that the client drew."""
    return hkdf_expand(hkdf_extract(context, seed), pack_fields("self mask", client))


def mask_secret(terms: Terms, client: int, root: bytes) -> X25519PrivateKey:
    """Derive the private mask key of a client from its 16-byte root.

    The root is shared among the neighbours, and opened if the client drops out.
    """
    info = pack_fields("fedq secagg mask key", terms.digest, client)
    return X25519PrivateKey.from_private_bytes(hkdf_expand(root, info))


def share_label(kind: str, owner: int, holder: int) -> bytes:
    """Return the label of the number that a holder computes for one secret of one owner.

    The key to which the label is applied belongs to one attempt and one pair of clients.

    Args:
        kind: "mask" or "seed". The two secrets must never be opened together, so their labels differ.
        owner: Client that has the secret.
        holder: Client that holds the share.
    """
    return pack_fields("share", kind, owner, holder)


def confirmation(pair_key: bytes, owner: int, holder: int, corrections: bytes) -> bytes:
    """Return four bytes that show that owner and holder have the same key and the same corrections.

    The pair's key depends on terms, roster and model, so a holder with different ones notices it here. A
    forgery succeeds with probability 2^-32. It makes a wrong share, which is corrected or ends the attempt.
    """
    return hkdf_expand(pair_key, pack_fields("confirm", owner, holder, corrections))[:CONFIRMATION_BYTES]
