"""Rounds of statistics in a fit: what they refuse, their trial on one client, and what becomes of the mean.

The rounds themselves are rounds as all others (`rounds.statistics`): nothing here charges, draws or encodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fedq._lightning import callbacks_of, pl, rank_zero_info
from lightning_fedq.data.batches import Stack
from lightning_fedq.rounds import RoundServer, Statistics
from lightning_fedq.training.rehearsal import Trial

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation

_HOOKS = ("client_statistics", "on_statistics")


def check_hooks(module: pl.LightningModule, statistics: Statistics | None) -> None:
    """Refuse a module and settings of which only one knows of statistics.

    Raises:
        ValueError: With the cure.
    """
    lacking = [name for name in _HOOKS if not callable(getattr(module, name, None))]
    if statistics is not None and lacking:
        raise ValueError(
            f"statistics need {type(module).__name__}.{lacking[0]}: client_statistics(self, batches) returns "
            f"({statistics.size},) numbers of one client, on_statistics(self, mean) takes the mean"
        )
    if statistics is None and len(lacking) < len(_HOOKS):
        own = next(name for name in _HOOKS if name not in lacking)
        raise ValueError(
            f"{type(module).__name__} has {own}, which nobody calls; say Federated(statistics=Statistics("
            "size=..., bound=...)), or leave it out"
        )


def check_statistics(federation: Federation, trainer: pl.Trainer, engine: RoundServer, done: int) -> None:
    """Refuse rounds of statistics that nobody trains after, or that a claim does not count.

    Args:
        done: Rounds of earlier fits of the same server.

    Raises:
        ValueError: With the cure.
    """
    statistics, rounds = federation.local.statistics, trainer.max_epochs
    check_hooks(trainer.lightning_module, statistics)
    if statistics is None or not engine.reads_statistics:
        return
    if rounds is not None and 0 <= rounds <= statistics.rounds - done:
        raise ValueError(
            f"statistics take the first {statistics.rounds} rounds, and max_epochs={rounds} "
            "leaves none to train in; add them to max_epochs"
        )
    protecting = [one for one in callbacks_of(trainer) if getattr(one, "protects_samples", False)]
    if protecting or federation.batch_rule is not None:
        name = type(protecting[0] if protecting else federation.batch_rule).__name__
        raise ValueError(
            f"{name} draws batches and says what one sample costs, and statistics of a client's data are not "
            "in that; leave statistics out, or leave the callback out"
        )


def try_statistics(trial: Trial, stack: Stack, statistics: Statistics) -> None:
    """Make the vector of one client before anybody is charged, and drop it.

    Args:
        stack: The client.

    Raises:
        ValueError: If it is of another shape, or not finite. What the hook itself raises goes on.
    """
    vector = trial.statistics(stack, len(stack.batch_sizes), statistics.size)
    if not bool(torch.isfinite(vector).all()):
        raise ValueError(
            f"client_statistics of client {stack.clients[0]} returned numbers that are not finite; divide by "
            "no count that may be 0, and take a standard deviation of two samples or more"
        )


def check_released(engine: RoundServer, aborted: str) -> None:
    """Refuse to train on statistics that no round has released.

    Args:
        aborted: Why the last one of them was aborted. "" if that is not known.

    Raises:
        RuntimeError: If their rounds are over, and none was released.
    """
    statistics = engine.statistics
    if statistics is None or engine.reads_statistics or engine.released:
        return
    why = f": {aborted}" if aborted else ""
    raise RuntimeError(
        f"none of {statistics.rounds} rounds of statistics has released a mean{why}; they stay charged, and "
        "on_statistics was never called. Ask more clients or allow more of them to be silent, or repeat: "
        f"Statistics(..., rounds={statistics.rounds + 1}) is the mean of those that are released"
    )


def show_statistic(module: Any, mean: Tensor) -> None:
    """Hand a released mean to the module, which keeps it in buffers or begins its parameters with it."""
    with torch.no_grad():
        module.on_statistics(mean.to(module.device, torch.float32))


def release(module: pl.LightningModule, engine: RoundServer) -> None:
    """After the last round of statistics: hand the mean to the user's module, and say how exact it is."""
    if (mean := engine.statistic) is None:
        return
    show_statistic(module, mean)
    std = engine.statistic_std
    noise = "their noise is not known" if std is None else f"noise of {std:.2g} each"
    rank_zero_info(f"statistics: {len(mean)} numbers released, {noise}")


def said_of(engine: RoundServer) -> str:
    """Line of a privacy page on what rounds of statistics have let out. "" if nothing."""
    if engine.statistics is None or not engine.released:
        return ""
    return (
        f"Released with the noise of a round and charged as one, {len(engine.released)} times: the mean of "
        f"{engine.statistics.size} numbers of each client's data (`client_statistics`)."
    )
