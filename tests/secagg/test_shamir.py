"""Shamir's secret sharing: enough shares give the secret, fewer give nothing, wrong ones are found out."""

from itertools import combinations

import pytest

from lightning_fedq.secagg.shamir import (
    NO_SHARE,
    PRIME,
    ReconstructedSecret,
    element_bytes,
    free_element,
    interpolate,
    interpolate_values,
    random_element,
    reconstruct,
)
from tests.secagg.play import seeded_entropy

SECRET = bytes(range(1, 17))
LARGEST = element_bytes(PRIME - 1)


def shares_of(secret, points, threshold, seed=0):
    """Of a polynomial through the secret at 0 and random values at the first threshold - 1 points."""
    entropy = seeded_entropy(seed)
    known = {0: int.from_bytes(secret, "big")} | {p: random_element(entropy) for p in points[: threshold - 1]}
    rest = [point for point in points if point not in known]
    values = known | dict(zip(rest, interpolate_values(known, rest), strict=True))
    return {point: element_bytes(values[point]) for point in points}


def test_field_order_is_prime():
    """Miller-Rabin with 20 bases: a composite passes with probability below 4^-20."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 22):
        value = pow(base, odd, PRIME)
        chain = [value] + [value := value * value % PRIME for _ in range(twos - 1)]
        assert chain[0] == 1 or PRIME - 1 in chain


@pytest.mark.parametrize("secret", [bytes(16), LARGEST, SECRET])
def test_every_threshold_subset_gives_the_secret(secret):
    points = [1, 2, 5, 1000, 2**64]
    shares = shares_of(secret, points, 3)
    for chosen in combinations(points, 3):
        assert interpolate({point: shares[point] for point in chosen}) == int.from_bytes(secret, "big")
    assert interpolate(shares) == int.from_bytes(secret, "big")


def test_fewer_shares_fit_every_secret():
    """Two shares of a threshold of three: for any other secret there are coefficients that give them too."""
    shares = shares_of(SECRET, [1, 2, 3], 3)
    for other in (bytes(16), LARGEST):
        # The quadratic through (0, other) and the two shares; its value at 3 would be the third share.
        third = (int.from_bytes(other, "big") - 3 * int.from_bytes(shares[1], "big")) % PRIME
        third = (third + 3 * int.from_bytes(shares[2], "big")) % PRIME
        fitting = {1: shares[1], 2: shares[2], 3: element_bytes(third)}
        assert interpolate(fitting) == int.from_bytes(other, "big")


def test_shares_are_uniform_field_elements():
    """Highest and lowest bit of 4,000 elements, drawn or computed of a key. |z| < 5: 6e-7, four times."""
    entropy = seeded_entropy(1)
    drawn = [random_element(entropy) for _ in range(4000)]
    for values in (drawn, [free_element(SECRET, b"%d" % i) for i in range(4000)]):
        assert max(values) < PRIME and len(set(values)) == 4000
        for bit in (0, 126):
            ones = sum(value >> bit & 1 for value in values)
            assert abs(ones - 2000) < 5 * 1000**0.5


def with_errors(shares, wrong):
    return {**shares, **{point: element_bytes((7 + point**3) % PRIME) for point in wrong}}


@pytest.mark.parametrize("num, threshold", [(3, 2), (4, 3), (5, 3), (6, 4), (7, 4), (10, 6), (10, 7)])
def test_wrong_shares_are_corrected_wherever_they_lie(num, threshold):
    """Every set of two holders, and every single one where one share more than needed came."""
    points = [3 * i + 1 for i in range(num)]
    shares, most = shares_of(SECRET, points, threshold), min(num - threshold, 2)
    for count in range(most + 1):
        for wrong in combinations(points, count):
            opened = reconstruct(with_errors(shares, list(wrong)), threshold, SECRET.__eq__)
            assert opened is not None and opened.secret == SECRET
            needed = set(wrong) & set(points[:threshold])
            assert needed <= set(opened.wrong) <= set(wrong) if needed else not opened.wrong


def test_shares_that_agree_on_a_wrong_secret_are_outvoted():
    """Two liars of seven send shares of one polynomial; the code's distance tells them all the same."""
    points = list(range(1, 8))
    shares, other = shares_of(SECRET, points, 3), shares_of(bytes(16), points, 3, seed=1)
    opened = reconstruct({**shares, 1: other[1], 2: other[2]}, 3, SECRET.__eq__)
    assert opened is not None and opened.wrong == (1, 2)


def test_nothing_is_returned_where_too_many_are_wrong_or_the_commitment_is():
    points = list(range(1, 11))
    shares = shares_of(SECRET, points, 6)
    assert reconstruct(with_errors(shares, [1, 2, 3]), 6, SECRET.__eq__) is None
    assert reconstruct(shares, 6, bytes(16).__eq__) is None
    assert reconstruct(with_errors(dict(list(shares.items())[:6]), [2]), 6, SECRET.__eq__) is None


def test_doubted_shares_and_shares_that_are_none_are_not_used():
    points = list(range(1, 8))
    shares, asked = shares_of(SECRET, points, 3), []

    def is_right(secret):
        asked.append(secret)
        return secret == SECRET

    wrong = with_errors(shares, [1, 2])
    assert reconstruct(wrong, 3, is_right, doubted={1, 2}) == ReconstructedSecret(SECRET) and len(asked) == 1
    missing = {**shares, 1: NO_SHARE, 2: b"\x80" + bytes(15), 3: element_bytes(PRIME)}
    assert reconstruct(missing, 3, SECRET.__eq__) == ReconstructedSecret(SECRET)
    with pytest.raises(ValueError, match="3 shares are needed, got 2"):
        reconstruct({**missing, 4: NO_SHARE, 5: b"short"}, 3, SECRET.__eq__)


def test_an_element_is_drawn_again_where_it_is_none():
    tries = [b"\xff" * 16, b"\xff" * 15 + b"\xfd"]
    assert random_element(lambda count: tries.pop(0)) == PRIME - 1 and not tries
