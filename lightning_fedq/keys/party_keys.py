"""Keys of one party of a secure federation: of the server, or of one client.

A simulation derives all keys from one root (`keys.randomness.RootKeys`). Here, only the parties that may know
a key can derive it. Each client sends its public key once, 32 bytes, and the server relays it to the clients
that share a pair with it. A request for a key that the party must not know raises `NotHeldError`.

The server relays public keys, so it could place itself between two clients and learn their shared bits. With
a directory of identities (Ed25519) from another source, a client accepts a peer's key only with that peer's
signature.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
"""Nonce of AES-GCM, which may be constant because every key seals one message only."""


class NotHeldError(PermissionError):
    """Error of a request for a key that a party does not hold and must not hold."""


class KeyVerificationError(ValueError):
    """Error of a public key, or of data sealed for its owner, that does not verify."""


@dataclass(frozen=True)
class ServerSecrets:
    """Secrets of a server, drawn once for a federation.

    Args:
        secret: X25519 private key of the server, 32 bytes.
        federation: Public key that names the federation, 32 bytes.
        members: Key that the server sends to each client, 32 bytes.
    """

    secret: bytes = field(repr=False)
    federation: bytes
    members: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> ServerSecrets:
        """Draw new secrets from the operating system."""
        return cls(os.urandom(32), os.urandom(32), os.urandom(32))

    @property
    def public_key(self) -> bytes:
        """X25519 public key of the server, 32 bytes."""
        return X25519PrivateKey.from_private_bytes(self.secret).public_key().public_bytes_raw()


def registration_proof(own: bytes, other: bytes, federation: bytes, client_key: bytes, nonce: bytes) -> bytes:
    """Return a proof, 32 bytes, that a client holds the private half of its public key.

    Each side can compute the proof, from its key agreement with the other side. No third party can. It is
    needed because a client's partners know its public key and could send it. The server's nonce makes a
    recorded proof useless.

    Args:
        own: X25519 private key of this side.
        other: X25519 public key of the other side.
        federation: Public key that names the federation, 32 bytes.
        client_key: Public key of the client.
        nonce: Nonce that the server drew for this registration.

    Raises:
        ValueError: If the other side's key is not 32 bytes, or of low order.
    """
    key, info = X25519PrivateKey.from_private_bytes(own), pack_fields("registration", client_key, nonce)
    return agree(key, X25519PublicKey.from_public_bytes(other), federation, info)


class HeldServerKeys(ServerKeys):
    """Keys of the server in a secure federation: its own key pair and all clients' public keys.

    Args:
        secrets: Secrets of the server.
        roster: Public key of each client, by number.

    Raises:
        ValueError: If two clients have the same key, or a key is not 32 bytes.
    """

    mode = "secure"
    setup_bits_per_client = 8 * PUBLIC_KEY_BYTES

    def __init__(self, secrets: ServerSecrets, roster: Mapping[int, bytes]) -> None:
        if len(set(roster.values())) != len(roster) or any(len(key) != 32 for key in roster.values()):
            raise ValueError("Every client needs a separate public key of 32 bytes")
        self._secrets, self.roster = secrets, dict(roster)
        self._secret = X25519PrivateKey.from_private_bytes(secrets.secret)
        self.salt = roster_digest(self.roster)
        self._client: dict[int, bytes] = {}
        # new in each process, so that a folder that is reset does not repeat the server's own noise
        self._own_key = os.urandom(32)

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
        """Return the members' key, encrypted for one client, 48 bytes."""
        return AESGCM(_seal_key(self.client(client))).encrypt(_NONCE, self.members(), b"")


@dataclass(frozen=True)
class ClientSecrets:
    """Secrets of a client, drawn once for a federation and never sent.

    Args:
        secret: X25519 private key of the client, 32 bytes.
        seed: Secret seed of 32 bytes.
    """

    secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> ClientSecrets:
        """Draw new secrets from the operating system."""
        return cls(os.urandom(32), os.urandom(32))

    def derived(self, purpose: str) -> bytes:
        """Return a secret of 32 bytes that only this client knows and that is the same in every round."""
        return hkdf_expand(self.seed, pack_fields(purpose))

    @property
    def public_key(self) -> bytes:
        """X25519 public key of the client, 32 bytes, its only upload before the first round."""
        return X25519PrivateKey.from_private_bytes(self.secret).public_key().public_bytes_raw()


