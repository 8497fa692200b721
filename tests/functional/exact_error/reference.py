"""Integer dithering and layers of any density, as the papers write them, to hold the package to."""

import math

import torch


def dither_quantize(values, dither, step):
    """M = floor(x / w + U + 1/2)."""
    return torch.floor(values.double() / step + dither + 0.5).to(torch.int64)


def dither_dequantize(symbols, dither, step):
    """(M - U) w in float64. The error is uniform on (-w/2, w/2]."""
    return (symbols.double() - dither) * step


def layer(depth, side, law, layering, sigma):
    """Step and offset of the layer at a depth, on the side +1 or -1."""

    def half_width(depth):
        return sigma * (2.0 * depth).sqrt() if law == "gaussian" else sigma / math.sqrt(2.0) * depth

    half = half_width(depth)
    if layering == "direct":
        return 2.0 * half, torch.zeros_like(half)
    near, far = -torch.log(-torch.expm1(-depth)), -torch.log1p(-torch.exp(-depth))
    other = half_width(torch.where(depth < math.log(2.0), near, far))
    return half + other, 0.5 * side * (half - other)
