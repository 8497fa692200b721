import numpy as np
import pytest
import torch

from lightning_fedq.functional.exact_error.layered import layer_row
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import SIGM
from lightning_fedq.mechanisms.interface import RoundContext
from lightning_fedq.wire.entropy_coding import Elias, Subset, from_positive, map_to_positive


def layers(count, kind, sigma=1.0):
    words = PublicRandomness(SeededKeys(3), 0).public(f"codes {kind}").words64(4 * count)
    dither, step, offset = (np.empty(count) for _ in range(3))
    layer_row(words, sigma, True, kind == "shifted", dither, step, offset)
    return dither, step


def quantize(x, dither, step):
    return torch.from_numpy(np.floor(x / step + dither + 0.5).astype(np.int64))


def test_the_signed_map():
    symbols = np.array([0, 1, -1, 2, -2, 2**61, -(2**61)])
    assert map_to_positive(symbols).tolist()[:5] == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(from_positive(map_to_positive(symbols)), symbols)


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
    with pytest.raises(ValueError, match="Symbols must be within"):
        code.pack(torch.tensor([2**62]))


def test_a_client_that_selects_nothing_sends_nothing():
    code = Subset(np.zeros(5, np.bool_), Elias())
    nothing = torch.zeros(5, dtype=torch.int64)
    assert code.pack(nothing) == b"" and code.num_bits(nothing) == 0
    assert torch.equal(code.unpack(b"", 5), nothing)
    words = "No coordinate is selected, so a message must be empty, got 1 bytes"
    with pytest.raises(ValueError, match=words):
        code.unpack(b"\x80", 5)


def test_few_parameters_may_leave_a_client_without_a_selection():
    """At 2 coordinates and a probability of 1/2 a quarter of the messages are empty."""
    mechanism, segments = SIGM(1.0, 2.0, 0.5), (2,)
    context = RoundContext(0, ((0,), (1,)), segments, torch.zeros(1), torch.ones(1))
    bits = []
    for seed in range(20):
        rand = ClientRandomness(SeededKeys(seed), [0, 1], 0)
        message = mechanism.encode(torch.ones(2, 2), context, rand)
        assert mechanism.decode(message.symbols, [0, 1], context, rand).shape == (2,)
        bits.append(message.num_bits)
    assert 0 in bits
