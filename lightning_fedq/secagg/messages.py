"""Framing of the messages: typed, bound to the terms of the round, length-checked and authenticated.

    magic "FQSA" | kind u8 | digest of the terms, 16 | client u64 | body | HMAC-SHA256, 16

Digest and tag are the first half of 32 bytes: 128 bits tell messages apart and can't be forged. Keys and
shares hang on the whole digest. Client and server share a channel key from X25519. The tag tells
corruption, truncation and replay from a valid message; who is behind a key is vouched for by the signatures
of the active variant, else by the transport. The invitation comes before there is a key, so its tag (under
the zero key) is a checksum only.
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

from lightning_fedq.keys.randomness import agree, hkdf_expand, pack_fields
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
"""Of a hash that only tells two things apart: of the terms, of the model, of a self-mask's seed."""
FRAME_BYTES = _HEADER.size + TAG_BYTES
CONFIRMATION_BYTES = 4
"""Tells a holder whether it has the owner's key, and its corrections as sent."""
CORRECTION_BYTES = 2 * SHARE_BYTES
"""For a holder whose two shares are not what it computes."""
NO_KEY = bytes(KEY_BYTES)


class Kind(IntEnum):
    """Message types. Odd ones go to a client, even ones to the server."""

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
    """Frame a body from or to `client`."""
    message = _HEADER.pack(_MAGIC, kind, terms.digest[:SHORT_BYTES], client) + body
    return message + hmac.digest(key, message, "sha256")[:TAG_BYTES]


