"""Settings of a federation, written into the configuration of each logger's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedq._lightning import get_callbacks, pl
from lightning_fedq.training.accounts import choose_delta
from lightning_fedq.training.client_metrics import sample_protectors

if TYPE_CHECKING:
    from lightning_fedq.training.settings import Federation


def collect_settings(trainer: pl.Trainer, federation: Federation) -> dict[str, Any]:
    """Return the settings of a federation, whose engine exists, as plain values by name."""
    engine, target = federation.started_engine, federation.privacy_target
    mechanism: Any = federation.mechanism
    protecting = sample_protectors(get_callbacks(trainer))
    values = {field.name: getattr(mechanism, field.name) for field in fields(mechanism) if field.repr}
    plain = (bool, int, float, str, tuple, type(None))
    return {
        "version": version("lightning_fedq"),
        "mechanism": repr(mechanism),
        "mechanism_name": type(mechanism).__name__,
        "mechanism_settings": {
            name: value if isinstance(value, plain) else repr(value) for name, value in values.items()
        },
        "epsilon": None if target is None else target.epsilon,
        "delta": choose_delta(federation, trainer),
        "adversary": None if target is None else target.against.name.lower(),
        "num_clients": federation.clients.num_clients,
        "clients_per_round": engine.planner.cohort_size,
        "rounds": federation.count_rounds(trainer),
        "secure_aggregation": repr(federation.server.secure_aggregation),
        "target": engine.target,
        "server_lr": federation.server.server_lr,
        "num_parameters": engine.weights.numel(),
        "reproducible": federation.seed is not None,
        **({"samples": protecting[-1].unit} if protecting else {}),
    }


def log_settings(trainer: pl.Trainer, federation: Federation) -> None:
    """Add a federation's settings to the configuration of every logger's run."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        settings: dict[str, Any] = {"federation": collect_settings(trainer, federation)}
        if isinstance(logger, pl.loggers.MLFlowLogger):
            # MLflow writes a parameter once, so a second fit of a run keeps the values of the first
            existing = logger.experiment.get_run(logger.run_id).data.params
            settings = {key: value for key, value in _flat(settings).items() if key not in existing}
        logger.log_hyperparams(settings)
        if isinstance(logger, pl.loggers.TensorBoardLogger):
            # Lightning wrote the module's settings before the fit, and never overwrites an existing file
            (Path(logger.log_dir) / logger.NAME_HPARAMS_FILE).unlink(missing_ok=True)
            logger.save()


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dict, with names joined by slashes."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        inner = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}/") if inner else {f"{prefix}{key}": value}
    return flat
