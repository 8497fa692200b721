"""Text that describes one side's training, with all that affects updates beyond `Federated`.

Each side describes its own code, from a Trainer that it has made. So defaults, aliases and environment
variables are resolved. The client refuses if the two descriptions differ, and names the differences.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.clients.hooks import trains_with_clients
from lightning_fedq.flower.settings import is_per_client

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OWN = (
    "logger",
    "enable_progress_bar",
    "enable_model_summary",
    "max_time",
    "strategy",
    "devices",
    "num_nodes",
)
"""Trainer arguments in which both sides may differ."""
_QUIET: dict[str, Any] = {
    **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
    "devices": 1,
}
_OF_TRAINERS: dict[str, Callable[[Any], object]] = {
    "gradient_clip_val": lambda t: t.gradient_clip_val or None,
    "gradient_clip_algorithm": lambda t: t.gradient_clip_val and (t.gradient_clip_algorithm or "norm"),
    "accumulate_grad_batches": lambda t: t.accumulate_grad_batches,
    "limit_train_batches": lambda t: t.limit_train_batches,
    "overfit_batches": lambda t: t.overfit_batches,
    "precision": lambda t: t.precision,
    "max_steps": lambda t: t.max_steps,
    "fast_dev_run": lambda t: t.fast_dev_run,
    "detect_anomaly": lambda t: t._detect_anomaly,
}
_OF_THE_FIT = (
    pl.callbacks.BaseFinetuning,
    pl.callbacks.GradientAccumulationScheduler,
    pl.callbacks.ModelPruning,
)
"""Lightning callbacks of a whole fit that change what is trained, so a client's fit needs them as well."""


def training_words(arguments: Mapping[str, Any], module: Callable[[], pl.LightningModule]) -> dict[str, str]:
    """Return all that affects a client's training, as text by name. Draws no random numbers.

    Args:
        arguments: Arguments of one side's Trainer.
        module: Function that makes its module.
    """
    with torch.random.fork_rng():
        instance = module()
        trainer: Any = quiet_trainer(arguments)
        # repr, since 1 is one batch and 1.0 is all batches
        words = {name: repr(of(trainer)) for name, of in _OF_TRAINERS.items()}
        changing = sorted(_describe_value(c) for c in trainer.callbacks if changes_training(c))
        words["callbacks"] = ", ".join(changing) or "none"
        words["module"] = f"{type(instance).__module__.rpartition('.')[2]}.{type(instance).__qualname__}"
        hashes = {name: layer.sha256 for name, layer in instance.named_modules() if hasattr(layer, "sha256")}
        words |= {f"sha256 of {name}": found for name, found in hashes.items()}  # the layer does not travel
        found = _describe_optimizers(instance)
    if found is None:  # configure_optimizers uses its Trainer, for example the length of the fit
        return {**words, "optimizer": "made in a fit", "max_epochs": repr(arguments.get("max_epochs"))}
    return {**words, **found}


def quiet_trainer(arguments: Mapping[str, Any]) -> pl.Trainer:
    """Return a Trainer with these arguments, to read its resolved settings."""
    shared = {name: value for name, value in arguments.items() if name not in _OWN}
    has_checkpoints = any(isinstance(one, pl.callbacks.Checkpoint) for one in callbacks_in(arguments))
    return pl.Trainer(**{"max_epochs": 1, **shared, **_QUIET, "enable_checkpointing": has_checkpoints})


def callbacks_in(arguments: Mapping[str, Any]) -> Sequence[Any]:
    """Return the callbacks in a Trainer's arguments as a sequence."""
    callbacks = arguments.get("callbacks") or ()
    return callbacks if isinstance(callbacks, Sequence) else (callbacks,)


def changes_training(callback: Any) -> bool:
    """Return whether a callback changes what clients train."""
    return trains_with_clients(callback) or is_per_client(callback) or isinstance(callback, _OF_THE_FIT)


def _describe_optimizers(module: pl.LightningModule) -> dict[str, str] | None:
    """Return optimisers and schedules with their options as text, or None where making them needs a fit."""
    parse: Any = pl.core.optimizer._configure_optimizers  # type: ignore[attr-defined]
    try:
        optimizers, configs, _ = parse(module.configure_optimizers())
    except Exception:  # the user's code fails without a Trainer
        return None
    schedules = [config["scheduler"] if isinstance(config, dict) else config for config in configs]
    return {
        "optimizer": "; ".join(map(_optimizer, optimizers)) or "none",
        "lr_scheduler": "; ".join(map(_schedule, schedules)) or "none",
    }


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimiser's class and the options of its groups as text."""
    groups = [_pairs({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
    return f"{type(optimizer).__name__}({' | '.join(groups)})"


def _schedule(scheduler: Any) -> str:
    """Return a schedule's class and its public state as text."""
    state = {name: value for name, value in scheduler.state_dict().items() if not name.startswith("_")}
    return f"{type(scheduler).__name__}({_pairs(state)})"


def _pairs(values: Mapping[Any, Any]) -> str:
    """Return names and values as text, sorted by name."""
    return ", ".join(f"{name}={_describe_value(values[name])}" for name in sorted(values, key=str))


def _describe_value(value: Any, depth: int = 3) -> str:
    """Return text for a value that is the same in every process: numbers, containers, attributes.

    Args:
        value: Any value.
        depth: Number of nested levels that are described.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"
    if isinstance(value, functools.partial):
        return f"{_describe_value(value.func)}({_describe_value(value.args)}, {_pairs(value.keywords)})"
    if isinstance(value, Mapping):
        return f"{{{_pairs(value)}}}" if depth else "{...}"
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_describe_value(item, depth - 1) for item in value] if depth else ["..."]
        return f"[{', '.join(sorted(parts) if isinstance(value, set | frozenset) else parts)}]"
    if hasattr(value, "training_words"):
        return str(value.training_words())
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    attributes = dict(vars(value)) if depth and hasattr(value, "__dict__") else {}
    attributes.pop("trainer", None)
    parts = [f"{name}={_describe_value(own, depth - 1)}" for name, own in sorted(attributes.items())]
    return f"{type(value).__qualname__}({', '.join(parts)})"
