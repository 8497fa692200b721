"""Shamir's secret sharing of field elements, with shares that need no message.

The field has 2^127 - 1 elements, a Mersenne prime: 16 bytes, and guessing a secret is as hard as X25519 is
(126 bits). Fewer than `threshold` shares say nothing about the secret; shares carry no proof of their own, so
whoever reconstructs passes a test that only the right secret can pass.

A polynomial of degree < t is any t of its values. So an owner who has a key in common with every holder need
not deal at all: it takes its secret as the value at 0, what t - 1 of the holders compute from their keys
(`free_element`) as their shares, and sends the others what is missing between what they compute and the
value at their point (Cramer, Damgard and Ishai, TCC 2005, with a dealer who knows every key).

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
"""An element of the field, big-endian. The top bit of one is 0."""

_NEAR = 1 << 12
"""Differences of two clients' numbers whose inverses are kept: 0.4 MB."""
_MOST_WRONG = 2
"""Wrong shares that are looked for, by trying: at a threshold of 60 two take a second, three take 15."""
NO_SHARE = b"\xff" * SHARE_BYTES
"""Stands where a holder has no share; it is no element of the field."""

Entropy = Callable[[int], bytes]
"""Returns that many uniform bytes; `os.urandom` outside tests."""


def random_element(entropy: Entropy) -> int:
    """Draw a uniform field element, by rejection: all but one of 2^127 tries are the first."""
    while True:
        if (value := int.from_bytes(entropy(SHARE_BYTES), "big") >> 1) < PRIME:
            return value


def free_element(key: bytes, label: bytes) -> int:
    """Field element that whoever holds the key computes, and that looks uniform to everybody else.

    HMAC-SHA256 under the key, of the label and a counter that goes up by rejection.
    """
    again = 0
    while True:
        value = int.from_bytes(hkdf_expand(key, label + bytes([again]))[:SHARE_BYTES], "big") >> 1
        if value < PRIME:
            return value
        again += 1


def element_bytes(value: int) -> bytes:
    """A field element on the wire."""
    return value.to_bytes(SHARE_BYTES, "big")


def interpolate_values(known: Mapping[int, int], points: Sequence[int]) -> list[int]:
    """Values of the one polynomial of degree < len(known) through all that is known.

    Lagrange's formula: f(x) = prod(x - p) sum over p of w(p) f(p) / (x - p), w the dual weights.

    Args:
        known: Point -> value; points in [0, 2^64], and at least one.
        points: Points that are not known, each in [0, 2^64].

    Example:
        >>> interpolate_values({0: 5, 1: 7}, [2, 3])
        [9, 11]
    """
    at = tuple(known)
    terms = [w * value % PRIME for w, value in zip(_dual_weights(at), known.values(), strict=True)]
    return [whole * sum(map(mul, terms, row)) % PRIME for whole, row in _distances(at, tuple(points))]


@lru_cache(maxsize=1)
def _distances(at: tuple[int, ...], points: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """For each of `points` product and inverses of the distances: a client's two secrets have the same."""
    rows, near = [], _near_inverses()
    for point in points:
        away = [point - p for p in at]
        is_near = max(map(abs, away)) <= _NEAR  # a negative one counts from the end
        inverses = [near[distance] for distance in away] if is_near else _inverses(away)
        rows.append((math.prod(away), inverses))
    return rows


@lru_cache(maxsize=1)
def _near_inverses() -> list[int]:
    found = _inverses(range(1, _NEAR + 1))
    return [0, *found, *(PRIME - one for one in reversed(found))]


@lru_cache(maxsize=8)
def _at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's coefficients: the value at 0 is the sum of coefficient x share. Kept, as holders recur."""
    whole = math.prod(points)
    slopes = [point * math.prod([other - point for other in points if other != point]) for point in points]
    return tuple(whole * inverse % PRIME for inverse in _inverses(slopes))


@lru_cache(maxsize=8)
def _dual_weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """1 / prod(point - other), as in Lagrange's formula. With them, polynomials of low degree sum to zero."""
    return tuple(_inverses([math.prod([p - other for other in points if other != p]) for p in points]))


def _inverses(values: Sequence[int]) -> list[int]:
    """Inverse of each element, by one inversion for all: prefix products, then walk back."""
    prefix = [1]
    for value in values:
        prefix.append(prefix[-1] * value % PRIME)
    inverse, found = pow(prefix[-1], -1, PRIME), [0] * len(values)
    for i in range(len(values) - 1, -1, -1):
        found[i] = inverse * prefix[i] % PRIME
        inverse = inverse * values[i] % PRIME
    return found


def interpolate(shares: Mapping[int, bytes]) -> int:
    """Value at 0 of the polynomial through all the shares, as a field element.

    Args:
        shares: Point -> share; at least one.
    """
    coefficients = _at_zero(tuple(shares))
    terms = (c * int.from_bytes(s, "big") for c, s in zip(coefficients, shares.values(), strict=True))
    return sum(terms) % PRIME


def is_element(share: bytes) -> bool:
    """Whether 16 bytes are an element of the field at all, which `NO_SHARE` is not.

    Example:
        >>> is_element(bytes(16)), is_element(bytes([255]) * 16)
        (True, False)
    """
    return len(share) == SHARE_BYTES and int.from_bytes(share, "big") < PRIME


@dataclass(frozen=True)
class ReconstructedSecret:
    """A secret, and whose shares were found wrong on the way to it.

    Args:
        secret: 16 bytes.
        wrong: Points, sorted; a wrong share that was not needed is not looked for.
    """

    secret: bytes
    wrong: tuple[int, ...] = ()


def reconstruct(
    shares: Mapping[int, bytes],
    threshold: int,
    is_right: Callable[[bytes], bool],
    doubted: Container[int] = (),
) -> ReconstructedSecret | None:
    """Give back a secret that passes `is_right`, in spite of up to `correctable` wrong shares.

    Shares in use are left out in turn, none, one, then two of them. What passes the test is the secret;
    nothing else is ever returned.

    Args:
        shares: Point -> share; what is no element of the field counts as missing.
        threshold: Number of shares that determine the secret.
        is_right: Test that only the right secret passes.
        doubted: Points whose shares are used last.

    Returns:
        The secret, or None if more shares are wrong, or what was shared is not what passes the test.

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
    """Number of wrong shares in spite of which `reconstruct` finds the secret.

    Example:
        >>> [correctable(num, 6) for num in (6, 7, 8, 20)]
        [0, 1, 2, 2]
    """
    return min(num_shares - threshold, _MOST_WRONG)
