"""Logging and metric updates of `training_step` in a stack of clients.

Inside `vmap` a value represents all clients at once, and a metric would store tensors that are invalid after
the map. So calls of `self.log` and of torchmetrics objects are recorded, and their tensors leave the map with
a client dimension. After the step the calls are executed. A logged value is reduced over clients by its
`reduce_fx`. A metric is updated with the arguments of one client after another, as without a stack.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
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
    """Placeholder for the value of a recorded metric call. It can only be logged."""

    def __init__(self, update: int, name: str, key: str | None = None) -> None:
        self.update, self.name, self.key = update, name, key

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"The value of {self.name} can be logged, but not used inside training_step, "
            "because a stack updates metrics after the step"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __float__ = __bool__ = __lt__ = __gt__ = __le__ = __ge__ = __format__ = _refuse

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # copy and inspect look for such attributes
            raise AttributeError(attribute)
        return self._refuse()


@dataclass(frozen=True)
class _Held:
    """Tensor of a recorded call, by its index among the step's tensors."""

    index: int


@dataclass
class _Update:
    """Recorded call of a metric. Each leaf is a `_Held` tensor or another argument."""

    metric: Metric | MetricCollection
    forward: bool
    spec: TreeSpec
    leaves: list[Any]


class StackedLogs:
    """Recorder of the logging and metric calls of a mapped `training_step`, which executes them afterwards.

    Args:
        module: Module whose `log` and metrics are recorded.
        keep: Function that receives the name and the clients' values `(clients, ...)` of a logged metric
            before they are reduced.
    """

    def __init__(self, module: pl.LightningModule, keep: Keep | None = None) -> None:
        self._module, self._keep = module, keep
        self._metrics = list(_outermost_metrics(module))
        self._updates: list[_Update] = []
        self._logs: list[dict[str, Any]] = []
        self._tensors: list[Tensor] = []

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Replace `log` and the methods of metrics by recorders, inside the `with` statement."""
        self._updates, self._logs, self._tensors = [], [], []
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
                if method is undo:  # the instance had no such attribute
                    del attributes[name]
                else:
                    attributes[name] = method

    def tensors(self) -> list[Tensor]:
        """Return the recorded tensors, which the mapped function must return."""
        return [tensor.detach() for tensor in self._tensors]

    def _hold(self, value: Any) -> Any:
        """Record a tensor and return its place. Return any other value unchanged."""
        if not isinstance(value, Tensor):
            return value
        self._tensors.append(value)
        return _Held(len(self._tensors) - 1)

    def _log(self, *args: Any, **kwargs: Any) -> None:
        """Record a call of `self.log`."""
        arguments = _SIGNATURE.bind(self._module, *args, **kwargs).arguments
        del arguments["self"]
        name, value = arguments["name"], arguments["value"]
        if not isinstance(value, Tensor | float | int | Metric | _MetricValue):
            raise TypeError(
                f"self.log({name!r}, ...) of a {type(value).__name__} can't be reduced over clients"
            )
        self._logs.append({**arguments, "value": self._hold(value)})

    def _catcher(self, metric: Metric | MetricCollection, forward: bool) -> Callable[..., Any]:
        """Make the recorder that replaces a metric's `forward` or `update`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            index, name = len(self._updates), type(metric).__name__
            self._updates.append(_Update(metric, forward, spec, list(map(self._hold, leaves))))
            if not forward:
                return None
            if isinstance(metric, MetricCollection):
                return {str(key): _MetricValue(index, name, str(key)) for key in metric.keys(keep_base=False)}
            return _MetricValue(index, name)

        return call

    def replay(
        self, tensors: Sequence[Tensor], num_clients: int, batch: Any, log: Callable[..., Any] | None = None
    ) -> None:
        """Execute the recorded calls: update metrics client by client, and log reduced values.

        Args:
            tensors: Result of `tensors` after the map, each with a leading client dimension.
            num_clients: Number of clients in the stack.
            batch: Batch of the stack, from which the number of samples is read.
            log: Function to log with. None is the module's `log`.
        """
        results = self._update_metrics(tensors, num_clients)
        for logged in self._logs:
            arguments = dict(logged)
            name, value = arguments.pop("name"), arguments.pop("value")
            if isinstance(value, _MetricValue):
                values = results[value.update]
                value = torch.stack([item if value.key is None else item[value.key] for item in values])
            elif isinstance(value, _Held):
                value = tensors[value.index]
            elif not isinstance(value, Metric):
                value = torch.full((num_clients,), float(value), device=self._module.device)
            if isinstance(value, Tensor):
                if log is None and self._keep is not None:
                    self._keep(name, value)
                reduce_fx = arguments.get("reduce_fx", "mean")
                value, size = _reduced(value, reduce_fx), arguments.get("batch_size")
                mean = reduce_fx in ("mean", "avg", torch.mean)
                if size is None and mean and arguments.get("on_epoch"):
                    size = pl.utilities.data.extract_batch_size(map_tensors(itemgetter(0), batch))
                arguments["batch_size"] = num_clients * (size or 1)
            (log or self._module.log)(name, value, **arguments)

    def _update_metrics(self, tensors: Sequence[Tensor], num_clients: int) -> list[list[Any]]:
        """Update the metrics client by client. Return, per recorded call, the values of all clients."""
        results: list[list[Any]] = [[] for _ in self._updates]
        for client in range(num_clients):
            for update, result in zip(self._updates, results, strict=True):
                leaves = [
                    tensors[leaf.index][client] if isinstance(leaf, _Held) else leaf for leaf in update.leaves
                ]
                args, kwargs = tree_unflatten(leaves, update.spec)
                call = update.metric if update.forward else update.metric.update
                result.append(call(*args, **kwargs))
        for update, result in zip(self._updates, results, strict=True):
            if update.forward:
                _show_mean(update.metric, result)
        return results


def _outermost_metrics(module: nn.Module) -> Iterator[Metric | MetricCollection]:
    """Yield the metrics of a module. Collections and wrappers count as one metric."""
    for child in module.children():
        if isinstance(child, Metric | MetricCollection):
            yield child
        else:
            yield from _outermost_metrics(child)


def _refuser(metric: nn.Module, name: str) -> Callable[..., Any]:
    """Make the function that replaces `compute` and `reset`, whose results depend on earlier clients."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{name}() of {type(metric).__name__} in training_step needs the clients in sequence")

    return refuse


def _reduced(values: Tensor, reduce_fx: Any) -> Tensor:
    """Reduce one value per client over clients, by sum, max, min or mean like Lightning."""
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    if reduce_fx in ("sum", torch.sum, sum):
        return values.sum(0)
    if reduce_fx in ("max", torch.max, max):
        return values.amax(0)
    if reduce_fx in ("min", torch.min, min):
        return values.amin(0)
    return values.mean(0)  # Lightning itself raises for any other reduction


def _show_mean(metric: Metric | MetricCollection, results: Sequence[Any]) -> None:
    """Set the value that a metric logs with `on_step=True` to the mean over clients."""
    if isinstance(metric, MetricCollection):
        for key, member in metric.items(keep_base=False, copy_state=False):
            if key in results[0]:
                _show_mean(member, [result[key] for result in results])
    elif all(isinstance(result, Tensor) and result.is_floating_point() for result in results):
        vars(metric)["_forward_cache"] = torch.stack(list(results)).mean(0)
