"""Shamir's secret sharing: enough shares give the secret, fewer give nothing, wrong ones are found out."""

from __future__ import annotations

from itertools import combinations

import pytest

from lightning_fedq.secagg.shamir import PRIME, interpolate, random_element, reconstruct, split
from tests.secagg.play import seeded_entropy

SECRET = bytes(range(1, 33))


def shares_of(secret: bytes, points: list[int], threshold: int, seed: int = 0) -> dict[int, bytes]:
    return dict(zip(points, split(secret, points, threshold, seeded_entropy(seed)), strict=True))


def test_field_order_is_prime() -> None:
    """Miller-Rabin with 20 bases: a composite passes with probability below 4^-20."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 22):
        value = pow(base, odd, PRIME)
        chain = [value] + [value := value * value % PRIME for _ in range(twos - 1)]
        assert chain[0] == 1 or PRIME - 1 in chain


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, SECRET])
def test_every_threshold_subset_gives_the_secret(secret: bytes) -> None:
    points = [1, 2, 5, 1000, 2**64]
    shares = shares_of(secret, points, 3)
    for chosen in combinations(points, 3):
        assert interpolate({point: shares[point] for point in chosen}) == int.from_bytes(secret, "big")
    assert interpolate(shares) == int.from_bytes(secret, "big")


def test_fewer_shares_fit_every_secret() -> None:
    """Two shares of a threshold of three: for any other secret there are coefficients that give them too."""
    shares = shares_of(SECRET, [1, 2, 3], 3)
    for other in (bytes(32), b"\xff" * 32):
        # The quadratic through (0, other) and the two shares; its value at 3 would be the third share.
        third = (int.from_bytes(other, "big") - 3 * int.from_bytes(shares[1], "big")) % PRIME
        third = (third + 3 * int.from_bytes(shares[2], "big")) % PRIME
        fitting = {1: shares[1], 2: shares[2], 3: third.to_bytes(33, "big")}
        assert interpolate(fitting) == int.from_bytes(other, "big")


def test_shares_are_uniform_field_elements() -> None:
    """Top byte of 4,000 shares of zero: half of them start with 0x00 and then any byte. |z| < 5: 6e-7."""
    values = [random_element(entropy) for entropy in [seeded_entropy(1)] for _ in range(4000)]
    assert max(values) < PRIME
    ones = sum(value >> 255 & 1 for value in values)
    assert abs(ones - 2000) < 5 * 1000**0.5


def test_wrong_shares_are_passed_over() -> None:
    shares = shares_of(SECRET, [1, 2, 3, 4, 5], 3)
    for liar in shares:
        wrong = {**shares, liar: (7).to_bytes(33, "big")}
        assert reconstruct(wrong, 3, SECRET.__eq__) == SECRET
    wrong = {**shares, 1: bytes(33), 3: b"\xff" * 33, 5: bytes(33)}
    assert reconstruct(wrong, 3, SECRET.__eq__) is None
    assert reconstruct({point: wrong[point] for point in (1, 2, 4)}, 3, SECRET.__eq__) is None


def test_refused_arguments() -> None:
    entropy = seeded_entropy(0)
    with pytest.raises(ValueError, match="a secret has 32 bytes, got 3"):
        split(b"abc", [1, 2], 2, entropy)
    with pytest.raises(ValueError, match=r"threshold must be in \[1, 2\], the number of shares, got 3"):
        split(SECRET, [1, 2], 3, entropy)
    with pytest.raises(ValueError, match="threshold must be"):
        split(SECRET, [1, 2], 0, entropy)
    for points in ([0, 1], [1, 1], [1, 2**64 + 1]):
        with pytest.raises(ValueError, match="distinct and in"):
            split(SECRET, points, 2, entropy)
    with pytest.raises(ValueError, match="3 shares are needed, got 1"):
        reconstruct({1: bytes(33)}, 3, SECRET.__eq__)
