"""Keys, key agreement, and the random streams that are drawn from them.

The address of a stream is `(federation, round, attempt, purpose, who)`, never a position in a global
generator. HKDF-SHA256 (RFC 5869) maps the address to a key, with every field length-prefixed. Each key gives
one AES-256-CTR keystream from counter 0, which is used once. A message is drawn as a whole, so an address has
no layer index. The layers of one message share no bits.

There are two sources of keys, and the report names the one in use:

* `RootKeys` (*secure*): all keys follow from 32 bytes of the operating system, since all parties of a
  simulation are in one program. Real clients agree on keys by X25519 (`party_keys`). Nothing is reproducible.
* `SeededKeys` (*reproducible*): all keys follow from one integer. They are for experiments and not private.

`PublicRandomness` has the streams that a server may know. `ClientRandomness` adds streams that it must not
know.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

_PROTOCOL = b"fedq/v1"
_INTEGER_FIELD = struct.Struct(">IQ").pack
_LENGTH = struct.Struct(">I").pack
_INNER_PAD, _OUTER_PAD = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))
_KEPT_KEYS, _KEY_BYTES = 1 << 14, 32
_ZEROS = memoryview(bytes(1 << 16))
_COUNTER = modes.CTR(bytes(16))
PUBLIC_KEY_BYTES = 32
"""Length of one client's public key, which is the whole set-up traffic of a pair."""


def hkdf_extract(salt: bytes, key_material: bytes) -> bytes:
    """Return 32 bytes of uniform key from shared key material, by HKDF-Extract with SHA-256 (RFC 5869, 2.2).

    Examples:
        >>> len(hkdf_extract(b"", b"key material"))
        32
    """
    return hmac.digest(salt or bytes(32), key_material, "sha256")  # RFC 5869 takes 32 zeros for an empty salt


def hkdf_expand(key: bytes, info: bytes) -> bytes:
    """Return 32 bytes for a key and a context, by HKDF-Expand with SHA-256 (RFC 5869, 2.3).

    For 32 bytes this is a single HMAC. Its two hashes are written out (RFC 2104), which is faster for short
    messages. A key must have at most 64 bytes.
    """
    block = key.ljust(64, b"\0")
    # 1 is the number of the only output block
    inner = hashlib.sha256(block.translate(_INNER_PAD) + info + b"\x01").digest()
    return hashlib.sha256(block.translate(_OUTER_PAD) + inner).digest()


def pack_fields(*fields: bytes | str | int) -> bytes:
    """Join fields so that no two lists of fields give the same bytes.

    Each field is preceded by its length. An integer takes 8 bytes, big-endian.

    Raises:
        ValueError: If an integer is not in [0, 2^64).

    Examples:
        >>> pack_fields("mask", 7) != pack_fields("mask7")
        True
    """
    return b"".join([_integer_field(f) if isinstance(f, int) else _bytes_field(f) for f in fields])


@lru_cache(maxsize=_KEPT_KEYS)
def _integer_field(value: int) -> bytes:
    """Return the length and the 8 bytes of an integer field."""
    if not 0 <= value < 2**64:
        raise ValueError(f"An address field must be in [0, 2^64), got {value}")
    return _INTEGER_FIELD(8, value)  # its length in bytes, then the value


def _bytes_field(value: bytes | str) -> bytes:
    """Return the length and the bytes of a field."""
    raw = value.encode() if isinstance(value, str) else value
    return _LENGTH(len(raw)) + raw


_PEER, _GROUP = pack_fields("peer"), pack_fields("group")


@lru_cache(maxsize=_KEPT_KEYS)
def _client_field(client: int) -> bytes:
    """Return the packed fields that name a client."""
    return pack_fields("client", client)


@lru_cache(maxsize=_KEPT_KEYS)
def _members_fields(group: tuple[int, ...]) -> bytes:
    """Return the packed fields that name the members of a group, in ascending order."""
    return pack_fields(*sorted(group))  # sorted, so that a group has one key for any order of its members


