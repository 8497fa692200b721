"""Clock of a client: the optimiser steps of a round, and the state of learning rate schedules at its start.

Every client of a round starts with the current schedules and steps its own copies. At the end of the round,
the schedules advance by the steps of the longest client of the federation. This number follows from data set
sizes, so it does not depend on the cohort. In manual optimisation it is not known in advance. There the
schedules advance by the largest number of steps among the clients of the round, separately for each schedule.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from copy import deepcopy
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_fedq._lightning import pl, rank_zero_warn


def count_rounds(max_epochs: int | None, max_steps: int, steps: Sequence[int]) -> int | None:
    """Return the largest number of rounds of a fit. None if neither limit tells it.

    Args:
        max_epochs: Largest number of rounds. None or -1 for no limit.
        max_steps: Largest number of optimiser steps of the longest client. -1 for no limit.
        steps: Steps of the longest client in the first rounds. The last number holds for all rounds after
            them. Empty if the steps of a round are not known.

    Examples:
        >>> count_rounds(1000, 20, [8])
        3
        >>> count_rounds(-1, 20, [4, 8])
        3
    """
    limits = [] if max_epochs is None or max_epochs < 0 else [max_epochs]
    if max_steps >= 0 and steps:
        first = list(accumulate(steps[:-1], initial=0))
        rounds = next((round for round, done in enumerate(first) if done >= max_steps), None)
        if rounds is None:
            rounds = len(first) - 1 + math.ceil((max_steps - first[-1]) / steps[-1])
        limits.append(rounds)
    return min(limits, default=None)


def round_steps(trainer: Any, batches: int) -> list[int]:
    """Return the optimiser steps of a client in the first rounds, until they no longer change.

    Args:
        trainer: Trainer, whose callbacks may change the accumulation of gradients.
        batches: Number of batches of the client in a round.
    """
    schedules = [
        one for one in trainer.callbacks if isinstance(one, pl.callbacks.GradientAccumulationScheduler)
    ]
    if not schedules:
        return [math.ceil(batches / int(trainer.accumulate_grad_batches))]
    last = max(schedules[-1].scheduling)
    of_round = schedules[-1].get_accumulate_grad_batches
    return [math.ceil(batches / int(of_round(round))) for round in range(last + 1)]


class ClientProgress(NamedTuple):
    """Steps and loss scales that clients of a round have reached, as plain numbers.

    Args:
        steps: Largest number of optimiser steps of a client.
        schedules: Largest number of steps of a client, per schedule, in manual optimisation.
        scales: State of each client's loss scaler after training, with 16-mixed precision.
        not_finite: Names of tensors with a NaN or an infinity in an update that counts as zero.
    """

    steps: int = 0
    schedules: tuple[int, ...] = ()
    scales: tuple[dict[str, Any], ...] = ()
    not_finite: tuple[str, ...] = ()

    @classmethod
    def merge(cls, several: Sequence[ClientProgress]) -> ClientProgress:
        """Merge the progress of several clients or ranks."""
        schedules = [one.schedules for one in several if one.schedules]
        return cls(
            max((one.steps for one in several), default=0),
            tuple(map(max, zip(*schedules, strict=True))) if schedules else (),
            tuple(scale for one in several for scale in one.scales),
            tuple(dict.fromkeys(name for one in several for name in one.not_finite)),
        )


class Clock:
    """Clock of the clients of one fit: it counts steps, and advances schedules at the end of a round.

    Args:
        trainer: User's Trainer during its fit.
        batches: Batches of the federation's longest client in a round.

    Attributes:
        steps: Optimiser steps of the last round.
    """

    def __init__(self, trainer: Any, batches: int) -> None:
        self._trainer, self._batches = trainer, batches
        self._clients: list[ClientProgress] = []
        self.steps = 0
        self._has_warned_of_plateau = False
        self._learning_rate_sum: float | None = None

    @property
    def steps_before_round(self) -> int:
        """Optimiser steps of one client before the current round."""
        return int(self._trainer.global_step)

    @property
    def _automatic(self) -> bool:
        """Whether the module uses automatic optimisation."""
        return bool(self._trainer.lightning_module.automatic_optimization)

    @property
    def max_batches(self) -> int | None:
        """Largest number of batches of a client in the next round, if `max_steps` ends the run in it.

        None if the round is complete.
        """
        every = int(self._trainer.accumulate_grad_batches)
        remaining = self._trainer.max_steps - self.steps_before_round  # negative without a limit of -1
        ends_in_round = 0 < remaining < math.ceil(self._batches / every)
        return remaining * every if ends_in_round and self._automatic else None

    def begin_round(self) -> None:
        """Reset the counts before the first client of a round."""
        self._clients, self._learning_rate_sum = [], None
        for optimizer in self._trainer.strategy.optimizers:
            # the user's optimiser never steps, and torch would warn that its schedule steps first
            optimizer._opt_called = True

    def count_steps(self, trainer: Any) -> None:
        """Record the steps and the loss scale of a trained client.

        Args:
            trainer: Trainer of the client.
        """
        configs = zip(trainer.lr_scheduler_configs, self._trainer.lr_scheduler_configs, strict=False)
        pairs = [(own.scheduler, home.scheduler) for own, home in configs]
        moved = any(
            isinstance(home, ReduceLROnPlateau) and own.last_epoch != home.last_epoch for own, home in pairs
        )
        if moved and not self._has_warned_of_plateau:
            self._has_warned_of_plateau = True
            rank_zero_warn(
                "ReduceLROnPlateau was stepped with a client's metric, so its change ends with the round. "
                "Step it with a validation metric: interval='epoch', or in on_validation_epoch_end."
            )
        steps = int(trainer.global_step) - self.steps_before_round
        schedules = () if self._automatic else tuple(_count_schedule_steps(*pair) for pair in pairs)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scales = () if scaler is None else (scaler.state_dict(),)
        self._clients.append(ClientProgress(steps, schedules, scales))

    @property
    def merged_progress(self) -> ClientProgress:
        """Progress of the clients so far, including other ranks after `merge_ranks`."""
        return ClientProgress.merge(self._clients)

    def merge_ranks(self, ranks: Sequence[ClientProgress]) -> None:
        """Replace the progress of this rank by the progress of all ranks."""
        self._clients = list(ranks)

    def note_not_finite(self, names: Sequence[str]) -> None:
        """Record the tensors with a NaN or an infinity in an update that counts as zero."""
        self._clients.append(ClientProgress(not_finite=tuple(names)))

    def commit(self, counted: Collection[int]) -> None:
        """End a round: advance schedules and loss scale by the progress of all its clients.

        Args:
            counted: Clients in the round's sum, which make no difference here.
        """
        trainer, progress = self._trainer, self.merged_progress
        # the next round starts with the smallest loss scale of a client
        if smallest := min(filter(None, progress.scales), key=itemgetter("scale"), default=None):
            trainer.precision_plugin.scaler.load_state_dict(smallest)
        if not self._automatic:
            for config, steps in zip(trainer.lr_scheduler_configs, progress.schedules, strict=False):
                for _ in range(steps):
                    config.scheduler.step()
            self.steps = progress.steps
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
        """Optimiser steps of the longest client in the next round."""
        steps = math.ceil(self._batches / int(self._trainer.accumulate_grad_batches))
        max_steps = int(self._trainer.max_steps)
        return steps if max_steps == -1 else min(steps, max_steps - self.steps_before_round)

    def _after_step(self, step: int) -> None:
        """Advance the schedules with interval "step" after a step of the round, counted from 1."""
        batch = min(step * int(self._trainer.accumulate_grad_batches), self._batches)
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau and not batch % config.frequency:
                self._step(config)

    @property
    def learning_rate_sum(self) -> float:
        """Public sum of the learning rates of one client's steps in the round.

        The steps follow from data set sizes and the rates from schedules, so the sum is known before
        training. Skipped steps and rates that a client sets itself depend on its data and are not included.
        """
        if self._learning_rate_sum is None:
            trainer = self._trainer
            group = trainer.strategy.optimizers[0].param_groups[0]
            if not any(config.interval == "step" for config in trainer.lr_scheduler_configs):
                self._learning_rate_sum = sum([float(group["lr"])] * self.next_round_steps)
                return self._learning_rate_sum
            groups = [g for optimizer in trainer.strategy.optimizers for g in optimizer.param_groups]
            before = list(map(dict, groups))
            states = [deepcopy(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs]
            rates = []
            for step in range(1, self.next_round_steps + 1):
                rates.append(float(group["lr"]))
                self._after_step(step)
            for config, state in zip(trainer.lr_scheduler_configs, states, strict=True):
                config.scheduler.load_state_dict(state)
            for g, values in zip(groups, before, strict=True):
                g.update(values)
            self._learning_rate_sum = sum(rates)
        return self._learning_rate_sum

    def planned_rates(self, rounds: int) -> list[float] | None:
        """Return the sum of the learning rates of one client's steps in each of the coming rounds.

        Copies of the schedules are stepped, so nothing changes.

        Args:
            rounds: Number of rounds to come.

        Returns:
            One sum per round. None if the schedules don't tell: there is none, one follows a metric or ends
            before the rounds do, or the module steps them by itself.
        """
        trainer, every = self._trainer, int(self._trainer.accumulate_grad_batches)
        configs = trainer.lr_scheduler_configs
        hook = type(trainer.lightning_module).lr_scheduler_step
        by_hand = not self._automatic or hook is not pl.LightningModule.lr_scheduler_step
        known = all(type(config.scheduler) is not ReduceLROnPlateau for config in configs)
        known = known and all(isinstance(config.scheduler, LRScheduler) for config in configs)
        if not configs or by_hand or not known:
            return None
        copies = _copy_schedules(trainer.strategy.optimizers, [config.scheduler for config in configs])
        group = copies[0].optimizer.param_groups[0]
        steps, rates = self.next_round_steps, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the copies' optimisers never step
            try:
                for round in range(trainer.current_epoch, trainer.current_epoch + rounds):
                    rates.append(0.0)
                    for step in range(1, steps + 1):
                        rates[-1] += float(group["lr"])
                        batch = min(step * every, self._batches)
                        for config, copy in zip(configs, copies, strict=True):
                            if config.interval == "step" and not batch % config.frequency:
                                copy.step()
                    for config, copy in zip(configs, copies, strict=True):
                        if config.interval == "epoch" and not (round + 1) % config.frequency:
                            copy.step()
            except ValueError:  # a schedule of fewer steps than the run has
                return None
        return rates

    def _step(self, config: Any) -> None:
        """Step one schedule through the module's hook."""
        self._trainer.lightning_module.lr_scheduler_step(config.scheduler, None)


def _copy_schedules(optimizers: Sequence[Any], schedules: Sequence[LRScheduler]) -> list[LRScheduler]:
    """Return copies of schedules with copies of their optimisers, which share no tensors with them."""
    memo: dict[int, Any] = {id(optimizer.state): {} for optimizer in optimizers}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            memo |= {id(parameter): torch.zeros(()) for parameter in group["params"]}
    return deepcopy(list(schedules), memo)


def _count_schedule_steps(client_schedule: Any, fit_schedule: Any) -> int:
    """Count the steps of a client's copy of a schedule. `ReduceLROnPlateau` counts as zero."""
    if isinstance(fit_schedule, ReduceLROnPlateau):
        return 0
    for count in ("_step_count", "last_epoch"):
        if isinstance(getattr(fit_schedule, count, None), int):
            return max(int(getattr(client_schedule, count)) - int(getattr(fit_schedule, count)), 0)
    return 0
