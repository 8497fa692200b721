"""Likeness of reconstructed pictures and the truth, as a number and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_pictures(inputs: Tensor) -> None:
    """Refuse inputs that are no pictures.

    Raises:
        ValueError: If the shape is not `(n, 1 or 3, height, width)`.
    """
    if inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
        raise ValueError(
            f"inputs of shape {tuple(inputs.shape)} have no picture form, which is (n, 1 or 3, height, "
            "width); reshape them in the data module, or do without pictures and SSIM"
        )


def ssim(found: Tensor, truth: Tensor, low: float, high: float) -> float:
    """Mean structural similarity of pictures `(n, channels, height, width)` with values in [low, high].

    Raises:
        ValueError: If the inputs are no pictures.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    check_pictures(truth)
    window = min(11, (min(truth.shape[2:]) - 1) // 2 * 2 + 1)
    value = structural_similarity_index_measure(
        found.float() - low,
        truth.float() - low,
        gaussian_kernel=False,
        kernel_size=window,
        data_range=high - low,
    )
    assert isinstance(value, Tensor)
    return value.item()


def picture_grid(truth: Tensor, found: Mapping[str, Tensor], low: float, high: float) -> Figure:
    """Draw originals in the first row and one row of reconstructions for each name.

    Args:
        truth: `(n, channels, height, width)`.
        found: `(n, channels, height, width)` each.
        low: Value drawn black.
        high: Value drawn white.

    Raises:
        ValueError: If the inputs are no pictures.
    """
    from matplotlib.figure import Figure

    check_pictures(truth)
    rows = {"original": truth, **found}
    figure = Figure(figsize=(1.0 * len(truth) + 3.4, 1.02 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(truth), squeeze=False)
    for line, (name, images) in zip(grid, rows.items(), strict=True):
        for axes, image in zip(line, images, strict=True):
            values = ((image - low) / (high - low)).clamp(0, 1).movedim(0, -1).cpu().numpy()
            axes.imshow(values, cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    return figure
