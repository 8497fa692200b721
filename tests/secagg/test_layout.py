"""Moduli, packing and masks."""

import numpy as np
import pytest

from lightning_fedq.keys.randomness import SeededKeys, Stream
from lightning_fedq.secagg.layout import Block, modular_layout, sum_layout

KEY = SeededKeys(0).public()


def random_symbols(layout, seed):
    words = Stream(SeededKeys(seed).public()).words64(layout.size)
    span = (np.asarray(layout.high, np.int64) - layout.low).astype(np.uint64) + np.uint64(1)
    return (words % span).astype(np.int64) + layout.low


@pytest.mark.parametrize("width", [*range(1, 18), 31, 32, 33, 40, 57, 58, 62, 63])
@pytest.mark.parametrize("size", [1, 7, 1001])
def test_packing_takes_exactly_the_width(width, size):
    layout = modular_layout(size, 2**width)
    residues = layout.split(random_symbols(layout, width))
    packed = layout.pack(residues)
    assert len(packed) == layout.num_bytes == (size * width + 7) // 8
    assert all(np.array_equal(*pair) for pair in zip(layout.unpack(packed), residues, strict=True))
    # Least significant bit first, read by hand.
    number = int.from_bytes(packed, "little")
    assert [number >> width * i & (2**width - 1) for i in range(min(size, 7))] == residues[0][:7].tolist()


@pytest.mark.parametrize(
    "modulus", [2, 3, 1000, 1024, 2**16, 2**16 + 1, 2**32, 10**18 + 9, 2**62 + 1, 2**63 - 25, 2**63]
)
def test_masks_cancel_and_are_uniform(modulus):
    layout = modular_layout(70_000, modulus)
    symbols = random_symbols(layout, 1)
    total = layout.split(symbols)
    layout.add_mask(total, KEY)
    assert not np.array_equal(layout.join(total, 1), symbols)
    mask = layout.zeros()
    layout.add_mask(mask, KEY)
    values = layout.join(mask, 1)
    # Mean of 70,000 draws, uniform on {0, ..., m - 1} / m: |z| < 5 fails with probability 6e-7.
    deviation = np.sqrt((1 - 1 / modulus**2) / 12 / 70_000)
    assert abs((values / modulus).mean() - (1 - 1 / modulus) / 2) < 5 * deviation
    layout.add_mask(total, KEY, subtract=True)
    assert np.array_equal(layout.join(total, 1), symbols)


def test_rejection_has_no_modulo_bias():
    """Modulus 3 * 2^61: without rejection the lowest 2^61 residues would come twice as often.

    Thirds of 90,000 draws: chi-square with 2 degrees of freedom exceeds 33 with probability 7e-8.
    """
    layout = modular_layout(90_000, 3 * 2**61)
    mask = layout.zeros()
    layout.add_mask(mask, KEY)
    counts = np.bincount((layout.join(mask, 1) >> 61).astype(int), minlength=3)
    assert counts.size == 3
    assert ((counts - 30_000) ** 2 / 30_000).sum() < 33


def test_the_last_value_of_the_modulus_is_reached():
    mask = modular_layout(5000, 5).zeros()
    modular_layout(5000, 5).add_mask(mask, KEY)
    assert set(np.unique(mask[0])) == set(range(5))


@pytest.mark.parametrize(
    ("low", "high", "clients", "width"),
    [(0, 1, 2, 2), (0, 1, 1000, 10), (0, 1, 1023, 10), (0, 1, 1024, 11), (-8, 7, 6, 7), (5, 5, 4, 3)],
)
def test_the_smallest_power_of_two_that_cannot_wrap(low, high, clients, width):
    layout = sum_layout(3, low, high, clients)
    assert layout.blocks[0].width == width
    for end in (low, high):
        total = layout.zeros()
        for _ in range(clients):
            layout.add(total, layout.split(np.full(3, end)))
        assert layout.join(total, clients).tolist() == [clients * end] * 3


