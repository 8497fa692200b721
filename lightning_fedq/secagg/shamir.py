"""Shamir's secret sharing of field elements, in which most shares need no message.

The field has 2^127 - 1 elements, a Mersenne prime. An element takes 16 bytes, and guessing a secret is hard
like breaking X25519 (126 bits). Fewer than `threshold` shares carry no information about the secret. A share
has no proof of correctness, so reconstruction takes a test that only the right secret passes.

Any t values fix a polynomial of degree < t. An owner that has a common key with every holder uses this. The
secret is the value at 0. t - 1 of the holders compute their shares from their keys (`free_element`). The
other holders are sent a correction: the difference between their value of the polynomial and the number that
they compute (Cramer, Damgard and Ishai, TCC 2005, with a dealer who knows every key).

References:
    Shamir, How to share a secret, CACM 1979.
    Cramer, Damgard and Ishai, Share conversion, pseudorandom secret-sharing and applications to secure
    computation, TCC 2005.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from operator import mul

from lightning_fedq.keys.randomness import hkdf_expand

PRIME = 2**127 - 1
SHARE_BYTES = 16
"""Length of a field element, which is sent big-endian with a top bit of 0."""

_NEAR = 1 << 12
"""Largest difference of two points whose inverse is cached (0.4 MB)."""
_MOST_WRONG = 2
"""Largest number of wrong shares that `reconstruct` searches for.

The search tries subsets. At a threshold of 60, two wrong shares take a second, three take 15 seconds.
"""
NO_SHARE = b"\xff" * SHARE_BYTES
"""Placeholder for a missing share. It is no element of the field."""

Entropy = Callable[[int], bytes]
"""Function that returns the requested number of uniform bytes. It is `os.urandom` outside tests."""


def random_element(entropy: Entropy) -> int:
    """Draw a uniform field element by rejection. A value is rejected with probability 2^-127."""
    while True:
        if (value := int.from_bytes(entropy(SHARE_BYTES), "big") >> 1) < PRIME:
            return value


def free_element(key: bytes, label: bytes) -> int:
    """Compute the field element of a label, which looks uniform to everybody without the key.

    The element is the HMAC-SHA256 of the label and a counter. The counter rises if a value is rejected.
    """
    counter = 0
    while True:
        value = int.from_bytes(hkdf_expand(key, label + bytes([counter]))[:SHARE_BYTES], "big") >> 1
        if value < PRIME:
            return value
        counter += 1


def element_bytes(value: int) -> bytes:
    """Return the bytes of a field element on the wire."""
    return value.to_bytes(SHARE_BYTES, "big")


def interpolate_values(known: Mapping[int, int], points: Sequence[int]) -> list[int]:
    """Return values of the polynomial of degree < len(known) through all known values.

    By Lagrange's formula f(x) = prod(x - p) sum over p of w(p) f(p) / (x - p), with the dual weights w.

    Args:
        known: Values by point, at least one. Points are in [0, 2^64].
        points: Points in [0, 2^64] that are not in `known`.

    Examples:
        >>> interpolate_values({0: 5, 1: 7}, [2, 3])
        [9, 11]
    """
    at = tuple(known)
    terms = [w * value % PRIME for w, value in zip(_dual_weights(at), known.values(), strict=True)]
    return [whole * sum(map(mul, terms, row)) % PRIME for whole, row in _distances(at, tuple(points))]


@lru_cache(maxsize=1)
def _distances(at: tuple[int, ...], points: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """Return, for each of `points`, the product and the inverses of its distances to the points `at`.

    The result is cached because the two secrets of a client have the same points.
    """
    rows, near = [], _near_inverses()
    for point in points:
        distances = [point - p for p in at]
        is_near = max(map(abs, distances)) <= _NEAR  # a negative distance indexes the list from its end
        inverses = [near[distance] for distance in distances] if is_near else _inverses(distances)
        rows.append((math.prod(distances), inverses))
    return rows


@lru_cache(maxsize=1)
def _near_inverses() -> list[int]:
    """Return the inverses of 0 (unused), 1, ..., _NEAR, -_NEAR, ..., -1."""
    inverses = _inverses(range(1, _NEAR + 1))
    return [0, *inverses, *(PRIME - inverse for inverse in reversed(inverses))]


@lru_cache(maxsize=8)
def _dual_weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return the weights 1 / prod(point - other) of Lagrange's formula."""
    return tuple(_inverses([math.prod([p - other for other in points if other != p]) for p in points]))


