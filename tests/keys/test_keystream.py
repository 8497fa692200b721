"""Keystreams by the CPU's own instructions are OpenSSL's, from any byte on."""

import copy
import os
import pickle
import platform
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lightning_fedq.keys import keystream
from lightning_fedq.keys.keystream import keystreams, keystreams_by_openssl
from lightning_fedq.keys.randomness import Stream, fill_rows


@given(
    starts=st.lists(st.integers(0, 2**40), min_size=1, max_size=3),
    size=st.one_of(st.integers(0, 1100), st.integers(60_000, 70_000)),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_compiled_keystreams_are_openssl_s(starts, size, seed):
    keys = np.random.default_rng(seed).integers(0, 2**32, (len(starts), 8), np.uint32)
    found, expected = (np.full((len(starts), size), 7, np.uint8) for _ in range(2))
    keystreams(keys, np.array(starts), found)
    keystreams_by_openssl(keys, np.array(starts), expected)
    assert np.array_equal(found, expected)


def test_the_first_block_is_nist_s():
    """AESAVS, KeySbox, AES-256, count 0: the block of zeros, which is that of counter 0."""
    key = bytes.fromhex("c47b0294dbbbee0fec4757f22ffeee3587ca4730c3d33b691df38bab076bc558")
    out = np.empty((1, 16), np.uint8)
    keystreams(np.frombuffer(key, np.uint32)[None], np.zeros(1, np.int64), out)
    assert out.tobytes().hex() == "46f2fb342d6f0ab477476fc501242c5f"


@pytest.mark.skipif(not keystream.LANES, reason="this CPU has no AES instructions")
def test_a_cpu_that_gives_other_bytes_is_refused_before_the_first(monkeypatch):
    def wrong(keys, starts, out):
        out[:] = 0

    monkeypatch.setattr(keystream, "_fill", wrong)
    keystream._compiled.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"differs from AES by OpenSSL.*NUMBA_CPU_FEATURES=\+sse2"):
            Stream(bytes(32)).words(1)
    finally:
        keystream._compiled.cache_clear()


CHECK = """
import sys
import numpy as np
from lightning_fedq.keys import keystream
from lightning_fedq.keys.randomness import Stream
assert keystream.LANES == int(sys.argv[1]), keystream.LANES
print(Stream(bytes(range(32))).words(1000).tobytes().hex())
"""


@pytest.mark.parametrize(("lanes", "features"), [(0, "+sse2"), (1, "+sse2,+aes")])
def test_other_cpus_draw_the_same_words(lanes, features):
    if platform.machine() not in ("x86_64", "AMD64"):
        lanes, features = 0, ""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-c", CHECK, str(lanes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == Stream(bytes(range(32))).words(1000).tobytes().hex()


class _Sevens(Stream):
    def fill(self, out):
        out[:] = 7


def test_rows_are_filled_as_streams_fill_them():
    keys = [bytes([i]) * 32 for i in range(3)]
    whole, rows = [Stream(key) for key in keys], np.empty((3, 5), np.uint32)
    whole[1].words(3)  # they need not stand at one place
    fill_rows(whole, rows)
    alone = [Stream(key) for key in keys]
    alone[1].words(3)
    for row, stream, one in zip(rows, whole, alone, strict=True):
        assert np.array_equal(row, one.words(5))
        assert np.array_equal(stream.words(4), one.words(4))


def test_a_stream_that_fills_otherwise_is_asked_itself():
    rows = np.empty((2, 4), np.uint32)
    fill_rows([_Sevens(bytes(32)), Stream(bytes(32))], rows)
    assert (rows[0] == 7).all() and np.array_equal(rows[1], Stream(bytes(32)).words(4))


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_has_one_owner(take):
    with pytest.raises(TypeError, match="two payloads would share it"):
        take(Stream(bytes(32)))


def test_a_stream_that_stands_twice_gives_no_bytes_twice():
    rows, stream, alone = np.empty((2, 4), np.uint32), Stream(bytes(32)), Stream(bytes(32))
    fill_rows([stream, stream], rows)
    assert np.array_equal(rows.ravel(), alone.words(8))
