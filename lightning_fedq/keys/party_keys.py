"""Keys of one party of a secure federation: a server with none of its clients', a client with its own.

A simulation derives all keys from one root (`keys.randomness.RootKeys`); here each is derived by those who
are meant to have it. A client sends its public key once, 32 bytes, and the server relays it to those who
share a pair with it. Asking a party for a key that it must not know raises `NotHeldError`.

The server relays public keys, so it could put itself between two clients, and would then know what they
share. With a directory of identities (Ed25519) from elsewhere, a client accepts a peer's key with that peer's
signature only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lightning_fedq.keys.randomness import (
    PUBLIC_KEY_BYTES,
    Keys,
    OneOwner,
    ServerKeys,
    agree,
    group_info,
    hkdf_expand,
    pack_fields,
    private_key,
    roster_digest,
    server_info,
)

_NONCE = bytes(12)
"""Every AES-GCM key seals one message (again and again the same), so the nonce may be constant."""


class NotHeldError(PermissionError):
    """Somebody asks a party for a key that it does not hold, and must not."""


class KeyVerificationError(ValueError):
    """A public key, or what was sealed for its owner, that does not verify: another's, or tampered with."""


@dataclass(frozen=True)
class ServerSecrets:
    """Secrets that a server draws once for a federation, and keeps to itself.

    Args:
        secret: Its X25519 private key, 32 bytes.
        federation: Key that everybody knows, 32 bytes; it names the federation.
        members: Key that goes to each client, 32 bytes.
    """

    secret: bytes = field(repr=False)
    federation: bytes
    members: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> ServerSecrets:
        """From the operating system."""
        return cls(os.urandom(32), os.urandom(32), os.urandom(32))

    @property
    def public_key(self) -> bytes:
        """Its X25519 public key."""
        return X25519PrivateKey.from_private_bytes(self.secret).public_key().public_bytes_raw()


def registration_proof(own: bytes, other: bytes, federation: bytes, client_key: bytes, nonce: bytes) -> bytes:
    """Proof, 32 bytes, that a client holds the private half of its public key, made by either side.

    A client's public key is known to its partners, so whoever sends it need not be the client. The proof is
    from the key agreement with the server, and nobody else can make it. It answers the server's nonce, so
    that a recorded one is of no use.

    Args:
        own: This side's X25519 private key.
        other: The other side's public key.
        federation: Key that names the federation, 32 bytes, as for `ServerSecrets`.
        client_key: The client's public key.
        nonce: Nonce that the server drew for this registration.

    Raises:
        ValueError: If the other's key is not 32 bytes, or of low order.
    """
    key, info = X25519PrivateKey.from_private_bytes(own), pack_fields("registration", client_key, nonce)
    return agree(key, X25519PublicKey.from_public_bytes(other), federation, info)


