"""A device that is not the CPU, without a GPU: its tensors say so, and are computed on the CPU.

PyTorch keeps the device type "privateuse1" for backends of others. Ours wraps a CPU tensor. It refuses to mix
with CPU tensors as CUDA does (those of no dimension may come along, and indices), gives no NumPy array, and
values leave it by `.cpu()`, `.item()` and `.tolist()` only. What runs on it bit for bit as on the CPU keeps
its tensors where they belong; it says nothing of a GPU's own kernels, streams or pinned memory.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils import _pytree as pytree, backend_registration
from torch.utils.weak import WeakIdKeyDictionary

from lightning_fedq._lightning import pl

NAME = "elsewhere"


if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip(f"torch {torch.__version__} has no backends in Python", allow_module_level=True)


class _Module(backend_registration._DummyBackendModule):
    """`torch.elsewhere`: one device, whose generator is the CPU's."""

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)


backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
DEVICE = torch.device(NAME, 0)
_aten = torch.ops.aten
_CROSSING = {_aten.copy_.default, _aten._to_copy.default, _aten._copy_from.default}
_PUT = (_aten.index_put_, _aten.index_put, _aten._index_put_impl_)
_INDEXED = {_aten.index.Tensor, *(operation.default for operation in _PUT)}


_memory = WeakIdKeyDictionary()
"""The CPU tensors, which are no attributes of anything: nobody looks into the memory of a device."""


class Elsewhere(torch.Tensor):
    """A tensor on the device, over one on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Elsewhere:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, raw.size(), device=DEVICE, **layout)
        _memory[made] = raw
        return made

    @property
    def raw(self):
        return _memory[self]

    def tolist(self):
        return self.raw.tolist()

    def untyped_storage(self):
        return self.raw.untyped_storage()

    def data_ptr(self):
        return self.raw.data_ptr()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            made = Elsewhere(self.raw.detach().clone()).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                made = torch.nn.Parameter(made, self.requires_grad)
            made.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _rebuilt, (self.raw.detach(), self.requires_grad)

    def __repr__(self, **_):
        return f"{self.raw!r} elsewhere"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        flat = pytree.tree_leaves((args, kwargs))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        here = [value for value in tensors if not isinstance(value, Elsewhere)]
        if func in _INDEXED:  # indices may be on the CPU
            here = [value for value in here if not any(value is index for index in args[1])]
        if func not in _CROSSING and any(value.dim() for value in here):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{DEVICE} and {here[0].device}! ({func})"
            )
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else DEVICE
        if target.type == NAME and "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        owners = {id(value.raw): value for value in tensors if isinstance(value, Elsewhere)}
        args, kwargs = pytree.tree_map_only(Elsewhere, lambda value: value.raw, (args, kwargs))
        found = func(*args, **kwargs)
        if func is _aten._to_copy.default and target.type == NAME and id(found) in owners:
            found = found.clone()
        if target.type != NAME:
            return found.clone() if id(found) in owners else found
        if func is _aten.copy_.default and id(found) not in owners:
            return found  # into a CPU tensor
        return pytree.tree_map_only(
            torch.Tensor, lambda value: owners[id(value)] if id(value) in owners else Elsewhere(value), found
        )


def _rebuilt(raw, requires_grad):
    return Elsewhere(raw).requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuilt])
_library = torch.library.Library("aten", "IMPL")


def _empty(size, *, dtype=None, **_):
    return Elsewhere(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, *, dtype=None, **_):
    return Elsewhere(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    from_, to = (t.raw if isinstance(t, Elsewhere) else t for t in (source, target))
    to.copy_(from_)
    return target


_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")


class ElsewhereAccelerator(pl.accelerators.Accelerator):
    """What Lightning asks about a device."""

    def setup_device(self, device):
        """Nothing to set up."""

    def teardown(self):
        """Nothing to tear down."""

    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [DEVICE] * (devices if isinstance(devices, int) else 1)

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return NAME

    def get_device_stats(self, device):
        return {}


def strategy():
    """Train there: `Trainer(strategy=strategy())`."""
    return pl.strategies.SingleDeviceStrategy(DEVICE, accelerator=ElsewhereAccelerator())
