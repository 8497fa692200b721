"""Shamir's secret sharing: enough shares give the secret, fewer give nothing, wrong ones are found out."""

from __future__ import annotations

from itertools import combinations

import pytest

from lightning_fedq.secagg.shamir import (
    NO_SHARE,
    PRIME,
    Opened,
    interpolate,
    random_element,
    reconstruct,
    split,
)
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


def with_errors(shares: dict[int, bytes], wrong: list[int]) -> dict[int, bytes]:
    return {**shares, **{point: (7 + point**3).to_bytes(33, "big") for point in wrong}}


@pytest.mark.parametrize("num, threshold", [(3, 2), (4, 3), (5, 3), (6, 4), (7, 4), (10, 6), (10, 7)])
def test_wrong_shares_are_corrected_wherever_they_lie(num: int, threshold: int) -> None:
    """Every set of up to (m - t) / 2 holders, and every single one."""
    points = [3 * i + 1 for i in range(num)]
    shares, most = shares_of(SECRET, points, threshold), max(1, (num - threshold) // 2)
    for count in range(most + 1):
        for wrong in combinations(points, count):
            opened = reconstruct(with_errors(shares, list(wrong)), threshold, SECRET.__eq__)
            assert opened is not None and opened.secret == SECRET
            needed = set(wrong) & set(points[:threshold])
            assert needed <= set(opened.wrong) <= set(wrong) if needed else not opened.wrong


@pytest.mark.parametrize("count", [1, 2, 20, 49])
def test_a_large_cohort_corrects_a_quarter_of_liars(count: int) -> None:
    points = list(range(1, 201))
    wrong = points[:: 200 // count][:count]
    opened = reconstruct(with_errors(shares_of(SECRET, points, 101), wrong), 101, SECRET.__eq__)
    assert opened is not None and opened.secret == SECRET and list(opened.wrong) == wrong


def test_shares_that_agree_on_a_wrong_secret_are_outvoted() -> None:
    """Two liars of seven send shares of one polynomial; the code's distance tells them all the same."""
    points = list(range(1, 8))
    shares, other = shares_of(SECRET, points, 3), shares_of(bytes(32), points, 3, seed=1)
    opened = reconstruct({**shares, 1: other[1], 2: other[2]}, 3, SECRET.__eq__)
    assert opened is not None and opened.wrong == (1, 2)


def test_nothing_is_returned_where_too_many_are_wrong_or_the_commitment_is() -> None:
    points = list(range(1, 11))
    shares = shares_of(SECRET, points, 6)
    assert reconstruct(with_errors(shares, [1, 2, 3]), 6, SECRET.__eq__) is None
    assert reconstruct(shares, 6, bytes(32).__eq__) is None
    assert reconstruct(with_errors(dict(list(shares.items())[:6]), [2]), 6, SECRET.__eq__) is None


def test_doubted_shares_and_shares_that_are_none_are_not_used() -> None:
    points = list(range(1, 8))
    shares, asked = shares_of(SECRET, points, 3), []

    def is_right(secret: bytes) -> bool:
        asked.append(secret)
        return secret == SECRET

    wrong = with_errors(shares, [1, 2])
    assert reconstruct(wrong, 3, is_right, doubted={1, 2}) == Opened(SECRET) and len(asked) == 1
    missing = {**shares, 1: NO_SHARE, 2: b"\xff" * 33, 3: PRIME.to_bytes(33, "big")}
    assert reconstruct(missing, 3, SECRET.__eq__) == Opened(SECRET)
    with pytest.raises(ValueError, match="3 shares are needed, got 2"):
        reconstruct({**missing, 4: NO_SHARE, 5: NO_SHARE}, 3, SECRET.__eq__)


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
