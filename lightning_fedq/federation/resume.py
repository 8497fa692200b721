"""Checkpoints of a federation: of an unfinished round its start, and whose federation it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from lightning_fedq._lightning import pl
from lightning_fedq.federation.local_model import LocalModel
from lightning_fedq.federation.optimizer_memory import copy_of
from lightning_fedq.rounds import RoundRecord


class RoundStart(NamedTuple):
    """Start of an unfinished round, which a checkpoint holds instead of the present state."""

    loops: dict[str, Any]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    engine: dict[str, Any]
    members: dict[str, list[str]]
    callbacks: dict[str, dict[str, Any]]
    global_step: int
    precision: dict[str, Any]
    data: dict[str, Any]
    datamodule: str

    @classmethod
    def now(cls, trainer: pl.Trainer, local: LocalModel, engine: dict[str, Any]) -> RoundStart:
        """The state right before a round. The epoch that is about to be counted as begun has not."""
        loops = trainer.fit_loop.state_dict()
        for progress in (loops["epoch_progress"]["current"], loops["epoch_progress"]["total"]):
            progress["ready"] = progress["processed"]
        schedulers = [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = {one.state_key: deepcopy(one.state_dict()) for one in callbacks if _goes_back(one)}
        optimizers = [copy_of(optimizer.state_dict()) for optimizer in local.optimizers]
        members = local.members.plain()
        plugin, step = trainer.precision_plugin, trainer.global_step
        precision = {type(plugin).__qualname__: plugin.state_dict()}  # a loss scale
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        data = {} if datamodule is None else deepcopy(datamodule.state_dict())
        of = "" if datamodule is None else type(datamodule).__qualname__
        return cls(loops, optimizers, schedulers, engine, members, others, step, precision, data, of)

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Put the start of the round in place of the present state."""
        checkpoint["loops"]["fit_loop"] = self.loops
        checkpoint["optimizer_states"] = self.optimizers
        checkpoint["lr_schedulers"] = self.schedulers
        for key, state in self.callbacks.items():
            checkpoint["callbacks"].pop(key, None)
            if state:
                checkpoint["callbacks"][key] = state
        checkpoint["global_step"] = self.global_step
        states = {**self.precision, self.datamodule: self.data}
        checkpoint.update({name: state for name, state in states.items() if state})


def _goes_back(callback: pl.Callback) -> bool:
    """Does a callback's state go back with the round? Ours know the round. Files that exist stay known."""
    return not (
        type(callback).__module__.startswith("lightning_fedq.")
        or isinstance(callback, pl.callbacks.Checkpoint)
    )


def check_federation(own: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Refuse a checkpoint of another federation.

    Args:
        own: What it must agree with, in words.
        theirs: The same of the checkpoint.

    Raises:
        ValueError: Naming what differs.
    """
    differing = [f"{key} = {theirs.get(key)} (here {own[key]})" for key in own if own[key] != theirs.get(key)]
    if differing:
        raise ValueError(
            f"the checkpoint is of another federation: {', '.join(differing)}; "
            "resume with its settings, or load only its weights"
        )


def plain_records(records: Sequence[RoundRecord], private: bool, lengths: bool) -> list[dict[str, Any]]:
    """Records in the types that a checkpoint may hold.

    Args:
        records: Of the run.
        private: Whether what only a simulation knows is left out.
        lengths: Whether lengths of messages are kept then.
    """
    kept = [record.released() if private else record for record in records]
    hidden = {"uplink_bits": math.nan} if private and not lengths else {}
    return [{**vars(r), "non_finite_clients": list(r.non_finite_clients), **hidden} for r in kept]


def records_of(plain: Sequence[dict[str, Any]]) -> list[RoundRecord]:
    """The records that `plain_records` wrote."""
    return [RoundRecord(**{**r, "non_finite_clients": tuple(r["non_finite_clients"])}) for r in plain]
