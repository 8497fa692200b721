"""Who knows which bits: keys, key agreement and the streams drawn from them.

A stream is addressed by `(federation, round, attempt, purpose, who)`, never by a position in a
global generator, and the address goes through HKDF-SHA256 (RFC 5869) with every field
length-prefixed. One key is one AES-256-CTR keystream from counter 0, used once. A message is drawn
as a whole, so an address needs no layer index: the layers of one message share no bits.

Two sources of keys, and the report says which:

* `RootKeys` (*secure*): everything follows from 32 bytes of the operating system, as all keys of a simulation
  lie in one program anyway. Real clients agree on theirs by X25519 (`party_keys`). Nothing is reproducible.
* `SeededKeys` (*reproducible*): everything follows from one integer. For experiments; not private.

What the server may hold is `PublicRandomness`; `ClientRandomness` adds what it must not.
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
from numpy.typing import NDArray

from lightning_fedq.keys.keystream import keystreams

_PROTOCOL = b"fedq/v1"
_INTEGER_FIELD = struct.Struct(">IQ").pack
_LENGTH = struct.Struct(">I").pack
_INNER_PAD, _OUTER_PAD = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))
_KEPT_KEYS, _KEY_BYTES = 1 << 14, 32
PUBLIC_KEY_BYTES = 32
"""Length of one client's public key, the whole set-up traffic of a pair."""


def hkdf_extract(salt: bytes, key_material: bytes) -> bytes:
    """HKDF-Extract with SHA-256: 32 bytes of uniform key from shared key material (RFC 5869, 2.2).

    Example:
        >>> len(hkdf_extract(b"", b"key material"))
        32
    """
    return hmac.digest(salt or bytes(32), key_material, "sha256")  # no salt is 32 zeros


def hkdf_expand(key: bytes, info: bytes) -> bytes:
    """HKDF-Expand with SHA-256 to 32 bytes, which is a single HMAC (RFC 5869, 2.3).

    The HMAC's two hashes are written out (RFC 2104): faster on short messages. A key has at most 64 bytes.
    """
    block = key.ljust(64, b"\0")
    # 1 counts the blocks of output, of which there is one
    inner = hashlib.sha256(block.translate(_INNER_PAD) + info + b"\x01").digest()
    return hashlib.sha256(block.translate(_OUTER_PAD) + inner).digest()


def pack_fields(*fields: bytes | str | int) -> bytes:
    """Join fields unambiguously: every one is preceded by its length, integers are 8 bytes big-endian.

    Raises:
        ValueError: If an integer does not fit 64 unsigned bits.

    Example:
        >>> pack_fields("mask", 7) != pack_fields("mask7")
        True
    """
    return b"".join([_integer_field(f) if isinstance(f, int) else _bytes_field(f) for f in fields])


@lru_cache(maxsize=_KEPT_KEYS)
def _integer_field(value: int) -> bytes:
    if not 0 <= value < 2**64:
        raise ValueError(f"an address field must be in [0, 2^64), got {value}")
    return _INTEGER_FIELD(8, value)  # its length in bytes, then the value


