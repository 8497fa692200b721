import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_fedq.functional.exact_error.dither import centred_dither
from lightning_fedq.wire.coding import FixedLength, UndecodableError
from lightning_fedq.wire.entropy_coding import Elias, Subset
from lightning_fedq.wire.range_coding import ConditionalRange


@st.composite
def messages(draw):
    width, signed = draw(st.integers(1, 32)), draw(st.booleans())
    low = -(1 << width - 1) if signed else 0
    high = low + (1 << width) - 1
    return width, signed, draw(st.lists(st.integers(low, high), max_size=40))


@given(messages())
@settings(max_examples=150, deadline=None)
def test_round_trip(message):
    width, signed, values = message
    code, symbols = FixedLength(width, signed), torch.tensor(values, dtype=torch.int64)
    stream = code.pack(symbols)
    assert code.num_bits(symbols) == width * len(values)
    assert len(stream) == (width * len(values) + 7) // 8
    assert code.unpack(stream, len(values)).to(torch.int64).tolist() == values


def test_most_significant_bit_first_and_padded_with_zeros():
    assert FixedLength(1).pack(torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1], dtype=torch.uint8)).hex() == "b180"
    assert FixedLength(3).pack(torch.tensor([5, 1, 7])).hex() == "a780"
    assert FixedLength(4, signed=True).pack(torch.tensor([-1, 3])).hex() == "f3"


@pytest.mark.parametrize(
    "code, value",
    [(FixedLength(3), 8), (FixedLength(3), -1), (FixedLength(3, True), 4), (FixedLength(3, True), -5)],
)
def test_a_symbol_that_does_not_fit_is_refused(code, value):
    with pytest.raises(ValueError, match="Symbols must be in"):
        code.pack(torch.tensor([0, value]))


def test_a_stream_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="9 symbols of 3 bits need 4 bytes, got 3"):
        FixedLength(3).unpack(b"abc", 9)


@pytest.mark.parametrize("width", [0, 33])
def test_widths_beyond_a_word_are_refused(width):
    with pytest.raises(ValueError, match=r"bits_per_symbol must be in \[1, 32\]"):
        FixedLength(width)


# ---- any bytes at all ----------------------------------------------------------------------------------
COUNT = 24
_SELECTED = np.arange(COUNT) % 3 == 0


def dithered(width):
    rng = np.random.default_rng(3)
    step = width * np.exp2(-rng.integers(0, 12, COUNT).astype(float))
    return ConditionalRange(centred_dither(rng.integers(0, 2**63, COUNT).astype(np.uint64)), step, (8, 16))


CODES = {
    "one bit": FixedLength(1),
    "signed": FixedLength(5, signed=True),
    "32 bits": FixedLength(32),
    "gamma": Elias(),
    "delta": Elias(delta=True),
    "subset": Subset(_SELECTED, Elias(), smallest=-2),
    "nothing": Subset(np.zeros(COUNT, bool), Elias()),
    "range": dithered(1.0),
    "narrow range": dithered(2.0**-12),
}
TOO_LONG = {FixedLength: "symbols of .* bits need", Subset: "must be empty|symbols take"}
every_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


def honest(code, rng):
    symbols = torch.from_numpy(rng.integers(0, 2, COUNT))
    if isinstance(code, Subset):
        symbols[torch.from_numpy(~code.selected)] = 0
    return symbols


def bad_streams(code, rng):
    """Junk of any length, and honest streams with other heads, tails and words. Checksums are made right."""
    good = code.pack(honest(code, rng))
    crc = isinstance(code, ConditionalRange)
    good = good[:-4] if crc else good
    for number in range(400):
        junk, place = rng.bytes(int(rng.integers(0, 2 * len(good) + 8))), int(rng.integers(0, len(good) + 1))
        bad = [junk, good[:place] + junk, good[:place] + b"\xff" * len(junk), junk + good[place:]]
        stream = bad[number % 4]
        if crc and number % 3 == 0:
            stream = bytes([number % 2]) + stream[1:]
        yield stream + zlib.crc32(stream).to_bytes(4, "little") if crc else stream


@every_code
def test_any_bytes_are_read_or_refused_by_one_error(code):
    rng, read = np.random.default_rng(1), 0
    for stream in bad_streams(code, rng):
        try:
            symbols = code.unpack(stream, COUNT)
        except UndecodableError:
            continue
        read += 1
        assert code.pack(symbols) == stream  # no other bytes are read
        assert symbols.shape == (COUNT,) and code.num_bits(symbols) >= 0
    assert code.unpack(code.pack(honest(code, rng)), COUNT).shape == (COUNT,)


@every_code
def test_what_is_too_long_for_its_symbols_is_not_read(code):
    longest = code.max_bytes(COUNT)
    with pytest.raises(UndecodableError, match=TOO_LONG.get(type(code), "symbols take at most .* bytes")):
        code.unpack(bytes(longest + 1), COUNT)


@every_code
@pytest.mark.parametrize("size", [0, 1, 2**31 - 1, 2**61, 2**62 - 3])
def test_the_limit_holds_for_the_longest_streams(code, size):
    rng = np.random.default_rng(2)
    for _ in range(50):
        symbols = torch.from_numpy(rng.choice([-size, -1, 0, size], COUNT))
        if isinstance(code, Subset):
            symbols[torch.from_numpy(~code.selected)] = 0
        try:
            stream = code.pack(symbols)
        except ValueError:
            assert isinstance(code, FixedLength)
            continue
        assert len(stream) <= code.max_bytes(COUNT)
