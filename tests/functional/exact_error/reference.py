"""Integer dithering and layers of any density, as the papers write them, to hold the package to."""

import torch


def integer_dither_quantize(points, dither, width):
    """Integer form: M = floor((X + V) / width) for a grid point X and V uniform on {0, ..., width - 1}.

    Args:
        points: int64 grid points, |X| < 2^62.
        dither: int64, uniform on {0, ..., width - 1}.
        width: Cells per step, >= 1.

    Raises:
        ValueError: If width < 1.
    """
    if width < 1:
        raise ValueError(f"width must be >= 1 grid points, got {width}; use a finer grid")
    return torch.div(points + dither, width, rounding_mode="floor")


def integer_dither_dequantize(symbols, dither, width):
    """Return twice the decoded point, 2 (M width - V) + width - 1, so that it stays an integer.

    The error of the point is exactly uniform on the `width` values (1 - width) / 2, ..., (width - 1) / 2,
    whatever the input was.
    """
    return 2 * (symbols * width - dither) + (width - 1)


def dither_dequantize(symbols, dither, step):
    """(M - U) w in float64. The error is uniform on (-w/2, w/2]."""
    return (symbols.double() - dither) * step
