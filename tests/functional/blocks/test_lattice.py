import numpy as np
import pytest
import torch

from lightning_fedq.functional.blocks.lattice import lattice, nearest_point, nested_split, scalar_levels
from lightning_fedq.functional.blocks.lattice_codebook import finite_codebook, voronoi_codebook
from tests.functional.blocks.oracle import inside, voronoi_dither

NAMES = ("Z", "A2")


def points(rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_nearest_points_of_the_specification():
    found = nearest_point(points([[0.6, 0.3], [0.5, 0.4], [1.3, 0.8], [-0.7, 2.1]]), "A2")
    expected = points([[1, 0], [0.5, 0.866025], [1.5, 0.866025], [-1, 1.732051]])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_nearest_point_is_the_nearest_of_all(name):
    """Against brute force over every lattice point of a ball that must hold the nearest one."""
    cell, generator = lattice(name), torch.Generator().manual_seed(0)
    x = torch.randn(300, cell.dim, dtype=torch.float64, generator=generator)
    lengths = (4.0 - cell.covering_radius) * torch.rand(300, 1, generator=generator).double()
    x *= lengths / x.norm(dim=1)[:, None]
    book = torch.from_numpy(finite_codebook(name, 4.0).points)
    torch.testing.assert_close((nearest_point(x, name) - x).norm(dim=1), torch.cdist(x, book).min(1).values)


@pytest.mark.parametrize(("name", "nsm", "energy"), [("Z", 0.0833333, 1 / 12), ("A2", 0.0801875, 0.138889)])
def test_dither_is_uniform_on_the_cell(name, nsm, energy):
    cell, generator = lattice(name), torch.Generator().manual_seed(1)
    assert energy / cell.dim / cell.volume ** (2.0 / cell.dim) == pytest.approx(nsm, rel=5e-6)
    assert cell.second_moment == pytest.approx(energy, abs=5e-7)
    assert abs(np.linalg.det(np.array(cell.generator))) == pytest.approx(cell.volume)
    u = voronoi_dither(torch.rand(40_000, cell.dim, dtype=torch.float64, generator=generator), name)
    squared = u.square().sum(1)
    assert squared.max() <= cell.covering_radius**2 + 1e-12
    # 4.4 standard errors: false alarm 1e-5 per lattice.
    assert abs(squared.mean() - energy) < 4.4 * squared.std() / 200
    # Each coordinate holds 1/L of the energy and none of the mean.
    assert (u.mean(0).abs() < 4.9 * u.std(0) / 200).all()
    squares = u.square()
    assert ((squares.mean(0) - energy / cell.dim).abs() < 4.9 * squares.std(0) / 200).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ratio", [2, 3, 4])
def test_nesting_is_exact_and_complete(name, ratio):
    """The printed identity Q_f = Q_c + Q_n(x - Q_c) fails for 10 to 54 % of inputs; this one for none."""
    dim = lattice(name).dim
    book = voronoi_codebook(name, ratio)
    assert len(book.points) == ratio**dim == len(np.unique(book.points, axis=0))
    generator = torch.Generator().manual_seed(3)
    fine = nearest_point(5 * torch.randn(2000, dim, dtype=torch.float64, generator=generator), name)
    coarse, rest = nested_split(fine, name, ratio)
    torch.testing.assert_close(coarse + rest, fine, atol=1e-12, rtol=0)
    torch.testing.assert_close(nearest_point(coarse / ratio, name), coarse / ratio, atol=1e-9, rtol=0)
    assert inside(book, rest).all()
    # The rest depends on the coset alone: moving by a coarse vector changes nothing.
    step = ratio * torch.tensor(lattice(name).generator, dtype=torch.float64)[-1]
    torch.testing.assert_close(nested_split(fine + step, name, ratio)[1], rest, atol=1e-9, rtol=0)


def test_scalar_vectors_of_the_specification():
    assert scalar_levels(4, 1.0).tolist() == [-0.75, -0.25, 0.25, 0.75]
    assert scalar_levels(3, 0.75).tolist() == [-0.5, 0.0, 0.5]


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="lattice must be one of Z, A2, got 'E7'"):
        lattice("E7")
    with pytest.raises(ValueError, match="blocks of A2 have length 2"):
        nearest_point(torch.zeros(3), "A2")
    with pytest.raises(ValueError, match="gamma must be > 0"):
        scalar_levels(2, 0.0)
