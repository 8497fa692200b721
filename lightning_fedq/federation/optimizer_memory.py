"""An optimiser's memory outside of its `state`: nested optimisers, numbers in attributes, parameter groups.

A client begins with a fresh optimiser, whatever class it is of. `state` is where torch's own optimisers keep
what they have learned, and others keep it elsewhere, too: a base optimiser with a state of its own (SAM), an
estimate of the rate in the parameter groups (D-Adaptation, Prodigy), counters in attributes. Those are put
back; tensors in attributes are for `federation.watch`, which refuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fedq.federation.undo import Undo

SCHEDULED = frozenset(
    {"lr", "initial_lr", "momentum", "betas", "weight_decay"}
    | {"max_lr", "min_lr", "max_momentum", "base_momentum"}
)
"""Keys of a parameter group that schedules set. All others are an optimiser's own."""

MACHINERY = frozenset(vars(SGD([nn.Parameter(torch.zeros(1))]))) - {"defaults"} | {"step", "_opt_called"}
"""Attributes that torch itself gives every optimiser."""

_NUMBERS = (bool, int, float, complex, str, type(None))


def with_nested(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimisers and those that they hold, in attributes and in lists and dictionaries in these."""
    found: list[Optimizer] = []
    todo = list(optimizers)
    while todo:
        optimizer = todo.pop(0)
        if all(optimizer is not other for other in found):
            found.append(optimizer)
            todo += [leaf for leaf in tree_leaves(dict(vars(optimizer))) if isinstance(leaf, Optimizer)]
    return found


def groups_of(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Parameter groups of all of them, each once."""
    groups = {id(group): group for optimizer in optimizers for group in optimizer.param_groups}
    return list(groups.values())


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of everything in a parameter group but its parameters. A rate may be a tensor."""
    return {name: copy_of(value) for name, value in group.items() if name != "params"}


def put_back_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Let a parameter group be as it was, its parameters aside."""
    for name in [name for name in group if name != "params" and name not in settings]:
        del group[name]
    group.update({name: copy_of(value) for name, value in settings.items()})


def copy_of(value: Any) -> Any:
    """A copy of the containers and tensors of a setting."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes that are single numbers or words, such as counters, by name."""
    return {name: value for name, value in _own(optimizer) if isinstance(value, _NUMBERS)}


def put_back_numbers(optimizer: Optimizer, numbers: Mapping[str, Any]) -> None:
    """Let the attributes of `numbers_of` be as they were."""
    for name in numbers_of(optimizer):
        if name not in numbers:
            delattr(optimizer, name)
    vars(optimizer).update(numbers)


def others_of(optimizer: Optimizer, in_groups: bool = True) -> dict[str, Any]:
    """Other attributes of an optimiser, and objects in its parameter groups, by name."""
    held = {name: value for name, value in _own(optimizer) if not isinstance(value, _NUMBERS)}
    if not in_groups:
        return held
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            leaves = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, (Tensor, *_NUMBERS))]
            if name != "params" and leaves:
                held[f"param_groups[{number}][{name!r}]"] = leaves
    return held


def _own(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in list(vars(optimizer).items()) if name not in MACHINERY)


def refuse_own_rates(optimizers: Sequence[Optimizer], undo: Undo) -> None:
    """Refuse, from now on, a step in which an optimiser changes its rate or another scheduled setting.

    Rates outlast a client, because schedules move them. Torch's own optimisers never set one.

    Args:
        optimizers: Whose.
        undo: Ends this.
    """
    for optimizer in optimizers:
        if not type(optimizer).__module__.startswith("torch.optim."):
            undo.replace(optimizer, "step", _guarded(optimizer))


def _guarded(optimizer: Optimizer) -> Callable[..., Any]:
    step = optimizer.step

    @functools.wraps(step)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        before = _scheduled(optimizer)
        found = step(*args, **kwargs)
        for old, new in zip(before, _scheduled(optimizer), strict=True):
            names = [name for name in (*old, *new) if not same_setting(old.get(name), new.get(name))]
            if names:
                raise ValueError(
                    f"a step of {type(optimizer).__name__} changed {names[0]} in its parameter groups, which "
                    "would go on from client to client and may follow from one client's data; keep an "
                    "estimate under a name of its own, which every client begins anew, or let a schedule "
                    "(interval='step') or the module's optimizer_step set the rate"
                )
        return found

    return guarded


def _scheduled(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in settings_of(group).items() if name in SCHEDULED}
        for group in optimizer.param_groups
    ]


def same_setting(one: Any, other: Any) -> bool:
    """Do two settings agree, tensors included?"""
    pairs = tree_leaves(one), tree_leaves(other)
    return len(pairs[0]) == len(pairs[1]) and all(
        torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a is b or (isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS) and a == b)
        for a, b in zip(*pairs, strict=True)
    )
