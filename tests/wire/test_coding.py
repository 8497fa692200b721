import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_fedq.wire.coding import FixedLength


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
    with pytest.raises(ValueError, match="symbols must lie in"):
        code.pack(torch.tensor([0, value]))


def test_a_stream_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="9 symbols of 3 bits need 4 bytes, got 3"):
        FixedLength(3).unpack(b"abc", 9)


@pytest.mark.parametrize("width", [0, 33])
def test_widths_beyond_a_word_are_refused(width):
    with pytest.raises(ValueError, match=r"bits_per_symbol must be in \[1, 32\]"):
        FixedLength(width)