def _inverses(values: Sequence[int]) -> list[int]:
    """Return the inverse of each element, with a single modular inversion.

    The function inverts the product of all elements. Then it divides by one element after another, from the
    last to the first, with the prefix products.
    """
    prefix = [1]
    for value in values:
        prefix.append(prefix[-1] * value % PRIME)
    inverse, inverses = pow(prefix[-1], -1, PRIME), [0] * len(values)
    for i in range(len(values) - 1, -1, -1):
        inverses[i] = inverse * prefix[i] % PRIME
        inverse = inverse * values[i] % PRIME
    return inverses


def interpolate(shares: Mapping[int, bytes]) -> int:
    """Return the value at 0 of the polynomial through all the shares, as a field element.

    Args:
        shares: Shares by point, at least one.
    """
    known = {point: int.from_bytes(share, "big") for point, share in shares.items()}
    return interpolate_values(known, [0])[0]


def is_element(share: bytes) -> bool:
    """Return whether bytes are an element of the field. `NO_SHARE` is not.

    Examples:
        >>> is_element(bytes(16)), is_element(bytes([255]) * 16)
        (True, False)
    """
    return len(share) == SHARE_BYTES and int.from_bytes(share, "big") < PRIME


@dataclass(frozen=True)
class ReconstructedSecret:
    """A reconstructed secret and the points of the wrong shares.

    Args:
        secret: Secret of 16 bytes.
        wrong: Points of wrong shares, sorted. Wrong shares that were not needed are not in it.
    """

    secret: bytes
    wrong: tuple[int, ...] = ()


def reconstruct(
    shares: Mapping[int, bytes],
    threshold: int,
    is_right: Callable[[bytes], bool],
    doubted: Container[int] = (),
) -> ReconstructedSecret | None:
    """Reconstruct a secret that passes `is_right`, in spite of up to `correctable` wrong shares.

    The function interpolates from `threshold` shares and applies the test. It first leaves out no share, then
    each single share, then each pair of shares.

    Args:
        shares: Shares by point. A share that is no element of the field counts as missing.
        threshold: Number of shares that determine the secret.
        is_right: Test that only the right secret passes.
        doubted: Points whose shares are used last.

    Returns:
        The secret, or None if more shares are wrong or the shared secret does not pass the test.

    Raises:
        ValueError: If there are fewer shares than the threshold.
    """
    shares = {point: share for point, share in shares.items() if is_element(share)}
    if len(shares) < threshold:
        raise ValueError(f"{threshold} shares are needed, got {len(shares)}")
    order = sorted(shares, key=lambda point: (point in doubted, point))
    for count in range(correctable(len(order), threshold) + 1):
        for wrong in combinations(order[: threshold + count - 1], count):
            used = [point for point in order if point not in wrong][:threshold]
            if is_right(secret := element_bytes(interpolate({point: shares[point] for point in used}))):
                return ReconstructedSecret(secret, tuple(sorted(wrong)))
    return None


def correctable(num_shares: int, threshold: int) -> int:
    """Return the number of wrong shares in spite of which `reconstruct` finds the secret.

    Examples:
        >>> [correctable(num, 6) for num in (6, 7, 8, 20)]
        [0, 1, 2, 2]
    """
    return min(num_shares - threshold, _MOST_WRONG)