class HeldServerKeys(ServerKeys):
    """Keys of the server of a secure federation: its own key pair and everybody's public keys.

    Args:
        roster: Public key of each client.
        entropy: Source of the key of its own noise, which is another one in every process, so that a folder
            that is set back does not bring it back.

    Raises:
        ValueError: If two clients have one key, or a key is not 32 bytes.
    """

    mode = "secure"
    setup_bits_per_client = 8 * PUBLIC_KEY_BYTES

    def __init__(
        self,
        secrets: ServerSecrets,
        roster: Mapping[int, bytes],
        *,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if len(set(roster.values())) != len(roster) or any(len(key) != 32 for key in roster.values()):
            raise ValueError("every client needs a public key of its own, 32 bytes")
        self._secrets, self.roster = secrets, dict(roster)
        self._secret = X25519PrivateKey.from_private_bytes(secrets.secret)
        self.salt = roster_digest(self.roster)
        self._client: dict[int, bytes] = {}
        self._own_key = entropy(32)

    def public(self) -> bytes:
        return self._secrets.federation

    def members(self) -> bytes:
        return self._secrets.members

    def client(self, client: int) -> bytes:
        if client not in self._client:
            other = X25519PublicKey.from_public_bytes(self.roster[client])
            info = server_info(self.public(), client)
            self._client[client] = agree(self._secret, other, self.salt, info)
        return self._client[client]

    def server(self) -> bytes:
        return self._own_key

    def sealed_members(self, client: int) -> bytes:
        """The members' key for one client's eyes, 48 bytes."""
        return AESGCM(_seal_key(self.client(client))).encrypt(_NONCE, self.members(), b"")


@dataclass(frozen=True)
class ClientSecrets:
    """Secrets that a client draws once for a federation, and never sends.

    Args:
        secret: Its X25519 private key, 32 bytes.
        seed: Secret seed of 32 bytes.
    """

    secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> ClientSecrets:
        """From the operating system."""
        return cls(os.urandom(32), os.urandom(32))

    def derived(self, purpose: str) -> bytes:
        """Secret of 32 bytes that is the same in every round, and nobody else's."""
        return hkdf_expand(self.seed, pack_fields(purpose))

    @property
    def public_key(self) -> bytes:
        """Its X25519 public key, which is all that it uploads before the first round."""
        return X25519PrivateKey.from_private_bytes(self.secret).public_key().public_bytes_raw()


@dataclass(frozen=True)
class Identities:
    """Signing key of a client, and everybody's verification keys, from elsewhere than the server.

    Args:
        own: Signs this client's key for a federation.
        directory: Verification key of each client, by number; its own is among them.
    """

    own: Ed25519PrivateKey
    directory: Mapping[int, Ed25519PublicKey]

    def check_number(self, client: int) -> None:
        """Refuse a number that is somebody else's.

        Raises:
            KeyVerificationError: If the directory has another key for it, or none.
        """
        known = self.directory.get(client)
        if known is None or known.public_bytes_raw() != self.own.public_key().public_bytes_raw():
            raise KeyVerificationError(
                f"the server takes this client for number {client}, which the directory gives to "
                f"{'nobody' if known is None else 'another identity'}"
            )


def sign_key(identity: Ed25519PrivateKey, federation: bytes, public_key: bytes) -> bytes:
    """Signature of a client's identity under its key for one federation."""
    return identity.sign(_statement(federation, public_key))


def verify_key(
    directory: Mapping[int, Ed25519PublicKey],
    client: int,
    federation: bytes,
    public_key: bytes,
    signature: bytes,
) -> None:
    """Check that a public key is the one that a client has signed.

    Raises:
        KeyVerificationError: If the directory has no such client, or its signature does not verify.
    """
    if client not in directory:
        raise KeyVerificationError(f"the directory holds no identity of client {client}")
    try:
        directory[client].verify(signature, _statement(federation, public_key))
    except InvalidSignature as error:
        raise KeyVerificationError(
            f"the public key of client {client} is not signed by its identity: the server relays another "
            "one, or the directory is out of date"
        ) from error


def _statement(federation: bytes, public_key: bytes) -> bytes:
    return pack_fields("fedq client key", federation, public_key)


def _seal_key(client_key: bytes) -> bytes:
    return hkdf_expand(client_key, pack_fields("seal members"))


class HeldClientKeys(OneOwner, Keys):
    """Keys of one client of a secure federation: its own secrets, and public keys of those it meets.

    Nobody else needs the coins of a client's own, so every object draws a key for them from the kept seed and
    the operating system: a client whose folder is set back, and with it the log of used streams, does not
    draw the same coins for another payload.

    Args:
        federation: Key that names the federation, 32 bytes, as for `ServerSecrets`.
        server_key: The server's public key.
        salt: `HeldServerKeys.salt`; with another one it has no key in common with anybody.
        sealed_members: Sealed list of members, as `HeldServerKeys.sealed_members` made it.
        peers: Public keys of the clients that share a group with it, their signatures verified (`verify_key`)
            where the server is not trusted to relay them.
        entropy: Source of what is mixed into the key of its own coins.

    Raises:
        KeyVerificationError: If the sealed key does not open: another server, roster, or number.
    """

    mode = "secure"
    setup_bits_per_client = 8 * PUBLIC_KEY_BYTES

    def __init__(
        self,
        client: int,
        secrets: ClientSecrets,
        federation: bytes,
        server_key: bytes,
        salt: bytes,
        sealed_members: bytes,
        peers: Mapping[int, bytes],
        *,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.number, self._secrets, self._federation = client, secrets, federation
        self._secret = X25519PrivateKey.from_private_bytes(secrets.secret)
        self._salt, self._peers = salt, dict(peers)
        self._private = private_key(secrets.seed + entropy(32), federation)
        server = X25519PublicKey.from_public_bytes(server_key)
        self._own = agree(self._secret, server, salt, server_info(federation, client))
        try:
            self._members = AESGCM(_seal_key(self._own)).decrypt(_NONCE, sealed_members, b"")
        except InvalidTag as error:
            raise KeyVerificationError(
                f"what the server sealed for client {client} does not open with its key: it has another "
                "public key of this client, or is another server"
            ) from error

    def public(self) -> bytes:
        return self._federation

    def members(self) -> bytes:
        return self._members

    def client(self, client: int) -> bytes:
        self._check_owner(client)
        return self._own

    def server(self) -> bytes:
        raise NotHeldError(f"client {self.number} does not hold the key of the server's own noise")

    def peer(self, group: tuple[int, ...]) -> bytes:
        members = self._sorted_members(group)
        if len(members) != 2:
            raise NotHeldError(f"keys are agreed in pairs, and the group {members} is none")
        return self._pair_key(next(member for member in members if member != self.number))

    def _sorted_members(self, group: Sequence[int]) -> tuple[int, ...]:
        members = tuple(sorted(group))
        if self.number not in members:
            raise NotHeldError(f"client {self.number} is not in the group {members}")
        return members

    def _pair_key(self, other: int) -> bytes:
        if other not in self._peers:
            raise NotHeldError(f"client {self.number} has no public key of client {other}")
        key = X25519PublicKey.from_public_bytes(self._peers[other])
        info = group_info(self._federation, sorted((self.number, other)))
        return agree(self._secret, key, self._salt, info)

    def private(self, client: int) -> bytes:
        self._check_owner(client)
        return self._private

    def _check_owner(self, client: int) -> None:
        if client != self.number:
            raise NotHeldError(f"client {self.number} does not hold the key of client {client}")
