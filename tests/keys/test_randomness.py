import copy
import pickle
from collections import Counter
from itertools import combinations, permutations, product

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given, settings, strategies as st
from scipy import stats

from lightning_fedq.keys.randomness import (
    ClientRandomness,
    PublicRandomness,
    RootKeys,
    SeededKeys,
    Stream,
    agree,
    hkdf_expand,
    hkdf_extract,
    pack_fields,
)


class Scripted(Stream):
    """A stream whose words are given; for exact laws by enumeration."""

    def __init__(self, words):
        self._left = [np.uint32(word) for word in words]

    def words(self, count):
        taken, self._left = self._left[:count], self._left[count:]
        return np.array(taken, np.uint32)


def test_hkdf_of_rfc_5869_case_1():
    key = hkdf_extract(bytes(range(13)), b"\x0b" * 22)
    assert key.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    info = bytes(range(0xF0, 0xFA))
    assert hkdf_expand(key, info).hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


@given(key=st.binary(min_size=32, max_size=32), info=st.binary(max_size=300))
@settings(max_examples=30, deadline=None)
def test_hkdf_expand_agrees_with_cryptography(key, info):
    assert hkdf_expand(key, info) == HKDFExpand(hashes.SHA256(), 32, info).derive(key)


def test_hkdf_extract_with_no_salt_uses_zeros():
    assert hkdf_extract(b"", b"x") == hkdf_extract(bytes(32), b"x")


def test_x25519_of_rfc_7748_section_6_1():
    alice = X25519PrivateKey.from_private_bytes(
        bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    )
    bob = X25519PrivateKey.from_private_bytes(
        bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    )
    secret = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    expected = hkdf_expand(hkdf_extract(b"salt", secret), b"info")
    assert agree(alice, bob.public_key(), b"salt", b"info") == expected
    assert agree(bob, alice.public_key(), b"salt", b"info") == expected


@pytest.mark.parametrize(
    "point",
    [
        bytes(32),
        b"\x01" + bytes(31),
        bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    ],
    ids=["0", "1", "order 8"],
)
def test_a_public_key_of_low_order_is_refused(point):
    with pytest.raises(ValueError, match="low order"):
        agree(X25519PrivateKey.generate(), X25519PublicKey.from_public_bytes(point), b"", b"")


def test_the_stream_is_aes_256_in_counter_mode_from_zero():
    """Blocks 0 and 1 under the zero key: E(0), and E(1), which is also the tag of GCM test case 13."""
    out = np.empty(32, np.uint8)
    Stream(bytes(32)).fill(out)
    assert out.tobytes().hex() == "dc95c078a2408989ad48a21492842087530f8afbc74536b9a963b4f1c4cb738b"


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_has_one_owner(take):
    with pytest.raises(TypeError, match="two payloads would share it"):
        take(Stream(bytes(32)))


def test_a_key_of_another_length_is_refused():
    with pytest.raises(ValueError):
        Stream(bytes(16))


@given(cuts=st.lists(st.integers(0, 40_000), min_size=1, max_size=5))
@settings(max_examples=15, deadline=None)
def test_a_stream_read_in_pieces_is_the_same_stream(cuts):
    whole, pieces = Stream(bytes(32)), Stream(bytes(32))
    assert np.array_equal(whole.words(sum(cuts)), np.concatenate([pieces.words(cut) for cut in cuts]))


# ---- addresses --------------------------------------------------------------------------------------


@given(
    first=st.lists(st.one_of(st.binary(max_size=9), st.integers(0, 2**64 - 1)), max_size=4),
    second=st.lists(st.one_of(st.binary(max_size=9), st.integers(0, 2**64 - 1)), max_size=4),
)
def test_packed_fields_are_unambiguous(first, second):
    """An integer and its own eight bytes are the one pair of lists that may pack alike."""
    plain = [
        [x.to_bytes(8, "big") if isinstance(x, int) else x for x in fields] for fields in (first, second)
    ]
    assert (pack_fields(*first) == pack_fields(*second)) == (plain[0] == plain[1])


def test_an_address_field_has_64_bits():
    with pytest.raises(ValueError, match=r"\[0, 2\^64\), got -1"):
        pack_fields(-1)


def test_a_seed_is_not_negative():
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        SeededKeys(-1)


def _streams(keys):
    """One stream for every value of every address field."""
    for round, attempt in ((0, 0), (1, 0), (0, 1)):
        rand = ClientRandomness(keys, (1, 2, 3), round, attempt)
        for purpose in ("coins", "coin"):
            yield rand.public(purpose)
            for client in (1, 2):
                yield rand.shared_with_server(client, purpose)
                yield rand.private(client, purpose)
            for group in ((1, 2), (1, 3), (2, 3)):
                yield rand.peer(group, purpose)


@pytest.mark.parametrize("keys", [SeededKeys(0), RootKeys()], ids=["seeded", "root"])
def test_every_address_field_changes_the_stream(keys):
    heads = [stream.words(8).tobytes() for stream in _streams(keys)]
    assert len(set(heads)) == len(heads) == 48


def test_federations_with_other_seeds_or_keys_share_no_stream():
    heads = [s.words(8).tobytes() for keys in (SeededKeys(0), SeededKeys(1)) for s in _streams(keys)]
    heads += [s.words(8).tobytes() for _ in range(2) for s in _streams(RootKeys())]
    assert len(set(heads)) == len(heads)


