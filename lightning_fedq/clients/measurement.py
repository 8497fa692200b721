"""Evaluation of one client: the module's validation, on a copy that is dropped afterwards.

All validation hooks of the module run, as in Lightning's validation. Callbacks of the fit do not run, because
they see only the global model.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_fedq.clients.stack import batch_handler
from lightning_fedq.data.batches import Stack

if TYPE_CHECKING:
    from lightning_fedq.clients.fit import Client, ClientFit


def measure(copy: Client, batches: Iterable[tuple[Any, int]]) -> dict[str, float]:
    """Validate a copy as Lightning does, with a `log` that stores the values.

    Args:
        copy: Client's copy of the fit.
        batches: Held-out batches, each with its number of samples.

    Returns:
        Values that `validation_step` and the hooks log, by name.
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
    parameters = inspect.signature(module.validation_step).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    further = 2 if takes_all else len(parameters) - 1  # arguments after the batch: its index, the loader's
    for number, (batch, logged.batch_size) in enumerate(batches):
        batch = handle(batch)
        module.on_validation_batch_start(batch, number)
        outputs = trainer.strategy.validation_step(batch, *(number, 0)[:further])
        module.on_validation_batch_end(outputs, batch, number)
    module.on_validation_epoch_end()
    module.on_validation_end()
    return logged.reduced()


def compute_statistics(fit: ClientFit, stack: Stack, batches: Iterable[Any], size: int) -> Tensor:
    """Compute a client's vector of statistics `(size,)` with the module's `client_statistics`, in a copy.

    Args:
        fit: `ClientFit` that makes the copy.
        stack: The client.
        batches: Batches of the client.
        size: Expected length of the vector.

    Raises:
        ValueError: If the vector has another shape.
    """
    copy = fit.copy(stack.training_seed, stack.clients, alone=True)
    module: Any = copy.module
    with torch.no_grad():
        vector = torch.as_tensor(module.client_statistics(map(batch_handler(copy.trainer), batches)))
    if vector.shape != (size,):
        raise ValueError(
            f"client_statistics returned shape {tuple(vector.shape)}, but Statistics(size={size}) "
            f"needs ({size},). Use the same size in both."
        )
    vector = vector.detach().clone()  # the vector may be a view of the copy's tensors
    fit.drop(copy)
    return vector


def _nan_if_undefined(compute: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a metric's `compute` to return NaN where torchmetrics returns zero and warns that it is undefined.

    An example is the area under a curve if all labels are of one class.
    """

    @wraps(compute)
    def compute_or_nan() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = compute()
        others = [item for item in caught if not re.search("meaningless|undefined", str(item.message))]
        for item in others:
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)
        if len(others) == len(caught):
            return result
        return tree_map_only(Tensor, lambda value: torch.full_like(value, torch.nan), result)

    return compute_or_nan


class _ValueLog:
    """Replacement of a module's `log` that stores values by name, with the sizes of their batches.

    Attributes:
        batch_size: Samples in the current batch.
    """

    def __init__(self) -> None:
        self.batch_size = 1
        self._values: dict[str, list[tuple[Any, int]]] = {}
        self._reductions: dict[str, Any] = {}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Store a value, or a metric object whose value is computed at the end."""
        value = value.detach() if isinstance(value, Tensor) else value
        size = kwargs.get("batch_size") or self.batch_size
        if isinstance(value, Metric):
            self._values[name] = [(value, 1)]
        else:
            self._values.setdefault(name, []).append((value, int(size)))
        self._reductions[name] = kwargs.get("reduce_fx", "mean")

    def reduced(self) -> dict[str, float]:
        """Return one number per name: the mean over samples, or the reduction by `reduce_fx`."""
        return {name: self._reduced(name, values) for name, values in self._values.items()}

    def _reduced(self, name: str, values: list[tuple[Any, int]]) -> float:
        """Reduce the values of one name, weighted by batch sizes for a mean."""
        first, reduce = values[0][0], self._reductions[name]
        if isinstance(first, Metric):
            return float(first.compute())
        numbers = torch.tensor([float(value) for value, _ in values], dtype=torch.float64)
        if reduce in ("mean", torch.mean):
            sizes = torch.tensor([float(size) for _, size in values], dtype=torch.float64)
            return float((numbers * sizes).sum() / sizes.sum())
        return float((getattr(torch, reduce) if isinstance(reduce, str) else reduce)(numbers))
