import math

import numpy as np
import pytest
import torch

from lightning_fedq.entropy_coding import (
    ConditionalHuffman,
    ConditionalRange,
    Elias,
    canonical_words,
    from_positive,
    huffman_lengths,
    to_positive,
)
from lightning_fedq.functional.dither import centred_dither
from lightning_fedq.functional.layered import layer_row
from lightning_fedq.functional.layered_cost import conditional_entropy
from lightning_fedq.randomness import PublicRandomness, SeededKeys


def layers(count, kind, sigma=1.0):
    words = PublicRandomness(SeededKeys(3), 0).public(f"codes {kind}").words64(4 * count)
    dither, step, offset = (np.empty(count) for _ in range(3))
    layer_row(words, sigma, True, kind == "shifted", dither, step, offset)
    return dither, step


def quantize(x, dither, step):
    return torch.from_numpy(np.floor(x / step + dither + 0.5).astype(np.int64))


def test_the_signed_map():
    symbols = np.array([0, 1, -1, 2, -2, 2**61, -(2**61)])
    assert to_positive(symbols).tolist()[:5] == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(from_positive(to_positive(symbols)), symbols)


@pytest.mark.parametrize(("delta", "bits"), [(False, [1, 3, 3, 5, 5, 5, 15]), (True, [1, 4, 4, 5, 5, 5, 14])])
def test_elias_lengths(delta, bits):
    symbols = torch.tensor([0, 1, -1, 2, -2, 3, 64])
    assert [Elias(delta).num_bits(symbol[None]) for symbol in symbols] == bits


def test_elias_gamma_by_hand():
    assert Elias().pack(torch.tensor([0, 1, -1, 2])) == bytes([0b10100110, 0b01000000])


@pytest.mark.parametrize("delta", [False, True])
def test_elias_round_trip(delta):
    rng = np.random.default_rng(0)
    symbols = torch.from_numpy(np.concatenate([rng.integers(-4, 5, 500), rng.integers(-(2**61), 2**61, 50)]))
    code = Elias(delta)
    stream = code.pack(symbols)
    assert torch.equal(code.unpack(stream, len(symbols)), symbols)
    assert len(stream) == (code.num_bits(symbols) + 7) // 8
    assert code.num_bits(symbols.reshape(2, -1)) == code.num_bits(symbols)


@pytest.mark.parametrize("delta", [False, True])
def test_elias_refuses_what_is_not_whole(delta):
    code, symbols = Elias(delta), torch.arange(-20, 20)
    stream = code.pack(symbols)
    for wrong in (stream[:-1], stream + b"\x00", b"\x00" * 20, b""):
        with pytest.raises(ValueError, match="truncated or corrupted"):
            code.unpack(wrong, 40)
    with pytest.raises(ValueError, match="symbols must lie within"):
        code.pack(torch.tensor([2**62]))


def test_huffman_is_optimal_and_complete():
    assert sorted(huffman_lengths([0.4, 0.3, 0.2, 0.1])) == [1, 2, 3, 3]
    assert huffman_lengths([1.0]) == [1]
    lengths = huffman_lengths(np.random.default_rng(1).dirichlet(np.ones(37)).tolist())
    assert sum(2.0**-length for length in lengths) == 1.0
    words = canonical_words(lengths)
    assert not any(a != b and b.startswith(a) for a in words for b in words)
    with pytest.raises(ValueError, match="probabilities > 0"):
        huffman_lengths([0.5, 0.0])


def cell_laws(dither, step, half):
    smallest, laws = [], []
    for u, w in zip(dither.tolist(), step.tolist(), strict=True):
        low, high = math.floor(-half / w + u + 0.5), math.floor(half / w + u + 0.5)
        edges = np.clip((np.arange(low, high + 2) - 0.5 - u) * w, -half, half)
        cells = np.diff(edges) / (2 * half)
        smallest.append(low)
        laws.append(tuple(np.maximum(cells, 1e-15).tolist()))
    return tuple(smallest), tuple(laws)


