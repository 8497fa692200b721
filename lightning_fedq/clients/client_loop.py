"""Lightning's epoch loop for a client, which trains on the client's batches without a validation."""

from __future__ import annotations

from typing import Any

from lightning_fedq._lightning import pl

_loops: Any = pl.loops


class ClientLoop(_loops._TrainingEpochLoop):  # type: ignore[misc]
    """Lightning's epoch loop for the batches of one client or stack.

    Attributes:
        steps_before: Optimiser steps of one client before this round.
    """

    steps_before = 0

    def __getattr__(self, name: str) -> Any:
        """Make the validation loop or the manual optimisation loop on first use.

        Few clients need them, and copying them would take a fifth of the time to load a client's copy.
        """
        if name == "manual_optimization":
            made: Any = _loops._ManualOptimization(self.trainer)
            steps = made.optim_step_progress.total
            steps.ready = steps.completed = self.steps_before
        elif name == "val_loop":
            states = pl.trainer.states
            stage = states.TrainerFn.FITTING, states.RunningStage.VALIDATING
            made = _loops._EvaluationLoop(self.trainer, *stage, verbose=False, inference_mode=False)
            home = self.trainer.home.fit_loop.epoch_loop.val_loop
            made._combined_loader, made._max_batches = home._combined_loader, list(home._max_batches)
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        setattr(self, name, made)
        return made

    def run(self, data_fetcher: Any) -> None:
        """Train on all batches of a fetcher that was set up."""
        if self.batch_progress.current.ready:  # a fresh loop needs no reset
            self.reset()
        if type(self.trainer.profiler) is not pl.profilers.PassThroughProfiler:
            data_fetcher._start_profiler = self._on_before_fetch
            data_fetcher._stop_profiler = self._on_after_fetch
        while not self.done:
            try:
                self.advance(data_fetcher)
                self.on_advance_end(data_fetcher)
            except StopIteration:
                break
