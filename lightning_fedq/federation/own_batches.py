"""The number of a batch, and whether it is the last: one client's, while the module trains on it.

Lightning counts the batches of a round. A training step that accumulates by hand, steps a schedule at the
last batch, or divides by the number of batches means those of one client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_fedq._lightning import is_overridden, pl


class OwnBatches:
    """The number of the present batch among its client's own, for the module.

    Args:
        trainer: Of the fit in progress.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._number, self._length = trainer, 0, 1

    def begin(self, number: int, length: int) -> None:
        """Go to a batch.

        Args:
            number: Of the batch among the client's own in this round, from 0 on.
            length: How many it has.
        """
        self._number, self._length = number, length

    @contextmanager
    def told(self) -> Iterator[int]:
        """Yield the number, while `trainer.is_last_batch` and `num_training_batches` are the client's."""
        loop = self._trainer.fit_loop
        progress, last, length = (
            loop.epoch_loop.batch_progress,
            self._trainer.is_last_batch,
            loop.max_batches,
        )
        progress.is_last_batch, loop.max_batches = self._number == self._length - 1, self._length
        try:
            yield self._number
        finally:
            progress.is_last_batch, loop.max_batches = last, length

    def attach(self) -> None:
        """Stand in for an `optimizer_step` of the module's own, which is handed a batch's number, too."""
        module = self._trainer.lightning_module
        if not is_overridden("optimizer_step", module, pl.LightningModule):
            return
        ordinary = module.optimizer_step

        def optimizer_step(epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
            return ordinary(epoch, self._number, *args, **kwargs)

        module.optimizer_step = optimizer_step

    def detach(self) -> None:
        """Give the method back."""
        vars(self._trainer.lightning_module).pop("optimizer_step", None)
