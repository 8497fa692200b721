"""Random draws of a stack of clients, with a separate random sequence per client.

Under `vmap` one operation draws for all clients from one generator, so a client's numbers would depend on its
place in the stack. Below `vmap` such an operation has a leading client dimension. There it is split and
repeated for each client with the client's own generator state. A client therefore gets the same dropout masks
and noise in a stack as alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fedq.data.generator_turns import GeneratorTurns, generator_state, same_state

_FOR_ALL_CLIENTS = {
    *("bernoulli", "bernoulli_", "native_dropout", "rand", "rand_like", "randn", "randn_like"),
    *("randint", "randint_like", "normal", "normal_", "uniform_", "exponential_", "log_normal_"),
    *("cauchy_", "geometric_", "random_", "poisson", "multinomial"),
}
"""Operations of aten that `vmap` calls once, with a leading client dimension."""

_FOR_EACH_CLIENT = {"randperm"}
"""Operations that `vmap` calls once per client."""


class DropoutInPlace(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """Mode in which dropout draws its mask in the memory layout of its input, as it does without `vmap`.

    Without `vmap` a mask is drawn in memory order. `vmap` draws it in the order of dimensions, which differs
    after a transposition, for example in attention.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace dropout by its own steps, and pass all other functions through."""
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Apply dropout with a mask in the layout of the input, if the input is below `vmap`."""
        mapped = torch._C._functorch.maybe_get_bdim(_inner(input)) >= 0
        if not training or not 0.0 < p < 1.0 or not mapped:
            return nn.functional.dropout(input, p, training, inplace)
        mask = torch.empty_like(input).bernoulli_(1.0 - p).div_(1.0 - p)
        return input.mul_(mask) if inplace else input * mask


def _inner(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of `torch.func.grad`."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class ClientDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which every random operation below `vmap` draws from each client's own sequence.

    Args:
        turns: Random sequences of the clients.
        rows: Indices of the sequences of the mapped clients, in order.
    """

    def __init__(self, turns: GeneratorTurns, rows: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._turns, self._rows = turns, rows
        self._calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Split a random operation by client, and pass all other operations through.

        Raises:
            TypeError: If a random operation can't be split by client.
        """
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _FOR_ALL_CLIENTS:
            return self._draw_per_client(func, args, kwargs)
        if name in _FOR_EACH_CLIENT:
            row = self._rows[self._calls[name] % len(self._rows)]
            self._calls[name] += 1
            with self._turns.activate(row):
                return func(*args, **kwargs)
        before = generator_state()
        result = func(*args, **kwargs)
        if not same_state(before, generator_state()):  # attention has the tag, but may draw nothing
            raise TypeError(f"{name} draws for all clients at once and can't be split by client")
        return result

    def _draw_per_client(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a random operation once per client, and concatenate the results."""
        parts = []
        for index, row in enumerate(self._rows):
            client_args = tuple(self._part(arg, index) for arg in args)
            with self._turns.activate(row):
                parts.append(func(*client_args, **kwargs))
        if func.overloadpacket.__name__.endswith("_"):  # in place: write into the given tensor
            whole: Tensor = args[0]
            return whole.copy_(torch.cat(parts))
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _part(self, arg: Any, index: int) -> Any:
        """Return one client's part of an argument. A clone keeps the memory layout, which draws follow."""
        clients = len(self._rows)
        if isinstance(arg, Tensor):
            if not arg.dim() or len(arg) % clients:
                raise TypeError(f"{tuple(arg.shape)} has no leading dimension of {clients} clients")
            rows = len(arg) // clients
            return arg[index * rows : (index + 1) * rows].clone()
        if isinstance(arg, list | tuple | torch.Size):  # shape of the drawn tensor
            if not arg or arg[0] % clients:
                raise TypeError(f"{tuple(arg)} has no leading dimension of {clients} clients")
            return [arg[0] // clients, *arg[1:]]
        return arg
