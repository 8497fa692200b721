"""The rotation against matrices, and how flat it makes vectors."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.functional.hadamard import kernel_order, near_size, padded_size
from lightning_fedq.functional.rotation import rotate, rotate_back, sign_words
from tests.functional.transform import hadamard


def drawn(dim, seed=0):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, sign_words(padded_size(dim)), dtype=np.uint32)
    return rng, words


def by_matrices(rows, words, block=None):
    """H D2 B D1 in float64, by the other implementation of the transform; B = H, or has blocks."""
    size = padded_size(rows.shape[1])
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    half = len(words) // 2 * 32
    first, second = (torch.from_numpy(1.0 - 2.0 * bits[at : at + size]) for at in (0, half))
    padded = torch.nn.functional.pad(torch.from_numpy(rows).double(), (0, size - rows.shape[1]))
    flat = hadamard((first * padded).view(len(rows), -1, min(block or size, size))).view(len(rows), size)
    return hadamard(second * flat).numpy()


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 63, 100, 1100, 1300, 1700, 5000, 8000, 140_000, 230_000])
def test_rotation_is_the_product_of_signs_and_transforms(dim):
    rng, words = drawn(dim)
    rows = rng.normal(size=(2, dim)).astype(np.float32)
    wanted = by_matrices(rows, words, near_size(padded_size(dim)))
    np.testing.assert_allclose(rotate(rows, words), wanted, atol=3e-6)
    np.testing.assert_allclose(rotate_back(wanted[1].astype(np.float32), words, dim), rows[1], atol=5e-6)
    keep = max(padded_size(dim) // 8, kernel_order(padded_size(dim)))
    np.testing.assert_allclose(rotate(rows, words, keep), by_matrices(rows, words)[:, :keep], atol=3e-6)


@pytest.mark.parametrize(
    ("dim", "kept"),
    [
        *[(240_000, 1 << 18), (240_000, 1 << 17), (240_000, 1 << 15), (240_000, 32)],
        *[(140_000, 5 << 15), (140_000, 5 << 14), (140_000, 20), (1600, 28), (50, 8)],
    ],
)
def test_back_is_the_transpose(dim, kept):
    rng, words = drawn(dim)
    some = rng.normal(size=(1, dim)).astype(np.float32)
    other = rng.normal(size=kept).astype(np.float32)
    block = near_size(kept) if kept == padded_size(dim) else None
    forth = by_matrices(some, words, block)[0, :kept] @ other.astype(np.float64)
    assert forth == pytest.approx(some[0].astype(np.float64) @ rotate_back(other, words, dim), rel=1e-4)


@pytest.mark.parametrize("dim", [100, 1300, 140_000])
def test_in_float64_to_its_last_digits(dim):
    rng, words = drawn(dim)
    rows = rng.normal(size=(2, dim))
    rotated = rotate(rows, words)
    assert rotated.dtype == np.float64
    np.testing.assert_allclose(rotated, by_matrices(rows, words, near_size(padded_size(dim))), atol=1e-13)
    np.testing.assert_allclose(rotate_back(rotated[1], words, dim), rows[1], atol=1e-13)


def test_a_dense_vector_is_flattened():
    """The bound fails with probability 1e-6 a seed."""
    dense = np.random.default_rng(3).normal(size=(1, 16_384))
    for seed in range(5):
        _, words = drawn(16_384, seed)
        flat = rotate(dense / np.linalg.norm(dense), words)
        assert np.abs(flat).max() <= math.sqrt(2.0 * math.log(2.0 * 16_384 / 1e-6) / 16_384)


def rotated_coordinates(dim, nonzero, rotations):
    """Coordinates of a vector of length sqrt(dim), rotated so many times."""
    values = []
    for seed in range(rotations):
        rng, words = drawn(dim, seed)
        vector = np.zeros((1, dim), np.float32)
        vector[0, rng.permutation(dim)[:nonzero]] = 1.0 / np.sqrt(nonzero)
        values.append(rotate(vector, words)[0] * math.sqrt(dim))
    return np.concatenate(values)


@pytest.mark.parametrize(
    ("dim", "nonzero"), [(4096, 1), (4096, 3), (4096, 4096), (2560, 1), (3072, 1), (3584, 3)]
)
def test_coordinates_look_gaussian_whatever_the_vector(dim, nonzero):
    """Sparse vectors, too: two rounds. Kolmogorov and Smirnov at 1e-6, eight rotations."""
    assert stats.kstest(rotated_coordinates(dim, nonzero, 8), "norm").pvalue > 1e-6


@pytest.mark.parametrize(("dim", "nonzero"), [(2**18, 1), (2**18, 70_000), (7 * 2**15, 1), (5 * 2**15, 1)])
def test_coordinates_look_gaussian_where_the_first_transform_is_in_blocks(dim, nonzero):
    """One coordinate mixes with its block only: sums of as many signs, whose steps are smoothed.

    Nine rotations as one sample.
    """
    sample, half_step = rotated_coordinates(dim, nonzero, 9).astype(np.float64), near_size(dim) ** -0.5
    sample += np.random.default_rng(9).uniform(-half_step, half_step, len(sample))
    assert stats.kstest(sample, "norm").pvalue > 1e-6
    assert abs((sample**4).mean() - 3.0) < 5.0 * math.sqrt(96.0 / len(sample))


def test_wrong_sizes_are_refused():
    _, words = drawn(64)
    with pytest.raises(ValueError, match="64 coordinates need 4 words of signs, got"):
        rotate(np.zeros((1, 64), np.float32), words[:3])
    with pytest.raises(ValueError, match="keep must be 64 over a power of two, an order itself, got 3"):
        rotate(np.zeros((1, 64), np.float32), words, 3)
    with pytest.raises(ValueError, match="keep must be 64 over a power of two, an order itself, got 65"):
        rotate_back(np.zeros(65, np.float32), words, 64)
