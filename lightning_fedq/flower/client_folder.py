"""A client's folder with its keys, and the log of the random streams that it has used.

The client writes the log before a message exists. So no stream ever carries two payloads, even if a client is
killed and restarts, or a server is reset to an earlier state.
"""

from pathlib import Path
from typing import Any

from lightning_fedq.flower.records import Fields
from lightning_fedq.flower.refusals import RefusedError, refused_in_private
from lightning_fedq.flower.settings import MOST_ROUNDS, RELEASE, check_folder_release
from lightning_fedq.flower.store import Store
from lightning_fedq.keys.party_keys import (
    ClientSecrets,
    HeldClientKeys,
    Identities,
    registration_proof,
    verify_key,
)
from lightning_fedq.keys.randomness import Keys, SeededKeys
from lightning_fedq.rounds import StreamLog

KEY_FIELDS: dict[str, type] = {
    **dict.fromkeys(("federation", "server", "salt", "sealed", "peer_keys"), bytes),
    "peers": list,
}
"""Types of the fields with keys that each message of a round has, by name."""
_KEYS, _PROBE = "keys", "probe"
_ROOM = 1 << 16
"""Bytes that must be free in a folder for a line of the log, keys, and the state of a round."""
_KEYS_AND_LOG = "Without a seed, the keys and the stream log"


