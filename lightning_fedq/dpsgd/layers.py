"""Names of layers, and errors about layers whose per-sample gradients can't be read."""

from collections.abc import Iterable
from typing import NoReturn

from torch import nn


class SampleGradientError(RuntimeError):
    """Error for a training step whose per-sample gradients hooks can't read."""


def describe_layer(module: nn.Module, layer: nn.Module) -> str:
    """Return the name and the class of a layer of a module."""
    names = (name for name, one in module.named_modules() if one is layer)
    return f"{next(names, '')} ({type(layer).__name__})"


def refuse_rows(rows: Iterable[int], samples: int, layer: str = "") -> NoReturn:
    """Refuse layers that saw another number of rows than samples.

    Args:
        rows: Numbers of rows that layers saw.
        samples: Number of samples of the batch.
        layer: Layer that saw them. "" if it is not known.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"Layers {layer and f'such as {layer} '}saw {', '.join(map(str, sorted(rows)))} rows for a batch of "
        f"{samples} samples. Give every layer the samples along axis 0 (Linear takes (batch, time, "
        "features)), and positions one row per sample."
    )
