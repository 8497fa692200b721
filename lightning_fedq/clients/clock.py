"""One client's clock: how many steps a round takes, and where schedules stand when it begins.

Every client of a round begins with the schedules as they are, and moves its own copies. When the round ends
the schedules go on by the steps of the longest client of the federation, which are known from sizes alone,
whoever has taken part. In manual optimisation nobody knows them beforehand: there it is the most steps that a
client of the round has taken, of optimisers and of each schedule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fedq._lightning import rank_zero_warn


class ClientProgress(NamedTuple):
    """Steps and loss scales that clients of a round have come to, in plain numbers.

    Args:
        steps: Most optimiser steps of a client.
        schedules: Most steps of a client, of each schedule that it moves by hand.
        scales: Loss scales that clients leave, of 16-mixed precision.
        not_finite: Names of what is NaN or infinite in an update that counts as zero.
    """

    steps: int = 0
    schedules: tuple[int, ...] = ()
    scales: tuple[dict[str, Any], ...] = ()
    not_finite: tuple[str, ...] = ()

    @classmethod
    def merge(cls, several: Sequence[ClientProgress]) -> ClientProgress:
        """Those of several clients, or ranks."""
        schedules = [one.schedules for one in several if one.schedules]
        return cls(
            max((one.steps for one in several), default=0),
            tuple(map(max, zip(*schedules, strict=True))) if schedules else (),
            tuple(scale for one in several for scale in one.scales),
            tuple(dict.fromkeys(name for one in several for name in one.not_finite)),
        )


class Clock:
    """The clock of every client of one fit.

    Args:
        batches: Batches of the federation's longest client in a round.

    Attributes:
        steps: Steps of the last round.
    """

    def __init__(self, trainer: Any, batches: int) -> None:
        self._trainer, self._batches = trainer, batches
        self._clients: list[ClientProgress] = []
        self.steps = 0
        self._has_warned_of_plateau = False
        self._learning_rate_sum: float | None = None

    @property
    def steps_before_round(self) -> int:
        """Steps that one client has taken before the present round."""
        return int(self._trainer.global_step)

    @property
    def _automatic(self) -> bool:
        return bool(self._trainer.lightning_module.automatic_optimization)

    @property
    def max_batches(self) -> int | None:
        """Most batches of a client in the coming round, where it is known that the run ends in it."""
        most, every = self._trainer.max_steps, int(self._trainer.accumulate_grad_batches)
        left = most - self.steps_before_round
        if most == -1 or left <= 0 or not self._automatic or left >= -(-self._batches // every):
            return None
        return int(left * every)

    def begin_round(self) -> None:
        """Before the first client. Torch warns of schedules that go on while their optimiser stands still."""
        self._clients, self._learning_rate_sum = [], None
        for optimizer in self._trainer.strategy.optimizers:
            optimizer._opt_called = True

    def count_steps(self, trainer: Any) -> None:
        """Count what a client has taken."""
        if trainer.lr_scheduler_configs:
            self._check_plateaus(trainer.lr_scheduler_configs)
        steps = int(trainer.global_step) - self.steps_before_round
        schedules: tuple[int, ...] = ()
        if not self._automatic:
            pairs = zip(trainer.lr_scheduler_configs, self._trainer.lr_scheduler_configs, strict=False)
            schedules = tuple(_count_schedule_steps(own.scheduler, home.scheduler) for own, home in pairs)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._clients.append(
            ClientProgress(steps, schedules, () if scaler is None else (scaler.state_dict(),))
        )

    def _check_plateaus(self, configs: Sequence[Any]) -> None:
        """Say once that a plateau which clients have stepped begins anew with every client."""
        pairs = zip(configs, self._trainer.lr_scheduler_configs, strict=False)
        moved = any(
            isinstance(home.scheduler, ReduceLROnPlateau)
            and own.scheduler.last_epoch != home.scheduler.last_epoch
            for own, home in pairs
        )
        if moved and not self._has_warned_of_plateau:
            self._has_warned_of_plateau = True
            rank_zero_warn(
                "ReduceLROnPlateau was stepped with a client's own metric: it follows that client within the "
                "round, and begins in the next round where the last one began; to let it last, step it once "
                "a round with a metric of the validation (interval='epoch', or in on_validation_epoch_end)"
            )

    @property
    def merged_progress(self) -> ClientProgress:
        """By the clients so far, and by those of other ranks once they are taken in."""
        return ClientProgress.merge(self._clients)

    def merge_ranks(self, ranks: Sequence[ClientProgress]) -> None:
        """Go on with what the clients of all ranks have taken."""
        self._clients = list(ranks)

    def note_not_finite(self, names: Sequence[str]) -> None:
        """Note what was NaN or infinite in an update that counts as zero."""
        self._clients.append(ClientProgress(not_finite=tuple(names)))

    def commit(self, counted: Collection[int]) -> None:
        """The round has ended: move schedules and loss scale on, by all its clients, counted or not."""
        trainer, taken = self._trainer, self.merged_progress
        self._scale(taken.scales)
        if not self._automatic:
            for config, steps in zip(trainer.lr_scheduler_configs, taken.schedules, strict=False):
                for _ in range(steps):
                    config.scheduler.step()
            self.steps = taken.steps
            return
        self.steps = self.next_round_steps
        for step in range(1, self.steps + 1):
            self._after_step(step)
        for config in trainer.lr_scheduler_configs:
            due = not (trainer.current_epoch + 1) % config.frequency
            if config.interval == "epoch" and not config.reduce_on_plateau and due:
                self._step(config)

    @property
    def next_round_steps(self) -> int:
        """Optimiser steps of the longest client in the coming round."""
        steps = math.ceil(self._batches / int(self._trainer.accumulate_grad_batches))
        return (
            steps
            if self._trainer.max_steps == -1
            else min(steps, self._trainer.max_steps - self.steps_before_round)
        )

    def _after_step(self, step: int) -> None:
        """Move on the schedules that count steps, after one of the round, from 1."""
        batch = min(step * int(self._trainer.accumulate_grad_batches), self._batches)
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau and not batch % config.frequency:
                self._step(config)

    @property
    def learning_rate_sum(self) -> float:
        """Sum of the learning rates of one client's steps in the round, as everybody knows it.

        Steps follow from sizes and rates from schedules, before anybody has trained. What a client does
        beside them (a step that it leaves out, a rate that it sets) follows from its data and does not count.
        """
        if self._learning_rate_sum is None:
            trainer = self._trainer
            group = trainer.strategy.optimizers[0].param_groups[0]
            if not any(config.interval == "step" for config in trainer.lr_scheduler_configs):
                self._learning_rate_sum = sum([float(group["lr"])] * self.next_round_steps)
                return self._learning_rate_sum
            before = [
                (g, {name: value for name, value in g.items() if name != "params"})
                for optimizer in trainer.strategy.optimizers
                for g in optimizer.param_groups
            ]
            states = [deepcopy(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs]
            rates = []
            for step in range(1, self.next_round_steps + 1):
                rates.append(float(group["lr"]))
                self._after_step(step)
            for config, state in zip(trainer.lr_scheduler_configs, states, strict=True):
                config.scheduler.load_state_dict(state)
            for g, numbers in before:
                g.update(numbers)
            self._learning_rate_sum = sum(rates)
        return self._learning_rate_sum

    def _step(self, config: Any) -> None:
        self._trainer.lightning_module.lr_scheduler_step(config.scheduler, None)

    def _scale(self, scales: Sequence[dict[str, Any]]) -> None:
        """The next round begins with the smallest loss scale that a client has left."""
        if smallest := min(filter(None, scales), key=lambda s: s["scale"], default=None):
            self._trainer.precision_plugin.scaler.load_state_dict(smallest)


def _count_schedule_steps(client_schedule: Any, fit_schedule: Any) -> int:
    """Steps that a client has moved its copy of a schedule by. One that follows metrics stays as it is."""
    if isinstance(fit_schedule, ReduceLROnPlateau):
        return 0
    for count in ("_step_count", "last_epoch"):
        if isinstance(getattr(fit_schedule, count, None), int):
            return max(int(getattr(client_schedule, count)) - int(getattr(fit_schedule, count)), 0)
    return 0
