"""Logging and metric updates of `training_step` in a stack of clients.

Inside `vmap` a value stands for all clients at once, and a metric would keep tensors of a map that is over.
So `self.log` and the calls of torchmetrics objects are caught, their tensors leave the map with a client
dimension, and then they are made for real: a value is reduced over the clients as its `reduce_fx` says, and
a metric is updated with one client's arguments after the other's, as it would be one client at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torchmetrics import Metric, MetricCollection

from lightning_fedq._lightning import pl
from lightning_fedq.functional.batch_stack import map_tensors

Keep = Callable[[str, Tensor], None]
_SIGNATURE = inspect.signature(pl.LightningModule.log)


class _MetricValue:
    """Value of a caught metric: to be logged, and nothing else, since the metric runs after the step."""

    def __init__(self, update: int, name: str, key: str | None = None) -> None:
        self.update, self.name, self.key = update, name, key

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"the value of {self.name} can be logged, and not computed with inside training_step, since a "
            "metric is updated after the step"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __float__ = __bool__ = __lt__ = __gt__ = __le__ = __ge__ = __format__ = _refuse

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # what copies and inspections ask for
            raise AttributeError(attribute)
        return self._refuse()


@dataclass
class _Update:
    """A caught call of a metric. Its tensors are `tensors[start:start + count]` of the step's."""

    metric: Metric | MetricCollection
    forward: bool
    spec: TreeSpec
    leaves: list[Any]


@dataclass
class _Log:
    """A caught `self.log`. `value` is an index of the step's tensors, or what else was logged."""

    value: Any
    is_tensor: bool
    arguments: dict[str, Any]


@dataclass
class _Caught:
    updates: list[_Update] = field(default_factory=list)
    logs: list[_Log] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)