class ClientFolder:
    """Folder of one client.

    Args:
        store: The folder. None keeps nothing, which needs a seed and no secure aggregation.
        seed: Seed of all keys, which then are not secret. None draws secret keys and stores them.
        identities: Signing key of this client and verification keys of its peers. None trusts the server to
            relay their keys.
    """

    def __init__(self, store: Store | None, seed: int | None, identities: Identities | None) -> None:
        self.store, self._seed, self._identities = store, seed, identities

    def require(self, purpose: str) -> Store:
        """Return the folder.

        Args:
            purpose: Data that need the folder, as a plural noun for the message.

        Raises:
            RefusedError: If the client has none.
        """
        if self.store is None:
            raise RefusedError(
                f"{purpose} need a client folder. Start the SuperNode with --node-config "
                "'fedq-home=\"/a/folder\"', or give client_app(home=...)"
            )
        return self.store

    def check_writable(self) -> None:
        """Refuse if the folder has no room for a round (`_ROOM`)."""
        if self.store is None:
            return
        words, place = "The client's folder can't be written", f"{self.store.folder}: "
        with refused_in_private(words, place, OSError):
            self.store.put(_PROBE, {"zeros": bytes(_ROOM)})
            self.store.drop(_PROBE)

    @property
    def agreed_rounds(self) -> int:
        """Number of rounds that the client has agreed to at registration. `MOST_ROUNDS` if there is none."""
        if self._seed is not None or self.store is None:
            return MOST_ROUNDS
        return int((self.store.get(_KEYS) or {}).get("rounds", MOST_ROUNDS))

    def agree_to(self, rounds: int) -> None:
        """Store the number of rounds that the client agrees to."""
        store = self.require(_KEYS_AND_LOG)
        store.put(_KEYS, {**(store.get(_KEYS) or {}), **RELEASE, "rounds": rounds})

    # ---- keys ---------------------------------------------------------------------------------------------

    def check_keys(self) -> None:
        """Refuse if the client has registered, but its keys are missing."""
        if self._seed is None:
            self._read_keys(is_registering=False)

    def _read_keys(self, is_registering: bool) -> dict[str, Any] | None:
        """Return the keys with which this client has registered. None at its first registration.

        Raises:
            RefusedError: If the client has registered, and its folder has no keys.
        """
        store = self.require(_KEYS_AND_LOG)
        kept = store.get(_KEYS)
        check_folder_release(store.folder, kept or {})
        if kept is None and not is_registering:
            raise RefusedError(
                f"{store.folder} has no keys, but this client has registered: the folder was emptied or "
                "replaced. Restore the original folder, because no other can act as this client."
            )
        return kept

    def secrets(self, fields: Fields, is_registering: bool = False) -> ClientSecrets:
        """Return the client's secrets, which it draws at its first registration with a federation.

        Args:
            fields: Fields of the message, with the federation and the server's public key.
            is_registering: Whether this message registers the client, so that missing secrets may be drawn.

        Raises:
            ValueError: If the folder is of another federation, or a copy of another client's folder.
        """
        store, federation = self.require(_KEYS_AND_LOG), fields["federation"]
        kept = self._read_keys(is_registering)
        if kept is None:
            new = ClientSecrets.draw()
            # raises before an invalid server key is stored
            registration_proof(new.secret, fields["server"], federation, new.public_key, b"")
            kept = {
                "secret": new.secret,
                "seed": new.seed,
                "federation": federation,
                "server": fields["server"],
                "folder": str(store.folder.resolve()),
                **RELEASE,
            }
            store.put(_KEYS, kept)  # stored before the key is sent, so that a crash does not change the key
        if (kept["federation"], kept["server"]) != (federation, fields["server"]):
            raise ValueError(
                f"Client folder {store.folder} is of federation {kept['federation'].hex()[:12]}, but the "
                f"server's is {federation.hex()[:12]}. Use a new folder for a new federation."
            )
        self._check_place(store, kept)
        return ClientSecrets(kept["secret"], kept["seed"])

    def _check_place(self, store: Store, kept: dict[str, Any]) -> None:
        """Refuse a copy of a folder whose original still exists. A moved folder is accepted.

        Each copy would count only its own messages against the same budget and keys.

        Raises:
            ValueError: If the original is still there.
        """
        here, there = store.folder.resolve(), Path(kept.get("folder", store.folder)).resolve()
        if str(here) == kept.get("folder"):
            return
        exists = (there / f"{_KEYS}.json").exists() and not there.samefile(here)
        if exists and (Store(there).get(_KEYS) or {}).get("secret") == kept["secret"]:
            raise ValueError(
                f"Client folder {here} is a copy of {there}, which still exists and shares its keys and "
                "budget. Use that folder, or move a folder instead of copying it."
            )
        store.put(_KEYS, {**kept, "folder": str(here)})

    def keys(self, fields: Fields) -> Keys:
        """Return the client's keys for one round, with the public keys of its peers.

        Raises:
            KeyVerificationError: If identities are given and a peer's key is not signed by its identity.
        """
        if self._seed is not None:
            return SeededKeys(self._seed)
        secrets, federation = self.secrets(fields), fields["federation"]
        peers = dict(zip(fields["peers"], _split_bytes(fields["peer_keys"], 32), strict=True))
        if self._identities is not None:
            self._identities.check_number(fields["client"])
            signed = dict(zip(fields["peers"], _split_bytes(fields.get("signatures", b""), 64), strict=False))
            for peer, key in peers.items():
                verify_key(self._identities.directory, peer, federation, key, signed.get(peer, b""))
        parts = federation, fields["server"], fields["salt"], fields["sealed"], peers
        return HeldClientKeys(fields["client"], secrets, *parts)

    def log(self, owner: str) -> StreamLog:
        """Return the log of streams that this client has used.

        Args:
            owner: Client and federation, as text.

        Raises:
            ValueError: If the log is missing although these keys have used it.
        """
        if self._seed is not None:  # with a seed, a repeated round repeats its bits
            return StreamLog(None, owner)
        store = self.require(_KEYS_AND_LOG)
        kept, path = store.get(_KEYS) or {}, store.folder / "streams.jsonl"
        if kept.get("logged") and not path.exists():
            raise ValueError(
                f"{path} is missing, so the messages under these keys are unknown. Restore the file, or "
                "begin a new federation in another folder."
            )
        log = StreamLog(path, owner)
        path.chmod(0o600)
        if not kept.get("logged"):
            store.put(_KEYS, {**kept, "logged": True})  # from here on, a missing log is an error
        return log


def _split_bytes(data: bytes, size: int) -> list[bytes]:
    """Split bytes into pieces of equal size."""
    return [data[start : start + size] for start in range(0, len(data), size)]
