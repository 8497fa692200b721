"""Tensors that training changes besides the trained parameters: by the layers, or found by comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

_STATISTICS = ("running_mean", "running_var")
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def layers_with_statistics(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with running statistics by name, in any mode."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        and layer.track_running_stats
        and isinstance(layer.running_mean, Tensor)
    }


def statistics_names(layers: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the running statistics of layers, given by name."""
    return tuple(f"{name}.{leaf}".lstrip(".") for name in layers for leaf in _STATISTICS)


def updated_statistics(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the running statistics of layers in training mode."""
    layers = layers_with_statistics(module)
    return statistics_names(name for name, layer in layers.items() if layer.training)


def find_counters(module: nn.Module, buffers: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the batch counters that belong to running statistics."""
    present = {name for name, _ in module.named_buffers()}
    means = [name for name in buffers if name.endswith("running_mean")]
    counters = [name.removesuffix("running_mean") + "num_batches_tracked" for name in means]
    return tuple(name for name in counters if name in present)


class ChangedTensors(NamedTuple):
    """Tensors that training changes in addition to trained parameters, found before the first round.

    Args:
        expected: Running statistics that should change, according to the modes of their layers.
        changed: Floating-point buffers and frozen parameters that changed in the rehearsal. Without a
            rehearsal, the same as `expected`.
        integers: Integer buffers that changed in the rehearsal, without batch counters. Examples are queue
            pointers and counts.
    """

    expected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()

    @classmethod
    def from_layers(cls, module: nn.Module) -> ChangedTensors:
        """Derive the tensors from the modes of normalisation layers, if no rehearsal is possible."""
        known = updated_statistics(module)
        return cls(known, known)

    @classmethod
    def compare(cls, before: nn.Module, after: nn.Module) -> ChangedTensors:
        """Find the tensors that differ between a module and a client's trained copy."""
        old, new = named_tensors(before), named_tensors(after)
        changed = [n for n, t in old.items() if n in new and not are_equal(t, new[n])]
        buffers = dict(before.named_buffers())
        frozen = {name for name, p in before.named_parameters() if not p.requires_grad}
        floats = [n for n in changed if old[n].is_floating_point() and (n in buffers or n in frozen)]
        counters = find_counters(before, tuple(buffers))
        integers = [n for n in changed if n in buffers and old[n].dtype in _INTEGERS and n not in counters]
        return cls(updated_statistics(before), tuple(floats), tuple(integers))

    def current(self, module: nn.Module, trained: Sequence[str]) -> tuple[str, ...]:
        """Return the names of changed tensors for the layers' current modes, in the order of the module.

        Args:
            module: Module with the current modes.
            trained: Names of trained parameters, which are excluded.
        """
        statistics = {*statistics_names(layers_with_statistics(module))}
        updated = set(updated_statistics(module))
        # statistics that should have changed in the rehearsal and did not are excluded
        unchanged = set(self.expected) - set(self.changed)
        wanted = (set(self.changed) - statistics) | (updated - unchanged)
        names = [name for name, _ in [*module.named_buffers(), *module.named_parameters()]]
        return tuple(name for name in names if name in wanted and name not in trained)


def find_changed(before: nn.Module, after: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the new values of tensors that training has changed, by name.

    Tensors that are missing afterwards, or have another shape or dtype, are left out.

    Args:
        before: Module before training.
        after: Trained module.
        names: Names of tensors to compare.
    """
    changed = {}
    for name in names:
        try:
            old, new = attrgetter(name)(before), attrgetter(name)(after)
        except AttributeError:
            continue
        comparable = isinstance(new, Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)
        if comparable and not are_equal(old.detach(), new.detach()):
            changed[name] = new
    return changed


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, detached."""
    return {name: t.detach() for name, t in [*module.named_parameters(), *module.named_buffers()]}


def are_equal(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are equal in shape, dtype and values. A NaN equals a NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(torch.as_tensor((left == right) | (left != left) & (right != right)).all())


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest absolute difference of two vectors. Infinite if only one value is a NaN."""
    if are_equal(left, right):
        return 0.0
    return float((left - right).abs().nan_to_num(torch.inf).max())


def has_other_state(module: nn.Module) -> bool:
    """Return whether training may change tensors that it does not train: buffers or frozen parameters."""
    return any(True for _ in module.buffers()) or not all(p.requires_grad for p in module.parameters())
