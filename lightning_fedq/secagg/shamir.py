"""Shamir's secret sharing of 32-byte secrets, with detection of wrong shares.

The field has 2^256 + 297 elements, the smallest prime above 2^256, so that every 32-byte string is
an element. Fewer than `threshold` shares say nothing about the secret; shares carry no proof of
their own, so whoever reconstructs passes a test that only the right secret can pass.

References:
    Shamir, How to share a secret, CACM 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
"""An element of the field, big-endian."""

Entropy = Callable[[int], bytes]
"""Returns that many uniform bytes; `os.urandom` outside tests."""


def random_element(entropy: Entropy) -> int:
    """Draw a uniform field element, by rejection: two tries on average."""
    while True:
        raw = entropy(SHARE_BYTES)
        if (value := int.from_bytes(raw, "big") & ((1 << 257) - 1)) < PRIME:
            return value


def split(secret: bytes, points: Sequence[int], threshold: int, entropy: Entropy) -> list[bytes]:
    """Share a secret: `threshold` of the shares give it back, fewer give nothing.

    Args:
        secret: 32 bytes.
        points: One distinct point in [1, 2^64] a holder.
        threshold: In [1, len(points)].
        entropy: Source of the coefficients.

    Returns:
        One 33-byte share a point.

    Raises:
        ValueError: If the threshold can't be met, a point is repeated or out of range, or the
            secret has another length.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold must be in [1, {len(points)}], the number of shares, got {threshold}")
    if len(set(points)) != len(points) or not all(1 <= point <= 2**64 for point in points):
        raise ValueError("points must be distinct and in [1, 2^64]; 0 would hand out the secret itself")
    coefficients = [random_element(entropy) for _ in range(threshold - 1)]
    constant, shares = int.from_bytes(secret, "big"), []
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * point % PRIME
        shares.append(((value + constant) % PRIME).to_bytes(SHARE_BYTES, "big"))
    return shares


def interpolate(shares: Mapping[int, bytes]) -> int:
    """Value at 0 of the polynomial through all the shares, as a field element.

    Args:
        shares: Point -> share; at least one.
    """
    points = list(shares)
    terms, denominators = [], []
    for point in points:
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        terms.append(int.from_bytes(shares[point], "big") * numerator)
        denominators.append(denominator)
    # One inversion for all: prefix products, then walk back.
    prefix = [1]
    for denominator in denominators:
        prefix.append(prefix[-1] * denominator % PRIME)
    inverse, value = pow(prefix[-1], -1, PRIME), 0
    for i in range(len(points) - 1, -1, -1):
        value += terms[i] * (inverse * prefix[i] % PRIME)
        inverse = inverse * denominators[i] % PRIME
    return value % PRIME


def reconstruct(
    shares: Mapping[int, bytes], threshold: int, is_right: Callable[[bytes], bool]
) -> bytes | None:
    """Give back a secret that passes `is_right`, in spite of a few wrong shares.

    Tries each run of `threshold` neighbouring shares, cyclically: with m shares given, wrong shares
    that lie within m - threshold neighbouring places are survived, in particular a single one
    whenever m > threshold. What passes the test is the secret; nothing else is ever returned.

    Args:
        shares: Point -> share.
        threshold: Number of shares that determine the secret.
        is_right: Test that only the right secret passes.

    Returns:
        The 32-byte secret, or None if no run gives it.

    Raises:
        ValueError: If there are fewer shares than the threshold.
    """
    if len(shares) < threshold:
        raise ValueError(f"{threshold} shares are needed, got {len(shares)}")
    points = sorted(shares)
    tries = len(points) if len(points) > threshold else 1
    for start in range(tries):
        run = [points[(start + i) % len(points)] for i in range(threshold)]
        value = interpolate({point: shares[point] for point in run})
        if value < 2 ** (8 * SECRET_BYTES) and is_right(secret := value.to_bytes(SECRET_BYTES, "big")):
            return secret
    return None