class StackedLogs:
    """Catches what a mapped `training_step` logs, and logs it for real afterwards.

    Args:
        module: Its `log` and its metrics.
        keep: Takes the clients' values of a logged metric, by name and as `(clients, ...)`, before they are
            reduced.
    """

    def __init__(self, module: pl.LightningModule, keep: Keep | None = None) -> None:
        self._module, self._keep = module, keep
        self._metrics = list(_outermost_metrics(module))
        self._caught = _Caught()

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Stand in for `log` and for the metrics' methods."""
        self._caught = _Caught()
        undo: list[tuple[dict[str, Any], str, Any]] = []

        def replace(owner: nn.Module, name: str, method: Any) -> None:
            undo.append((owner.__dict__, name, owner.__dict__.get(name, undo)))
            owner.__dict__[name] = method

        replace(self._module, "log", self._log)
        for metric in self._metrics:
            for name in ("forward", "update"):
                replace(metric, name, self._catcher(metric, name == "forward"))
            for name in ("compute", "reset"):
                replace(metric, name, _refuser(metric, name))
        try:
            yield
        finally:
            for attributes, name, method in reversed(undo):
                if method is undo:  # there was none of the instance's own
                    del attributes[name]
                else:
                    attributes[name] = method

    def tensors(self) -> list[Tensor]:
        """Caught tensors, to be returned from the mapped function."""
        return [tensor.detach() for tensor in self._caught.tensors]

    def _hold(self, tensor: Tensor) -> int:
        self._caught.tensors.append(tensor)
        return len(self._caught.tensors) - 1

    def _log(self, *args: Any, **kwargs: Any) -> None:
        arguments = _SIGNATURE.bind(self._module, *args, **kwargs).arguments
        del arguments["self"]
        name, value = arguments.pop("name"), arguments.pop("value")
        arguments["name"] = name
        if not isinstance(value, Tensor | float | int | Metric | _MetricValue):
            raise TypeError(
                f"self.log({name!r}, ...) of a {type(value).__name__} can't be reduced over clients"
            )
        held = self._hold(value) if isinstance(value, Tensor) else value
        self._caught.logs.append(_Log(held, isinstance(value, Tensor), arguments))

    def _catcher(self, metric: Metric | MetricCollection, forward: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            held = [self._hold(leaf) if isinstance(leaf, Tensor) else _Constant(leaf) for leaf in leaves]
            index, name = len(self._caught.updates), type(metric).__name__
            self._caught.updates.append(_Update(metric, forward, spec, held))
            if not forward:
                return None
            if isinstance(metric, MetricCollection):
                return {str(key): _MetricValue(index, name, str(key)) for key in metric.keys(keep_base=False)}
            return _MetricValue(index, name)

        return call

    def replay(
        self, tensors: Sequence[Tensor], num_clients: int, batch: Any, log: Callable[..., Any] | None = None
    ) -> None:
        """Update the metrics with every client's arguments, and log what was logged.

        Args:
            tensors: What `tensors` has returned, each with a leading client dimension.
            batch: The stack's batch, for its number of samples.
            log: Logs; None is the module's own.
        """
        caught, results = self._caught, self._update_metrics(tensors, num_clients)
        for entry in caught.logs:
            value, arguments = entry.value, dict(entry.arguments)
            if isinstance(value, _MetricValue):
                found = results[value.update]
                value = torch.stack([one if value.key is None else one[value.key] for one in found])
            elif entry.is_tensor:
                value = tensors[value]
            elif not isinstance(value, Metric):
                value = torch.full((num_clients,), float(value), device=self._module.device)
            if log is None and isinstance(value, Tensor) and self._keep is not None:
                self._keep(entry.arguments["name"], value)
            if isinstance(value, Tensor):
                reduce_fx = arguments.get("reduce_fx", "mean")
                value, size = _reduced(value, reduce_fx), arguments.get("batch_size")
                mean = reduce_fx in ("mean", "avg", torch.mean)
                if size is None and mean and arguments.get("on_epoch"):
                    size = pl.utilities.data.extract_batch_size(map_tensors(_first, batch))
                arguments["batch_size"] = num_clients * (size or 1)
            name = arguments.pop("name")
            (log or self._module.log)(name, value, **arguments)

    def _update_metrics(self, tensors: Sequence[Tensor], num_clients: int) -> list[list[Any]]:
        """Values of each caught `forward`, client after client."""
        results: list[list[Any]] = [[] for _ in self._caught.updates]
        for client in range(num_clients):
            for update, result in zip(self._caught.updates, results, strict=True):
                leaves = [
                    leaf.value if isinstance(leaf, _Constant) else tensors[leaf][client]
                    for leaf in update.leaves
                ]
                args, kwargs = tree_unflatten(leaves, update.spec)
                call = update.metric if update.forward else update.metric.update
                result.append(call(*args, **kwargs))
        for update, result in zip(self._caught.updates, results, strict=True):
            if update.forward:
                _show_mean(update.metric, result)
        return results


@dataclass(frozen=True)
class _Constant:
    """An argument that is not a tensor."""

    value: Any


def _first(tensor: Tensor) -> Tensor:
    return tensor[0]


def _outermost_metrics(module: nn.Module) -> Iterator[Metric | MetricCollection]:
    """The metrics of a module, a collection or a wrapper as a whole."""
    for child in module.children():
        if isinstance(child, Metric | MetricCollection):
            yield child
        else:
            yield from _outermost_metrics(child)


def _refuser(metric: nn.Module, name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{name}() of {type(metric).__name__} inside training_step needs the clients before")

    return refuse


def _reduced(values: Tensor, reduce_fx: Any) -> Tensor:
    """One value a client, reduced over clients by one of the four reductions that Lightning knows."""
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    if reduce_fx in ("sum", torch.sum, sum):
        return values.sum(0)
    if reduce_fx in ("max", torch.max, max):
        return values.amax(0)
    if reduce_fx in ("min", torch.min, min):
        return values.amin(0)
    return values.mean(0)  # Lightning refuses any other by its own words


def _show_mean(metric: Metric | MetricCollection, results: Sequence[Any]) -> None:
    """Let a metric that is logged with `on_step=True` show the clients' mean, not the last one's value."""
    if isinstance(metric, MetricCollection):
        for key, member in metric.items(keep_base=False, copy_state=False):
            if key in results[0]:
                _show_mean(member, [result[key] for result in results])
    elif all(isinstance(result, Tensor) and result.is_floating_point() for result in results):
        vars(metric)["_forward_cache"] = torch.stack(list(results)).mean(0)
