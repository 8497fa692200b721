"""One client's measurement: the module's own validation, on a copy that is dropped.

All hooks of the module's validation run, as in a validation of its own. Callbacks of the fit do not: they see
the global model only.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_fedq._lightning import pl
from lightning_fedq.clients.fit import Client, ClientFit
from lightning_fedq.clients.stack import batch_handler
from lightning_fedq.data.batches import Stack


def measure(copy: Client, batches: Iterable[tuple[Any, int]]) -> dict[str, float]:
    """Validate a copy as Lightning does, with a `log` that keeps the values.

    Args:
        batches: Its held-out batches, each with its number of samples.

    Returns:
        What `validation_step` and the hooks log, by name.
    """
    module, trainer, logged = copy.module, copy.trainer, _ValueLog()
    handle = batch_handler(trainer)
    trainer.validating = True
    module.log = logged  # type: ignore[method-assign]
    for part in module.modules():
        if isinstance(part, Metric):
            part.reset()
            part.compute = _nan_if_undefined(part.compute)  # type: ignore[method-assign]
    module.on_validation_model_eval()
    module.on_validation_start()
    module.on_validation_epoch_start()
    further = _further_arguments(module)
    for number, (batch, logged.batch_size) in enumerate(batches):
        batch = handle(batch)
        module.on_validation_batch_start(batch, number)
        outputs = trainer.strategy.validation_step(batch, *(number, 0)[:further])
        module.on_validation_batch_end(outputs, batch, number)
    module.on_validation_epoch_end()
    module.on_validation_end()
    return logged.reduced()


def compute_statistics(fit: ClientFit, stack: Stack, batches: Iterable[Any], size: int) -> Tensor:
    """Vector that a client's module makes of its batches, `(size,)`, in a copy and without gradients.

    Args:
        size: Numbers that are expected.

    Raises:
        ValueError: If there are others.
    """
    copy = fit.copy(stack.training_seed, stack.clients, alone=True)
    module: Any = copy.module
    with torch.no_grad():
        found = torch.as_tensor(module.client_statistics(map(batch_handler(copy.trainer), batches)))
    if found.shape != (size,):
        raise ValueError(
            f"client_statistics returned shape {tuple(found.shape)}, and Statistics(size={size}) "
            f"releases ({size},); let both be the same"
        )
    found = found.detach().clone()  # it may be a part of the copy
    fit.drop(copy)
    return found


def _nan_if_undefined(compute: Callable[[], Any]) -> Callable[[], Any]:
    """Let a metric be NaN where torchmetrics puts a zero and warns that it means nothing.

    So are areas under curves where all labels are of one class.
    """

    @wraps(compute)
    def compute_or_nan() -> Any:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = compute()
        others = [one for one in said if not re.search("meaningless|undefined", str(one.message))]
        for one in others:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if len(others) == len(said):
            return found
        return tree_map_only(Tensor, lambda value: torch.full_like(value, torch.nan), found)

    return compute_or_nan


def _further_arguments(module: pl.LightningModule) -> int:
    """Number of arguments of `validation_step` behind the batch: batch index, loader index."""
    parameters = list(inspect.signature(module.validation_step).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 2
    return min(len(parameters) - 1, 2)


class _ValueLog:
    """Stands in for a module's `log`: keeps values by name, with the sizes of their batches.

    Attributes:
        batch_size: Samples of the present batch.
    """

    def __init__(self) -> None:
        self.batch_size = 1
        self._values: dict[str, list[tuple[Any, int]]] = {}
        self._reductions: dict[str, Any] = {}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take a value, or a metric object, which is asked at the end."""
        value = value.detach() if isinstance(value, Tensor) else value
        size = kwargs.get("batch_size") or self.batch_size
        if isinstance(value, Metric):
            self._values[name] = [(value, 1)]
        else:
            self._values.setdefault(name, []).append((value, int(size)))
        self._reductions[name] = kwargs.get("reduce_fx", "mean")

    def reduced(self) -> dict[str, float]:
        """One number a name: the mean over samples, or what `reduce_fx` asks for."""
        return {name: self._reduced(name, values) for name, values in self._values.items()}

    def _reduced(self, name: str, values: list[tuple[Any, int]]) -> float:
        first, reduce = values[0][0], self._reductions[name]
        if isinstance(first, Metric):
            return float(first.compute())
        numbers = torch.tensor([float(value) for value, _ in values], dtype=torch.float64)
        if reduce in ("mean", torch.mean):
            sizes = torch.tensor([float(size) for _, size in values], dtype=torch.float64)
            return float((numbers * sizes).sum() / sizes.sum())
        return float((getattr(torch, reduce) if isinstance(reduce, str) else reduce)(numbers))
