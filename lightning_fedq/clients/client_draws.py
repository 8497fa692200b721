"""Random numbers of a stack of clients, each client's from its own sequence.

Under `vmap` one operation draws for all clients at once, from one generator: what a client gets would
depend on its place in the stack. Below `vmap` such an operation has a leading client dimension. It is taken
apart there and made once for each client, from the client's own turn of torch's generators, so that dropout
masks and noise are those of the client on its own, whoever trains beside it.
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
"""Operations of aten that `vmap` makes once, with the clients in front."""

_FOR_EACH_CLIENT = {"randperm"}
"""Operations that `vmap` makes again for every client."""


class DropoutInPlace(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """While it is on, dropout draws its mask in the layout of what it drops, as it does outside of `vmap`.

    A mask is drawn in the order of memory; `vmap` draws it in the order of dimensions, which is another one
    after a transposition, as behind attention.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Write dropout out. Leave everything else alone."""
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        mapped = torch._C._functorch.maybe_get_bdim(_inner(input)) >= 0
        if not training or not 0.0 < p < 1.0 or not mapped:
            return nn.functional.dropout(input, p, training, inplace)
        mask = torch.empty_like(input).bernoulli_(1.0 - p).div_(1.0 - p)
        return input.mul_(mask) if inplace else input * mask


def _inner(tensor: Tensor) -> Tensor:
    """The tensor that `grad` has wrapped."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class ClientDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, every draw is each client's own.

    Args:
        rows: Indices of those that belong to the clients of the map, in order.
    """

    def __init__(self, turns: GeneratorTurns, rows: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._turns, self._rows = turns, rows
        self._calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take a draw apart. Leave everything else alone."""
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
        if not same_state(before, generator_state()):  # attention is tagged, and may draw nothing
            raise TypeError(f"{name} draws for all clients at once, which can't be told apart")
        return result

    def _draw_per_client(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = []
        for index, row in enumerate(self._rows):
            own = tuple(self._part(arg, index) for arg in args)
            with self._turns.activate(row):
                parts.append(func(*own, **kwargs))
        if func.overloadpacket.__name__.endswith("_"):  # in place, into the one tensor
            whole: Tensor = args[0]
            return whole.copy_(torch.cat(parts))
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _part(self, arg: Any, index: int) -> Any:
        """One client's share of an argument: a copy of its layout, which draws follow."""
        clients = len(self._rows)
        if isinstance(arg, Tensor):
            if not arg.dim() or len(arg) % clients:
                raise TypeError(f"{tuple(arg.shape)} has no dimension of {clients} clients in front")
            rows = len(arg) // clients
            part = arg[index * rows : (index + 1) * rows]
            return part.clone()
        if isinstance(arg, list | tuple | torch.Size):  # the shape of what is drawn
            if not arg or arg[0] % clients:
                raise TypeError(f"{tuple(arg)} has no dimension of {clients} clients in front")
            return [arg[0] // clients, *arg[1:]]
        return arg
