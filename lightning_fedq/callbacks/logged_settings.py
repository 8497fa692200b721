"""Settings of a federation in the configuration of each logger's run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedq._lightning import get_callbacks, pl
from lightning_fedq.training.accounts import choose_delta
from lightning_fedq.training.client_metrics import sample_protectors

if TYPE_CHECKING:
    from lightning_fedq.training.settings import Federation


def collect_settings(trainer: pl.Trainer, federation: Federation) -> dict[str, Any]:
    """Settings of a federation that has its server: plain values by name."""
    engine, target, mechanism = federation.engine, federation.privacy_target, federation.mechanism
    assert engine is not None
    protecting = sample_protectors(get_callbacks(trainer))
    return {
        "version": version("lightning_fedq"),
        "mechanism": repr(mechanism),
        "mechanism_name": type(mechanism).__name__,
        "mechanism_settings": _settings_in(repr(mechanism)),
        "epsilon": None if target is None else target.epsilon,
        "delta": choose_delta(federation, trainer),
        "adversary": None if target is None else target.against.name.lower(),
        "num_clients": federation.clients.num_clients,
        "clients_per_round": engine.planner.cohort_size,
        "rounds": trainer.max_epochs,
        "secure_aggregation": repr(federation.server.secure_aggregation),
        "target": engine.target,
        "server_lr": federation.server.server_lr,
        "num_parameters": engine.weights.numel(),
        "reproducible": federation.seed is not None,
        **({"samples": protecting[-1].unit} if protecting else {}),
    }


def log_settings(trainer: pl.Trainer, federation: Federation) -> None:
    """Put a federation into the configuration of every logger's run, beside what is there."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        settings: dict[str, Any] = {"federation": collect_settings(trainer, federation)}
        if isinstance(logger, pl.loggers.MLFlowLogger):
            # a parameter is written once: a second fit of the same run keeps the first's
            there = logger.experiment.get_run(logger.run_id).data.params
            settings = {key: value for key, value in _flat(settings).items() if key not in there}
        logger.log_hyperparams(settings)
        if isinstance(logger, pl.loggers.TensorBoardLogger):
            # Lightning wrote the module's own before the fit, and never writes over a file that is there
            (Path(logger.log_dir) / logger.NAME_HPARAMS_FILE).unlink(missing_ok=True)
            logger.save()


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner = isinstance(value, dict) and value
        found |= _flat(value, f"{prefix}{key}/") if inner else {f"{prefix}{key}": value}
    return found


def _settings_in(shown: str) -> dict[str, Any]:
    """Arguments of a class in its `repr`, plain values or as they are shown."""
    try:
        call = ast.parse(shown, mode="eval").body
    except SyntaxError:
        return {}
    return {str(one.arg): _plain(one.value) for one in getattr(call, "keywords", [])}


def _plain(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
