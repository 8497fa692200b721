"""The public generator and the dither of blocks in tensor code, for the compiled loops to be held to."""

import math

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.functional.blocks.codeword import GOLD, MIX1, MIX2, hadamard_signs, prf_mix
from lightning_fedq.functional.blocks.lattice import lattice, nearest_point, nested_split
from lightning_fedq.functional.blocks.lattice_codebook import point_keys

_MASK = (1 << 64) - 1


def prf_base(seed: int, round: int, user: int, stage: int, tag: int) -> int:
    """Key of one sequence of words, in [0, 2^64)."""
    z = seed
    for word in (round, user, stage, tag):
        z = prf_mix(z + GOLD * (word + 1) & _MASK)
    return z


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def prf_words(base: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Words start, ..., start + count - 1 of one sequence: int64 tensor holding 64 unsigned bits each."""
    z = torch.arange(start + 1, start + count + 1, device=device) * _signed(GOLD) + _signed(base)
    z = (z ^ _shift_right(z, 30)) * _signed(MIX1)
    z = (z ^ _shift_right(z, 27)) * _signed(MIX2)
    return z ^ _shift_right(z, 31)


def prf_rows(words: Tensor, num_rows: int) -> Tensor:
    """Map words to rows 0, ..., num_rows - 1 by their top 24 bits: probabilities are exact to 2^-24."""
    return _shift_right(_shift_right(words, 40) * num_rows, 24)


def prf_uniforms(words: Tensor) -> Tensor:
    """Map words to float64 uniforms on [0, 1), a grid of 2^-53."""
    return _shift_right(words, 11).double() * 2.0**-53


def voronoi_dither(uniforms: Tensor, name: str) -> Tensor:
    """Map `(..., L)` uniforms on [0, 1) to points uniform on the Voronoi cell.

    A point uniform on any region that tiles space under the lattice, less its nearest lattice point. The
    region is a box here, not the parallelepiped G z: the law is the same and the box costs L products.
    """
    point = uniforms * uniforms.new_tensor(lattice(name).sides)
    return point - nearest_point(point, name)


def inside(book, points):
    """Which lattice points `(n, L)` are in a codebook."""
    name = _name(points)
    return torch.isin(point_keys(points, name), point_keys(torch.from_numpy(book.points), name))


def _name(points):
    return {1: "Z", 2: "A2"}[points.shape[1]]


def bits_of(design, values, chosen, keys, coins, flips):
    """Bits `(rows, stages * blocks)` of rows in units of the radius, and how many blocks are outside."""
    size, rows = design.block_dim, []
    x = torch.nn.functional.pad(values, (0, -values.shape[1] % size)).reshape(len(values), -1, size)
    norms = x.norm(dim=2, keepdim=True)
    outside = norms > design.limit * (1.0 + 1e-12)
    x = x * torch.where(outside, design.limit / norms, 1.0)
    for row, stream in enumerate(coins):
        blocks = x[row] if chosen is None else x[row, torch.from_numpy(chosen[row])]
        count, drawn = len(blocks), []
        for first in range(0, count, 1 << 13):
            drawn.append([stream.words(min(1 << 13, count - first)) for _ in design.tables])
        words = np.concatenate(drawn, 1)
        u = prf_uniforms(prf_words(int(keys[-1, row]), 0, count * size)).reshape(count, size)
        u = voronoi_dither(u, design.name) if design.dithered else torch.zeros(count, size)
        for stage, (table, index) in enumerate(zip(design.tables, _indices(design, blocks, u), strict=True)):
            which = prf_rows(prf_words(int(keys[stage, row]), 0, count), table.num_rows)
            signs = hadamard_signs(which + 1, index)
            if len(table.signs):
                signs = torch.from_numpy(table.signs)[which, index]
            rows.append((signs > 0).numpy() ^ (words[stage] < flips[row]))
    return torch.from_numpy(np.array(rows)).to(torch.uint8).reshape(len(values), -1), int(outside.sum())


def _indices(design, blocks, u):
    """Index of every stage, coarsest first."""
    if design.books is None:
        total = math.prod(design.counts)
        fine = (blocks[:, 0] * (0.5 * (total - 1)) + u[:, 0] + total / 2).floor().clamp(0, total - 1).long()
        digits = []
        for count in reversed(design.counts):
            digits.append(fine % count)
            fine = fine // count
        return digits[::-1]
    fine, found = nearest_point(blocks / design.step + u, design.name), []
    for _ in design.tables[1:]:
        coarse, rest = nested_split(fine, design.name, design.ratio)
        found.append(_index(design.books[1], rest))
        fine = coarse / design.ratio
    return [_index(design.books[0], fine), *found[::-1]]


def _index(book, points):
    name = _name(points)
    same = point_keys(points, name)[:, None] == point_keys(torch.from_numpy(book.points), name)
    assert same.any(1).all()
    return same.long().argmax(1)
