"""State of a client of secure aggregation between two messages, as JSON."""

from collections.abc import Callable
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lightning_fedq.secagg.messages import PublicKeys


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
STATE = {
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
"""What a client keeps between two messages, by attribute."""