def test_huffman_per_layer_costs_what_the_table_says():
    # specification 3.5: 4.772 for t = 64, shifted; standard error about 0.02
    dither, step = layers(4000, "shifted")
    symbols = quantize(np.random.default_rng(2).uniform(-32, 32, 4000), dither, step)
    code = ConditionalHuffman(*cell_laws(dither, step, 32.0))
    stream = code.pack(symbols)
    assert torch.equal(code.unpack(stream, 4000), symbols)
    bits = code.num_bits(symbols) / 4000
    assert bits == pytest.approx(4.772, abs=0.06)
    assert bits >= conditional_entropy(64.0, 1.0, "gaussian", "shifted") - 0.06
    with pytest.raises(ValueError, match="truncated"):
        code.unpack(stream[: len(stream) // 2], 4000)
    with pytest.raises(ValueError, match="wrong count or model"):
        code.unpack(stream + b"\x00\x00", 4000)
    with pytest.raises(ValueError, match="impossible in its law"):
        code.num_bits(symbols + 1000)


# specification 3.5, range coder: x ~ N(0, 0.01), N(0, 1), N(0, 100); bits per coordinate
RANGE = {0.1: (0.1047, 0.1040), 1.0: (0.9662, 1.0239), 10.0: (3.8498, 4.0412)}


@pytest.mark.parametrize("size", RANGE)
def test_range_coding_costs_what_the_table_says(size):
    # at most 1% above for the coarse model, and the sampling error of 200,000 symbols (std < 0.004)
    for kind, ideal in zip(("direct", "shifted"), RANGE[size], strict=True):
        dither, step = layers(200_000, kind)
        symbols = quantize(np.random.default_rng(4).normal(scale=size, size=200_000), dither, step)
        code = ConditionalRange(dither, step, (50_000, 150_000))
        stream = code.pack(symbols)
        assert torch.equal(code.unpack(stream, 200_000), symbols)
        assert code.num_bits(symbols) == 8 * len(stream)
        assert len(stream) * 8 / 200_000 == pytest.approx(ideal, rel=0.01, abs=0.012)


def test_range_coding_of_very_short_steps_sends_low_bits_as_they_are():
    rng, count = np.random.default_rng(5), 3000
    step = np.exp2(-rng.integers(0, 46, count).astype(float))
    dither = centred_dither(rng.integers(0, 2**63, count).astype(np.uint64))
    x = rng.normal(size=count)
    symbols = quantize(x, dither, step)
    code = ConditionalRange(dither, step, (count,))
    stream = code.pack(symbols)
    assert torch.equal(code.unpack(stream, count), symbols)
    # differential entropy of N(0, 1) is 2.05 bits; a step of 2^-k adds k
    ideal = np.maximum(2.05 - np.log2(step), 0).sum()
    assert len(stream) * 8 == pytest.approx(ideal, rel=0.02)


@pytest.mark.parametrize(
    "symbols", [[0] * 6, [10**9, 0, 0, 0, 0, -5], [2**60, -(2**60), 1, 2, 3, 4], [3, -3, 3, -3, 2, 1]]
)
def test_range_coding_of_anything(symbols):
    code = ConditionalRange(np.linspace(-0.4, 0.4, 6), np.full(6, 2.0), (2, 4))
    assert code.unpack(code.pack(torch.tensor(symbols)), 6).tolist() == symbols


def test_range_coding_refuses_bad_streams():
    code = ConditionalRange(np.zeros(100), np.ones(100), (100,))
    stream = code.pack(torch.arange(100))
    with pytest.raises(ValueError, match="messages of 100 symbols, asked for 7"):
        code.unpack(stream, 7)
    with pytest.raises(ValueError, match="truncated"):
        code.unpack(stream[:-1], 100)
    with pytest.raises(ValueError, match="starts with mode 0 or 1"):
        code.unpack(b"\x07" + stream[1:], 100)
    with pytest.raises(ValueError, match="hold more than 100 symbols"):
        code.unpack(stream + bytes(range(64)), 100)
    with pytest.raises(ValueError, match="one value per coordinate, 100"):
        ConditionalRange(np.zeros(3), np.ones(3), (100,))
