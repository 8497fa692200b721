"""Progress bar that counts rounds and clients, in place of Lightning's bar, which counts batches."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.reports.runs import BITS_PER_MEGABYTE, first_metric


class RoundProgressBar(pl.callbacks.ProgressBar):
    """Progress bar of rounds, with the finished clients, one metric, megabytes and seconds.

    On a terminal it is one line that is updated. In a pipe or a file it prints whole lines: always for the
    first and the last round, and for others at least `interval` seconds apart.

    Args:
        monitor: Name of a logged metric to show. None shows `val_acc`, `val/acc` or else the first
            validation metric.
        interval: Smallest number of seconds between lines if there is no terminal, >= 0.
        file: File to write to. None is standard error.

    Examples:
        >>> callbacks = [RoundProgressBar()]  # next to Federated(...)
    """

    knows_clients = True

    def __init__(
        self, monitor: str | None = None, interval: float = 10.0, file: TextIO | None = None
    ) -> None:
        super().__init__()
        if interval < 0:
            raise ValueError(f"interval must be >= 0 seconds, got {interval}")
        self.monitor, self.interval = monitor, interval
        self._console = Console(file=file or sys.stderr)
        self._progress: Progress | None = None
        self._enabled, self._last_line, self._started = True, float("-inf"), 0.0

    def disable(self) -> None:
        """Stop printing. Lightning calls this on all ranks except zero."""
        self._enabled = False

    def enable(self) -> None:
        """Start printing again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._console.print(*args)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar if the output is a terminal."""
        self._started = time.monotonic()
        find_federated(trainer, "RoundProgressBar")
        if self._enabled and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("round 1", total=self._rounds(trainer), note="")
            self._progress.start()

    def on_clients_done(self, trainer: pl.Trainer, done: int, expected: int) -> None:
        """Move the bar to the finished part of the round."""
        if self._progress is not None:
            self._progress.update(
                self._task,
                completed=trainer.current_epoch + done / max(expected, 1),
                description=f"round {trainer.current_epoch + 1}/{self._rounds(trainer) or '?'}, "
                f"{done}/{expected} clients",
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the metric, the clients and the megabytes of the round."""
        note = self._note(trainer)
        if self._progress is not None:
            self._progress.update(self._task, completed=trainer.current_epoch + 1, note=note)
            return
        rounds, done, now = self._rounds(trainer), trainer.current_epoch + 1, time.monotonic()
        due = now - self._last_line >= self.interval or done == rounds
        if self._enabled and due:
            self._last_line = now
            line = f"round {done}/{rounds or '?'}: {note}, {now - self._started:.0f} s so far"
            self._console.print(line, highlight=False, soft_wrap=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close the bar, so that the traceback is readable."""
        self.on_train_end(trainer, pl_module)

    def _note(self, trainer: pl.Trainer) -> str:
        records = find_federated(trainer, "RoundProgressBar").records
        if not records:
            return "no round has ended"
        record = records[-1]
        logged = trainer.callback_metrics
        name = self.monitor or first_metric([logged])
        parts = [f"{name} {float(logged[name]):.4f}"] if name in logged else []
        if math.isnan(record.num_received):
            parts.append(f"{record.cohort_size} clients expected")
        else:
            parts.append(f"{record.num_received}/{record.cohort_size} clients")
            parts.append(f"{record.uplink_bits / BITS_PER_MEGABYTE:.3g} MB up this round")
        if record.non_finite_clients:
            parts.append(f"{len(record.non_finite_clients)} not finite")
        return ", ".join(parts)

    @staticmethod
    def _rounds(trainer: pl.Trainer) -> int | None:
        return find_federated(trainer, "RoundProgressBar").count_rounds(trainer)
