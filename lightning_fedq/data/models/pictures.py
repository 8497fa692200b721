"""Synthetic images that whiten `FixedFeatures`, drawn from a seed without any data."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Pictures = Literal["strokes", "leaves"]
"""Kind of synthetic images: pen strokes on black (for handwriting), or dead leaves (for any task)."""


def drawn(kind: Pictures, number: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw synthetic images in [0, 1], `(number, channels, side, side)`.

    Args:
        kind: Kind of the images.
        number: Number of images.
        shape: Shape of an image, (channels, side, side).
        generator: CPU generator.
    """
    parts = torch.split(torch.arange(number), 250)
    draw = _strokes if kind == "strokes" else _leaves
    return torch.cat([draw(len(part), shape[0], shape[1], generator) for part in parts])


def _strokes(number: int, channels: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw images of one or two cubic Bezier curves. The second often starts at the end of the first."""
    t = torch.linspace(0, 1, 24)
    weights = torch.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    ends = (torch.rand(number, 2, 4, 2, generator=generator) * 20 + 4) * side / 28
    is_connected, is_single = (torch.rand(number, generator=generator) < chance for chance in (0.6, 0.3))
    ends[is_connected, 1, 0] = ends[is_connected, 0, 3]
    ends[is_single, 1] = ends[is_single, 0]
    points = torch.einsum("mcki,kt->mcti", ends, weights).flatten(1, 2)
    width = (torch.rand(number, 1, generator=generator) + 1) * 0.9 * side / 28
    pixels = torch.cartesian_prod(*[torch.arange(float(side))] * 2).expand(number, -1, -1)
    inked = (1 + width - torch.cdist(pixels, points).amin(-1)).clamp(0, 1)
    return inked.view(number, 1, side, side).expand(-1, channels, -1, -1)


def _leaves(number: int, channels: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw dead-leaves images of sixty overlapping ellipses, few of them large.

    References:
        Lee, Mumford, Huang, Occlusion Models for Natural Images, IJCV 2001.
    """
    line = torch.arange(float(side))
    pictures = torch.rand(number, channels, 1, 1, generator=generator).expand(-1, -1, side, side)
    for _ in range(60):
        right, down, u, turn, slant, light = torch.rand(6, number, 1, 1, generator=generator)
        x, y = line - right * (side + 8) + 4, line[:, None] - down * (side + 8) + 4
        cos, sin = (math.pi * turn).cos(), (math.pi * turn).sin()
        along, across = x * cos + y * sin, (y * cos - x * sin) / (0.2 + 0.8 * slant)
        inside = along**2 + across**2 < 1 / (1 / 1.5**2 - u * (1 / 1.5**2 - 1 / 20**2))
        tint = 0.35 * torch.randn(number, channels, 1, 1, generator=generator)
        pictures = torch.where(inside[:, None], (light[:, None] + tint).clamp(0, 1), pictures)
    return pictures