def test_public_randomness_is_what_the_client_sees_of_it():
    keys = SeededKeys(3)
    server, client = PublicRandomness(keys, 5, 2), ClientRandomness(keys, (4,), 5, 2)
    assert np.array_equal(server.public("p").words(4), client.public("p").words(4))
    assert np.array_equal(
        server.shared_with_server(4, "p").words(4), client.shared_with_server(4, "p").words(4)
    )
    assert not hasattr(server, "peer")
    assert not hasattr(server, "private")


def test_peers_agree_whatever_the_order_of_the_group():
    rand = ClientRandomness(RootKeys(), (1,), 0)
    assert np.array_equal(rand.peer((1, 2), "p").words(4), rand.peer((2, 1), "p").words(4))


def test_modes_are_named():
    assert SeededKeys(0).mode == "reproducible"
    assert RootKeys().mode == "secure"
    assert SeededKeys(0).setup_bits_per_client == RootKeys().setup_bits_per_client == 256


# ---- laws ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 7, 1000, 2**31 + 1, 2**32 - 1, 2**32])
def test_uniform_below_accepts_a_multiple_of_the_bound_and_nothing_else(bound):
    """Exactly floor(2^32 / bound) words lead to each value: words around the limit show where it is."""
    limit = 2**32 // bound * bound
    accepted = [w for w in (0, 1, bound - 1, limit - 1) if 0 <= w < limit]
    rejected = [w for w in (limit, 2**32 - 1) if limit <= w < 2**32]
    stream = Scripted(rejected + accepted)
    assert stream.uniform_below(bound, len(accepted)).tolist() == [w % bound for w in accepted]


def test_uniform_below_reads_no_more_than_it_needs():
    """Two calls give what one would, with rejected words in any place: every pattern of 6 words."""
    good, bad = 7, 2**32 - 1
    for pattern in product((good, bad), repeat=6):
        if (count := pattern.count(good)) < 2:
            continue
        words = [w if w == bad else w + 3 * i for i, w in enumerate(pattern)]
        whole = Scripted(words).uniform_below(3, count)
        halves = Scripted(words)
        parts = [halves.uniform_below(3, 1), halves.uniform_below(3, count - 1)]
        assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("bound", [0, 2**32 + 1])
def test_uniform_below_refuses_bounds_beyond_a_word(bound):
    with pytest.raises(ValueError, match=r"bound must be in \[1, 2\^32\]"):
        Stream(bytes(32)).uniform_below(bound, 1)


def test_uniforms_lie_inside_the_unit_interval_even_at_its_ends():
    class Ends(Stream):
        def words64(self, count):
            return np.array([0, 2**64 - 1], np.uint64)

    assert Ends(bytes(32)).uniforms(2).tolist() == [2.0**-53, 1.0 - 2.0**-53]


def test_uniforms_are_uniform():
    """Kolmogorov-Smirnov at 1e-6: sqrt(ln(2 / 1e-6) / 2n)."""
    sample = np.sort(Stream(b"u" * 32).uniforms(100_000))
    grid = np.arange(1, len(sample) + 1) / len(sample)
    assert np.abs(sample - grid).max() < (np.log(2e6) / 2 / len(sample)) ** 0.5 + 1e-5


def test_permutations_are_uniform():
    """All 24 orders of 4 in 24,000 draws; chi-square with 23 degrees exceeds 80 with chance 3e-8."""
    stream, counts = Stream(b"p" * 32), {}
    for _ in range(24_000):
        order = tuple(stream.permutation(4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 80


class FewWords(Stream):
    """Words of two bits, so that many tie."""

    def words64(self, count):
        return super().words64(count) >> np.uint64(62)


@pytest.mark.parametrize(("bound", "count"), [(4, 4), (4, 2), (5, 1)])
def test_a_choice_is_uniform_even_where_words_tie(bound, count):
    """Chi-square over all sequences: a fresh key alarms with probability 1e-3, this one does not."""
    stream, draws = FewWords(bytes(32)), 12_000
    counts = Counter(tuple(stream.choice(bound, count)) for _ in range(draws))
    assert set(counts) == set(permutations(range(bound), count))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_a_choice_is_the_head_of_a_permutation():
    """Recorded cohorts stay what they were."""
    assert Stream(bytes(32)).choice(50, 7) == Stream(bytes(32)).permutation(50)[:7]
    assert Stream(bytes(32)).choice(3, 0) == []


@pytest.mark.parametrize(("bound", "count"), [(3, 4), (3, -1), (-1, 0)])
def test_no_choice_of_more_than_there_are(bound, count):
    with pytest.raises(ValueError, match=rf"count must be in \[0, bound = {bound}\], got {count}"):
        Stream(bytes(32)).choice(bound, count)


def test_words_of_different_streams_are_uncorrelated():
    """32 bits a word, 1,000 words, 28 pairs: each correlation within 6 / sqrt(32000)."""
    rand = ClientRandomness(SeededKeys(9), range(8), 0)
    rows = [np.unpackbits(rand.private(c, "x").words(1000).view(np.uint8)) * 2.0 - 1.0 for c in range(8)]
    for first, second in combinations(rows, 2):
        assert abs((first * second).mean()) < 6 / 32_000**0.5


@pytest.mark.parametrize("make", [lambda: RootKeys(bytes(32)), RootKeys])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_secret_keys_have_one_owner(make, copied):
    """A second one would draw the same coins for another payload."""
    with pytest.raises(TypeError, match="Secure keys can't be copied or pickled"):
        copied(make())
    assert copied(SeededKeys(3)) is not None  # nothing of these is secret