def _bytes_field(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return _LENGTH(len(raw)) + raw


_PEER, _GROUP = pack_fields("peer"), pack_fields("group")


@lru_cache(maxsize=_KEPT_KEYS)
def _client_field(client: int) -> bytes:
    return pack_fields("client", client)


@lru_cache(maxsize=_KEPT_KEYS)
def _members_fields(group: tuple[int, ...]) -> bytes:
    return pack_fields(*sorted(group))  # one key a group, in whatever order its members are named


class Stream:
    """One AES-256-CTR keystream under one key, read once from its start.

    Args:
        key: 32 bytes, never used for another stream.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != _KEY_BYTES:
            raise ValueError(f"a stream's key has {_KEY_BYTES} bytes, got {len(key)}")
        self._key, self._read = key, 0

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a stream can't be copied or pickled: two payloads would share it")

    def fill(self, out: NDArray[Any]) -> None:
        """Overwrite a contiguous array with the next bytes of the stream."""
        if out.size:
            row = np.frombuffer(memoryview(out.data).cast("B"), np.uint8)[None]
            keystreams(np.frombuffer(self._key, np.uint32)[None], np.array([self._read]), row)
            self._read += row.shape[1]

    def words(self, count: int) -> NDArray[np.uint32]:
        """Return the next `count` uniform 32-bit words."""
        out = np.empty(count, np.uint32)
        if count:
            self.fill(out)
        return out

    def words64(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` uniform 64-bit words."""
        out = np.empty(count, np.uint64)
        if count:
            self.fill(out)
        return out

    def uniform_below(self, bound: int, count: int) -> NDArray[np.uint32]:
        """Return `count` integers, exactly uniform on {0, ..., bound - 1}.

        Words at or above the largest multiple of `bound` are skipped, so the law has no modulo
        bias. What is read is the shortest part of the stream that holds `count` accepted words:
        it depends on the stream alone, never on data, and two calls read what one call would.

        Raises:
            ValueError: If bound is not in [1, 2^32].
        """
        if not 1 <= bound <= 2**32:
            raise ValueError(f"bound must be in [1, 2^32], got {bound}")
        words = self.words(count)
        if bound == 2**32:
            return words
        if limit := 2**32 // bound * bound % 2**32:  # 0 where bound divides 2^32: no word is skipped
            words = words[words < limit]
            while missing := count - len(words):
                # as many as are missing: none beyond the last accepted word is read
                more = self.words(missing)
                words = np.concatenate([words, more[more < limit]])
        return words % np.uint32(bound)

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Return float64 uniforms on the open interval (0, 1): the 2^52 odd multiples of 2^-53, all exact.

        Not for coins: a coin is an integer compared with an integer threshold.
        """
        return (self.words64(count) >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53

    def permutation(self, count: int) -> list[int]:
        """Return a uniformly random permutation of {0, ..., count - 1}. See `choice`."""
        return self.choice(count, count)

    def choice(self, bound: int, count: int) -> list[int]:
        """Draw `count` of {0, ..., bound - 1} without replacement, every sequence equally likely.

        They are the first in the order of one 64-bit word each. Where words tie, all are extended by a
        further one until none do, so the law is exact.

        Raises:
            ValueError: If count is not in [0, bound].
        """
        if not 0 <= count <= bound:
            raise ValueError(f"count must be in [0, bound = {bound}], got {count}")
        words = [self.words64(bound)]
        order = np.argsort(words[0], kind="stable")
        # equal ones are neighbours once they are sorted
        while np.logical_and.reduce([word[order[1:]] == word[order[:-1]] for word in words]).any():
            words.append(self.words64(bound))
            order = np.lexsort(words[::-1])  # the last key of lexsort counts most
        drawn: list[int] = order[:count].tolist()
        return drawn


def fill_rows(streams: Sequence[Stream], rows: NDArray[Any]) -> None:
    """Overwrite each row of a contiguous array with the next bytes of a stream of its own, in one pass."""
    twice = len(set(streams)) < len(streams)  # one of them goes on from row to row
    if twice or any(type(stream).fill is not Stream.fill for stream in streams):
        for stream, row in zip(streams, rows, strict=True):
            stream.fill(row)
        return
    keys = np.frombuffer(b"".join([stream._key for stream in streams]), np.uint32).reshape(len(rows), -1)
    out = rows.view(np.uint8)
    keystreams(keys, np.array([stream._read for stream in streams]), out)
    for stream in streams:
        stream._read += out.shape[1]


class ServerKeys(ABC):
    """Root keys that a server may hold, 32 bytes each: everybody's, the members', one with each client.

    An owner without one of them raises `NotHeldError`.
    """

    mode: ClassVar[Literal["secure", "reproducible"]]
    setup_bits_per_client: int
    """Bits that each client uploads once, before the first round."""

    @abstractmethod
    def public(self) -> bytes:
        """Key that everybody knows. It also names the federation."""

    @abstractmethod
    def members(self) -> bytes:
        """Key that the server and all clients know, and nobody outside the federation."""

    @abstractmethod
    def client(self, client: int) -> bytes:
        """Key that one client shares with the server."""

    @abstractmethod
    def server(self) -> bytes:
        """Key that nobody but the server knows, and no other object: its own noise comes from it."""


class Keys(ServerKeys):
    """Root keys of one federation, each 32 bytes and known to somebody else."""

    @abstractmethod
    def peer(self, group: tuple[int, ...]) -> bytes:
        """Key that the two clients of a group share and the server does not know."""

    @abstractmethod
    def private(self, client: int) -> bytes:
        """Key that nobody but the client knows."""


class OneOwner:
    """Keys that can't be copied or pickled: two owners would draw the same secret coins for two payloads."""

    def __copy__(self) -> NoReturn:
        """Refuse.

        Raises:
            TypeError: Always, with the cure.
        """
        raise TypeError(
            "secure keys can't be copied or pickled: both owners would draw the same secret "
            "coins; make a new Federated (or RoundEngine), which draws keys of its own, or use a seed, which "
            "protects nothing"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse. See `__copy__`."""
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        """Refuse. See `__copy__`."""
        self.__copy__()


class _DerivedKeys(Keys):
    """Keys that all follow from one root, 32 bytes."""

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
    """Reproducible keys: every key follows from one integer, so nothing here is private.

    Args:
        seed: Any integer >= 0.
    """

    mode = "reproducible"

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.seed = seed
        # as text: a seed may be longer than an integer field's 64 bits
        super().__init__(hkdf_extract(_PROTOCOL, pack_fields("reproducible", hex(seed))))


class RootKeys(OneOwner, _DerivedKeys):
    """Keys of all parties of a simulation: all follow from 32 bytes of the operating system.

    They can't be copied or pickled: two owners would draw the same secret coins for different payloads.

    Args:
        root: Drawn by one process, and told to the others, which own disjoint clients. None is drawn here.

    Example:
        >>> RootKeys().public() == RootKeys().public()
        False
    """

    mode = "secure"

    def __init__(self, root: bytes | None = None) -> None:
        super().__init__(hkdf_extract(_PROTOCOL, pack_fields("ranks", root or os.urandom(_KEY_BYTES))))


def agree(own: X25519PrivateKey, other: X25519PublicKey, salt: bytes, info: bytes) -> bytes:
    """Derive the key that two parties share, from one X25519 exchange.

    Args:
        own: This party's private key.
        other: The other party's public key, authenticated by the caller.
        salt: Binds the key to the federation and its roster.
        info: Binds it to the two parties; both must pass the same.

    Raises:
        ValueError: If the shared secret is all zeros, which a public key of low order forces, or the key is
            written in a second way, in which it passes for another one.
    """
    if int.from_bytes(other.public_bytes_raw(), "little") >= 2**255 - 19:
        raise ValueError(
            "the peer's public key is not below 2^255 - 19, as X25519 writes it; refuse this peer"
        )
    try:
        secret = own.exchange(other)
    except ValueError as error:
        raise ValueError("the peer's public key has low order; refuse this peer") from error
    if not any(secret):  # for a backend that returns zeros and does not raise
        raise ValueError("the peer's public key has low order; refuse this peer")
    return hkdf_expand(hkdf_extract(salt, secret), info)


def roster_digest(roster: Mapping[int, bytes]) -> bytes:
    """Salt of every key of a federation: the hash of its clients' numbers and public keys."""
    digest = hashlib.sha256()
    for client, key in sorted(roster.items()):
        digest.update(pack_fields(client, key))  # with lengths: no two rosters have the same bytes
    return hashlib.sha256(_PROTOCOL + digest.digest()).digest()


def server_info(federation: bytes, client: int) -> bytes:
    """Context string of the key between a client and the server, beside the salt."""
    return pack_fields("client", federation, client)


def group_info(federation: bytes, members: Sequence[int]) -> bytes:
    """Context string of the key of a pair, in ascending order."""
    return pack_fields("peer", federation, *members)


def private_key(seed: bytes, federation: bytes) -> bytes:
    """Key that nobody but a client knows, from its own seed."""
    return hkdf_expand(seed, pack_fields("private", federation))


class PublicRandomness:
    """The streams of one round that the server may know: everybody's, and each client's with it.

    Args:
        keys: What a server may hold.
        attempt: Number of earlier attempts at this round.

    Attributes:
        federation: 16 bytes that name it.
    """

    def __init__(self, keys: ServerKeys, round: int, attempt: int = 0) -> None:
        self._public_key, self._members_key, self._client_key = keys.public(), keys.members(), keys.client
        self._keys = keys
        self.federation = self._public_key[:16]
        self._address = pack_fields(_PROTOCOL, self.federation, round, attempt)
        self._prefixes: dict[str, bytes] = {}

    def _stream(self, key: bytes, purpose: str, who: bytes) -> Stream:
        if (prefix := self._prefixes.get(purpose)) is None:
            prefix = self._prefixes[purpose] = self._address + pack_fields(purpose)
        return Stream(hkdf_expand(key, prefix + who))

    def public(self, purpose: str) -> Stream:
        """Stream that everybody knows."""
        return self._stream(self._public_key, purpose, pack_fields("everybody"))

    def members(self, purpose: str) -> Stream:
        """Stream that the server and all clients know, and nobody outside."""
        return self._stream(self._members_key, purpose, pack_fields("members"))

    def shared_with_server(self, client: int, purpose: str) -> Stream:
        """Stream that one client shares with the server (a dither, say)."""
        return self._stream(self._client_key(client), purpose, _client_field(client))

    def server(self, purpose: str) -> Stream:
        """Stream that nobody but the server knows: the noise of a trusted one."""
        return self._stream(self._keys.server(), purpose, pack_fields("server"))

    def for_round(self, round: int, attempt: int = 0) -> PublicRandomness:
        """The server's streams of another round, under the same keys."""
        return PublicRandomness(self._keys, round, attempt)


class ClientRandomness(PublicRandomness):
    """Random streams of the clients of one stack: the public ones, their peers' and their own.

    Args:
        clients: The clients of the stack, in the order of its rows.
        attempt: Number of earlier attempts at this round.
    """

    def __init__(self, keys: Keys, clients: Sequence[int], round: int, attempt: int = 0) -> None:
        super().__init__(keys, round, attempt)
        self.clients = tuple(clients)
        self._client_keys = keys
        self._peer_key, self._private_key = keys.peer, keys.private

    def peer(self, group: tuple[int, ...], purpose: str) -> Stream:
        """Stream that the two clients of a group share, hidden from the server."""
        return self._stream(self._peer_key(group), purpose, _GROUP + _members_fields(group))

    def private(self, client: int, purpose: str) -> Stream:
        """Stream that nobody but the client knows."""
        return self._stream(self._private_key(client), purpose, _client_field(client))

    def for_round(self, round: int, attempt: int = 0) -> ClientRandomness:
        """The clients' streams of another round, under the same keys."""
        return ClientRandomness(self._client_keys, self.clients, round, attempt)
