"""Which buffers does training change? Known layers, and one step that is rehearsed on a copy of the module.

Normalisation layers in training mode update their running statistics; a rehearsal finds other layers that
keep floating point state, and layers that the module itself puts into eval mode in its training step. What
changes later all the same is found when it does (`federation.watch`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import pl

_STATISTICS = ("running_mean", "running_var")
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def layers_with_statistics(module: nn.Module) -> dict[str, nn.Module]:
    """Layers that update running statistics when they train, by name, whatever their present mode."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        and layer.track_running_stats
        and isinstance(layer.running_mean, Tensor)
    }


def updated_statistics(module: nn.Module) -> tuple[str, ...]:
    """Names of the running statistics of layers in training mode."""
    layers = [name for name, layer in layers_with_statistics(module).items() if layer.training]
    return tuple(f"{name}.{leaf}".lstrip(".") for name in layers for leaf in _STATISTICS)


def counters_of(module: nn.Module, buffers: Sequence[str]) -> tuple[str, ...]:
    """Names of the batch counters beside running statistics. How many batches there are is known."""
    present = {name for name, _ in module.named_buffers()}
    wanted = [
        name[: -len("running_mean")] + "num_batches_tracked"
        for name in buffers
        if name.endswith("running_mean")
    ]
    return tuple(name for name in wanted if name in present)


class Rehearsed(NamedTuple):
    """Buffers of a module as known before it trains.

    Args:
        expected: Running statistics that were to change, by the modes of their layers.
        changed: Floating point buffers that did change in the rehearsal; `expected` where there was none.
        integers: Other buffers that did, beside the counters of batches: pointers, counts.
    """

    expected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()

    def now(self, module: nn.Module) -> tuple[str, ...]:
        """The buffers that training changes by the present modes of the layers, in the module's order."""
        statistics = {
            f"{name}.{leaf}".lstrip(".") for name in layers_with_statistics(module) for leaf in _STATISTICS
        }
        updated = set(updated_statistics(module))
        held = set(self.expected) - set(self.changed)
        wanted = (set(self.changed) - statistics) | (updated - held)
        return tuple(name for name, _ in module.named_buffers() if name in wanted)


def rehearse_buffers(
    module: pl.LightningModule, step: Callable[[pl.LightningModule], object], devices: Sequence[int]
) -> Rehearsed:
    """Take one step on a copy and look which buffers have changed.

    Args:
        module: The module; left alone.
        step: Takes a training step of the module that it is given.
        devices: CUDA devices whose generators are put back.
    """
    expected = updated_statistics(module)
    if not any(True for _ in module.buffers()):
        return Rehearsed()
    with torch.random.fork_rng(devices):
        try:
            double = copy.deepcopy(module)
            before = {name: buffer.detach().clone() for name, buffer in double.named_buffers()}
            step(double)
            after = dict(double.named_buffers())
        except Exception:  # whatever the user's code raises: then the types of the layers must do
            return Rehearsed(expected, expected)
    changed = [n for n, old in before.items() if n in after and not torch.equal(old, after[n].detach())]
    floats = tuple(name for name in changed if before[name].is_floating_point())
    counters = counters_of(module, tuple(before))
    integers = tuple(n for n in changed if before[n].dtype in _INTEGERS and n not in counters)
    return Rehearsed(expected, floats, integers)
