import numpy as np
import pytest
import torch

from lightning_fedq.functional.segments import normalise_segments, segment_lines

SEGMENTS = (3, 500, 1, 900)
CENTERS = torch.tensor([0.0, 0.1, -2.0, 1e3], dtype=torch.float64)
RADII = torch.tensor([1.0, 0.3, 1e-9, 7e2], dtype=torch.float64)


def rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, sum(SEGMENTS), generator=generator, dtype=torch.float64)
    values = values * expand(RADII) + expand(CENTERS)
    values[:, ::7] = expand(CENTERS)[::7]
    return values.to(dtype)


def expand(values):
    return values.repeat_interleave(torch.tensor(SEGMENTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divide", [True, False])
def test_units_are_the_formula_bit_for_bit(dtype, divide):
    row = rows(dtype)[0]
    distance = row.double() - expand(CENTERS)
    wanted = distance / expand(RADII) if divide else distance * expand(1.0 / RADII)
    lines = segment_lines(SEGMENTS, CENTERS, RADII if divide else 1.0 / RADII)
    for first, size in ((0, sum(SEGMENTS)), (2, 3), (100, 403), (504, 900), (1403, 1)):
        units, part = np.empty(size), wanted[first : first + size]
        assert normalise_segments(row.numpy(), first, lines, divide, units) == int((part.abs() > 1.0).sum())
        assert torch.equal(torch.from_numpy(units), part.clamp(-1.0, 1.0))