def sender(message: bytes, terms: Terms, expected: Kind, stage: Stage) -> int:
    """Read the header and return the client it names. Nothing is authenticated yet.

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
        raise TermsError(
            "the message belongs to another session, round, attempt, cohort or modulus", stage, client
        )
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
    if not hmac.compare_digest(
        hmac.digest(key, message[:-TAG_BYTES], "sha256")[:TAG_BYTES], message[-TAG_BYTES:]
    ):
        raise AuthenticationError(
            "the message's tag does not verify: corrupted, truncated or forged", stage, client
        )
    return message[_HEADER.size : -TAG_BYTES]


@lru_cache(maxsize=8)
def _listed(cohort: tuple[int, ...], raw: bytes) -> tuple[int, ...] | None:
    """Clients of a bit field. The parties of one process share the tuple."""
    bits = np.unpackbits(np.frombuffer(raw, np.uint8))
    if bits[len(cohort) :].any():  # a set has one encoding
        return None
    return tuple(cohort[place] for place in np.flatnonzero(bits[: len(cohort)]))


class Reader:
    """Cuts a body into fields of exact length.

    Args:
        client: Sender, for errors.
    """

    def __init__(self, data: bytes, stage: Stage, client: int) -> None:
        self._data, self._at, self._stage, self._client = data, 0, stage, client

    def read_bytes(self, size: int) -> bytes:
        """Return the next `size` bytes.

        Raises:
            MessageError: If there are fewer.
        """
        self._at += size
        if self._at > len(self._data):
            raise MessageError(
                f"the message ends early: {len(self._data)} bytes of body", self._stage, self._client
            )
        return self._data[self._at - size : self._at]

    def clients(self, terms: Terms) -> tuple[int, ...]:
        """Read a set of clients of the cohort, as one bit each."""
        listed = _listed(terms.cohort, self.read_bytes((len(terms.cohort) + 7) // 8))
        if listed is None:
            raise MessageError("a list of clients has bits beyond the cohort", self._stage, self._client)
        return listed

    def end(self) -> None:
        """Make sure that nothing is left.

        Raises:
            MessageError: If something is.
        """
        if left := len(self._data) - self._at:
            raise MessageError(f"the message has {left} bytes too many", self._stage, self._client)


def client_bits(clients: Iterable[int], terms: Terms) -> bytes:
    """Write a set of clients of the cohort, as one bit each."""
    chosen = frozenset(clients)
    return np.packbits(np.array([client in chosen for client in terms.cohort], bool)).tobytes()


@dataclass(frozen=True)
class PublicKeys:
    """Public keys that a client advertises.

    Args:
        channel: X25519 key for the channels to the server and to the neighbours.
        mask: X25519 key for pairwise masks; its private half is opened if the client drops out.
        signature: Ed25519 over both, against an active server; else empty.
    """

    channel: bytes
    mask: bytes
    signature: bytes

    def encode(self) -> bytes:
        """Bytes on the wire."""
        return self.channel + self.mask + self.signature

    @classmethod
    def read(cls, reader: Reader, active: bool) -> PublicKeys:
        """Bytes off the wire."""
        return cls(
            reader.read_bytes(KEY_BYTES),
            reader.read_bytes(KEY_BYTES),
            reader.read_bytes(SIGNATURE_BYTES if active else 0),
        )


def keys_statement(terms: Terms, client: int, keys: PublicKeys, model_hash: bytes) -> bytes:
    """Statement that a client signs about its keys."""
    return pack_fields("fedq secagg keys", terms.digest, client, keys.channel, keys.mask, model_hash)


def survivors_statement(context: bytes, survivors: Sequence[int], terms: Terms) -> bytes:
    """Statement that a client signs about the survivors."""
    return pack_fields("fedq secagg survivors", context, client_bits(survivors, terms))


def verify(
    key: Ed25519PublicKey | None, signature: bytes, statement: bytes, stage: Stage, client: int
) -> None:
    """Check one signature.

    Raises:
        AuthenticationError: If there is no such identity or the signature is not its own.
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
        LowOrderKeyError: If the public key has low order; `client` is its owner.
    """
    try:
        return agree(own, X25519PublicKey.from_public_bytes(other), salt, info)
    except ValueError as error:
        raise LowOrderKeyError("the public key has low order", stage, client) from error


def channel_key(own: X25519PrivateKey, other: bytes, terms: Terms, client: int, owner: int | None) -> bytes:
    """Key between a client and the server, from either side. `owner` is who `other` belongs to."""
    info = pack_fields("server channel", client)
    who = client if owner is None else owner
    return pair_key(own, other, terms.digest, info, Stage.ADVERTISE, who)


def mask_key(
    own: X25519PrivateKey, other: bytes, context: bytes, pair: tuple[int, int], stage: Stage, owner: int
) -> bytes:
    """Key of the mask between two clients, from either side. `owner` is who `other` belongs to."""
    return pair_key(own, other, context, pack_fields("pairwise mask", *sorted(pair)), stage, owner)


def roster_hash(terms: Terms, roster: dict[int, PublicKeys]) -> bytes:
    """Hash of all advertised keys. It also fixes the order on the ring."""
    state = hashlib.sha256(pack_fields("fedq secagg roster", terms.digest))
    for client in sorted(roster):
        state.update(pack_fields(client, roster[client].encode()))
    return state.digest()


def round_context(terms: Terms, roster_digest: bytes, model_hash: bytes) -> bytes:
    """Salt of every key between clients: same terms, same roster and same model, or no common key."""
    return hashlib.sha256(
        pack_fields("fedq secagg context", terms.digest, roster_digest, model_hash)
    ).digest()


def self_mask_commitment(context: bytes, client: int, seed: bytes) -> bytes:
    """Hash that tells the right self-mask seed from a wrong one. A 127-bit seed stays hidden in it."""
    return hashlib.sha256(pack_fields("fedq secagg self mask", context, client, seed)).digest()[:SHORT_BYTES]


def mask_secret(terms: Terms, client: int, root: bytes) -> X25519PrivateKey:
    """Private mask key of a client. What is shared, and opened if it drops out, is its 16-byte root."""
    info = pack_fields("fedq secagg mask key", terms.digest, client)
    return X25519PrivateKey.from_private_bytes(hkdf_expand(root, info))


def share_label(kind: str, owner: int, holder: int) -> bytes:
    """Label of what a holder computes for one secret of one owner. Its key is of one attempt and one pair.

    Args:
        kind: "mask" or "seed": the two are never to be opened together, so they have nothing in common.
        owner: Client that has the secret.
        holder: Client that holds the share.
    """
    return pack_fields("share", kind, owner, holder)


def confirmation(pair_key: bytes, owner: int, holder: int, corrections: bytes) -> bytes:
    """Four bytes that say that owner and holder have the same key, and these corrections.

    The pair's key hangs on the terms, the roster and the model, so other ones are noticed here. A forged one,
    2^-32, makes a wrong share, which is corrected or ends the attempt.
    """
    return hkdf_expand(pair_key, pack_fields("confirm", owner, holder, corrections))[:CONFIRMATION_BYTES]
