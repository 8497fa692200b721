import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lightning_fedq.functional.blocks.lattice import lattice, nearest_point
from lightning_fedq.functional.blocks.lattice_codebook import finite_codebook, safe_radius
from tests.functional.blocks.oracle import inside, voronoi_dither


@pytest.mark.parametrize(("radius", "size"), [(1, 7), (3**0.5, 13), (2, 19), (7**0.5, 31)])
def test_codebook_sizes_order_and_index(radius, size):
    book = finite_codebook("A2", radius)
    assert len(book.points) == size
    norms = np.square(book.points).sum(1).round(9)
    assert (np.diff(norms) >= 0).all() and norms[0] == 0 and norms[-1] <= radius**2 + 1e-9
    rows = [(n, *p) for n, p in zip(norms.tolist(), (book.points.round(9) + 0.0).tolist(), strict=True)]
    assert rows == sorted(rows)
    assert inside(book, torch.from_numpy(book.points)).all()
    assert not inside(book, torch.from_numpy(10 * book.points[1:2]))


@pytest.mark.parametrize("cells", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("radius", [1.0, 2.0])
def test_nothing_in_the_safe_ball_is_overloaded_and_the_ball_is_the_largest(radius, cells):
    name, safe = "A2", safe_radius("A2", radius, cells)
    cell, generator = lattice(name), torch.Generator().manual_seed(6)
    x = torch.randn(4000, cell.dim, dtype=torch.float64, generator=generator)
    x *= safe * (1 - 1e-9) / x.norm(dim=1, keepdim=True)
    u = voronoi_dither(torch.rand(4000, cell.dim, dtype=torch.float64, generator=generator), name)
    book = finite_codebook(name, radius)
    assert inside(book, nearest_point(x + (cells - 1) * u, name)).all()
    # Outside reference: the distance from the outer points to `cells` V by scipy's SLSQP.
    outer = finite_codebook(name, math.sqrt(radius**2 + 3)).points
    outer = outer[np.square(outer).sum(1) > radius**2 + 1e-6]
    normals = finite_codebook(name, cell.shortest).points[1:]
    bounds = cells * np.square(normals).sum(1) / 2
    distances = []
    for p in outer:
        limits = {"type": "ineq", "fun": lambda y: bounds - normals @ y, "jac": lambda y: -normals}
        square, slope = (lambda y, p=p: ((y - p) ** 2).sum()), (lambda y, p=p: 2 * (y - p))
        fit = minimize(square, 0 * p, jac=slope, constraints=limits)
        distances.append(math.sqrt(fit.fun))
    assert safe == pytest.approx(min(distances), abs=1e-4)


def test_a_codebook_whose_zero_block_can_be_overloaded_has_no_safe_ball():
    assert safe_radius("A2", 1.0, 3.0) == 0.0


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="needs a radius >="):
        finite_codebook("A2", math.nan)
