"""Reports of a finished round to loggers and to the user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.vector import Members
from lightning_fedq.privacy.planning import GOOD, SWAMPED
from lightning_fedq.rounds import RoundRecord

_NAMED = 10
"""Clients that a warning names."""


class NoiseWarning(UserWarning):
    """A privacy target whose noise swamps the updates."""


def log_round(trainer: pl.Trainer, record: RoundRecord, spent: Mapping[str, float]) -> None:
    """Log a round's numbers at once. Fifteen calls of `self.log` cost a tenth of a short round.

    What is not known of this round is NaN in `spent`, and taken out: a number of an earlier round would be
    too small.
    """
    for name in (name for name, value in spent.items() if math.isnan(value)):
        trainer.callback_metrics.pop(name, None)
        trainer.logged_metrics.pop(name, None)
    spent = {name: value for name, value in spent.items() if not math.isnan(value)}
    own = {f"fed/{name}": float(v) for name, v in record.metrics().items() if v == v}
    log_values(trainer, {**own, **spent})


def log_values(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Log numbers of a round by name, where `callback_metrics` and the loggers have metrics."""
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)
        logger.save()


def warn_of(record: RoundRecord, not_finite: Sequence[str] = ()) -> None:
    """Say what went wrong in a round.

    Args:
        not_finite: Names of the tensors that are not finite in some client's update.
    """
    if bad := record.non_finite_clients:
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        others = f" and {len(not_finite) - _NAMED} more" if len(not_finite) > _NAMED else ""
        what = f" ({', '.join(not_finite[:_NAMED])}{others})" if not_finite else ""
        rank_zero_warn(
            f"round {record.round + 1}: the updates of clients {list(bad[:_NAMED])}{more} held a NaN or an "
            f"infinity{what} and count as zero"
        )
    if record.aborted:
        rank_zero_warn(f"round {record.round + 1} was aborted, the model stays as it was: {record.aborted}")


def say_cost_of_statistics(names: Sequence[str], coordinates: int, dim: int) -> None:
    """Say, before the first round, what running statistics behind noise cost, and what costs less.

    Args:
        names: Names of the statistics that travel; nothing is said if there are none.
        coordinates: Coordinates of these.
        dim: Coordinates of an update.
    """
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        rank_zero_info(
            f"running statistics travel with noise: {', '.join(names[:4])}{more}, {coordinates} of {dim} "
            "coordinates of an update. A small variance that is noised makes large activations: at epsilon 8 "
            "on 479 clients, BatchNorm ended at 0.39 to 0.87 where GroupNorm ended at 0.88 to 0.93 "
            "(docs/guides/batch_norm.md). GroupNorm in its place has none; buffers='frozen' keeps those of a "
            "pretrained network, buffers='local' leaves them with the clients"
        )


def say_what_is_constant(names: Sequence[str]) -> None:
    """Say, before the first round, which parameters have a part that stays as it is.

    Args:
        names: Names of parameters whose layers hold a part constant; nothing is said if there are none.
    """
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        rank_zero_info(
            f"the row of padding_idx, and pruned weights, of {', '.join(names[:4])}{more} travel with noise "
            "and are put back after every round"
        )


def say_what_is_not_known(names: Sequence[str]) -> None:
    """Say, before the first round, which buffers noise may make anything of.

    Args:
        names: Names of buffers that travel and have no constraint; nothing is said if there are none.
    """
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        rank_zero_info(
            f"travel with noise, which may make any number of them: {', '.join(names[:4])}{more}. Where one "
            f"must stay positive, as a variance, say so: Federated(constraints={{{names[0]!r}: 'positive'}})"
        )


def warn_of_noise(record: RoundRecord, rounds: int | None) -> None:
    """Warn after a first round whose error says that the run can hardly learn.

    Args:
        record: Record of the round; without diagnostics its error is not known.
        rounds: Rounds of the run; None or -1 where they are not known.
    """
    if math.isnan(record.snr_db) or rounds is None or rounds < 1:
        return
    noise = 10.0 ** (-record.snr_db / 10.0)
    if noise > SWAMPED * rounds:
        rank_zero_warn(
            f"this run can hardly learn: in round {record.round + 1} the squared error of the decoded mean "
            f"was {noise:.3g} times the squared mean of the updates, {noise / rounds:.3g} over {rounds} "
            f"rounds (R; no loss is seen up to {GOOD:g}). More clients, fewer parameters or a larger epsilon "
            "would help; `fedq plan` says how many",
            category=NoiseWarning,
        )


def say_change(before: Members, after: Members, module: nn.Module, round: int) -> str:
    """Which parameters and buffers join and which leave, as the beginning of a sentence."""
    sizes = {name: tensor.numel() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    said = []
    for verb, one, other in (("join", after, before), ("leave", before, after)):
        others = {*other.parameters, *other.buffers, *other.local}
        names = [name for name in (*one.parameters, *one.buffers, *one.local) if name not in others]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            count = sum(sizes.get(name, 0) for name in names)
            said.append(f"{', '.join(names[:_NAMED])}{more} ({count} coordinates) {verb}")
    return f"round {round + 1}: " + (" and ".join(said) or "the order of the parameters changes")
