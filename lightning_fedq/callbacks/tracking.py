"""Facts of a federation for experiment trackers: the same names and numbers, whoever shows them.

`Federated` logs `fed/*` after every round to each of the Trainer's loggers, and `PrivacyBudget` logs
`fed/epsilon`. What a logger can't know is here: settings, validation by rounds, who holds what, noise over
signal, and the files of the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_fedq._lightning import callbacks_of, pl
from lightning_fedq.callbacks.of_trainer import engine_of
from lightning_fedq.callbacks.run_folder import RunFolder
from lightning_fedq.reports.runs import first_metric
from lightning_fedq.rounds import RoundRecord
from lightning_fedq.training.spending import noise_over_signal

if TYPE_CHECKING:
    from lightning_fedq.callbacks.federated import Federated

PRICES = ("fed/epsilon", "fed/sim_epsilon", "fed/megabytes_up")
"""What a round has cost so far."""
COLUMNS = ("client", "samples", "rounds not finite")
"""Columns of the table of clients."""


def settings_of(trainer: pl.Trainer, federated: Federated, asking: str) -> dict[str, Any]:
    """Settings of the run: the resolved configuration where there is one, and `federation`.

    Args:
        federated: Its federation.
        asking: Name of the callback that asks, for the message.
    """
    engine, folder = engine_of(trainer, asking), folder_of(trainer)
    target = federated.privacy_target
    federation = {
        "mechanism": repr(engine.mechanism),
        "mechanism_name": type(engine.mechanism).__name__,
        "epsilon": None if target is None else target.epsilon,
        "delta": None if target is None else target.delta,
        "adversary": None if target is None else target.against.name.lower(),
        "num_clients": federated.clients.num_clients,
        "clients_per_round": engine.planner.cohort_size,
        "target": engine.target,
        "server_lr": federated.server.server_lr,
        "num_parameters": engine.weights.numel(),
        "reproducible": federated.seed is not None,
    }
    resolved = {} if folder is None or folder.config is None else yaml.safe_load(folder.config)
    return {**resolved, "federation": federation}


def folder_of(trainer: pl.Trainer) -> RunFolder | None:
    """The trainer's run folder. None without one."""
    return next((c for c in callbacks_of(trainer) if isinstance(c, RunFolder)), None)


def check_order(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Refuse a run folder behind the callback that sends its report.

    Raises:
        ValueError: With the cure.
    """
    folder, callbacks = folder_of(trainer), callbacks_of(trainer)
    if folder is not None and callbacks.index(folder) > callbacks.index(callback):
        name = type(callback).__name__
        raise ValueError(f"{name} sends the run folder: put it behind RunFolder in trainer.callbacks")


def values_of_round(trainer: pl.Trainer, record: RoundRecord) -> dict[str, float]:
    """Metrics of validation after a round as `fed/*`, and the round, from 1."""
    values = {
        f"fed/{key}": float(value)
        for key, value in trainer.callback_metrics.items()
        if not key.startswith("fed/")
    }
    return {"fed/round": float(record.round + 1), **values}


def price_of_round(trainer: pl.Trainer) -> dict[str, float]:
    """Cost of the rounds so far, and one metric of validation: a point of each chart.

    Args:
        trainer: The trainer, at the end of a round.

    Returns:
        Epsilon towards the target's adversary, where it is known after this round ("sim_" where keys come
        from a seed), megabytes of all clients' messages, and last one metric of validation. {} without one.
    """
    known = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metric = first_metric([known])
    if metric is None or not math.isfinite(known[metric]):
        return {}
    return {name: known[name] for name in (*PRICES, metric) if math.isfinite(known.get(name, math.nan))}


def noise_values(federated: Federated) -> dict[str, float]:
    """Noise over signal of the run, planned and as seen, and whether it could learn."""
    records, engine = federated.records, federated.engine
    assert engine is not None
    known = noise_over_signal(engine, [record.metrics() for record in records], len(records))
    values = {"noise_over_signal": known["planned"], "sim_noise_over_signal": known["sim_seen"]}
    return {f"fed/{name}": value for name, value in values.items() if value is not None}


def rows_of_clients(federated: Federated, non_finite: Mapping[int, int]) -> list[list[int]]:
    """Rows of the table of clients, by `COLUMNS`.

    Args:
        federated: The federation.
        non_finite: Rounds in which a client's update was not finite, by client.
    """
    held = federated.client_indices
    return [[client, len(part), non_finite.get(client, 0)] for client, part in enumerate(held)]


def files_of(folder: RunFolder | None) -> list[Path]:
    """Files of a run folder that a tracker may have.

    What stays with the clients is in a folder of its own, which is not sent.
    """
    if folder is None or folder.path is None or not folder.path.is_dir():
        return []
    return [path for path in sorted(folder.path.iterdir()) if path.is_file()]
