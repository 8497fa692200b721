import zlib

import numpy as np
import pytest
import torch

from lightning_fedq.functional.exact_error.dither import centred_dither
from lightning_fedq.wire.range_coding import ConditionalRange, _log_step
from tests.wire.test_entropy_coding import layers, quantize

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


def summed(body):
    return body + zlib.crc32(body).to_bytes(4, "little")


def test_every_flipped_bit_and_every_other_length_is_noticed():
    # a CRC-32 notices any burst of up to 32 bits; other damage passes with probability 2^-32
    rng = np.random.default_rng(7)
    dither, step = layers(60, "direct")
    code = ConditionalRange(dither, step, (20, 40))
    stream = code.pack(quantize(rng.normal(scale=3.0, size=60), dither, step))
    bad = [stream[:length] for length in range(len(stream))]
    bad += [stream + bytes(more) for more in range(1, 9)] + [stream + rng.bytes(4) for _ in range(50)]
    bad += [
        bytes(byte ^ (1 << bit if i == place else 0) for i, byte in enumerate(stream))
        for place in range(len(stream))
        for bit in range(8)
    ]
    for wrong in bad:
        with pytest.raises(ValueError, match=r"checksum of the message is wrong\. The message is truncated"):
            code.unpack(wrong, 60)


def test_range_coding_refuses_bad_streams():
    code = ConditionalRange(np.zeros(100), np.ones(100), (100,))
    stream = code.pack(torch.arange(100))
    with pytest.raises(ValueError, match="for 100 symbols, got count=7"):
        code.unpack(stream, 7)
    with pytest.raises(ValueError, match="must start with mode 0 or 1"):
        code.unpack(summed(b"\x07" + stream[1:-4]), 100)
    with pytest.raises(ValueError, match=r"hold more than 100 symbols of these steps\. Check the dither"):
        code.unpack(summed(stream[:-4] + bytes(range(64))), 100)
    with pytest.raises(ValueError, match=r"do not hold 100 symbols of these steps\. Check the dither"):
        code.unpack(summed(stream[:-5]), 100)
    with pytest.raises(ValueError, match="one value per coordinate, 100"):
        ConditionalRange(np.zeros(3), np.ones(3), (100,))


def test_steps_are_rounded_to_sixteenths_of_an_octave():
    rng = np.random.default_rng(0)
    changes = np.exp2((np.arange(-500, 500) - 0.5) / 16)
    steps = np.concatenate([np.exp2(rng.uniform(-100, 100, 3000)), changes * 0.999999, changes * 1.000001])
    found = [_log_step(bits) for bits in steps.view(np.int64).tolist()]
    assert found == np.floor(16 * np.log2(steps) + 0.5).astype(int).tolist()


def test_chunks_and_segments_do_not_show():
    # 40,000 coordinates in five segments, some larger than a chunk and some tiny
    segments = (3, 20_000, 1, 19_990, 6)
    dither, step = layers(40_000, "direct")
    x = np.random.default_rng(6).normal(size=40_000) * np.repeat([1e-3, 5.0, 1e6, 0.2, 1e9], segments)
    symbols, code = quantize(x, dither, step), ConditionalRange(dither, step, segments)
    assert torch.equal(code.unpack(code.pack(symbols), 40_000), symbols)
    small = code.pack(symbols.to(torch.int32)) if symbols.abs().max() < 2**31 else code.pack(symbols)
    assert small == code.pack(symbols)
