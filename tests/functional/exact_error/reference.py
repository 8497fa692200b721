"""Integer dithering and layers of any density, as the papers write them, to hold the package to."""

import torch
from torch import Tensor

from lightning_fedq.functional.exact_error.layered import Layering, UnimodalDensity, check_law


def integer_dither_quantize(points: Tensor, dither: Tensor, width: int) -> Tensor:
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


def integer_dither_dequantize(symbols: Tensor, dither: Tensor, width: int) -> Tensor:
    """Return twice the decoded point, 2 (M width - V) + width - 1, so that it stays an integer.

    The error of the point is exactly uniform on the `width` values (1 - width) / 2, ..., (width - 1) / 2,
    whatever the input was.
    """
    return 2 * (symbols * width - dither) + (width - 1)


def density_layer(density: UnimodalDensity, words: Tensor, layering: Layering) -> tuple[Tensor, Tensor]:
    """Draw steps and offsets of any unimodal density.

    Args:
        density: The error's law.
        words: `(2, ...)` float64 uniforms on (0, 1), for z and for the height below f(z).
        layering: Direct or shifted.

    Returns:
        `(step, offset)`, float64.
    """
    check_law("gaussian", layering, 1.0)
    z = density.quantile(words[0])
    tiny = density.peak * 1e-15
    height = (words[1] * density.pdf(z)).clamp(tiny, density.peak - tiny)
    if layering == "direct":
        low, high = density.left(height), density.right(height)
        return high - low, 0.5 * (high + low)
    height = torch.where(z >= density.mode, height, density.peak - height)
    low, high = density.left(density.peak - height), density.right(height)
    return high - low, 0.5 * (high + low)
