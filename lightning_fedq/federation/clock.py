"""One client's clock: steps, schedules, accumulation and loss scale, the same for every client of a round.

Lightning counts the batches of a round, in which the clients follow one another. Whatever a training makes
depend on time has to go by one client's own: local step `s` of a round is step `now + s` of the run, for
every client, and a round advances the clock by the steps of the longest client of the federation, whoever
takes part. So a schedule that steps with every batch, a recipe that reads `trainer.global_step` in the
training step or in `optimizer_step`, and `accumulate_grad_batches` mean for each client what they mean in an
ordinary training of its own.

Manual optimisation takes as many steps of as many optimisers as it likes, and nobody knows it beforehand.
There a round advances the clock by the most steps that a client of it has taken, and where `max_steps` are
reached in a client's middle the rest of its batches are no step.

Outside of a batch `trainer.global_step` goes on counting the steps of all clients, as loggers and checkpoints
need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.data.batches import Stack
from lightning_fedq.federation.optimizer_memory import (
    SCHEDULED,
    groups_of,
    put_back_settings,
    same_setting,
    settings_of,
    with_nested,
)


class OfOneClient(int):
    """`k` of "every k-th batch", counted in one client's batches though Lightning counts a round's.

    Lightning asks `batches % k == 0` of its own count, at every batch; here the answer is the client's. To
    everything else this is the integer, so that a loss is still divided by k.

    Args:
        every: The integer, >= 1.
        remainders: `batches % k` for 0, 1, 2, ... batches of the round.
    """

    def __new__(cls, every: int, remainders: Sequence[int] = ()) -> OfOneClient:
        """An immutable number, so made here."""
        number = super().__new__(cls, every)
        number._remainders = remainders
        return number

    _remainders: Sequence[int]

    def __rmod__(self, batches: int) -> int:
        """Batches since the last k-th one."""
        return self._remainders[batches]


def remainders(every: int, lengths: Sequence[int], last_counts: bool) -> list[int]:
    """`batches % every` after each batch of a round, counted anew for each client.

    Args:
        every: >= 1.
        lengths: Batches of each stack, in their order.
        last_counts: Is a client's last batch a k-th one, whatever its number?
    """
    found = [0]
    for length in lengths:
        found += [batch % every for batch in range(1, length + 1)]
        if last_counts:
            found[-1] = 0
    return found


class _Moment(NamedTuple):
    """The optimiser's settings and the schedules' states at one time."""

    groups: list[dict[str, Any]]
    schedules: list[dict[str, Any]]


class RankClock(NamedTuple):
    """One rank's share of a round, for the clocks of the other ranks.

    Args:
        place: Of the longest client's stack, among those of one process.
        longest: What it leaves and how many steps it took; only of a module that optimises by hand.
        last_place: Of the last stack.
        left: What it leaves; only of a module that optimises by hand.
        most_steps: Of any client.
        scales: Loss scales that clients leave.
        batches: Of this rank's clients.
        steps: Lightning's count of them.
    """

    place: int
    longest: tuple[_Moment, int] | None
    last_place: int
    left: _Moment | None
    most_steps: int
    scales: list[dict[str, Any] | None]
    batches: int
    steps: int


class LocalClock:
    """The clock of every client of one fit.

    Args:
        trainer: Of the fit in progress.
        optimizers: All of them.
        batches: Batches of the federation's longest client in a round.
        now: Steps of one client before the coming round.
        max_steps: After so many steps of one client the run is over; -1 is never.

    Attributes:
        now: Steps that one client has taken before the present round.
        max_steps: As given.
    """

    def __init__(
        self, trainer: Any, optimizers: Sequence[Optimizer], batches: int, now: int, max_steps: int
    ) -> None:
        self._trainer, self._optimizers = trainer, with_nested(optimizers)
        self._batches, self.now, self.max_steps = batches, now, max_steps
        self._start: _Moment | None = None
        self._longest: _Moment | None = None
        self._scales: list[dict[str, Any] | None] = []
        self._scale: dict[str, Any] | None = None
        self._elsewhere: int | None = None
        self._told: set[str] = set()
        self._plateaus: list[tuple[ReduceLROnPlateau, dict[str, Any]]] = []
        self._steps = self._most_steps = 0
        self._stack = self._longest_stack = -1

    # ---- how many steps -----------------------------------------------------------------------------

    @property
    def accumulation(self) -> int:
        """Batches to one step in the coming round."""
        for callback in self._trainer.callbacks:
            if isinstance(callback, pl.callbacks.GradientAccumulationScheduler):
                return callback.get_accumulate_grad_batches(self._trainer.current_epoch)
        return int(self._trainer.accumulate_grad_batches)

    @property
    def most_batches(self) -> int | None:
        """Most batches of a client in the coming round, where it is known that the run ends in it."""
        if self.max_steps == -1 or self.is_over or not self._automatic:
            return None
        if self.max_steps - self.now >= -(-self._batches // self.accumulation):
            return None
        return (self.max_steps - self.now) * self.accumulation

    @property
    def is_over(self) -> bool:
        """Are there no steps left?"""
        return self.max_steps != -1 and self.now >= self.max_steps

    @property
    def client_is_over(self) -> bool:
        """Has the present client no steps left?"""
        return self.max_steps != -1 and self.now + self._steps >= self.max_steps

    def _steps_of_longest(self) -> int:
        """Steps of the federation's longest client in the present round."""
        if not self._automatic:
            return self._most_steps
        steps = -(-self._batches // self._accumulate)
        return steps if self.max_steps == -1 else min(steps, self.max_steps - self.now)

    @property
    def _automatic(self) -> bool:
        return bool(self._trainer.lightning_module.automatic_optimization)

    @property
    def _counter(self) -> Any:
        """Lightning's own count of optimiser steps, which is `trainer.global_step`."""
        loop = self._trainer.fit_loop.epoch_loop
        if self._automatic:
            return loop.automatic_optimization.optim_progress.optimizer.step.total
        return loop.manual_optimization.optim_step_progress.total

    # ---- one round ----------------------------------------------------------------------------------

    def begin_client(self, stacks: Sequence[Stack]) -> None:
        """At the first batch of a client or a stack: everything as at the round's first batch.

        Args:
            stacks: Of the round.
        """
        if self._start is None:
            self._begin_round(stacks)
        assert self._start is not None
        self._check_plateaus()
        self._stack += 1
        self._restore(self._start)
        self._load_scale(self._scale)
        self._steps = 0

    def _begin_round(self, stacks: Sequence[Stack]) -> None:
        """Remember the start. It is the first batch, so that `on_train_epoch_start` may still set a rate."""
        trainer, lengths = self._trainer, [len(stack.batch_sizes) for stack in stacks]
        configs, automatic = trainer.lr_scheduler_configs, self._automatic
        self._per_batch = [c for c in configs if c.interval == "step"] if automatic else []
        self._put_back = configs
        self._start, self._longest, self._longest_steps, self._most_steps = self._moment(), None, 0, 0
        self._plateaus = [
            (config.scheduler, deepcopy(config.scheduler.state_dict()))
            for config in configs
            if isinstance(config.scheduler, ReduceLROnPlateau)
        ]
        self._stack = -1
        self._counted, self._trained = self._counter.completed, sum(lengths)
        self._scale = self._loss_scale()
        self._scales.clear()
        self._accumulate = int(trainer.accumulate_grad_batches)
        self._frequencies = [int(config.frequency) for config in self._per_batch]
        if self._accumulate > 1:
            counts = remainders(self._accumulate, lengths, last_counts=True)
            trainer.accumulate_grad_batches = OfOneClient(self._accumulate, counts)
        for config, every in zip(self._per_batch, self._frequencies, strict=True):
            if every > 1:
                config.frequency = OfOneClient(every, remainders(every, lengths, last_counts=False))

    def begin_batch(self) -> None:
        """Show the client's step as `trainer.global_step`."""
        counter = self._counter
        self._elsewhere, counter.completed = counter.completed, self.now + self._steps

    def end_batch(self) -> None:
        """Count the step, if there was one, and show the steps of all clients again."""
        if self._elsewhere is None:
            return
        self._check_plateaus()
        counter = self._counter
        taken = counter.completed - self.now - self._steps
        counter.completed, self._elsewhere = self._elsewhere + taken, None
        self._steps += taken

    def _check_plateaus(self) -> None:
        """Refuse a plateau that is stepped by hand with what clients' batches say.

        Raises:
            ValueError: With the cure.
        """
        for plateau, before in self._plateaus if self._start is not None else ():
            if not same_setting(before, plateau.state_dict()):
                plateau.load_state_dict(deepcopy(before))
                raise ValueError(
                    f"{type(plateau).__name__} was stepped in the middle of a round: it would keep one "
                    "client's exact metric and follow it; step it once a round with a metric of validation, "
                    "in on_validation_epoch_end or on_train_epoch_end"
                )

    def end_client(self, last: bool) -> None:
        """After the last batch of a client or a stack.

        Args:
            last: Does nobody follow in this round?
        """
        assert self._start is not None
        self._scales.append(self._loss_scale())
        self._most_steps = max(self._most_steps, self._steps)
        if self._put_back and not self._automatic and self._steps > self._longest_steps:
            self._longest, self._longest_steps, self._longest_is_last = self._moment(), self._steps, last
            self._longest_stack = self._stack
        if not last:  # whoever looks before the next batch starts sees the next client's
            self._restore(self._start)

    def of_rank(self, places: Sequence[int]) -> RankClock | None:
        """This rank's share of the round, for `of_all_ranks`. None where it has no clients.

        Args:
            places: Of its stacks, among those of one process.
        """
        if not places:
            return None
        by_hand = not self._automatic
        longest = (self._longest, self._longest_steps) if by_hand and self._longest is not None else None
        return RankClock(
            place=places[max(self._longest_stack, 0)],
            longest=longest,
            last_place=places[-1],
            left=self._moment() if by_hand else None,
            most_steps=self._most_steps,
            scales=self._scales,
            batches=self._trained,
            steps=self._counter.completed - self._counted,
        )

    def of_all_ranks(self, clocks: Sequence[RankClock | None]) -> None:
        """Count what the clients of all ranks have done, before `end_round`."""
        others = [clock for clock in clocks if clock is not None]
        if not others:
            return
        self._most_steps = max(clock.most_steps for clock in others)
        self._scales = [scale for clock in others for scale in clock.scales]
        by_hand = [(-clock.longest[1], clock.place, clock.longest) for clock in others if clock.longest]
        if by_hand:
            self._longest, self._longest_steps = min(by_hand, key=lambda found: found[:2])[2]
            self._longest_is_last = False  # it may have trained elsewhere
        last = max(others, key=lambda clock: clock.last_place)
        if last.left is not None and not self._put_back:
            self._restore(last.left)
        self._count_for_all(sum(clock.steps for clock in others), sum(clock.batches for clock in others))

    def _count_for_all(self, steps: int, batches: int) -> None:
        """Let Lightning's counts be those of one process, which loggers and checkpoints go by."""
        counter, loop = self._counter, self._trainer.fit_loop.epoch_loop
        more = self._counted + steps - counter.completed
        counter.completed += more
        counter.ready += more
        loop._batches_that_stepped += more
        progress, more = loop.batch_progress.total, batches - self._trained
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, getattr(progress, name) + more)

    def end_round(self) -> None:
        """The schedules as the longest client of the federation leaves them. The smallest loss scale."""
        start, self._start = self._start, None
        assert start is not None
        steps = self._steps_of_longest()
        if not self._automatic and self._put_back and not (self._longest and self._longest_is_last):
            self._restore(self._longest or start)
        self._leave_own_settings(start)
        if self._automatic:
            self._leave_as_scheduled(start, steps)
        self.now += steps
        self._load_scale(min(filter(None, self._scales), key=lambda s: s["scale"], default=None))
        self._give_back()

    def _leave_as_scheduled(self, start: _Moment, steps: int) -> None:
        """Rates as schedules alone make them: what a module has set by hand may follow from a client's data.

        Replayed from the round's start, because a schedule may go on from the rate that it finds.
        """
        self._restore(start)
        for step in range(1, steps + 1):
            for config, every in zip(self._per_batch, self._frequencies, strict=True):
                if min(step * self._accumulate, self._batches) % every == 0:
                    self._step(config)
        for config in self._trainer.lr_scheduler_configs:
            if config.interval != "epoch" or config.reduce_on_plateau:
                continue
            if (self._trainer.current_epoch + 1) % config.frequency == 0:
                self._step(config)

    def _leave_own_settings(self, start: _Moment) -> None:
        """Parameter groups without what the optimiser itself set in them, which goes with the client."""
        moved: set[str] = set()
        for group, before in zip(self._groups, start.groups, strict=True):
            now = settings_of(group)
            own = (before.keys() | now.keys()) - SCHEDULED
            moved |= {name for name in own if not same_setting(before.get(name), now.get(name))}
            scheduled = {name: value for name, value in now.items() if name in SCHEDULED}
            put_back_settings(group, {**before, **scheduled})
        names = ", ".join(sorted(moved - self._told))
        if names:
            self._told |= moved
            rank_zero_warn(
                f"training changed {names} in the optimiser's parameter groups, which is put back: every "
                "client begins with what the round began with, and so does the next round; what a round is "
                "to begin with can be set in on_train_epoch_start"
            )

    def _step(self, config: Any) -> None:
        self._trainer.lightning_module.lr_scheduler_step(config.scheduler, None)

    def abandon(self) -> None:
        """Give up the open round, if there is one: everything as it was before."""
        if self._elsewhere is not None:
            self.end_batch()
        if self._start is not None:
            self._restore(self._start)
            self._load_scale(self._scale)
            self._start = None
            self._give_back()

    def _give_back(self) -> None:
        """Plain integers again."""
        if isinstance(self._trainer.accumulate_grad_batches, OfOneClient):
            self._trainer.accumulate_grad_batches = self._accumulate
        for config, every in zip(self._per_batch, self._frequencies, strict=True):
            config.frequency = every

    # ---- what is put back -----------------------------------------------------------------------------

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return groups_of(self._optimizers)

    def _moment(self) -> _Moment:
        groups = [settings_of(group) for group in self._groups]
        return _Moment(groups, [deepcopy(config.scheduler.state_dict()) for config in self._put_back])

    def _restore(self, moment: _Moment) -> None:
        for group, values in zip(self._groups, moment.groups, strict=True):
            put_back_settings(group, values)
        for config, state in zip(self._put_back, moment.schedules, strict=True):
            config.scheduler.load_state_dict(deepcopy(state))

    def _loss_scale(self) -> dict[str, Any] | None:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return None if scaler is None else scaler.state_dict()

    def _load_scale(self, state: dict[str, Any] | None) -> None:
        if state:
            self._trainer.precision_plugin.scaler.load_state_dict(state)