class Stream:
    """AES-256-CTR keystream of one key, which is read once from its start.

    Args:
        key: 32 bytes, never used for another stream.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != _KEY_BYTES:
            raise ValueError(f"A stream's key must have {_KEY_BYTES} bytes, got {len(key)}")
        self._update = Cipher(algorithms.AES256(key), _COUNTER).encryptor().update_into

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled, because two payloads would share the stream.

        Raises:
            TypeError: Always.
        """
        raise TypeError("A stream can't be copied or pickled, because two payloads would share it")

    def fill(self, out: NDArray[Any]) -> None:
        """Overwrite a contiguous array with the next bytes of the stream."""
        view = memoryview(out.data).cast("B") if out.size else b""
        for first in range(0, len(view), len(_ZEROS)):
            part = view[first : first + len(_ZEROS)]
            self._update(_ZEROS[: len(part)], part)  # zeros in counter mode give the keystream itself

    def words(self, count: int) -> NDArray[np.uint32]:
        """Return the next `count` uniform 32-bit words."""
        out = np.empty(count, np.uint32)
        self.fill(out)
        return out

    def words64(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` uniform 64-bit words."""
        out = np.empty(count, np.uint64)
        self.fill(out)
        return out

    def uniform_below(self, bound: int, count: int) -> NDArray[np.uint32]:
        """Return `count` integers, exactly uniform on {0, ..., bound - 1}.

        Words at or above the largest multiple of `bound` are skipped, so there is no modulo bias. The method
        reads the shortest part of the stream with `count` accepted words. This part depends on the stream
        alone, never on data, and two calls read what one call would.

        Args:
            bound: Number of possible values, 1 to 2^32.
            count: Number of integers.

        Raises:
            ValueError: If bound is not in [1, 2^32].
        """
        if not 1 <= bound <= 2**32:
            raise ValueError(f"bound must be in [1, 2^32], got {bound}")
        words = self.words(count)
        if bound == 2**32:
            return words
        if limit := 2**32 // bound * bound % 2**32:  # 0 if bound divides 2^32, so no word is skipped
            words = words[words < limit]
            while missing := count - len(words):
                # read only as many as are missing, so none beyond the last accepted word
                more = self.words(missing)
                words = np.concatenate([words, more[more < limit]])
        return words % np.uint32(bound)

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Return float64 uniforms on the open interval (0, 1): the 2^52 odd multiples of 2^-53, all exact.

        Do not use them for randomised bits, which compare an integer with an integer threshold.
        """
        return (self.words64(count) >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53

    def permutation(self, count: int) -> list[int]:
        """Return a uniformly random permutation of {0, ..., count - 1}. See `choice`."""
        return self.choice(count, count)

    def choice(self, bound: int, count: int) -> list[int]:
        """Draw `count` of {0, ..., bound - 1} without replacement, with all sequences equally likely.

        Each number gets a 64-bit word, and the numbers with the smallest words are returned in their order.
        While any words tie, all numbers get a further word, so the distribution is exact.

        Args:
            bound: Number of possible values.
            count: Number of values to draw.

        Raises:
            ValueError: If count is not in [0, bound].
        """
        if not 0 <= count <= bound:
            raise ValueError(f"count must be in [0, bound = {bound}], got {count}")
        words = [self.words64(bound)]
        order = np.argsort(words[0], kind="stable")
        # equal words are neighbours after sorting
        while np.logical_and.reduce([word[order[1:]] == word[order[:-1]] for word in words]).any():
            words.append(self.words64(bound))
            order = np.lexsort(words[::-1])  # the last key of lexsort is its primary key
        drawn: list[int] = order[:count].tolist()
        return drawn


class ServerKeys(ABC):
    """Root keys that a server may hold, 32 bytes each: the public key, the members' and one per client.

    An owner without one of them raises `NotHeldError`.
    """

    mode: ClassVar[Literal["secure", "reproducible"]]
    setup_bits_per_client: int
    """Number of bits that each client uploads once, before the first round."""

    @abstractmethod
    def public(self) -> bytes:
        """Return the key that every party knows. It also names the federation."""

    @abstractmethod
    def members(self) -> bytes:
        """Return the key that the server and all clients know, but no outsider."""

    @abstractmethod
    def client(self, client: int) -> bytes:
        """Return the key that one client shares with the server."""

    @abstractmethod
    def server(self) -> bytes:
        """Return the key of the server's own noise, which only this object of the server knows."""


class Keys(ServerKeys):
    """All root keys of one federation, 32 bytes each, including those that the server must not know."""

    @abstractmethod
    def peer(self, group: tuple[int, ...]) -> bytes:
        """Return the key that the two clients of a group share, and that the server does not know."""

    @abstractmethod
    def private(self, client: int) -> bytes:
        """Return the key that only the client knows."""


class OneOwner:
    """Base of keys that can't be copied or pickled.

    Two owners of the same keys would draw the same secret bits for two payloads.
    """

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, deep-copied and copied.

        Raises:
            TypeError: Always. The message has the cure.
        """
        raise TypeError(
            "Secure keys can't be copied or pickled, because both owners would draw the same bits. Make a "
            "new Federated (or RoundEngine), or use a seed, which protects nothing."
        )


class _DerivedKeys(Keys):
    """Keys that all follow from one root.

    Args:
        root: Root key of 32 bytes.
    """

    setup_bits_per_client = 8 * PUBLIC_KEY_BYTES

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._public, self._members = (hkdf_expand(root, pack_fields(name)) for name in ("public", "members"))
        self._private: dict[int, bytes] = {}

    def public(self) -> bytes:
        return self._public

    def members(self) -> bytes:
        return self._members

    def client(self, client: int) -> bytes:
        return hkdf_expand(self._root, pack_fields("client", client))

    def server(self) -> bytes:
        return hkdf_expand(self._root, pack_fields("server"))

    def peer(self, group: tuple[int, ...]) -> bytes:
        return hkdf_expand(self._root, _PEER + _members_fields(group))

    def private(self, client: int) -> bytes:
        if (key := self._private.get(client)) is None:
            key = self._private[client] = hkdf_expand(self._root, pack_fields("private", client))
        return key


class SeededKeys(_DerivedKeys):
    """Reproducible keys, which all follow from one integer, so that nothing is private.

    Args:
        seed: Any integer >= 0.
    """

    mode = "reproducible"

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.seed = seed
        # as text, because a seed may be longer than the 64 bits of an integer field
        super().__init__(hkdf_extract(_PROTOCOL, pack_fields("reproducible", hex(seed))))


class RootKeys(OneOwner, _DerivedKeys):
    """Keys of all parties in a simulation, which follow from 32 bytes of the operating system.

    They can't be copied or pickled, because two owners would draw the same secret bits for two payloads.

    Args:
        root: Root that one process draws and sends to the others, which simulate disjoint clients. None draws
            a new root.

    Examples:
        >>> RootKeys().public() == RootKeys().public()
        False
    """

    mode = "secure"

    def __init__(self, root: bytes | None = None) -> None:
        super().__init__(hkdf_extract(_PROTOCOL, pack_fields("ranks", root or os.urandom(_KEY_BYTES))))


def agree(own: X25519PrivateKey, other: X25519PublicKey, salt: bytes, info: bytes) -> bytes:
    """Return the key that two parties share, from one X25519 exchange.

    Args:
        own: Private key of this party.
        other: Public key of the other party, authenticated by the caller.
        salt: Binds the key to the federation and its roster.
        info: Binds the key to the two parties. Both must pass the same bytes.

    Raises:
        ValueError: If the shared secret is all zeros, which a public key of low order forces. Also if the
            public key is not in its unique encoding, so that it could pass for another key.
    """
    if int.from_bytes(other.public_bytes_raw(), "little") >= 2**255 - 19:
        raise ValueError("The peer's public key must be below 2^255 - 19. Refuse this peer.")
    try:
        secret = own.exchange(other)
    except ValueError as error:
        raise ValueError("The peer's public key has low order. Refuse this peer.") from error
    if not any(secret):  # some backends return zeros and do not raise
        raise ValueError("The peer's public key has low order. Refuse this peer.")
    return hkdf_expand(hkdf_extract(salt, secret), info)


def roster_digest(roster: Mapping[int, bytes]) -> bytes:
    """Return the salt of every key of a federation: the hash of its clients' numbers and public keys."""
    digest = hashlib.sha256()
    for client, key in sorted(roster.items()):
        digest.update(pack_fields(client, key))  # fields have lengths, so no two rosters have the same bytes
    return hashlib.sha256(_PROTOCOL + digest.digest()).digest()


def server_info(federation: bytes, client: int) -> bytes:
    """Return the context string of the key between a client and the server, used with the salt."""
    return pack_fields("client", federation, client)


def group_info(federation: bytes, members: Sequence[int]) -> bytes:
    """Return the context string of the key of a pair, whose members are in ascending order."""
    return pack_fields("peer", federation, *members)


def private_key(seed: bytes, federation: bytes) -> bytes:
    """Return the key that only a client knows, from its own seed."""
    return hkdf_expand(seed, pack_fields("private", federation))


class PublicRandomness:
    """Streams of one round that the server may know: the public ones, and one with each client.

    Args:
        keys: Keys that a server may hold.
        round: Index of the round, from 0.
        attempt: Number of earlier attempts at this round.

    Attributes:
        federation: 16 bytes that name the federation.
    """

    def __init__(self, keys: ServerKeys, round: int, attempt: int = 0) -> None:
        self._public_key, self._members_key, self._client_key = keys.public(), keys.members(), keys.client
        self._keys = keys
        self.federation = self._public_key[:16]
        self._address = pack_fields(_PROTOCOL, self.federation, round, attempt)
        self._prefixes: dict[str, bytes] = {}

    def _stream(self, key: bytes, purpose: str, who: bytes) -> Stream:
        """Return the stream of an address under a key.

        Args:
            key: Root key, 32 bytes.
            purpose: Use of the stream, such as "dither".
            who: Packed fields that name the parties.
        """
        if (prefix := self._prefixes.get(purpose)) is None:
            prefix = self._prefixes[purpose] = self._address + pack_fields(purpose)
        return Stream(hkdf_expand(key, prefix + who))

    def public(self, purpose: str) -> Stream:
        """Return the stream that every party knows."""
        return self._stream(self._public_key, purpose, pack_fields("everybody"))

    def members(self, purpose: str) -> Stream:
        """Return the stream that the server and all clients know, but no outsider."""
        return self._stream(self._members_key, purpose, pack_fields("members"))

    def shared_with_server(self, client: int, purpose: str) -> Stream:
        """Return the stream that one client shares with the server, for example for a dither."""
        return self._stream(self._client_key(client), purpose, _client_field(client))

    def server(self, purpose: str) -> Stream:
        """Return the stream that only the server knows, for the noise of a trusted server."""
        return self._stream(self._keys.server(), purpose, pack_fields("server"))

    def for_round(self, round: int, attempt: int = 0) -> PublicRandomness:
        """Return the server's streams of another round, under the same keys."""
        return PublicRandomness(self._keys, round, attempt)


class ClientRandomness(PublicRandomness):
    """Streams of the clients in one stack: public streams, those of peers, and private ones.

    Args:
        keys: Keys of the clients.
        clients: Clients of the stack (clients that train in one step), in the order of its rows.
        round: Index of the round, from 0.
        attempt: Number of earlier attempts at this round.
    """

    def __init__(self, keys: Keys, clients: Sequence[int], round: int, attempt: int = 0) -> None:
        super().__init__(keys, round, attempt)
        self.clients = tuple(clients)
        self._client_keys = keys
        self._peer_key, self._private_key = keys.peer, keys.private

    def peer(self, group: tuple[int, ...], purpose: str) -> Stream:
        """Return the stream that the two clients of a group share, hidden from the server."""
        return self._stream(self._peer_key(group), purpose, _GROUP + _members_fields(group))

    def private(self, client: int, purpose: str) -> Stream:
        """Return the stream that only the client knows."""
        return self._stream(self._private_key(client), purpose, _client_field(client))

    def for_round(self, round: int, attempt: int = 0) -> ClientRandomness:
        """Return the clients' streams of another round, under the same keys."""
        return ClientRandomness(self._client_keys, self.clients, round, attempt)