def test_no_silent_wrap_up_to_a_million_clients():
    """For every cohort size the modulus is above the largest sum, and an explicit one below it is refused."""
    for clients in [2**k + j for k in range(1, 20) for j in (-1, 0, 1)] + [10**6]:
        if clients < 2:
            continue
        assert sum_layout(1, 0, 15, clients).blocks[0].modulus > 15 * clients
        assert sum_layout(1, 0, 15, clients, 15 * clients + 1).blocks[0].modulus == 15 * clients + 1
        with pytest.raises(ValueError, match="so that the sum can't wrap"):
            sum_layout(1, 0, 15, clients, 15 * clients)


def test_bounds_that_differ_between_coordinates():
    low = np.array([0, -100, 0, -(2**40), 3, -1])
    high = np.array([1, 100, 1, 2**40, 3, 2])
    layout = sum_layout(6, low, high, 5)
    assert [block.width for block in layout.blocks] == [3, 4, 10, 44]
    assert sorted(np.concatenate([block.index for block in layout.blocks]).tolist()) == list(range(6))
    total = layout.zeros()
    messages = [np.clip(random_symbols(layout, seed), low, high) for seed in range(5)]
    for seed, message in enumerate(messages):
        masked = layout.split(message)
        layout.add_mask(masked, SeededKeys(100 + seed).public())
        layout.add(total, layout.unpack(layout.pack(masked)))
    for seed in range(5):
        layout.add_mask(total, SeededKeys(100 + seed).public(), subtract=True)
    assert np.array_equal(layout.join(total, 5), sum(messages))
    with pytest.raises(ValueError, match="must lie in"):
        layout.split(np.array([0, 0, 0, 0, 2, 0]))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, bool])
def test_integer_types(dtype):
    layout = sum_layout(4, 0, 1, 3)
    assert layout.join(layout.split(np.array([0, 1, 1, 0], dtype)), 1).tolist() == [0, 1, 1, 0]


def test_modular_sums_come_back_reduced():
    layout = modular_layout(2, 100)
    total = layout.zeros()
    for _ in range(3):
        layout.add(total, layout.split(np.array([99, 40])))
    assert layout.join(total, 3).tolist() == [97, 20]


def test_digest_tells_layouts_apart():
    layouts = [
        sum_layout(5, 0, 1, 3),
        sum_layout(6, 0, 1, 3),
        sum_layout(5, -1, 0, 3),
        sum_layout(5, 0, 1, 4),
        sum_layout(5, 0, 1, 3, 5),
        sum_layout(5, 0, np.array([1, 1, 1, 1, 9]), 3),
        sum_layout(5, 0, np.array([1, 1, 1, 9, 1]), 3),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert sum_layout(5, 0, 1, 3).digest == sum_layout(5, np.zeros(5, np.int64), 1, 3).digest


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: sum_layout(0, 0, 1, 3), "need size >= 1"),
        (lambda: sum_layout(3, np.zeros(2), 1, 3), "need size >= 1"),
        (lambda: sum_layout(3, 2, 1, 3), "must not be above"),
        (lambda: sum_layout(3, 0, 2**62, 3), "does not fit 63 bits"),
        (lambda: sum_layout(3, 2**62, 2**62, 3), "does not fit 63 bits"),
        (lambda: modular_layout(3, 1), "modulus must be in"),
        (lambda: sum_layout(3, 0, 2, 3, 7).unpack(b"\0"), "has 2 bytes, got 1"),
        (lambda: sum_layout(3, 0, 2, 3, 7).unpack(b"\x07\0"), "must be below 7, got 7"),
        (lambda: sum_layout(3, 0, 2, 3, 7).unpack(b"\0\x80"), "padding"),
    ],
)
def test_refused_arguments(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_blocks_take_the_shortest_words():
    assert Block(7, None, 3).dtype == np.uint32
    assert Block(2**24 + 1, None, 3).dtype == np.uint64
