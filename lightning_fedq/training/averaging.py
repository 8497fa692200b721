"""Lightning's own weight averaging beside a federation: averages of global models, once a round.

`WeightAveraging` and `EMAWeightAveraging` average after every step. Here the end of a round stands for all
its steps: the global model enters the average once, if any step of the round's longest client is one that
the callback's `should_update` asks for. `StochasticWeightAveraging` averages where an epoch begins; what it
does for BatchNorm, a pass over the training data at the end, would look at everybody's data, so with
BatchNorm it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lightning_fedq._lightning import callbacks_of, pl, rank_zero_info
from lightning_fedq.clients.undo import Undo


def check_averaging(trainer: pl.Trainer, module: nn.Module) -> None:
    """Refuse averaging that looks at the clients' data.

    Raises:
        ValueError: Naming the callback.
    """
    norms = [
        name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
    ]
    kind = pl.callbacks.StochasticWeightAveraging
    if norms and any(isinstance(callback, kind) for callback in callbacks_of(trainer)):
        raise ValueError(
            "StochasticWeightAveraging ends with a pass over the training data for the statistics of "
            f"{', '.join(norms)}, which would look at all clients' data past the mechanism; use "
            "WeightAveraging, which averages the global model's statistics, once a round"
        )


def average_by_rounds(trainer: pl.Trainer, steps_of: Callable[[], range | None], undo: Undo) -> None:
    """Let the end of a round stand for all its steps in the averaging callbacks of a Trainer, until undone.

    Args:
        trainer: Trainer in the setup of its fit.
        steps_of: Returns the steps of one client in the last round, counted from the first round on; None if
            it was given up.
    """

    def unless_given_up(hook: Callable[..., Any], *arguments: Any) -> None:
        if steps_of() is not None:
            hook(*arguments)

    def any_step(due: Callable[..., bool], step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None:
            return due(epoch_idx=epoch_idx)
        return any(due(step_idx=step) for step in steps_of() or ())

    for callback in callbacks_of(trainer):
        if isinstance(callback, pl.callbacks.WeightAveraging):
            rank_zero_info(f"{type(callback).__name__} averages the global model, once a round")
            hook = partial(unless_given_up, callback.on_train_epoch_end)
            undo.replace(callback, "on_train_epoch_end", hook)
            undo.replace(callback, "should_update", partial(any_step, callback.should_update))
