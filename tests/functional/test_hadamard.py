import math

import pytest
import torch
from scipy.linalg import hadamard as hadamard_matrix

from lightning_fedq.functional.hadamard import kernel_order, padded_size
from tests.functional.transform import hadamard


@pytest.mark.parametrize("size", [1, 2, 8, 64, 12, 20, 28, 96, 1280, 1792])
def test_is_by_an_orthonormal_symmetric_matrix_of_equal_magnitudes(size):
    matrix = hadamard(torch.eye(size, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5), rtol=1e-15, atol=0.0)
    if size & (size - 1) == 0:
        assert torch.equal(matrix.sign(), torch.from_numpy(hadamard_matrix(size)).double())


def test_at_most_a_quarter_is_padded_beyond_1024_and_padding_twice_is_padding_once():
    assert [padded_size(dim) for dim in (1, 5, 100, 1024)] == [1, 8, 128, 1024]
    for dim in [*range(1025, 5000), 50_186, 2**20 + 1, 11_200_000]:
        size = padded_size(dim)
        assert dim <= size <= 1.25 * dim and size == padded_size(size) and kernel_order(size)


def test_bad_sizes():
    with pytest.raises(ValueError, match="dim must be >= 1, got 0"):
        padded_size(0)


@pytest.mark.parametrize(
    "size",
    [
        *(1 << k for k in (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 17, 20)),
        *(o << k for o in (3, 5, 7) for k in (2, 8, 12, 17)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_compiled_transform_agrees_with_the_plain_loop_to_the_last_bit(size, dtype):
    generator, kernel = torch.Generator().manual_seed(size), kernel_order(size)
    values = torch.randn(3, size, dtype=dtype, generator=generator)
    kept, expected, half = values.clone(), values, kernel
    if kernel > 1:
        groups = values.view(-1, kernel)
        matrix = (hadamard(torch.eye(kernel, dtype=torch.float64)).sign()).to(dtype)
        expected = sum(groups[:, k : k + 1] * matrix[k] for k in range(kernel)).view(3, size)
    while half < size:
        pairs = expected.view(3, size // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        expected, half = torch.stack([first + second, first - second], 2).view(3, size), 2 * half
    assert torch.equal(hadamard(values), expected / math.sqrt(size))
    assert torch.equal(values, kept)