@dataclass(frozen=True)
class Identities:
    """Signing key of a client, and all clients' verification keys, from a source outside the server.

    Args:
        own: Signing key for this client's key in a federation.
        directory: Verification key of each client, by number, including this client's.
    """

    own: Ed25519PrivateKey
    directory: Mapping[int, Ed25519PublicKey]

    def check_number(self, client: int) -> None:
        """Refuse a number that the directory does not give to this client.

        Args:
            client: Number that the server assigns to this client.

        Raises:
            KeyVerificationError: If the directory has another key for the number, or none.
        """
        known = self.directory.get(client)
        if known is None or known.public_bytes_raw() != self.own.public_key().public_bytes_raw():
            raise KeyVerificationError(
                f"The server calls this client number {client}, which the directory gives to "
                f"{'nobody' if known is None else 'another identity'}"
            )


def sign_key(identity: Ed25519PrivateKey, federation: bytes, public_key: bytes) -> bytes:
    """Return the signature of a client's identity for its public key in one federation."""
    return identity.sign(_statement(federation, public_key))


def verify_key(
    directory: Mapping[int, Ed25519PublicKey],
    client: int,
    federation: bytes,
    public_key: bytes,
    signature: bytes,
) -> None:
    """Check that a client's identity has signed a public key.

    Args:
        directory: Verification key of each client, by number.
        client: Number of the client.
        federation: Public key that names the federation, 32 bytes.
        public_key: Public key of the client.
        signature: Signature of the client's identity.

    Raises:
        KeyVerificationError: If the directory has no such client, or the signature does not verify.
    """
    if client not in directory:
        raise KeyVerificationError(f"The directory has no identity of client {client}")
    try:
        directory[client].verify(signature, _statement(federation, public_key))
    except InvalidSignature as error:
        raise KeyVerificationError(
            f"The public key of client {client} is not signed by its identity. The server relays another "
            "key, or the directory is out of date."
        ) from error


def _statement(federation: bytes, public_key: bytes) -> bytes:
    """Return the bytes that a client's identity signs."""
    return pack_fields("fedq client key", federation, public_key)


def _seal_key(client_key: bytes) -> bytes:
    """Return the AES-GCM key that seals the members' key for one client."""
    return hkdf_expand(client_key, pack_fields("seal members"))


class HeldClientKeys(OneOwner, Keys):
    """Keys of one client in a secure federation: its own secrets, and the public keys of its peers.

    No other party needs the client's private randomised bits. So every object derives their key from the kept
    seed and from the operating system. If the client's folder is reset, with its log of used streams, the
    client does not draw the same bits for another payload.

    Args:
        client: Number of the client.
        secrets: Secrets of the client.
        federation: Public key that names the federation, 32 bytes.
        server_key: Public key of the server.
        salt: `HeldServerKeys.salt`. With another salt, the client has no key in common with any party.
        sealed_members: Sealed members' key, from `HeldServerKeys.sealed_members`.
        peers: Public keys of the clients that share a group with this one, by number. Verify their signatures
            first (`verify_key`) if the server is not trusted to relay them.
        entropy: Source of the random bytes in the key of the client's private bits.

    Raises:
        KeyVerificationError: If the sealed key does not open, because it is of another server, roster or
            number.
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
                f"Data that the server sealed for client {client} do not open with its key. The server has "
                "another key of this client, or is another server."
            ) from error

    def public(self) -> bytes:
        return self._federation

    def members(self) -> bytes:
        return self._members

    def client(self, client: int) -> bytes:
        self._check_owner(client)
        return self._own

    def server(self) -> bytes:
        raise NotHeldError(f"Client {self.number} does not hold the key of the server's own noise")

    def peer(self, group: tuple[int, ...]) -> bytes:
        if len(group) != 2:
            raise NotHeldError(f"Keys are agreed in pairs, got the group {tuple(sorted(group))}")
        if self.number not in group:
            raise NotHeldError(f"Client {self.number} is not in the group {tuple(sorted(group))}")
        (other,) = set(group) - {self.number}
        if other not in self._peers:
            raise NotHeldError(f"Client {self.number} has no public key of client {other}")
        key = X25519PublicKey.from_public_bytes(self._peers[other])
        return agree(self._secret, key, self._salt, group_info(self._federation, sorted(group)))

    def private(self, client: int) -> bytes:
        self._check_owner(client)
        return self._private

    def _check_owner(self, client: int) -> None:
        """Refuse requests for another client's key."""
        if client != self.number:
            raise NotHeldError(f"Client {self.number} does not hold the key of client {client}")
