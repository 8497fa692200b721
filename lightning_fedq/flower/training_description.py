"""A side's training in words: all that clients' updates follow from beside the settings of `Federated`.

Each side says it of its own code, from a Trainer that it has made, so that defaults, other names of one
thing, and environment variables are resolved. The client refuses by name where the two differ.
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
"""Arguments of a Trainer that each side has its own of."""
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
"""Lightning's callbacks of a whole fit that change what is trained, which a client's fit needs, too."""


def training_words(arguments: Mapping[str, Any], module: Callable[[], pl.LightningModule]) -> dict[str, str]:
    """List all that acts on a client's training, by name. Draws nothing.

    Args:
        arguments: Arguments of a side's Trainer.
        module: Makes its module.
    """
    with torch.random.fork_rng():
        made = module()
        trainer: Any = quiet_trainer(arguments)
        words = {name: repr(of(trainer)) for name, of in _OF_TRAINERS.items()}  # 1 is a batch, 1.0 are all
        words["callbacks"] = (
            ", ".join(sorted(_describe_value(c) for c in trainer.callbacks if changes_training(c))) or "none"
        )
        words["module"] = f"{type(made).__module__.rpartition('.')[2]}.{type(made).__qualname__}"
        fixed = {name: layer.sha256 for name, layer in made.named_modules() if hasattr(layer, "sha256")}
        words |= {f"sha256 of {name}": found for name, found in fixed.items()}  # it does not travel
        found = _describe_optimizers(made)
    if found is None:  # it asks its Trainer, of the length of the fit say
        return {**words, "optimizer": "made in a fit", "max_epochs": repr(arguments.get("max_epochs"))}
    return {**words, **found}


def quiet_trainer(arguments: Mapping[str, Any]) -> pl.Trainer:
    """A Trainer of these arguments, to be asked how it would train."""
    kept = {name: value for name, value in arguments.items() if name not in _OWN}
    keeps = any(isinstance(one, pl.callbacks.Checkpoint) for one in callbacks_in(arguments))
    return pl.Trainer(**{"max_epochs": 1, **kept, **_QUIET, "enable_checkpointing": keeps})


def callbacks_in(arguments: Mapping[str, Any]) -> Sequence[Any]:
    """Those of a Trainer's arguments, which may be one, or none."""
    given = arguments.get("callbacks") or ()
    return given if isinstance(given, Sequence) else (given,)


def changes_training(callback: Any) -> bool:
    """Does a callback change what clients train?"""
    return trains_with_clients(callback) or is_per_client(callback) or isinstance(callback, _OF_THE_FIT)


def _describe_optimizers(module: pl.LightningModule) -> dict[str, str] | None:
    """Optimisers and schedules with their numbers. None where making them takes a fit."""
    parse: Any = pl.core.optimizer._configure_optimizers  # type: ignore[attr-defined]
    try:
        optimizers, configs, _ = parse(module.configure_optimizers())
    except Exception:  # the user's own code, which has no Trainer here
        return None
    schedules = [config["scheduler"] if isinstance(config, dict) else config for config in configs]
    return {
        "optimizer": "; ".join(map(_optimizer, optimizers)) or "none",
        "lr_scheduler": "; ".join(map(_schedule, schedules)) or "none",
    }


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    groups = [_pairs({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
    return f"{type(optimizer).__name__}({' | '.join(groups)})"


def _schedule(scheduler: Any) -> str:
    state = {name: value for name, value in scheduler.state_dict().items() if not name.startswith("_")}
    return f"{type(scheduler).__name__}({_pairs(state)})"


def _pairs(values: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name}={_describe_value(values[name])}" for name in sorted(values, key=str))


def _describe_value(value: Any, depth: int = 3) -> str:
    """A value in words that do not hang on the process: plain numbers, containers, attributes."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"
    if isinstance(value, functools.partial):
        return f"{_describe_value(value.func)}({_describe_value(value.args)}, {_pairs(value.keywords)})"
    if isinstance(value, Mapping):
        return f"{{{_pairs(value)}}}" if depth else "{...}"
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_describe_value(one, depth - 1) for one in value] if depth else ["..."]
        return f"[{', '.join(sorted(parts) if isinstance(value, set | frozenset) else parts)}]"
    if hasattr(value, "training_words"):
        return str(value.training_words())
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    own = vars(value) if depth and hasattr(value, "__dict__") else {}
    parts = [
        f"{name}={_describe_value(held, depth - 1)}"
        for name, held in sorted(own.items())
        if name != "trainer"
    ]
    return f"{type(value).__qualname__}({', '.join(parts)})"
